"""Text to ids and back: bytes, a byte-level BPE, or any `tokenizer.json` of the `tokenizers` package.

    bytes   ids 0 … 255 are the bytes of UTF-8, 256 is <|end|>, 257 is <|mask|>; it needs no file and no package
    bpe     byte-level BPE trained on the corpus, with the same two special tokens
    json    somebody else's tokenizer.json; its end and mask tokens are looked for under their usual names

Text is text: a document that holds the characters `<|end|>` gets the ids of these characters, never the special
token, or any page about tokenizers would break documents in two.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from lengthen.checks import nearest

END, MASK = "<|end|>", "<|mask|>"
END_NAMES = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")
MASK_NAMES = (MASK, "<mask>", "[MASK]", "<|mask_token|>")
BYTE_VOCAB_SIZE, BYTE_END, BYTE_MASK = 258, 256, 257


class Tokenizer(Protocol):
    """What turns text into ids and back."""

    name: str
    vocab_size: int
    end_id: int | None
    mask_id: int | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with no special token added."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are written out by name."""


class ByteTokenizer:
    """The bytes of UTF-8, and an end and a mask token."""

    name = "bytes"
    vocab_size = BYTE_VOCAB_SIZE
    end_id: int | None = BYTE_END
    mask_id: int | None = BYTE_MASK

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 come out as U+FFFD."""
        special = {BYTE_END: END.encode(), BYTE_MASK: MASK.encode()}
        return b"".join(special[i] if i in special else bytes([i]) for i in map(int, ids)).decode("utf-8", "replace")


class JsonTokenizer:
    """A `tokenizer.json`, ours or another's."""

    def __init__(self, path: Path, *, name: str, end_id: int | None, mask_id: int | None) -> None:
        self._inner = load_json(path)
        self.name = name
        self.vocab_size = size_of(self._inner)
        self.end_id, self.mask_id = end_id, mask_id

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; the names of special tokens in it are read as plain text."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are written out by name."""
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))


def open_tokenizer(kind: str, path: Path | None, *, end_id: int | None, mask_id: int | None) -> Tokenizer:
    """Return the tokenizer that an index names."""
    if kind == "bytes":
        return ByteTokenizer()
    if path is None:
        raise ValueError(f"tokenizer: kind {kind!r} needs a file, got none")
    return JsonTokenizer(path, name=kind, end_id=end_id, mask_id=mask_id)


def load_json(path: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a file, set to read text as text: nothing added, cut off or padded."""
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer: {path} is not there; expected 'bytes', 'bpe' or a tokenizer.json")
    package = optional("tokenizers", "a tokenizer.json")
    try:
        inner = package.Tokenizer.from_file(str(path))
    except Exception as problem:  # the package raises bare Exception
        raise ValueError(f"{path}: expected a tokenizer.json, got {problem}") from None
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    return inner


def size_of(inner: Any) -> int:
    """Return one more than the largest id: what an embedding needs, gaps included."""
    return max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def special_id(inner: Any, key: str, wanted: str | None, usual: tuple[str, ...], where: Path) -> int | None:
    """Return the id of the token asked for, or of the first usual name that the vocabulary has, or None."""
    if wanted is not None:
        found = inner.token_to_id(wanted)
        if found is None:
            known = [token.content for token in inner.get_added_tokens_decoder().values()]
            raise ValueError(f"{key}: {where} has no token {wanted!r}{nearest(wanted, known)}")
        return int(found)
    return next((int(found) for name in usual if (found := inner.token_to_id(name)) is not None), None)


def optional(package: str, what: str) -> Any:
    """Import a package of an extra, or say what needs it and how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as problem:
        raise ImportError(f'{what} needs {package}: pip install "lengthen[data]" ({problem})') from None
