"""The options of `prepare`, checked, as the readers use them and as index.json has them."""

from __future__ import annotations

import codecs
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lengthen.checks import describe, nearest, number, whole_number
from lengthen.data.corpus import INDEX, Index
from lengthen.data.tokenizer import BYTE_VOCAB_SIZE, optional


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of a corpus beside its sources; made by `io.build`, which checks the types."""

    tokenizer: str = "bytes"  # or "bpe" or "json"
    tokenizer_sha256: str | None = None  # of a "json"
    vocab_size: int | None = None
    sample_bytes: int | None = None
    end_token: str | None = None
    mask_token: str | None = None
    validation: float | Literal["files"] = 0.0
    seed: int = 0
    text_key: str = "text"
    separator: str | None = None
    split_before: str | None = None
    shard_tokens: int = 1 << 27
    dtype: Literal["uint16", "uint32"] | None = None
    encoding: str | None = None  # of text files; None: UTF-8

    def table(self) -> dict[str, Any]:
        """Return what index.json has: all of it, the encoding only if it is another than UTF-8."""
        return {key: value for key, value in asdict(self).items() if key != "encoding" or value is not None}

    def __post_init__(self) -> None:
        only = {"vocab_size": "bpe", "end_token": "json", "mask_token": "json"}
        for key, kind in only.items():
            if self.tokenizer != kind and (value := getattr(self, key)) is not None:
                which = "a tokenizer.json" if kind == "json" else "tokenizer='bpe'"
                raise ValueError(f"{key}: only {which} has one to choose, got {value!r} for {self.tokenizer!r}")
        check_seed(self.seed)
        least = {"vocab_size": BYTE_VOCAB_SIZE, "sample_bytes": 1, "shard_tokens": 1}
        for key, at_least in least.items():
            if getattr(self, key) is not None:
                whole_number(key, getattr(self, key), at_least=at_least)
        for key in ("text_key", "separator", "split_before"):
            if getattr(self, key) == "":
                raise ValueError(f"{key}: expected a string of at least one character, got ''")
        if self.separator is not None and self.split_before is not None:
            both = f"{self.separator!r} and {self.split_before!r}"
            raise ValueError(f"separator, split_before: expected one of them, got {both}")
        try:
            re.compile(self.split_before or "")
        except re.error as problem:
            got = f"{self.split_before!r}: {problem}"
            raise ValueError(f"split_before: expected a regular expression, got {got}") from None


def find_tokenizer(tokenizer: Any) -> tuple[str, Path | None]:
    """Return the kind of the tokenizer, "bytes", "bpe" or "json", and the file of the last."""
    if not isinstance(tokenizer, str | Path):
        raise TypeError(f"tokenizer: expected 'bytes', 'bpe' or a path, got {describe(tokenizer)}")
    path = Path(tokenizer)
    if (path / INDEX).is_file():  # that of another corpus
        said = Index.read(path).tokenizer
        path = Path(said.kind) if said.file is None else path / said.file
    if str(path) == "bpe":
        optional("tokenizers", "tokenizer='bpe'")
    if str(path) in ("bytes", "bpe"):
        return str(path), None
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        got = f"{str(tokenizer)!r}{nearest(str(tokenizer), ('bytes', 'bpe'))}"
        raise FileNotFoundError(f"tokenizer: expected 'bytes', 'bpe', a tokenizer.json or a corpus, got {got}")
    return "json", path


def check_seed(seed: Any) -> int:
    """Return the seed if it is a number of 64 bits, as all that is drawn from it are."""
    if whole_number("seed", seed, at_least=0) >> 64:
        raise ValueError(f"seed: expected less than 2**64, got {seed}")
    return int(seed)


def check_encoding(name: Any) -> str | None:
    """Return Python's own name of a text encoding, or None for UTF-8."""
    try:
        codec = codecs.lookup(name)
        codec.incrementaldecoder().decode(b"", final=True)
        found = codec.name
    except (LookupError, TypeError, ValueError):  # not known, not a name, not of text
        found = ""
    if not found or not getattr(codec, "_is_text_encoding", True):
        raise ValueError(f"encoding: expected a name such as 'utf-8', 'latin-1' or 'cp1252', got {name!r}")
    return None if found == "utf-8" else found


def check_validation(validation: Any) -> tuple[float, list[Any]]:
    """Return the fraction of the documents to hold out, and the files."""
    if validation is None or isinstance(validation, int | float):
        fraction = number("validation", 0.05 if validation is None else validation, at_least=0)
        if fraction >= 1:
            raise ValueError(f"validation: expected a fraction of the documents below 1, or paths, got {validation}")
        return fraction, []
    if not isinstance(validation, str | Path | list | tuple):
        raise TypeError(f"validation: expected a fraction of the documents or paths, got {describe(validation)}")
    return 0.0, [validation] if isinstance(validation, str | Path) else list(validation)
