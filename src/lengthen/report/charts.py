"""The figures, each described once: Altair charts that the page shows and that `write_figures` saves.

`figures(report)` has, for each section, its figures; the first is shown, the others can be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

try:
    import altair as alt
    import vl_convert  # noqa: F401 (the page and the files are made by it)
except ImportError:
    raise ImportError("charts need altair and vl-convert: pip install altair vl-convert-python") from None

from lengthen.evaluation.tasks.results import binomial_error
from lengthen.report import papers
from lengthen.report.collect import Report, Run, finite
from lengthen.report.lines import COLOURS, Row, lines, row
from lengthen.report.tasks import newest

FORMATS = ("svg", "pdf", "png")
WIDTH = 430  # pixels of a plot in a paper
STYLE: dict[str, Any] = {
    "background": "white",
    "font": "Helvetica, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#e4e4e4", "labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal"},
    "legend": {"labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal"},
    "text": {"fontSize": 12},
    "title": {"anchor": "start", "fontSize": 14, "fontWeight": "normal", "frame": "bounds", "offset": 12},
}
NAMES = {
    "perplexity": "perplexity per token",
    **{"perplexity_per_word": "perplexity per word", "bits_per_byte": "bits per byte"},
    **{"tokens_per_second": "tokens/s", "peak_bytes": "peak memory, bytes"},
    **{"ratio": "perplexity ÷ that at the training length"},
}
FILES = {"tokens_per_second": "speed", "peak_bytes": "memory", "positions": "loss_by_position"}
ANALYSED = (
    ("resolution", "length", "resolution"),
    ("positions", "position", "loss"),
    ("induction", "length", "difference"),
    ("longppl", "length", "long_ppl"),
)
TITLES = {
    **{"resolution": "resolution", "positions": "loss, nats per token"},
    **{"longppl": "perplexity over key tokens"},
    **{"induction": "loss of the copy less that of the first half, nats per token"},
}
AXES = {
    **{"length": "length in tokens", "position": "position in the input", "distance": "distance in tokens"},
    **{"induction": "length in tokens, its second half a copy of the first"},
}
TWICE = {"induction": 2}  # its lengths are of what is read twice
METHODS = {  # a known method has the same colour in every report
    **{"alibi": 0, "xpos": 1, "rotary": 2, "sinusoidal": 3, "absolute": 3, "t5": 4, "learned": 5, "kerple": 6},
    **{"sandwich": 7, "none": 8},
}


@dataclass(frozen=True)
class Figure:
    """One figure: the name of its file, what it shows, and its panels, one but for maps."""

    name: str
    title: str
    panels: list[Any]


def write_figures(report: Report, folder: str | Path, formats: Sequence[str] = ("svg", "pdf")) -> list[Path]:
    """Save every figure that the runs have numbers for, in each format; return the paths."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ValueError(f"formats: expected some of {', '.join(FORMATS)}, got {', '.join(unknown) or 'none'}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = [one for some in figures(report, WIDTH).values() for one in some]
    written = []
    for name, panels in {one.name: one.panels for one in reversed(found)}.items():  # of papers, the first set
        chart = alt.concat(*panels, columns=2 if len(panels) < 5 else 3) if len(panels) > 1 else panels[0]
        chart = chart.configure(**STYLE)
        for form in formats:
            written.append(folder / f"{name}.{form}")
            chart.save(written[-1], format=form, **({"scale_factor": 2} if form == "png" else {}))
    return sorted(written)


def figures(report: Report, width: Any = "container") -> dict[str, list[Figure]]:
    """Return the figures of each section that the runs have numbers for."""
    curves = partial(lines, width=width, marks=sorted({run.train_length for run in report.runs}))
    beside = partial(lines, x="length ÷ training length", width=width, marks=[1])
    tints = dict(zip((run.label for run in report.runs), colours(report.runs), strict=True))
    made: dict[str, list[Figure]] = {}

    def add(section: str, name: str, title: str, chart: Any) -> None:
        made.setdefault(section, []).extend([Figure(name, title, [chart])] if chart else [])

    for key in list(NAMES)[:-1]:
        chart = curves(_measured(report, tints, key), AXES["length"], NAMES[key], log=key != "bits_per_byte")
        add("speed" if key in FILES else "perplexity", FILES.get(key, key), NAMES[key], chart)
    own = _measured(report, tints, "ratio")
    for name in papers.SETS if own else []:
        chart = beside(own + _paper(name), y=NAMES["ratio"], log=True)
        add("perplexity", "perplexity_relative", f"beside {name}", chart)
    for kind, x, y in ANALYSED:
        chart = curves(_analysed(report, tints, kind, x, y), AXES.get(kind, AXES[x]), TITLES[kind])
        add(kind, FILES.get(kind, kind), TITLES[kind], chart)
    if own := _analysed(report, tints, *ANALYSED[0], relative=True):
        title = "beside LEX, table 3: arXiv, trained at 1,024"
        add("resolution", "resolution_relative", title, beside(own + _paper_resolution(), y="resolution"))
    for kind in ("reach", "distance"):
        made[kind] = [Figure(kind, kind, panels)] if (panels := _maps(report, kind, width)) else []
    asked = dict.fromkeys(one.task for run in report.runs for one in run.tasks)
    for task in asked:
        add(
            "tasks",
            f"task_{task}",
            task,
            curves(_asked(report, tints, task), AXES["length"], f"{task}: fraction right"),
        )
        if panels := _depths(report, task, width):
            made.setdefault("depths", []).append(Figure(f"depths_{task}", task, panels))
    return {section: some for section, some in made.items() if some}


def colours(runs: Sequence[Run]) -> list[int]:
    """Return a colour's number for each run: its method's if no earlier run has it, or else the first that is free."""
    taken: list[int] = []
    wanted = {METHODS.get(run.positions, -1) for run in runs}
    for run in runs:
        free = [METHODS.get(run.positions, -1), *sorted(range(len(COLOURS)), key=lambda one: one in wanted)]
        taken.append(next((one for one in free if one >= 0 and one not in taken), len(taken)))
    return taken


def shown(value: Any, digits: int = 4) -> str:
    """Return a number for reading: ∞ and n.a. for what is not one."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return "n.a."
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if isinstance(value, int) or 10 ** (digits - 1) <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".").replace("e+0", "e").replace("e+", "e")


# The rows of each figure of curves.


def _measured(report: Report, tints: dict[str, int], key: str) -> list[Row]:
    found = []
    for curve in report.curves:
        start = curve.reference.perplexity if curve.reference else None
        for one in curve.records:
            value = getattr(one, "perplexity" if key == "ratio" else key)
            if key == "ratio" and value is not None:
                value = value / start if finite(start) and start else None
            bar: tuple[float, ...] = ()
            change = curve.change(one)
            error = finite(change.error) if change else None
            if key == "perplexity" and error is not None and abs(error) < 100 and 0 < (value or 0) < 1e50:
                bar = (value * math.exp(-error), value * math.exp(error))
            x = one.length / curve.run.train_length if key == "ratio" else one.length
            tip = {"length": f"{one.length:,}", NAMES[key]: shown(value)}
            tip |= {f"from {curve.verdict.reference.length:,}": str(change)} if change and curve.verdict else {}
            tip |= {"protocol": one.how}
            tip |= {"n": f"{shown(one.tokens)} tokens, {shown(one.documents)} documents"}
            tip |= {"checkpoint": one.checkpoint or "n.a."}
            found.append(row(curve.label, tints[curve.run.label], one.protocol, x, value, tip, bar))
    return [one for one in found if one["y"] is not None]


def _paper(name: str) -> list[Row]:
    found = []
    for one in papers.ratios(name):
        tip = {"length": shown(one["eval_length"]), NAMES["ratio"]: shown(one["ratio"])}
        tip |= {"protocol": one["protocol"], "n": one["corpus"]}
        look = (one["label"], METHODS[one["method"]], one["protocol"])
        found.append(row(*look, one["times"], one["ratio"], tip))
    return found


def _analysed(report: Report, tints: dict[str, int], kind: str, x: str, y: str, relative: bool = False) -> list[Row]:
    found = []
    for run in report.runs:
        longest = max((one.get("length", 0) for one in run.rows(kind)), default=0)
        for one in run.rows(kind):
            if one.get("layer") is not None or (kind == "positions" and one["length"] < longest):
                continue  # a layer's, or a shorter input's: in the table
            block = bool(one.get("blockwise"))
            label = run.label + f" · blockwise {one.get('block') or ''}".rstrip() * block
            told = {name: value for name, value in one.items() if value is not None and name != "blockwise"}
            tip = {"repeated" if name == x and kind in TWICE else name: shown(value) for name, value in told.items()}
            value, error = finite(one[y]), finite(one.get("standard_error"))
            bar: tuple[float, ...] = ()
            if value is not None and error is not None:
                bar = (value - error, value + error)
            place = one[x] / run.train_length if relative else TWICE.get(kind, 1) * one[x]
            found.append(row(label, tints[run.label], "blockwise" if block else "full", place, value, tip, bar))
    return found


def _asked(report: Report, tints: dict[str, int], task: str) -> list[Row]:
    found = []
    for run in report.runs:
        for one in newest([one for one in run.tasks if one.task == task], run.weights):
            right, count = sum(one.right), sum(one.counts)
            value, bar = right / count, binomial_error(right / count, count)
            tip = {"length": f"{one.length:,}", "fraction right": shown(value), "standard error": shown(bar)}
            tip |= {"chance": shown(one.chance), "samples": f"{count:,}", "checkpoint": one.checkpoint or "n.a."}
            label = " · ".join(filter(None, (run.label, one.how(run.model))))
            ends = (max(0.0, value - bar), min(1.0, value + bar))
            found.append(row(label, tints[run.label], one.protocol, one.length, value, tip, ends))
    return found


def _depths(report: Report, task: str, width: Any) -> list[Any]:
    """Return a panel per run and way of reading: lengths across, depths down, of a task that has depths."""
    cells: dict[str, list[Row]] = {}
    for run in report.runs:
        for one in newest([one for one in run.tasks if one.task == task and None not in one.depths], run.weights):
            title = " · ".join(filter(None, (run.label, one.how(run.model))))
            for depth, right, count in zip(one.depths, one.right, one.counts, strict=True):
                tip = {"length": one.length, "depth": f"{depth:g}", "samples": count, "right": right}
                cells.setdefault(title, []).append(tip | {"shade": right / count, "text": f"{100 * right / count:.0f}"})
    return [_depth_map(some).properties(title=title, width=width) for title, some in cells.items()]


def _depth_map(cells: list[Row]) -> Any:
    base = alt.Chart(alt.InlineData(values=cells)).encode(
        x=alt.X("length:O", sort=None, title=AXES["length"], axis=alt.Axis(labelAngle=0, format=",d")),
        y=alt.Y("depth:N", sort=None, title="depth"),
        tooltip=[alt.Tooltip(field=name, type="nominal") for name in ("length", "depth", "samples", "right")],
    )
    scale = alt.Scale(scheme="blues", domain=[0, 1])
    rect = base.mark_rect().encode(color=alt.Color("shade:Q", scale=scale, legend=None))
    dark = alt.ColorValue("#222222", condition={"test": "datum.shade > 0.55", "value": "white"})
    text = base.mark_text(fontSize=11).encode(text=alt.Text("text:N"), color=dark)
    return alt.layer(rect, text).properties(height=26 * len({cell["depth"] for cell in cells}))


def _paper_resolution() -> list[Row]:
    found = []
    for one in papers.resolution():
        label = f"LEX: {one['method']}{' · blockwise' * one['blockwise']}"
        tip = {"length": shown(one["eval_length"]), "resolution": shown(one["resolution"]), "block": "n.a."}
        x, how = one["eval_length"] / one["train_length"], "blockwise" if one["blockwise"] else "full"
        found.append(row(label, METHODS[one["method"]], how, x, one["resolution"], tip))
    return found


def _maps(report: Report, kind: str, width: Any) -> list[Any]:
    """Return a panel per run, at the longest length that was analysed."""
    shade = "fraction" if kind == "reach" else "weight"
    cells: dict[str, list[Row]] = {}
    for run in report.runs:
        longest = max((one["length"] for one in run.rows(kind)), default=0)
        for one in [one for one in run.rows(kind) if one["length"] == longest]:
            text = {name: shown(value, 3) for name, value in one.items() if isinstance(value, float)}
            named = {**one, **text, "shade": finite(one[shade]), "row": f"{one['layer']}.{one['head']}"}
            cells.setdefault(f"{run.label}, length {longest:,}", []).append(named)
    most = 1.0 if kind == "reach" else max((one["shade"] or 0 for some in cells.values() for one in some), default=1.0)
    last = list(cells)[-1:]
    maps = {title: _map(some, kind, most or 1.0, legend=title in last) for title, some in cells.items()}
    return [one.properties(title=title, width=width) for title, one in maps.items()]


def _map(cells: list[Row], kind: str, most: float, legend: bool) -> Any:
    reach = kind == "reach"
    across, down = ("head", "layer") if reach else ("distance", "row")
    what = "fraction of scores" if reach else "fraction of attention"
    scale = alt.Scale(scheme="blues", domain=[0, most], type="linear" if reach else "sqrt")
    key = alt.Legend(title=what, orient="bottom", direction="horizontal", gradientLength=140, tickCount=3)
    axis = alt.Axis(labelAngle=0, labelOverlap="greedy", labelSeparation=4, format=",d")
    base = alt.Chart(alt.InlineData(values=cells)).encode(
        x=alt.X(f"{across}:O", sort=None, axis=axis),
        y=alt.Y(f"{down}:N", sort=None, title="layer" if reach else "layer.head"),
        tooltip=[alt.Tooltip(field=key, type="nominal") for key in cells[0] if key not in ("shade", "row")],
    )
    rect = base.mark_rect().encode(color=alt.Color("shade:Q", scale=scale, legend=key if legend else None))
    dark = alt.ColorValue("#222222", condition={"test": "datum.shade > 0.55", "value": "white"})
    text = base.mark_text(fontSize=11).encode(text=alt.Text("reach:N"), color=dark)
    height = (26 if reach else 14) * len({cell[down] for cell in cells})
    return alt.layer(rect, *([text] if reach else [])).properties(height=height)
