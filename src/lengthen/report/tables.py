"""The report's numbers as CSV: one file per kind of measurement; reading them gives the very same floats.

Text that a spreadsheet would run as a formula gets an apostrophe before it, which spreadsheets take for "this is text".
"""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lengthen.io import Table, write_bytes
from lengthen.report.collect import Report, Run

NAMES = ("evaluation", "resolution", "positions", "curse", "reach", "distance", "induction", "recall")
FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # what a cell begins with that spreadsheets calculate
CURSE = ("short", "long", "gain", "from_context", "from_curse")


def write_csv(report: Report, folder: str | Path) -> list[Path]:
    """Write a file for each kind of measurement that the runs have; return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in NAMES:
        found = [{"run": run.path, **row} for run in report.runs for row in rows(run, name)]
        if found:
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")  # None is written as nothing
            writer.writeheader()
            writer.writerows({key: _harmless(value) for key, value in row.items()} for row in found)
            written.append(folder / f"{name}.csv")
            write_bytes(written[-1], text.getvalue().encode(errors="replace"))  # JSON may hold half a character
    return written


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
        return [asdict(one) for one in run.evaluations]
    made = run.analyses.get("positions" if name == "curse" else name)
    if made is None:
        return []
    about = {"positions": run.positions, "train_length": run.train_length}
    about |= {key: getattr(made, key) for key in ("checkpoint", "data", "device", "precision", "version")}
    curse = [{key: made.curse.get(key) for key in CURSE}] if made.curse else []
    return [{**about, **row} for row in (curse if name == "curse" else made.rows)]
