"""Cutting a long document changes no token and no word, in any script, and a document has no place without a bound."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthen.data import Corpus, cuts
from lengthen.data.documents import _inside_a_word
from lengthen.data.readers import _cut
from lengthen.data.tokenizer import train

# Letters, marks, digits and punctuation of many scripts, the Latin one first; what begins a line decided once.
SCRIPTS = [
    ("abzAZé", "'’!…-(", "09²"),
    ("აბგჰ", "჻.", "7"),  # Georgian
    ("កខគ", "ាិ។៕", "០៩"),  # Khmer
    ("กขค", "ๆิ์", "๑"),  # Thai
    ("あいカキー", "、。「」・", "１"),  # kana
    ("海中文", "，。！《", "〇"),  # Chinese
    ("한글", ".", "3"),
    ("अकि", "ा्।", "१"),  # Devanagari
    ("عربى", "َ،؟", "٣"),
    ("עב", "ְ־", "5"),
    ("мир", "«»", "1"),
    ("ཀཁ", "་།", "༡"),  # Tibetan
    ("ᚁᚂ", "᚛", "1"),  # Ogham, whose space has a line
    ("𐍈𝒳", "😀𝅘𝅥", "𝟗"),  # beyond the first plane
    ("ꬠ\u10fd\u1c90", "\u2e43", "\u1e150"[:1]),  # younger than Unicode 3.2
]
WHITE = ["\n", "\n\n", "\n ", " \n", " ", "  ", "\t", "\r\n", "\x0b", "\x1c", "\x85", "\xa0", "\u1680", "\u180e"]
WHITE += ["\u2003", "\u2028", "\u202f", "\u3000", "\u3000 ", " \u3000"]
ODD = ["don't", "'s", "''s", " 'll", "<|end|>", "\u200b", "\x00", "\x1f", "\ufeff", "\ue000", "\U000e0001"]
words = st.sampled_from([list("".join(kinds)) for kinds in SCRIPTS]).flatmap(
    lambda characters: st.lists(st.sampled_from(characters), min_size=1, max_size=5).map("".join)
)
texts = st.lists(st.one_of(words, words, st.sampled_from(WHITE), st.sampled_from(ODD)), max_size=40).map("".join)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    """A BPE that has joined much in every script."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    some = [f" {a}{b}{c} {a}{b}" for letters, marks, digits in SCRIPTS for a in letters for b in letters for c in marks]
    train([*some, "\n \n\n  \r\n"] * 3, 900, path)
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.encode_special_tokens = True
    return inner


def cut(text: str, block: int) -> tuple[list[str], bool]:
    """Return the pieces of a text, and whether each was cut where it is safe to."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "BLOCK", block)
        safe = cuts.safe_place
        patch.setattr(cuts, "safe_place", lambda held: found.append(safe(held)) or found[-1])
        pieces = [piece.decode() for piece, _ in _cut([(text.encode(), True)])]
    return pieces, 0 not in found


def check(inner: Any, text: str, pieces: list[str], safe: bool) -> None:
    assert "".join(pieces) == text
    pairs = zip(["", *pieces], pieces, strict=False)
    inside = sum(_inside_a_word(before.encode(), piece.encode()) for before, piece in pairs)
    assert sum(len(piece.split()) for piece in pieces) - inside == len(text.split())
    if safe:
        split = inner.pre_tokenizer.pre_tokenize_str
        assert [word for piece in pieces for word, _ in split(piece)] == [word for word, _ in split(text)]
        assert [i for piece in pieces for i in inner.encode(piece).ids] == inner.encode(text).ids


@settings(max_examples=500)
@given(texts, st.integers(4, 40))
def test_cutting_changes_no_token_and_no_word(bpe: tokenizers.Tokenizer, text: str, block: int) -> None:
    check(bpe, text, *cut(text, block))


@settings(max_examples=300)
@given(st.text(max_size=60), st.integers(4, 40))
def test_cutting_any_characters(bpe: tokenizers.Tokenizer, text: str, block: int) -> None:
    check(bpe, text, *cut(text, block))


@pytest.mark.parametrize("kinds", SCRIPTS[:-1], ids=[unicodedata.name(kinds[0][0]) for kinds in SCRIPTS[:-1]])
def test_every_script_has_safe_places(bpe: tokenizers.Tokenizer, kinds: tuple[str, str, str]) -> None:
    letters, marks, digits = kinds
    word = letters[0] + letters[-1] + letters[0]
    for between in (" ", "\n", "\n    ", "\u3000", marks[-1], digits):
        text = (word + between) * 30
        pieces, safe = cut(text, len((word + between).encode()) + 4)
        assert safe, between
        assert len(pieces) >= 15
        check(bpe, text, pieces, safe)


def test_what_kind_a_character_is_agrees_with_the_tokenizer() -> None:
    """The first two planes: 'a', '1' and '!' join letters, numbers and what is neither."""
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str
    characters = [chr(number) for number in range(0x20000) if not 0xD800 <= number < 0xE000]
    kinds = cuts.kinds_of("".join(characters))
    for before, kind in (("a", cuts.LETTER), ("1", cuts.NUMBER), ("!", cuts.OTHER)):
        text = "".join(f"{before}{character}\n" for character in characters)
        starts = {start for _, (start, _) in split(text)}
        joined = np.array([3 * i + 1 not in starts for i in range(len(characters))])
        assert joined[kinds == kind].all()
        assert not joined[(kinds != kind) & (kinds != cuts.UNSURE)].any()
    assert np.bincount(kinds).tolist()[1] > 40_000


def test_cuts_do_not_depend_on_how_text_arrives(monkeypatch: pytest.MonkeyPatch, stories: list[str]) -> None:
    monkeypatch.setattr(cuts, "BLOCK", 100)
    text = (stories[9] + "海" * 300 + "a!" * 200).encode()
    pieces = list(_cut([(text, True)]))
    assert max(len(piece) for piece, _ in pieces) <= 100
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    for size in (1, 7, 1000):
        arriving = [(text[i : i + size], False) for i in range(0, len(text), size)]
        assert list(_cut([*arriving, (b"", True)])) == pieces


def test_a_run_without_a_safe_place_is_cut_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "BLOCK", 10)
    for text, sizes in (("a" * 25, [10, 10, 5]), ("海" * 7, [9, 9, 3]), (" " * 25, [10, 10, 5])):
        assert [len(piece) for piece, _ in _cut([(text.encode(), True)])] == sizes


@settings(max_examples=60)
@given(texts)
def test_small_pieces(bpe: tokenizers.Tokenizer, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "SMALL_PIECE", re.compile(cuts.SMALL_PIECE.pattern.replace(b"%d" % cuts.SMALL, b"2000")))
        text = text * (6000 // max(len(text.encode()), 1))
        pieces = [piece.decode() for piece in cuts.small(text.encode())]
    check(bpe, text, pieces, safe=True)


def test_small_pieces_are_small() -> None:
    text = ("ა" * 50 + " ") * 3000
    assert [len(piece) <= cuts.SMALL for piece in cuts.small(text.encode())] == [True] * 7
    assert len(list(cuts.small(b"a" * 300_000))) == 1  # it has no place
    assert list(cuts.small(b"a few words")) == [b"a few words"]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_words_of_a_document_that_is_cut_inside_them(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    monkeypatch.setattr(cuts, "BLOCK", 16)
    text = "a" * 100 + " " + "b!" * 60 + " " * 70 + "c"
    (tmp_path / "text.txt").write_text(text)
    corpus: Corpus = make(tmp_path / "text.txt", tokenizer=tokenizer)
    assert corpus["train"].words.tolist() == [3]
    assert corpus["train"].bytes.tolist() == [len(text)]
