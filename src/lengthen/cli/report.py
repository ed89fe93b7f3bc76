"""Write an HTML report of one or more runs: perplexity by length, analyses, tasks, and how each number was measured.

The page is a single HTML file that loads nothing from elsewhere: it can be mailed, printed and read on a phone. It
opens with the longest length that each model holds, and shows the results of `lengthen eval` and `lengthen analyse`.
The curves of the ALiBi and LEX papers can be overlaid. A run without measurements is left out, with a note.

--csv writes every number. --figures saves the same figures for a paper. The charts need Altair and
vl-convert (pip install altair vl-convert-python).

Examples:
  lengthen report runs/alibi runs/xpos -o report.html
  lengthen report runs/* -o report.html --csv numbers --figures figures
  lengthen report runs/* -o report.html --figures figures --formats pdf
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Arguments:
    """Arguments of `lengthen report`."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN …")]
    """Folders of runs that `lengthen eval` has measured."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")  # the page to write
    csv: Path | None = None  # a folder: also write the numbers, one file per kind of measurement
    figures: Path | None = None  # a folder: also draw the figures for a paper
    formats: list[Literal["svg", "pdf", "png"]] = field(default_factory=lambda: ["svg", "pdf"])  # of the figures


def run(arguments: Arguments) -> int:
    """Write the page and what else is asked for; print each path."""
    from lengthen.report import collect, write_csv, write_figures, write_html

    if not arguments.runs:
        raise ValueError("RUN: expected the folder of at least one run, got none")
    report = collect(arguments.runs)
    for note in report.notes:
        print(f"left out: {note}", file=sys.stderr)
    print(write_html(report, arguments.out))
    if arguments.csv:
        for path in write_csv(report, arguments.csv):
            print(path)
    if arguments.figures:
        for path in write_figures(report, arguments.figures, arguments.formats):
            print(path)
    return 0
