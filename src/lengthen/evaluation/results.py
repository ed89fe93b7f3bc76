"""Results of evaluations: each number with all that says how it was made; a file of JSON lines that only grows."""

from __future__ import annotations

import fcntl
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lengthen import io

FILE = "evaluation.jsonl"
WITHIN = 0.01  # of the best loss: what still counts as holding


@dataclass(frozen=True)
class Result:
    """The loss of one checkpoint on one text at one length under one protocol."""

    positions: str
    train_length: int
    checkpoint: str
    step: int
    data: str  # the corpus' fingerprint
    split: str
    protocol: str
    length: int
    stride: int
    block: int | None
    tokens: int  # scored
    documents: int  # that those tokens are from
    loss: float  # nats a token
    loss_se: float | None  # its standard error over documents; none for a single one
    perplexity_per_word: float  # a document that was scored in part counts with its share of words
    bits_per_byte: float  # likewise
    tokens_per_second: float
    seconds: float
    peak_bytes: int | None  # of memory that scoring took beside the model; none where it cannot be known
    device: str
    weights: str = ""  # the sha256 of the model's file; empty in results from before it was noted

    @property
    def perplexity(self) -> float:
        """e^loss, a token's."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes it the same measurement as another."""
        return key(asdict(self))

    def record(self) -> dict[str, Any]:
        """Return it as a line of the file has it."""
        return {"kind": "evaluation", **asdict(self), "perplexity": self.perplexity}


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what makes a record the same measurement as another."""
    names = ("weights", "data", "split", "protocol", "length", "stride", "block", "tokens")
    return tuple(record[name] for name in names)


def read(folder: Path) -> dict[tuple[Any, ...], Result]:
    """Return the results in a folder by their key; of two with the same key, the later."""
    path, found = folder / FILE, {}
    lines: Iterable[dict[str, Any]] = io.read_lines(path, dict) if path.exists() else ()
    for number, record in enumerate(lines, 1):
        values = {name: value for name, value in record.items() if name not in ("kind", "perplexity")}
        result = io.build(Result, values, f"{path}, line {number}")
        found[result.key] = result
    return found


def append(folder: Path, result: Result) -> None:
    """Add a result to the folder's file; lines stay whole if others append too, and one left torn is cut off."""
    with (folder / FILE).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
        file.write(io.line_of(result.record()).encode())


@dataclass(frozen=True)
class Verdict:
    """How far a model can be stretched under one protocol."""

    protocol: str
    length: int  # the longest that holds
    times: float  # the training length
    best: float  # loss
    longest: int  # that was tried

    def __str__(self) -> str:
        beyond = " (the longest tried)" if self.length == self.longest else ""
        return (
            f"{self.protocol}: holds to {self.length:,} tokens, {self.times:g}× the training length{beyond}: "
            f"the loss is within {WITHIN:.0%} of its best, {self.best:.4f}"
        )


def verdicts(results: list[Result]) -> list[Verdict]:
    """Return a verdict for each protocol (and block): the longest length whose loss is within 1 % of the best."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        name = result.protocol if result.block is None else f"{result.protocol} ({result.block:,})"
        groups.setdefault(name, []).append(result)
    found = []
    for name, group in groups.items():
        finite = [one for one in group if math.isfinite(one.loss)]
        if not finite:
            continue
        best = min(one.loss for one in finite)
        holds = max((one for one in finite if one.loss <= best * (1 + WITHIN)), key=lambda one: one.length)
        times = holds.length / holds.train_length
        found.append(Verdict(name, holds.length, times, best, max(one.length for one in group)))
    return found
