"""The page: one self-contained HTML file with its data, style and script; it loads nothing.

Vega, which draws the charts, is bundled in by vl-convert. All that comes from runs' files is escaped. A content
security policy lets the browser run this one script, without `eval`, and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib import resources
from string import Template

import vl_convert

from lengthen.report import sections
from lengthen.report.charts import STYLE, figures
from lengthen.report.collect import Report


def html(report: Report) -> str:
    """Return the page as text."""
    found = figures(report)
    style = {"config": STYLE | {"background": None, "font": "system-ui, sans-serif"}}
    specs = {name: [[panel.to_dict() | style for panel in one.panels] for one in some] for name, some in found.items()}
    data = json.dumps(specs, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    script = _script()
    return Template(_asset("page.html")).substitute(
        title=escape(f"Perplexity by length: {', '.join(run.label for run in report.runs)}"),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=_asset("page.css"),
        body=sections.body(report, found),
        data=data.translate({ord(one): f"\\u{ord(one):04x}" for one in "<>&\u2028\u2029"}),  # no text ends the block
        script=script,
    )


@cache
def _script() -> str:
    return vl_convert.javascript_bundle(_asset("page.js")).strip()  # with Vega, Vega-Lite and Vega-Embed


def _asset(name: str) -> str:
    return (resources.files("lengthen.report") / "assets" / name).read_text(encoding="utf-8").strip()
