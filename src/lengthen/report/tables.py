"""The report's numbers as CSV: one file per kind of measurement; reading them gives the very same floats.

Text that a spreadsheet would run as a formula gets an apostrophe before it, which spreadsheets take for "this is text".
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lengthen.evaluation.errors import Difference
from lengthen.io import Table, write_bytes
from lengthen.report.collect import Curve, Measurement, Report, Run, paired

NAMES = ("evaluation", "resolution", "positions", "curse", "reach", "distance", "induction", "longppl", "tasks")
FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # what a cell begins with that spreadsheets calculate
CURSE = ("short", "long", "gain", "from_context", "from_curse")


def write_csv(report: Report, folder: str | Path) -> list[Path]:
    """Write a file for each kind of measurement that the runs have; return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    tables = {name: [{"run": run.path, **row} for run in report.runs for row in rows(run, name)] for name in NAMES}
    for name, found in (tables | {"differences": differences(report)}).items():
        if found:
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")  # None is written as nothing
            writer.writeheader()
            writer.writerows({key: _harmless(value) for key, value in row.items()} for row in found)
            written.append(folder / f"{name}.csv")
            write_bytes(written[-1], text.getvalue().encode(errors="replace"))  # JSON may hold half a character
    return written


def _measured(one: Measurement) -> Table:
    """Return a measurement without its segments, which `differences.csv` is made from."""
    left_out = ("segment_losses", "segment_counts")
    found = {key: value for key, value in asdict(one).items() if key not in left_out}
    return found | {"position_options": json.dumps(one.position_options) if one.position_options else None}


def differences(report: Report) -> list[Table]:
    """Return the paired difference of any two curves at each length, and of each curve from its training length."""
    found = []
    for curve in report.curves:
        for one in curve.records:
            if change := curve.change(one):
                start = curve.verdict.reference.length if curve.verdict else None
                found.append(_difference(curve, one.length, curve, start, change))
    for curve, other in itertools.combinations(report.curves, 2):
        by_length = {one.length: one for one in other.records}
        for one in curve.records:
            if one.length in by_length and (between := paired(one, by_length[one.length])):
                found.append(_difference(curve, one.length, other, one.length, between))
    return found


def _difference(curve: Curve, length: int, other: Curve, other_length: int | None, found: Difference) -> Table:
    return {
        "curve": curve.label,
        "length": length,
        "other_curve": other.label,
        "other_length": other_length,
        "loss_difference": found.loss,
        "loss_difference_se": found.error,
        "perplexity_ratio": found.ratio,
        "perplexity_ratio_se": found.ratio_error,
    }


def _harmless(value: Any) -> Any:
    """Return a cell; text that begins as a formula does, and is no number, with an apostrophe before it."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r", " ")  # which the csv module leaves unquoted, and readers take for the end of a line
    if not value.startswith(FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def rows(run: Run, name: str) -> list[Table]:
    """Return the rows of one kind, as the run's files have them, each with what it was made from."""
    if name == "evaluation":
        return [_measured(one) for one in run.evaluations]
    if name == "tasks":
        return [row for one in run.tasks for row in one.rows()]
    made = run.analyses.get("positions" if name == "curse" else name)
    if made is None:
        return []
    about = {"positions": run.positions, "train_length": run.train_length}
    about |= {key: getattr(made, key) for key in ("checkpoint", "data", "device", "precision", "version")}
    curse = [{key: made.curse.get(key) for key in CURSE}] if made.curse else []
    return [{**about, **row} for row in (curse if name == "curse" else made.rows)]
