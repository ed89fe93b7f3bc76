"""What the analyses share: the text in pieces, lengths that fit it, the head of their files, a row of their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lengthen.data import Corpus, Tokens
from lengthen.evaluation.recall import BESIDE, NEAREST
from lengthen.evaluation.runs import Subject

TOKENS = 16_384  # of the text that are read, by default
BATCH_TOKENS = 1 << 13  # in one pass
TIMES = (1, 2, 4, 8, 16)  # the training length: the usual lengths
WIDEST = 9  # columns of numbers that fit on a terminal

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]  # the stage, what is done, and what there is to do


def silent(stage: str, done: int, total: int) -> None:
    """Say nothing."""


def header(kind: str, subject: Subject, corpus: Corpus | None) -> Row:
    """Return what every file says of the model and the data."""
    config = subject.model.config
    return {
        "kind": kind,
        "positions": config.positions,
        "train_length": config.train_length,
        "checkpoint": subject.checkpoint.path.name,
        "weights": subject.weights,
        "data": None if corpus is None else corpus.fingerprint,
    }


def pieces(text: Tokens, length: int, tokens: int, stage: str, progress: Progress) -> Iterator[Tensor]:
    """Yield batches of pieces of a length `[pieces, length]`, of about so many tokens in all and one piece at least."""
    count, rows = max(1, min(tokens, len(text)) // length), max(1, BATCH_TOKENS // length)
    for start in range(0, count, rows):
        here = range(start, min(start + rows, count))
        yield torch.stack([torch.from_numpy(text.read(p * length, (p + 1) * length)) for p in here])
        progress(f"{stage}, {length}", here.stop * length, count * length)


def fitting_lengths(subject: Subject, corpus: Corpus | None, split: str, given: list[int] | None = None) -> list[int]:
    """Return the lengths, checked against the text and the model; without any, those of the usual ones that fit.

    Without a corpus they are recall's distances, which are read with a few tokens beside them.
    """
    least, beside = (NEAREST, BESIDE) if corpus is None else (2, 0)
    there = None if corpus is None else len(corpus[split])
    config, fitting = subject.model.config, []
    for length in given or [config.train_length * factor for factor in TIMES]:
        problem = None
        if length < least:
            problem = f"expected at least {least}, got {length}"
        elif corpus is not None and there is not None and length >= there:
            problem = f"{length:,} is longer than the text: split {split!r} of {corpus.directory} has {there:,} tokens"
        elif config.longest is not None and length + beside > config.longest:
            beyond = f"beyond the {config.longest:,} positions that this model has learned vectors for"
            problem = f"{length + beside:,} tokens are {beyond}"
        if problem is None:
            fitting.append(length)
        elif given is not None or length == config.train_length:
            raise ValueError(f"--lengths: {problem}")
    return fitting


def line(first: object, cells: Iterable[object]) -> str:
    """Return a row of a table for the terminal."""
    return (f"  {first!s:<22}" + "".join(f"{cell!s:>9}" for cell in cells)).rstrip()
