"""What the files of RUN/analysis/ hold, as rows with one number each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lengthen.checks import describe, whole_number
from lengthen.io import Table, build, fields, read_json

T = TypeVar("T")
KINDS = ("resolution", "positions", "reach", "distance", "induction", "longppl")
COPYING = ("sequences", "first", "second", "difference", "standard_error")  # of induction, beside weights
LONGPPL = ("candidates", "key_tokens", "long_ppl", "standard_error", "soft_long_ppl", "perplexity")
PLACES = ("length", "position", "distance")  # columns of whole numbers


@dataclass(frozen=True)
class Analysis:
    """One file: its rows, with one number each, and what it was made from."""

    rows: list[Table]
    positions: str | None = None
    checkpoint: str | None = None
    weights: str | None = None  # the sha256 of the model's file
    data: str | None = None
    device: str | None = None
    precision: str | None = None
    version: str | None = None  # of the package
    curse: Table | None = None  # of positions: where the gain of longer inputs comes from


def read_analysis(path: Path, kind: str) -> Analysis:
    """Return what a file of analysis/ holds."""
    found = known(Analysis, read_json(path, dict), str(path))
    rows = []
    for place, row in enumerate(found.rows, 1):
        try:
            rows += [_checked(one) for one in _flat(kind, row)]
        except (KeyError, TypeError, ValueError) as problem:
            told = f"expected what `lengthen analyse --what {kind}` writes"
            raise ValueError(f"{path}, row {place}: {told}, got {problem!r}") from None
    return replace(found, rows=rows)


def _flat(kind: str, row: Table) -> Iterator[Table]:
    if kind == "induction":  # without a layer: the model's losses
        nothing = {"length": row["length"], **dict.fromkeys(("layer", *COPYING, "previous", "induction"))}
        yield nothing | {key: row[key] for key in COPYING}
        for number, (previous, after) in enumerate(zip(row["previous"], row["induction"], strict=True)):
            yield nothing | {"layer": number, "previous": previous, "induction": after}
    elif kind == "longppl":
        yield {key: row[key] for key in ("length", *LONGPPL)}
    elif kind == "resolution":  # without a layer: the mean over all
        about = {key: row[key] for key in ("length", "blockwise", "block")}
        for layer, value in [(None, row["resolution"]), *enumerate(row["layers"])]:
            yield {**about, "layer": layer, "resolution": value}
    elif kind == "positions":
        for position, loss, count in zip(row["positions"], row["loss"], row["count"], strict=True):
            yield {"length": row["length"], "position": position, "loss": loss, "count": count}
    elif kind == "reach":
        for layer, heads in enumerate(zip(row["reach"], row["fraction"], strict=True)):
            for head, (reach, fraction) in enumerate(zip(*heads, strict=True)):
                yield {"length": row["length"], "layer": layer, "head": head, "reach": reach, "fraction": fraction}
    else:
        for layer, heads in enumerate(row["weight"]):
            for head, weights in enumerate(heads):
                about = {"length": row["length"], "layer": layer, "head": head}
                for distance, weight in zip(row["distances"], weights, strict=True):
                    yield {**about, "distance": distance, "weight": weight}


def _checked(row: Table) -> Table:
    for key, value in row.items():
        if key in PLACES:
            whole_number(key, value, at_least=0)
        elif value is not None and not isinstance(value, int | float):
            raise TypeError(f"{key}: expected a number, got {describe(value)}")
    return row


def known(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """Return the dataclass from the keys that it knows; others are passed over."""
    return build(kind, {key: table[key] for key in fields(kind) if key in table}, where)
