"""What the analyses share: the text in pieces, lengths that fit it, the head of their files, a row of their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lengthen import __version__
from lengthen.data import Corpus, Tokens
from lengthen.evaluation.capture import refuse_encoder
from lengthen.evaluation.runs import Subject
from lengthen.model.score import device_name, device_of, precision_of

TOKENS = 16_384  # of the text that are read, by default
BATCH_TOKENS = 1 << 13  # in one pass
TIMES = (1, 2, 4, 8, 16)  # the training length: the usual lengths
WIDEST = 9  # columns of numbers that fit on a terminal

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]  # the stage, what is done, and what there is to do


def silent(stage: str, done: int, total: int) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Lengths:
    """What the lengths of an analysis are: `times`·length + `beside` tokens are read at once."""

    least: int = 2
    times: int = 1
    beside: int = 0
    of_text: bool = True  # pieces of the text, which cannot be longer than it is

    def read(self, length: int) -> int:
        """Return how many tokens are read at once."""
        return self.times * length + self.beside

    def usual(self, train_length: int) -> list[int]:
        """Return the lengths at which about the training length and multiples of it are read."""
        return sorted({max(self.least, train_length * factor // self.times) for factor in TIMES})


def header(kind: str, subject: Subject, corpus: Corpus, precision: torch.dtype = torch.float32) -> Row:
    """Return what every file says of the model, the data and the computation; float32 is the weights' own precision."""
    refuse_encoder(subject.model)
    config = subject.model.config
    return {
        "kind": kind,
        "positions": config.positions,
        "train_length": config.train_length,
        "checkpoint": subject.checkpoint.path.name,
        "weights": subject.weights,
        "data": corpus.fingerprint,
        "precision": precision_of(subject.model, precision),
        "device": device_name(device_of(subject.model)),
        "version": __version__,
    }


def pieces(text: Tokens, length: int, tokens: int, stage: str, progress: Progress) -> Iterator[Tensor]:
    """Yield batches of pieces of a length `[pieces, length]`, of about so many tokens in all and one piece at least."""
    count, rows = max(1, min(tokens, len(text)) // length), max(1, BATCH_TOKENS // length)
    for start in range(0, count, rows):
        here = range(start, min(start + rows, count))
        yield torch.stack([torch.from_numpy(text.read(p * length, (p + 1) * length)) for p in here])
        progress(f"{stage}, {length}", here.stop * length, count * length)


def fitting_lengths(subject: Subject, kind: Lengths, text: Tokens, given: list[int] | None = None) -> list[int]:
    """Return the lengths, checked against the text and the model; without any, those of the usual ones that fit."""
    config, fitting = subject.model.config, []
    usual = kind.usual(config.train_length)
    for length in usual if given is None else given:
        problem = None
        if length < kind.least:
            problem = f"expected at least {kind.least}, got {length}"
        elif kind.of_text and length >= len(text):
            held = f"split {text.name!r} of {text.directory} has {len(text):,} tokens"
            problem = f"{length:,} is longer than the text: {held}"
        elif config.longest is not None and kind.read(length) > config.longest:
            beyond = f"beyond the {config.longest:,} positions that this model has learned vectors for"
            problem = f"{kind.read(length):,} tokens are {beyond}"
        if problem is None:
            fitting.append(length)
        elif given is not None or length == usual[0]:
            raise ValueError(f"--lengths: {problem}")
    return fitting


def line(first: object, cells: Iterable[object]) -> str:
    """Return a row of a table for the terminal."""
    return (f"  {first!s:<22}" + "".join(f"{cell!s:>9}" for cell in cells)).rstrip()
