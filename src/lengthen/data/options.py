"""The options of `prepare`, checked, and the settings that they become in a corpus's index."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthen.checks import describe, nearest, number, whole_number
from lengthen.data.corpus import INDEX, fitting_dtype, read_index, sha256_of
from lengthen.data.readers import Reading
from lengthen.data.sources import Source
from lengthen.data.tokenizer import BYTE_VOCAB_SIZE, optional

DEFAULT_VOCAB_SIZE = 16384
DEFAULT_SHARE = 0.05
SMALLEST_BPE = 258  # every byte, <|end|> and <|mask|>


@dataclass(frozen=True)
class Options:
    """What was asked for; `settings` is the part of it that decides the bytes of the corpus."""

    kind: str  # "bytes", "bpe" or "json"
    tokenizer_path: Path | None
    share: float
    held_out: tuple[str | Path, ...]
    share_given: bool
    reading: Reading
    processes: int
    settings: dict[str, Any]


def check_options(
    *,
    tokenizer: str | Path,
    vocab_size: int | None,
    end_token: str | None,
    mask_token: str | None,
    sample_bytes: int,
    validation: Any,
    text_key: str,
    separator: str | None,
    split_before: str | None,
    processes: int | None,
    seed: int,
    shard_tokens: int,
    dtype: str | None,
) -> Options:
    """Check each option by itself; what depends on the sources is checked when they are known."""
    kind, path = _tokenizer(tokenizer, vocab_size, end_token, mask_token)
    share, held_out = _validation(validation)
    reading = _reading(text_key, separator, split_before)
    if kind == "bytes":
        fitting_dtype(BYTE_VOCAB_SIZE, dtype, "bytes")
    elif dtype is not None:
        fitting_dtype(1, dtype, "")  # is it the name of a dtype at all?
    settings = {
        "tokenizer": kind,
        "tokenizer_sha256": None if path is None else sha256_of(path),
        "vocab_size": _vocab_size(vocab_size, dtype) if kind == "bpe" else None,
        "sample_bytes": whole_number("sample_bytes", sample_bytes, at_least=1) if kind == "bpe" else None,
        "end_token": end_token,
        "mask_token": mask_token,
        "validation": "files" if held_out else share,
        "seed": whole_number("seed", seed, at_least=0),
        "text_key": text_key,
        "separator": separator,
        "split_before": split_before,
        "shard_tokens": whole_number("shard_tokens", shard_tokens, at_least=1),
        "dtype": dtype,
    }
    workers = whole_number("processes", available_cores() if processes is None else processes, at_least=1)
    return Options(kind, path, share, held_out, validation is not None, reading, workers, settings)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tokenizer(
    tokenizer: str | Path, vocab_size: int | None, end_token: str | None, mask_token: str | None
) -> tuple[str, Path | None]:
    if not isinstance(tokenizer, str | Path):
        raise TypeError(f"tokenizer: expected 'bytes', 'bpe' or a path, got {describe(tokenizer)}")
    tokenizer = _of_corpus(Path(tokenizer)) or tokenizer
    if tokenizer != "bpe" and vocab_size is not None:
        raise ValueError(f"vocab_size: only tokenizer='bpe' has one to choose, got {vocab_size} for {str(tokenizer)!r}")
    if tokenizer in ("bytes", "bpe"):
        for key, value in (("end_token", end_token), ("mask_token", mask_token)):
            if value is not None:
                raise ValueError(f"{key}: only a tokenizer.json has one to choose, got {value!r} for {tokenizer!r}")
        if tokenizer == "bpe":
            optional("tokenizers", "tokenizer='bpe'")
        return str(tokenizer), None
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        hint = nearest(str(tokenizer), ("bytes", "bpe"))
        raise FileNotFoundError(
            f"tokenizer: expected 'bytes', 'bpe', a tokenizer.json or a corpus, got {str(tokenizer)!r}{hint}"
        )
    return "json", path


def _of_corpus(folder: Path) -> str | Path | None:
    """Return the tokenizer of a prepared corpus, if the folder is one: another text in the same tokens."""
    if not (folder / INDEX).is_file():
        return None
    said = read_index(folder)["tokenizer"]
    return folder / said["file"] if "file" in said else str(said["kind"])


def _vocab_size(vocab_size: int | None, dtype: str | None) -> int:
    size = whole_number("vocab_size", DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size, at_least=SMALLEST_BPE)
    fitting_dtype(size, dtype, "tokenizer='bpe'")
    return size


def _validation(validation: Any) -> tuple[float, tuple[str | Path, ...]]:
    if validation is None:
        return DEFAULT_SHARE, ()
    if isinstance(validation, str | Path):
        return 0.0, (validation,)
    if isinstance(validation, int | float):
        share = number("validation", validation, at_least=0)
        if share >= 1:
            raise ValueError(f"validation: expected a share of the documents below 1, or paths, got {validation}")
        return share, ()
    if not isinstance(validation, Sequence) or not all(isinstance(item, str | Path) for item in validation):
        raise TypeError(f"validation: expected a share of the documents or a list of paths, got {describe(validation)}")
    return 0.0, tuple(validation)


def _reading(text_key: str, separator: str | None, split_before: str | None) -> Reading:
    for key, value in (("text_key", text_key), ("separator", separator), ("split_before", split_before)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{key}: expected a string, got {describe(value)}")
        if value == "":
            raise ValueError(f"{key}: expected a string of at least one character, got {value!r}")
    if separator is not None and split_before is not None:
        raise ValueError(f"separator, split_before: expected one of them, got {separator!r} and {split_before!r}")
    try:
        pattern = None if split_before is None else re.compile(split_before)
    except re.error as problem:
        raise ValueError(f"split_before: expected a regular expression, got {split_before!r}: {problem}") from None
    return Reading(text_key, None if separator is None else separator.encode("utf-8"), pattern)


def check_sources(options: Options, files: list[Source], out: Path) -> float:
    """Check the options against the files; return the share of the train documents that go to validation."""
    for key in ("separator", "split_before"):
        if options.settings[key] is not None and all(file.kind != "text" for file in files):
            raise ValueError(f"{key}: splits text files, but there is none among the sources")
    if not any(file.split == "train" for file in files):
        raise ValueError("sources: all of them are held out for validation, which leaves nothing to train on")
    here = out.resolve()
    for file in files:
        if here in file.path.resolve().parents:
            raise ValueError(f"out: expected a folder apart from the sources, but {file.path} lies in {out}")
    own = next((file for file in files if file.split == "validation"), None)
    if own is not None and not options.held_out:
        if options.share_given and options.share > 0:
            raise ValueError(f"validation: {options.share} asked for, but the source {own.name} is validation already")
        return 0.0
    return options.share


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Say in which settings two corpora differ."""
    keys = sorted(old.keys() | new.keys())
    return [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} asked for" for key in keys if old.get(key) != new.get(key)
    ]
