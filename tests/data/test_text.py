"""Tokens into text as they come: whole characters, stop texts, what the tokenizer does not have."""

from __future__ import annotations

from pathlib import Path

from lengthen.data.text import Text
from lengthen.data.tokenizer import Tokenizer, train


def stream(ids: list[int], *stops: str, tokenizer: Tokenizer | None = None) -> list[str]:
    text = Text(tokenizer or Tokenizer(), list(stops))
    parts = []
    for token in ids:
        text.add(token)
        parts.append(text.take())
    text.finish()
    return [*parts, text.take()]


def test_characters_are_whole() -> None:
    said = "naïve — 漢字 🦉!"
    parts = stream(list(said.encode()))
    assert "".join(parts) == said
    assert all("\ufffd" not in part for part in parts)
    assert parts[3] == "ï"


def test_bytes_that_are_no_text_are_replaced() -> None:
    ids = [*b"a", 0xFF, 0xC3, *b"b", 0xE2, 0x82]
    assert "".join(stream(ids)) == bytes(ids).decode("utf-8", "replace")
    long = [0x80, *b"x"] * 200
    assert "".join(stream(long)) == bytes(long).decode("utf-8", "replace")


def test_long_texts_are_what_they_are_at_once() -> None:
    said = "the whale — 漢字, " * 100
    assert "".join(stream(list(said.encode()))) == said


def test_stops_across_tokens_are_honoured() -> None:
    assert "".join(stream(list(b"one END two"), "END")) == "one "
    assert "".join(stream(list(b"one EN two E"), "END")) == "one EN two E"
    assert "".join(stream(list(b"aab"), "ab")) == "a"
    assert stream(list(b"xEND"), "END", "N") == ["x", "", "E", "", ""]
    assert "".join(stream(list("wal—x".encode()), "—")) == "wal"


def test_a_bpe_too(tmp_path: Path) -> None:
    said = "the ship, the whale, naïve 漢字; " * 20
    train([said], 280, tmp_path / "tokenizer.json")
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", "bpe")
    parts = stream(tokenizer.encode(said), tokenizer=tokenizer)
    assert "".join(parts) == said
    assert all("\ufffd" not in part for part in parts)
    assert "".join(stream(tokenizer.encode(said), "whale, na", tokenizer=tokenizer)) == "the ship, the "


def test_tokens_that_the_tokenizer_has_not_are_left_out() -> None:
    assert "".join(stream([97, 300, 98])) == "ab"
