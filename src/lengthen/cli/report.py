"""Make one page of one or many runs: perplexity against length, one curve per method, and how each number was made.

The page is a single HTML file that loads nothing from elsewhere: it can be mailed, printed and read on a phone. It
opens with how far each model holds, shows what `lengthen eval` and the analyses left in the runs' folders, and names
the command for what is missing. The curves of the ALiBi and LEX papers can be laid beside its own. A run without
measurements is left out, with a note.

--csv writes every number as it was measured. --figures saves the same figures for a paper. The charts need Altair and
vl-convert (pip install "lengthen[report]").

Examples:
  lengthen report runs/alibi runs/xpos -o report.html
  lengthen report runs/* -o report.html --csv numbers --figures figures
  lengthen report runs/* -o report.html --figures figures --formats pdf
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs that `lengthen eval` has measured")
    parser.add_argument("-o", "--out", default="report.html", metavar="FILE", help="the page to write (report.html)")
    parser.add_argument("--csv", metavar="DIR", help="also write the numbers, one file per kind of measurement")
    parser.add_argument("--figures", metavar="DIR", help="also save the figures for a paper")
    parser.add_argument("--formats", default="svg,pdf", metavar="LIST", help="of the figures: svg, pdf, png (svg,pdf)")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and what else is asked for; print each path."""
    from lengthen.report import collect, write_csv, write_figures, write_html

    report = collect(arguments.runs)
    for note in report.notes:
        print(f"left out: {note}", file=sys.stderr)
    print(write_html(report, arguments.out))
    if arguments.csv:
        for path in write_csv(report, arguments.csv):
            print(path)
    if arguments.figures:
        formats = [word.strip() for word in arguments.formats.split(",") if word.strip()]
        for path in write_figures(report, arguments.figures, formats):
            print(path)
    return 0
