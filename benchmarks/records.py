"""What benchmarks measure: records with their targets, printed and written to JSON as they come.

    python benchmarks/records.py benchmarks/results/attention_gpu-2026-11-16.json      # earlier records, in Markdown

A benchmark is a dictionary of sections, functions that add records to a `Report`. A section that fails leaves a record
that says why, and the others run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
KNOWN = ("what", "value", "unit", "at_least", "at_most", "met", "ms", "note")  # of a record; the rest says where


@dataclass
class Report:
    """The records so far."""

    facts: dict[str, Any]
    path: Path | None = None
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(
        self,
        section: str,
        what: str,
        at: dict[str, Any],
        value: float | None,
        unit: str = "×",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        ms: dict[str, float] | None = None,
        note: str = "",
    ) -> None:
        """Take one record; a value of None was not measured, and the note says why."""
        record: dict[str, Any] = {"what": what, **at, "value": value, "unit": unit}
        record |= {key: bound for key, bound in (("at_least", at_least), ("at_most", at_most)) if bound is not None}
        if at_least is not None or at_most is not None:
            low, high = -math.inf if at_least is None else at_least, math.inf if at_most is None else at_most
            record["met"] = None if value is None else low <= value <= high
        record |= {key: said for key, said in (("ms", ms), ("note", note)) if said}
        self.sections.setdefault(section, []).append(record)
        self.write()
        print(f"{section:<8} " + "  ".join(cell for cell in cells(record) if cell), flush=True)

    def write(self) -> None:
        """Write everything to the file, if there is one."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = {**self.facts, "sections": self.sections}
            self.path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        """Return all records in Markdown."""
        lines = ["| section | what | at | result | target | met | times, ms | note |", "|---" * 8 + "|"]
        for section, records in self.sections.items():
            lines += [f"| {section} | " + " | ".join(cells(record)) + " |" for record in records]
        return "\n".join(lines)

    def run(self, sections: Mapping[str, Callable[[], None]], strict: bool = False) -> int:
        """Run sections one after the other; return 1 if one failed or, where it is strict, a target was missed."""
        began, failed = time.monotonic(), False
        for name, section in sections.items():
            started = time.monotonic()
            try:
                section()
            except Exception as error:  # the other sections are worth having
                failed = True
                traceback.print_exc()
                self.add(name, "failed", {}, None, note=reason(error))
            print(f"{name} took {time.monotonic() - started:.0f} s", flush=True)
        print("\n" + self.table())
        print(f"\ntook {time.monotonic() - began:.0f} s" + (f"; written to {self.path}" if self.path else ""))
        missed = any(record.get("met") is False for records in self.sections.values() for record in records)
        return int(failed or (strict and missed))


def cells(record: dict[str, Any]) -> list[str]:
    """Return a record as words: what, where, the result, the target, whether it was met, times, a note."""
    at = {key: value for key, value in record.items() if key not in KNOWN}
    where = ", ".join(f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in at.items())
    result = "–" if record["value"] is None else f"{record['value']:.3g}{record['unit']}"
    bounds = [f"{sign} {record[key]:g}" for sign, key in (("≥", "at_least"), ("≤", "at_most")) if key in record]
    met = {True: "yes", False: "NO", None: ""}[record.get("met")]
    times = ", ".join(f"{name} {value:.4g}" for name, value in record.get("ms", {}).items())
    return [record["what"], where, result, " ".join(bounds), met, times, record.get("note", "")]


def parser_of(doc: str | None, sections: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(sections), help="sections, with commas (default: all)")
    parser.add_argument("--quick", action="store_true", help="check that it works: tiny sizes, no file without --out")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--out", type=Path, help="the JSON (default: benchmarks/results, with the date)")
    return parser


def parsed(parser: argparse.ArgumentParser, name: str, sections: Sequence[str]) -> argparse.Namespace:
    """Return the options of a benchmark: which sections, in their order, and where the JSON goes."""
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := [section for section in chosen if section not in sections]:
        parser.error(f"--only: expected some of {', '.join(sections)}, got {', '.join(unknown)}")
    options.only = [section for section in sections if section in chosen]
    if options.out is None and not options.quick:
        options.out = Path(__file__).parent / "results" / f"{name}-{datetime.now(UTC):%Y-%m-%d}.json"
    return options


def attempted(make: Callable[[], T]) -> tuple[T | None, str]:
    """Return what `make` makes, or None and what went wrong: peers may fail, the run goes on."""
    try:
        return make(), ""
    except Exception as error:
        return None, reason(error)


def reason(error: Exception) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def software() -> dict[str, Any]:
    """Return what a reader needs to know of the software; neither the host's name nor a path is in it."""
    python, date = platform.python_version(), f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return {"date": date, "torch": torch.__version__, "python": python, "commit": commit()}


def machine(device: torch.device | str) -> str:
    """Return the name of a device, as in "NVIDIA H200"."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}"


def commit() -> str:
    """Return the commit that is checked out, and whether tracked files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the records of earlier runs in Markdown.")
    parser.add_argument("files", type=Path, nargs="+", metavar="JSON", help="results of attention_cpu or attention_gpu")
    for path in parser.parse_args().files:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if "sections" not in facts:
            parser.error(f"{path}: expected a file with sections of records, got one with {', '.join(facts)}")
        sections = facts.pop("sections")
        print(f"{path.name}: " + ", ".join(f"{key} {value}" for key, value in facts.items()) + "\n")
        print(Report(facts, sections=sections).table() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
