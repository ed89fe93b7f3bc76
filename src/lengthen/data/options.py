"""The options of `prepare` that take more than a line to check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lengthen.checks import describe, nearest, number
from lengthen.data.corpus import INDEX, Index
from lengthen.data.readers import Reading
from lengthen.data.sources import Source
from lengthen.data.tokenizer import optional


def find_tokenizer(
    tokenizer: Any, vocab_size: int | None, end_token: str | None, mask_token: str | None
) -> tuple[str, Path | None]:
    """Return the kind of the tokenizer, "bytes", "bpe" or "json", and the file of the last."""
    if not isinstance(tokenizer, str | Path):
        raise TypeError(f"tokenizer: expected 'bytes', 'bpe' or a path, got {describe(tokenizer)}")
    path = Path(tokenizer)
    if (path / INDEX).is_file():  # that of another corpus
        said = Index.read(path).tokenizer
        path = Path(said.kind) if said.file is None else path / said.file
    kind = str(path) if str(path) in ("bytes", "bpe") else "json"
    if kind != "bpe" and vocab_size is not None:
        raise ValueError(f"vocab_size: only tokenizer='bpe' has one to choose, got {vocab_size} for {str(tokenizer)!r}")
    for key, value in (("end_token", end_token), ("mask_token", mask_token)):
        if kind != "json" and value is not None:
            raise ValueError(f"{key}: only a tokenizer.json has one to choose, got {value!r} for {kind!r}")
    if kind == "bpe":
        optional("tokenizers", "tokenizer='bpe'")
    if kind != "json":
        return kind, None
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        got = f"{str(tokenizer)!r}{nearest(str(tokenizer), ('bytes', 'bpe'))}"
        raise FileNotFoundError(f"tokenizer: expected 'bytes', 'bpe', a tokenizer.json or a corpus, got {got}")
    return kind, path


def check_validation(validation: Any) -> tuple[float, list[str | Path]]:
    """Return the fraction of the documents to hold out, and the files."""
    if validation is None or isinstance(validation, int | float):
        fraction = number("validation", 0.05 if validation is None else validation, at_least=0)
        if fraction >= 1:
            raise ValueError(f"validation: expected a fraction of the documents below 1, or paths, got {validation}")
        return fraction, []
    paths = [validation] if isinstance(validation, str | Path) else validation
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | Path) for path in paths):
        raise TypeError(f"validation: expected a fraction of the documents or paths, got {describe(validation)}")
    return 0.0, list(paths)


def check_sources(files: list[Source], out: Path, reading: Reading, fraction: float, validation: Any) -> float:
    """Check the options against the files; return the fraction of the train documents that go to validation."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder, got the file {out}")
    for key in ("separator", "split_before"):
        if getattr(reading, key) is not None and all(file.kind != "text" for file in files):
            raise ValueError(f"{key}: splits text files, but there is none among the sources")
    for file in files:
        if out.resolve() in file.path.resolve().parents:
            raise ValueError(f"out: expected a folder apart from the sources, but {file.path} lies in {out}")
    if not any(file.split == "train" for file in files):
        raise ValueError("sources: all of them are held out for validation, which leaves nothing to train on")
    own = next((file for file in files if file.split == "validation"), None)
    if own is not None and validation is not None and fraction > 0:
        raise ValueError(f"validation: {fraction} asked for, but the source {own.name} is validation already")
    return 0.0 if own is not None else fraction
