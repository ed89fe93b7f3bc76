"""The report's numbers as CSV: a file a kind of measurement, written so that reading gives the very same floats."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lengthen.report.collect import REAL, WHOLE, WORDS, Record, Report, Run

ABOUT = ("run", "positions", "train_length", "checkpoint", "data")
EVALUATION = (
    *("run", "positions", "train_length", "checkpoint", "step", "data", "split", "protocol", "length", "stride"),
    *("block", "tokens", "documents", *REAL, "device"),
)
COLUMNS: dict[str, tuple[str, ...]] = {
    "evaluation": EVALUATION,
    "training": ("run", "positions", "train_length", "steps", "loss", "tokens_per_second"),
    "resolution": (*ABOUT, "length", "blockwise", "block", "layer", "resolution"),
    "positions": (*ABOUT, "length", "position", "loss", "count"),
    "curse": (*ABOUT, "short", "long", "gain", "from_context", "from_curse"),
    "reach": (*ABOUT, "length", "layer", "head", "reach", "share"),
    "distance": (*ABOUT, "length", "layer", "head", "distance", "weight"),
    "recall": (*ABOUT, "distance", "accuracy", "trials"),
}
assert set(EVALUATION) == {"run", *WORDS, *WHOLE, *REAL}


def write_csv(report: Report, folder: str | Path) -> list[Path]:
    """Write a file for each kind of measurement that the runs have; return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in COLUMNS:
        found = list(rows(report, name))
        if not found:
            continue
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS[name], lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in found)
        path = folder / f"{name}.csv"
        path.write_text(text.getvalue(), encoding="utf-8", errors="replace")
        written.append(path)
    return written


def rows(report: Report, name: str) -> Iterator[Record]:
    """Yield the rows of one of the files, as they are in the runs' folders."""
    for run in report.runs:
        if name == "evaluation":
            for record in run.evaluations:
                yield {"run": run.path, **{key: record.get(key) for key in EVALUATION[1:]}}
        elif name == "training":
            if run.training is not None:
                yield {**_about(run, {}, 3), **run.training}
        else:
            analysis = run.analyses.get("positions" if name == "curse" else name)
            if analysis is not None:
                about = _about(run, analysis)
                yield from ({**about, **row} for row in _KINDS[name](analysis))


def _about(run: Run, analysis: Record, columns: int = 5) -> Record:
    own = {"run": run.path, "positions": run.positions, "train_length": run.train_length}
    return {key: analysis.get(key, own.get(key)) if key != "run" else run.path for key in ABOUT[:columns]}


def _cell(value: Any) -> Any:
    return "" if value is None else value


def _resolution(analysis: Record) -> Iterator[Record]:
    for row in analysis["rows"]:
        about = {key: row.get(key) for key in ("length", "blockwise", "block")}
        yield {**about, "layer": None, "resolution": row["resolution"]}  # no layer: the mean over all
        yield from ({**about, "layer": i, "resolution": value} for i, value in enumerate(row.get("layers") or []))


def _positions(analysis: Record) -> Iterator[Record]:
    for row in analysis["rows"]:
        counts = row.get("count") or [None] * len(row["loss"])
        for position, loss, count in zip(row["positions"], row["loss"], counts, strict=True):
            yield {"length": row["length"], "position": position, "loss": loss, "count": count}


def _curse(analysis: Record) -> Iterator[Record]:
    curse = analysis.get("curse")
    if curse:
        yield {key: curse.get(key) for key in COLUMNS["curse"][len(ABOUT) :]}


def _reach(analysis: Record) -> Iterator[Record]:
    for row in analysis["rows"]:
        shares = row.get("share")
        for layer, heads in enumerate(row["reach"]):
            for head, reach in enumerate(heads):
                share = shares[layer][head] if shares else None
                yield {"length": row["length"], "layer": layer, "head": head, "reach": reach, "share": share}


def _distance(analysis: Record) -> Iterator[Record]:
    for row in analysis["rows"]:
        for layer, heads in enumerate(row["weight"]):
            for head, weights in enumerate(heads):
                for distance, weight in zip(row["distances"], weights, strict=True):
                    about = {"length": row["length"], "layer": layer, "head": head}
                    yield {**about, "distance": distance, "weight": weight}


def _recall(analysis: Record) -> Iterator[Record]:
    for row in analysis["rows"]:
        yield {key: row.get(key) for key in ("distance", "accuracy", "trials")}


_KINDS = {
    **{"resolution": _resolution, "positions": _positions, "curse": _curse},
    **{"reach": _reach, "distance": _distance, "recall": _recall},
}
