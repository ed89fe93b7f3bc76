"""What the files of RUN/analysis/ hold: the schema of each kind's rows, and the same rows with one number each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

from lengthen.io import Table, build, fields, read_json

T = TypeVar("T")
Numbers = list[float | None]


@dataclass(frozen=True)
class Analysis:
    """One file: its rows, with one number each, and how it was made."""

    rows: list[Table]
    checkpoint: str | None = None
    data: str | None = None
    command: str | None = None
    curse: Table | None = None  # of positions: where the gain of longer inputs comes from


@dataclass(frozen=True)
class _Resolution:
    length: int
    resolution: float | None
    layers: Numbers | None = None
    blockwise: bool | None = False
    block: int | None = None

    def flat(self) -> Iterator[Table]:
        about = {"length": self.length, "blockwise": self.blockwise, "block": self.block}
        yield {**about, "layer": None, "resolution": self.resolution}  # no layer: the mean over all
        yield from ({**about, "layer": layer, "resolution": value} for layer, value in enumerate(self.layers or []))


@dataclass(frozen=True)
class _Positions:
    length: int
    positions: list[int]  # where buckets end
    loss: Numbers
    count: list[int | float | None] | None = None

    def flat(self) -> Iterator[Table]:
        counts = self.count or [None] * len(self.positions)
        for position, loss, count in zip(self.positions, self.loss, counts, strict=True):
            yield {"length": self.length, "position": position, "loss": loss, "count": count}


@dataclass(frozen=True)
class _Reach:
    length: int
    reach: list[Numbers]  # by layer and head
    share: list[Numbers] | None = None

    def flat(self) -> Iterator[Table]:
        for layer, (heads, shares) in enumerate(
            zip(self.reach, self.share or repeat(None, len(self.reach)), strict=True)
        ):
            for head, (reach, share) in enumerate(zip(heads, shares or [None] * len(heads), strict=True)):
                yield {"length": self.length, "layer": layer, "head": head, "reach": reach, "share": share}


@dataclass(frozen=True)
class _Distance:
    length: int
    distances: list[int]  # where buckets start
    weight: list[list[Numbers]]  # by layer, head and bucket

    def flat(self) -> Iterator[Table]:
        for layer, heads in enumerate(self.weight):
            for head, weights in enumerate(heads):
                for distance, weight in zip(self.distances, weights, strict=True):
                    about = {"length": self.length, "layer": layer, "head": head}
                    yield {**about, "distance": distance, "weight": weight}


@dataclass(frozen=True)
class _Recall:
    distance: int
    accuracy: float | None
    trials: int | None = None

    def flat(self) -> Iterator[Table]:
        yield {"distance": self.distance, "accuracy": self.accuracy, "trials": self.trials}


KINDS: dict[str, Any] = {
    **{"resolution": _Resolution, "positions": _Positions, "reach": _Reach},
    **{"distance": _Distance, "recall": _Recall},
}


def read_analysis(path: Path, kind: str) -> Analysis:
    """Return what a file of analysis/ holds."""
    found = known(Analysis, read_json(path, dict), str(path))
    rows = [known(KINDS[kind], row, f"{path}, row {place}") for place, row in enumerate(found.rows, 1)]
    try:
        return replace(found, rows=[flat for row in rows for flat in row.flat()])
    except ValueError as problem:
        raise ValueError(f"{path}: expected lists of equal lengths in a row: {problem}") from None


def known(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """Return the dataclass from the keys that it knows; others are passed over."""
    return build(kind, {key: table[key] for key in fields(kind) if key in table}, where)
