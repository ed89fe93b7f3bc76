"""The page: one HTML file that holds its data, its style and its script, and asks no other host for anything.

The template, the style and the scripts are files of `assets/`. All that comes from runs' files is escaped; the figures'
data is JSON in a block of its own, in which `<`, `>` and `&` are written as escapes, so that no text can end it. A
content security policy lets the browser run this one script and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from lengthen.report import sections, series
from lengthen.report.collect import Report
from lengthen.report.style import COLOURS

SCRIPTS = ("chart.js", "maps.js", "page.js")


def write_html(report: Report, path: str | Path) -> Path:
    """Write the page; return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html(report), encoding="utf-8", errors="replace")  # a JSON string may hold half a character
    return path


def html(report: Report) -> str:
    """Return the page as text."""
    charts = series.charts(report)
    maps = series.maps(report)
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    names = ", ".join(run.label for run in report.runs)
    return Template(_asset("page.html")).substitute(
        title=escape(f"Perplexity by length: {names}"),
        digest=digest,
        style=Template(_asset("page.css")).substitute(colours=_colours()),
        body=sections.body(report, charts, maps),
        data=_json({"charts": charts, "maps": maps}),
        script=script,
    )


def _asset(name: str) -> str:
    return (resources.files("lengthen.report") / "assets" / name).read_text(encoding="utf-8").strip()


def _colours() -> str:
    return " ".join(f"--c{number}: {colour};" for number, colour in enumerate(COLOURS))


def _json(data: Any) -> str:
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
