"""The tokenizer of bytes as a tokenizer.json: ids 0 … 255 are bytes, 256 is <|end|>, 257 is <|mask|>.

Byte-level tokenizers write a byte as a character that can be printed: itself where it is one, and otherwise one of the
characters from U+0100 on, in order.
"""

from __future__ import annotations

from pathlib import Path

from lengthen.data.tokenizer import BYTE_END, BYTE_MASK, END, MASK, optional
from lengthen.io import write_text

PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}


def characters() -> list[str]:
    """Return the character that stands for each byte."""
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in PRINTABLE else next(others)) for byte in range(256)]


def write(path: Path) -> None:
    """Write the file."""
    package = optional("tokenizers", "a tokenizer.json")
    inner = package.Tokenizer(package.models.BPE({character: byte for byte, character in enumerate(characters())}, []))
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = package.decoders.ByteLevel()
    inner.add_special_tokens([END, MASK])
    if (inner.token_to_id(END), inner.token_to_id(MASK)) != (BYTE_END, BYTE_MASK):
        raise RuntimeError("tokenizers: expected special tokens to follow the 256 bytes, got others")
    write_text(path, inner.to_str(pretty=True))
