"""The run's log: JSON lines, one per step, one per evaluation, each step once however often the run was stopped.

    {"kind": "step", "step": 12, "loss": 2.31, "lr": 0.0006, "grad_norm": 0.8, "tokens_per_second": 7680.2, …}
    {"kind": "evaluation", "step": 250, "length": 128, "loss": 2.1, "perplexity": 8.2, "tokens": 65536}

Numbers are written so that reading them gives the very same float, and each line ends with its crc32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthen import io

Record = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """What every line has, whatever else."""

    kind: str
    step: int


def read(path: str | Path) -> Iterator[Record]:
    """Yield the records of a log; a last line that a killed process left torn is not one."""
    records: Iterator[Record] = io.read_lines(path, dict, sealed=True)
    for number, record in enumerate(records, 1):
        io.build(Entry, {key: record[key] for key in ("kind", "step") if key in record}, f"{path}, line {number}")
        yield record


class Log:
    """Appends records to a file; each is flushed before the next step begins."""

    def __init__(self, path: Path, after: int) -> None:
        """Open the log to resume after this many steps; records of later steps are dropped, to be written again."""
        if path.exists():
            io.write_lines(path, [record for record in read(path) if record["step"] <= after] if after >= 0 else [])
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one record."""
        self._file.write(io.line_of(record))
        self._file.flush()

    def close(self) -> None:
        """Have the log on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
