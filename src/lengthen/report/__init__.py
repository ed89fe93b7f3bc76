"""Results → one page, tables and figures: what `lengthen report` is made of.

    collect(paths) ──▶ Report ──┬──▶ write_html      one self-contained file
                                ├──▶ write_csv       every number, as it was measured
                                └──▶ write_figures   SVG, PDF and PNG, from the charts of the page

    collect.py    folders → Report: runs, curves, labels, how far each holds
    analyses.py   the files of analysis/, as rows with one number each; tasks.py: tasks.jsonl
    charts.py     Report → the figures, each described once; lines.py: one chart of curves
    sections.py   Report → the page's body; words.py has its text
    page.py       the file: assets/ put together with Vega, and a content security policy that lets nothing load
    tables.py     Report → CSV

`lengthen.report.papers` has the tables of the papers that the page can lay over its own curves. Charts need the extra
`report` (Altair and vl-convert); reading runs and writing CSV do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lengthen.io import write_bytes
from lengthen.report.collect import Curve, Report, Run, collect
from lengthen.report.tables import write_csv

__all__ = ["Curve", "Report", "Run", "collect", "write_csv", "write_figures", "write_html"]


def write_html(report: Report, path: str | Path) -> Path:
    """Write the page; return its path."""
    from lengthen.report.page import html

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, html(report).encode(errors="replace"))  # a JSON string may hold half a character
    return path


def write_figures(report: Report, folder: str | Path, formats: Sequence[str] = ("svg", "pdf")) -> list[Path]:
    """Save every figure that the runs have numbers for, in each format; return the paths."""
    from lengthen.report.charts import write_figures

    return write_figures(report, folder, formats)
