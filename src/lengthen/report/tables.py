"""The report's numbers as CSV: one file per kind of measurement; reading them gives the very same floats."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from pathlib import Path

from lengthen.io import Table, write_bytes
from lengthen.report.collect import Report, Run

NAMES = ("evaluation", "training", "resolution", "positions", "curse", "reach", "distance", "recall")
CURSE = ("short", "long", "gain", "from_context", "from_curse")


def write_csv(report: Report, folder: str | Path) -> list[Path]:
    """Write a file for each kind of measurement that the runs have; return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in NAMES:
        found = []
        for run in report.runs:
            about = {"run": run.path, "positions": run.positions, "train_length": run.train_length}
            made = run.analyses.get("positions" if name == "curse" else name)
            about |= {"checkpoint": made.checkpoint, "data": made.data} if made else {}
            found += [{**about, **row} for row in rows(run, name)]
        if found:
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")  # None is written as nothing
            writer.writeheader()
            writer.writerows(found)
            written.append(folder / f"{name}.csv")
            write_bytes(written[-1], text.getvalue().encode(errors="replace"))  # JSON may hold half a character
    return written


def rows(run: Run, name: str) -> list[Table]:
    """Return the rows of one kind, as the run's files have them."""
    if name == "evaluation":
        return [{key: value for key, value in asdict(one).items() if key != "command"} for one in run.evaluations]
    if name == "training":
        return [run.training] if run.training else []
    if name == "curse":
        curse = run.analyses["positions"].curse if "positions" in run.analyses else None
        return [{key: curse.get(key) for key in CURSE}] if curse else []
    return run.rows(name)
