"""How much text a BPE is trained on when its words are too many."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lengthen.data import vocabulary
from lengthen.data.vocabulary import EVERY, Vocabulary, _words

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def made(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randint(2, 9))) for _ in range(count)]


def test_the_words_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    words = made(8000)
    text = " ".join(words) + "\n" + ", ".join(words[::-1])
    counted = Vocabulary()
    counted.add(text, 0)
    assert counted.finish() == 0
    wanted = sum(len(word) + 1 for word in set(words))
    assert counted._size * EVERY == pytest.approx(wanted, rel=0.1)
    monkeypatch.setattr(vocabulary, "EVERY", 1)
    assert sorted(_words("海海 ab1海海!ab 1")[1]) == [2, 2, 3, 7]  # 海海, ab, 1 and !, each once, and a space each
    assert _words("") == ([], [])
    assert _words(" \n") == ([], [])


def test_a_text_is_halved_until_its_words_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "BYTES", 4000)
    pieces = [(" ".join(made(100, seed)), (seed & -seed).bit_length() - 1 if seed else 7) for seed in range(128)]
    counted = Vocabulary()
    for piece, level in pieces:
        counted.add(piece, level)
    kept = [piece for piece, level in pieces if level >= counted.finish()]
    assert counted.finish() == 5
    assert 1000 < sum(len(word) + 1 for word in {word for piece in kept for word in piece.split()}) < 5000


def test_a_corpus_of_too_many_words_is_trained_on_a_part(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(64):
        (tmp_path / f"{number}.txt").write_text(" ".join(made(300, number)))
    files = sorted(tmp_path.glob("*.txt"))
    whole = make(files, tokenizer="bpe", vocab_size=500)
    same = make(files, tokenizer="bpe", vocab_size=500, sample_bytes=10**9)
    monkeypatch.setattr(vocabulary, "BYTES", 20_000)
    part = make(files, tokenizer="bpe", vocab_size=500)
    assert whole.fingerprint == same.fingerprint != part.fingerprint
    assert part.vocab_size == 500
