"""What `lengthen eval RUN --task` left in RUN/tasks.jsonl, as rows with one accuracy each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthen.checks import whole_number
from lengthen.evaluation.tasks.results import binomial_error
from lengthen.io import Table, read_lines
from lengthen.report.analyses import known


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One line of tasks.jsonl: one task at one length."""

    task: str
    length: int
    protocol: str = "nonoverlapping"
    block: int | None = None
    depths: list[float | None]
    right: list[int]
    counts: list[int]
    token_accuracy: float | None = None
    chance: float | None = None
    seed: int | None = None
    split: str | None = None
    position_options: Table = field(default_factory=dict)
    positions: str | None = None
    checkpoint: str | None = None
    weights: str | None = None
    data: str | None = None
    device: str | None = None
    precision: str | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        whole_number("length", self.length, at_least=1)
        if not (len(self.depths) == len(self.right) == len(self.counts) > 0 and all(n > 0 for n in self.counts)):
            raise ValueError("depths, right, counts: expected as many of each, and samples in all")
        if not all(0 <= right <= count for right, count in zip(self.right, self.counts, strict=True)):
            raise ValueError("right: expected at most as many as counts has")

    @property
    def curve(self) -> tuple[Any, ...]:
        """What the lines for one curve of a figure have in common."""
        options = tuple(sorted((name, str(value)) for name, value in self.position_options.items()))
        return (self.task, self.protocol, self.block, options)

    def how(self, model: Table) -> str:
        """Return how it was read, where that is not as trained: under a mask, with other options of the method."""
        words = changed_options(self.position_options, model)
        return ", ".join([*words, f"{self.protocol} {self.block:,}"] if self.block else words)

    def rows(self) -> Iterator[Table]:
        """Yield a row without a depth for all samples, and one for each depth."""
        options = {"position_options": str(self.position_options) if self.position_options else None}
        about = {name: getattr(self, name) for name in ("task", "length", "protocol", "block")} | options
        made = {name: getattr(self, name) for name in ("checkpoint", "data", "device", "precision", "version")}
        told = {"chance": self.chance, "seed": self.seed, "split": self.split, **made}
        every = [(None, sum(self.right), sum(self.counts)), *zip(self.depths, self.right, self.counts, strict=True)]
        for place, (depth, right, count) in enumerate(every):
            if place == 0 or depth is not None:
                found = {"accuracy": right / count, "standard_error": binomial_error(right / count, count)}
                tokens = {"token_accuracy": None if place else self.token_accuracy}
                yield {**about, "depth": depth, "samples": count, "right": right, **found, **tokens, **told}


def changed_options(options: Table, model: Table) -> list[str]:
    """Return the options of the position method that are not those it was trained with, in words."""
    trained = model.get("position_options") or {}
    return [f"{name} {value}" for name, value in options.items() if trained.get(name) != value]


def read_tasks(path: Path) -> list[Asked]:
    """Return the lines of a file, none without one; lines of other kinds are passed over."""
    lines = enumerate(read_lines(path, dict) if path.is_file() else [], 1)
    return [known(Asked, line, f"{path}, line {number}") for number, line in lines if line.get("kind") == "task"]


def newest(found: list[Asked], there: Collection[str | None] = ()) -> list[Asked]:
    """Return the last line for each point, by length; of a curve, those of one model: of one that is there, if any."""
    curves: dict[tuple[Any, ...], list[Asked]] = {}
    for one in found:
        curves.setdefault(one.curve, []).append(one)
    points: dict[tuple[Any, ...], Asked] = {}
    for group in curves.values():
        last = max(reversed(group), key=lambda one: one.weights in there)
        points |= {(one.curve, one.length): one for one in group if one.weights == last.weights}
    return sorted(points.values(), key=lambda one: one.length)
