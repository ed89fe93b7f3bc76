"""The report's numbers as CSV: one file per kind of measurement; reading them gives the very same floats."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lengthen.io import write_bytes
from lengthen.report.collect import Report, Run

Row = dict[str, Any]
ABOUT = ("run", "positions", "train_length", "checkpoint", "data")
COLUMNS: dict[str, tuple[str, ...]] = {
    "evaluation": (
        *("run", "positions", "train_length", "checkpoint", "step", "data", "split", "protocol", "length", "stride"),
        *("block", "tokens", "documents", "loss", "loss_se", "perplexity", "perplexity_per_word", "bits_per_byte"),
        *("tokens_per_second", "seconds", "peak_bytes", "device"),
    ),
    "training": ("run", "positions", "train_length", "steps", "loss", "tokens_per_second"),
    "resolution": (*ABOUT, "length", "blockwise", "block", "layer", "resolution"),
    "positions": (*ABOUT, "length", "position", "loss", "count"),
    "curse": (*ABOUT, "short", "long", "gain", "from_context", "from_curse"),
    "reach": (*ABOUT, "length", "layer", "head", "reach", "share"),
    "distance": (*ABOUT, "length", "layer", "head", "distance", "weight"),
    "recall": (*ABOUT, "distance", "accuracy", "trials"),
}


def write_csv(report: Report, folder: str | Path) -> list[Path]:
    """Write a file for each kind of measurement that the runs have; return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, columns in COLUMNS.items():
        found = [{**about(run, name), **row} for run in report.runs for row in rows(run, name)]
        if found:
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, columns, lineterminator="\n")  # None is written as nothing
            writer.writeheader()
            writer.writerows(found)
            written.append(folder / f"{name}.csv")
            write_bytes(written[-1], text.getvalue().encode(errors="replace"))  # JSON may hold half a character
    return written


def about(run: Run, name: str) -> Row:
    """Return the columns that say which run and checkpoint a row is of."""
    own = {"run": run.path, "positions": run.positions, "train_length": run.train_length}
    made = run.analyses.get("positions" if name == "curse" else name)
    return own if made is None else {**own, "checkpoint": made.checkpoint, "data": made.data}


def rows(run: Run, name: str) -> Iterator[Row]:
    """Yield the rows of one kind as the run's files have them, one number per row."""
    if name == "evaluation":
        for one in run.evaluations:
            yield {key: getattr(one, key) for key in COLUMNS[name][1:]}
    elif name == "training" and run.training is not None:
        yield run.training
    elif name == "curse" and "positions" in run.analyses:
        curse = run.analyses["positions"].curse
        if curse:
            yield {key: curse.get(key) for key in COLUMNS[name][len(ABOUT) :]}
    for row in run.rows(name):
        yield from FLAT[name](row)


def _resolution(row: Any) -> Iterator[Row]:
    layers = enumerate(row.layers or [])
    for layer, value in [(None, row.resolution), *layers]:  # no layer: the mean over all
        yield {"length": row.length, "blockwise": row.blockwise, "block": row.block, "layer": layer, "resolution": value}


def _positions(row: Any) -> Iterator[Row]:
    for position, loss, count in zip_longest(row.positions, row.loss, row.count or []):
        yield {"length": row.length, "position": position, "loss": loss, "count": count}


def _reach(row: Any) -> Iterator[Row]:
    for layer, heads in enumerate(row.reach):
        for head, (reach, share) in enumerate(zip_longest(heads, row.share[layer] if row.share else [])):
            yield {"length": row.length, "layer": layer, "head": head, "reach": reach, "share": share}


def _distance(row: Any) -> Iterator[Row]:
    for layer, heads in enumerate(row.weight):
        for head, weights in enumerate(heads):
            for distance, weight in zip(row.distances, weights, strict=True):
                place = {"length": row.length, "layer": layer, "head": head}
                yield {**place, "distance": distance, "weight": weight}


def _recall(row: Any) -> Iterator[Row]:
    yield {"distance": row.distance, "accuracy": row.accuracy, "trials": row.trials}


FLAT = {
    **{"resolution": _resolution, "positions": _positions},
    **{"reach": _reach, "distance": _distance, "recall": _recall},
}
