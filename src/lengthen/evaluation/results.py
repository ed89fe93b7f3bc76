"""Results of evaluations: each number with all that says how it was made; a file of JSON lines that only grows."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lengthen.training import log

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
    names = ("checkpoint", "step", "data", "split", "protocol", "length", "stride", "block", "tokens")
    return tuple(record[name] for name in names)


def read(folder: Path) -> dict[tuple[Any, ...], Result]:
    """Return the results in a folder by their key; of two with the same key, the later."""
    path = folder / FILE
    if not path.exists():
        return {}
    results = {}
    for record in log.read(path):
        values = {name: record[name] for name in Result.__dataclass_fields__}
        results[key(record)] = Result(**values)
    return results


def append(folder: Path, result: Result) -> None:
    """Add a result to the folder's file; a line that a killed process left torn is ended first."""
    path = folder / FILE
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    if torn:
        whole = [json.dumps(record) + "\n" for record in log.read(path)]
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(whole), encoding="utf-8")
        partial.replace(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result.record()) + "\n")


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
