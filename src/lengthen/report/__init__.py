"""Results → one page, tables and figures: what `lengthen report` is made of.

    collect(paths) ──▶ Report ──┬──▶ write_html      one file that asks no other host for anything
                                ├──▶ write_csv       every number, as it was measured
                                └──▶ write_figures   SVG and PDF, by matplotlib (the extra `report`)

`lengthen.report.papers` has the tables of the papers that the page can lay over its own curves.
"""

from lengthen.report.collect import Curve, Report, Run, collect
from lengthen.report.figures import write_figures
from lengthen.report.page import write_html
from lengthen.report.tables import write_csv

__all__ = ["Curve", "Report", "Run", "collect", "write_csv", "write_figures", "write_html"]
