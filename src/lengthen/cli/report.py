"""Make one page of one or many runs: perplexity against length, a curve a method, and how each number was made.

The page is a single HTML file that loads nothing from elsewhere: it can be mailed, printed and read on a phone. It
shows what `lengthen eval` and the analyses left in the runs' folders, and names the command for what is missing. Curves
can be hidden, hovered and zoomed, and the curves of the ALiBi and LEX papers laid over them.

--csv writes every number as it was measured. --figures draws the figures for a paper, and needs matplotlib
(pip install "lengthen[report]").

Examples:
  lengthen report runs/alibi runs/xpos -o report.html
  lengthen report runs/* -o report.html --csv numbers --figures figures
  lengthen report runs/* -o report.html --figures figures --formats pdf
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs that `lengthen eval` has measured")
    parser.add_argument("-o", "--out", default="report.html", metavar="FILE", help="the page to write (report.html)")
    parser.add_argument("--csv", metavar="DIR", help="also write the numbers, one file a kind of measurement")
    parser.add_argument("--figures", metavar="DIR", help="also draw the figures for a paper")
    parser.add_argument("--formats", default="svg,pdf", metavar="LIST", help="of the figures: svg, pdf, png (svg,pdf)")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and what else is asked for; print each path."""
    from lengthen.report import collect, write_csv, write_figures, write_html

    report = collect(arguments.runs)
    print(write_html(report, arguments.out))
    if arguments.csv:
        for path in write_csv(report, arguments.csv):
            print(path)
    if arguments.figures:
        formats = [word.strip() for word in arguments.formats.split(",") if word.strip()]
        for path in write_figures(report, arguments.figures, formats):
            print(path)
    return 0
