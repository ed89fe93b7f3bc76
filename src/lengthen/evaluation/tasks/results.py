"""Results of tasks: how many samples were right, by length and depth, and how they were measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lengthen import io
from lengthen.evaluation.results import Keyed, append_line

FILE = "tasks.jsonl"


@dataclass(frozen=True, kw_only=True)
class Asked(Keyed):
    """What is asked: two results of the same are of one number."""

    weights: str  # the sha256 of the model's file
    position_options: dict[str, Any]  # as the model was read, which may differ from how it was trained
    data: str  # the fingerprint of the corpus whose text is around what is asked for
    split: str
    task: str
    length: int  # tokens of prompt and answer
    protocol: str  # nonoverlapping: all is seen; blockwise, window: what those let a token see
    block: int | None
    samples: int
    depths: list[float | None]  # that samples are dealt to; [None] of a task without
    seed: int
    precision: str


@dataclass(frozen=True, kw_only=True)
class TaskResult(Asked):
    """How many samples of one task one model answers at one length."""

    positions: str
    train_length: int
    checkpoint: str
    step: int
    corpus: str  # its folder
    right: list[int]  # of each depth: samples whose answer is right in every token
    counts: list[int]  # and samples
    token_accuracy: float  # of the answers' tokens, those that are the likeliest after the right ones before
    chance: float  # the accuracy of a guess
    tokens_per_second: float
    seconds: float
    device: str  # cpu, or the GPU's name
    version: str  # of this package

    @property
    def accuracy(self) -> float:
        """The fraction of samples that are right."""
        return sum(self.right) / sum(self.counts)

    @property
    def standard_error(self) -> float:
        """The accuracy's, by the binomial distribution."""
        return binomial_error(self.accuracy, sum(self.counts))

    def record(self) -> dict[str, Any]:
        """Return it as a line of the file has it."""
        more = {"accuracy": self.accuracy, "standard_error": self.standard_error}
        return {"kind": "task", **asdict(self), **more}


def binomial_error(fraction: float, count: int) -> float:
    """Return √(p·(1 − p)/n), the standard error of a fraction of n."""
    return math.sqrt(fraction * (1 - fraction) / count)


def read(folder: Path) -> dict[str, TaskResult]:
    """Return the results in a folder by their key; of two with the same key, the later."""
    path, found = folder / FILE, {}
    for number, record in enumerate(io.read_lines(path, dict) if path.exists() else (), 1):
        values = {name: value for name, value in record.items() if name not in ("kind", "accuracy", "standard_error")}
        result = io.build(TaskResult, values, f"{path}, line {number}")
        found[result.key] = result
    return found


def append(folder: Path, result: TaskResult) -> None:
    """Add a result to the folder's file."""
    append_line(folder / FILE, result.record())
