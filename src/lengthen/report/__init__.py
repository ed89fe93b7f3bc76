"""Results → one page, tables and figures: what `lengthen report` is made of.

    collect(paths) ──▶ Report ──┬──▶ write_html      one file that asks no other host for anything
                                ├──▶ write_csv       every number, as it was measured
                                └──▶ write_figures   SVG, PDF and PNG, from the charts of the page

`lengthen.report.papers` has the tables of the papers that the page can lay over its own curves. The charts need Altair
and vl-convert (the extra `report`); reading runs and writing CSV need nothing beside the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lengthen.report.collect import Curve, Report, Run, collect
from lengthen.report.tables import write_csv

__all__ = ["Curve", "Report", "Run", "collect", "write_csv", "write_figures", "write_html"]


def write_html(report: Report, path: str | Path) -> Path:
    """Write the page; return its path."""
    _need()
    from lengthen.report import page

    return page.write_html(report, path)


def write_figures(report: Report, folder: str | Path, formats: Sequence[str] = ("svg", "pdf")) -> list[Path]:
    """Save every figure that the runs have numbers for, in each format; return the paths."""
    _need()
    from lengthen.report import charts

    return charts.write_figures(report, folder, formats)


def _need() -> None:
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        raise ImportError('charts need altair and vl-convert: pip install "lengthen[report]"') from None
