"""Analyses of a trained model, one file each: resolution, loss by position, reach, attention by distance, …

    found = resolution.analyse(open_run("runs/tiny"), corpus, lengths=[64, 256], blockwise=True)
    write(Path("runs/tiny"), found)                       runs/tiny/analysis/resolution.json
    print("\\n".join(resolution.table(found)))

Every module has `analyse(subject, corpus, lengths, …)`, which returns what its file holds, and `table(found)`, which
yields lines for a terminal. `LENGTHS` says what the lengths of each are: of most, pieces of the text.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from lengthen import io
from lengthen.evaluation.analyses import distance, induction, longppl, positions, reach, resolution
from lengthen.evaluation.analyses.shared import Lengths, Row, fitting_lengths
from lengthen.evaluation.capture import refuse_encoder

ANALYSES: dict[str, ModuleType] = {
    "resolution": resolution,
    "positions": positions,
    "reach": reach,
    "distance": distance,
    "induction": induction,
    "longppl": longppl,
}
LENGTHS = dict.fromkeys(ANALYSES, Lengths()) | {"induction": induction.LENGTHS}


def write(folder: Path, found: Row) -> Path:
    """Write FOLDER/analysis/KIND.json, whole or not at all, and return its path."""
    path = folder / "analysis" / f"{found['kind']}.json"
    path.parent.mkdir(exist_ok=True)
    io.write_json(path, found)
    return path


__all__ = [
    "ANALYSES",
    "LENGTHS",
    "Row",
    "distance",
    "fitting_lengths",
    "induction",
    "longppl",
    "positions",
    "reach",
    "refuse_encoder",
    "resolution",
    "write",
]
