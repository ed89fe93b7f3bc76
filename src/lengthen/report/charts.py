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

import altair as alt

from lengthen.report import papers
from lengthen.report.collect import Curve, Measurement, Report, Run, finite
from lengthen.report.lines import COLOURS, Row, lines, row

FORMATS = ("svg", "pdf", "png")
WIDTH = 430  # pixels of a plot in a paper
NAMES = {
    **{"perplexity": "perplexity per token", "loss": "loss, nats per token"},
    **{"perplexity_per_word": "perplexity per word", "bits_per_byte": "bits per byte"},
    **{"ratio": "perplexity ÷ that at the training length", "speed": "tokens/s", "memory": "peak memory, MB"},
}
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
        chart = chart.configure(font="Helvetica, Arial, sans-serif", background="white").configure_view(stroke=None)
        chart = chart.configure_axis(gridColor="#e4e4e4", titleFontWeight="normal")
        for form in formats:
            written.append(folder / f"{name}.{form}")
            chart.save(written[-1], format=form, **({"scale_factor": 2} if form == "png" else {}))
    return sorted(written)


def figures(report: Report, width: Any = "container") -> dict[str, list[Figure]]:
    """Return the figures of each section that the runs have numbers for."""
    curves = partial(lines, width=width, marks=sorted({run.train_length for run in report.runs}))
    beside = partial(lines, x="length ÷ training length", width=width, marks=[1])
    tints = dict(zip((run.label for run in report.runs), colours(report.runs), strict=True))
    made: dict[str, list[tuple[str, str, Any]]] = {"perplexity": [], "speed": []}
    for key in ("perplexity", "loss", "perplexity_per_word", "bits_per_byte", "speed", "memory"):
        chart = curves(_measured(report, tints, key), "length in tokens", NAMES[key], log="p" in key or key == "speed")
        made["speed" if key in ("speed", "memory") else "perplexity"].append((key, NAMES[key], chart))
    own = _measured(report, tints, "ratio")
    for name in papers.SETS if own else []:
        chart = beside(own + _paper(name), y=NAMES["ratio"], log=True)
        made["perplexity"].append(("perplexity_relative", f"beside {name}", chart))
    own, relative = (_resolution(report, tints, over) for over in (False, True))
    made["resolution"] = [("resolution", "resolution", curves(own, "length in tokens", "resolution"))]
    if own:
        title = "beside LEX, table 3: arXiv, trained at 1,024"
        chart = beside(relative + _paper_resolution(), y="resolution")
        made["resolution"].append(("resolution_relative", title, chart))
    chart = curves(_positions(report, tints), "position in the input", NAMES["loss"])
    made["positions"] = [("loss_by_position", NAMES["loss"], chart)]
    made["recall"] = [("recall", "recall", curves(_recall(report, tints), "distance in tokens", "fraction recalled"))]
    drawn = {section: [Figure(*one[:2], [one[2]]) for one in some if one[2]] for section, some in made.items()}
    drawn |= {kind: [Figure(kind, kind, _maps(report, kind))] for kind in ("reach", "distance")}
    return {section: some for section, some in drawn.items() if some and some[0].panels}


def colours(runs: Sequence[Run]) -> list[int]:
    """Return a colour's number for each run: its method's if no earlier run has it, or else the first that is free."""
    taken: list[int] = []
    wanted = {METHODS[run.positions] for run in runs if run.positions in METHODS}
    for run in runs:
        own = METHODS.get(run.positions)
        free = [i for i in range(len(COLOURS)) if i not in taken and i not in wanted]
        free += [i for i in range(len(COLOURS)) if i not in taken]
        taken.append(own if own is not None and own not in taken else free[0] if free else len(taken))
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
        for one in curve.records:
            value, error = _value(curve, one, key), finite(one.loss_se)
            if value is None:
                continue
            bar: tuple[float, ...] = ()
            if error is not None and 0 <= error < 100 and 0 < value < 1e100:
                bar = {"loss": (value - error, value + error)}.get(key, ())
                bar = (value * math.exp(-error), value * math.exp(error)) if key == "perplexity" else bar
            x = one.length / curve.run.train_length if key == "ratio" else one.length
            tip = {"length": f"{one.length:,}", NAMES[key]: shown(value), "s.e. of the loss": shown(one.loss_se, 2)}
            tip |= {"protocol": one.how, "n": f"{shown(one.tokens)} tokens, {shown(one.documents)} documents"}
            tip |= {"checkpoint": one.checkpoint or "n.a."}
            found.append(row(curve.label, tints[curve.run.label], one.protocol, x, value, tip, bar))
    return found


def _value(curve: Curve, one: Measurement, key: str) -> float | None:
    if key == "ratio":
        start = curve.reference.perplexity if curve.reference else None
        return one.perplexity / start if one.perplexity is not None and start and math.isfinite(start) else None
    if key == "memory":
        return None if one.peak_bytes is None else one.peak_bytes / 1e6
    value: float | None = getattr(one, "tokens_per_second" if key == "speed" else key)
    return value


def _paper(name: str) -> list[Row]:
    found = []
    for line in papers.curves(name):
        for length, value in line.points:
            x, y = length / line.train_length, value / line.reference
            tip = {"length": f"{length:,}", "perplexity": shown(value), "protocol": line.protocol, "n": line.corpus}
            found.append(row(line.label, METHODS[line.method], line.protocol, x, y, tip))
    return found


def _resolution(report: Report, tints: dict[str, int], over: bool) -> list[Row]:
    found = []
    for run in report.runs:
        for one in [one for one in run.rows("resolution") if one["layer"] is None]:
            protocol = "blockwise" if one["blockwise"] else "nonoverlapping"
            label = run.label + f" · blockwise {one['block'] or ''}".rstrip() * (protocol == "blockwise")
            x, y = one["length"] / (run.train_length if over else 1), one["resolution"]
            tip = {"length": f"{one['length']:,}", "resolution": shown(y, 3)}
            found.append(row(label, tints[run.label], protocol, x, y, tip))
    return found


def _paper_resolution() -> list[Row]:
    found = []
    for one in papers.resolution():
        label = f"LEX: {one['method']}{' · blockwise' * one['blockwise']}"
        tip = {"length": f"{one['eval_length']:,}", "resolution": shown(one["resolution"], 3)}
        protocol, x = "blockwise" if one["blockwise"] else "full", one["eval_length"] / one["train_length"]
        found.append(row(label, METHODS[one["method"]], protocol, x, one["resolution"], tip))
    return found


def _positions(report: Report, tints: dict[str, int]) -> list[Row]:
    found = []
    for run in report.runs:
        lengths = sorted({one["length"] for one in run.rows("positions")})
        for one in run.rows("positions"):
            if one["length"] in (lengths[0], lengths[-1]):  # those between are in the CSV
                label = run.label + f" · length {one['length']:,}" * (len(lengths) > 1)
                protocol = "full" if one["length"] == lengths[-1] else "blockwise"
                tip = {"length": f"{one['length']:,}", "position": f"up to {one['position']:,}"}
                tip |= {"loss": shown(one["loss"]), "n": f"{shown(one['count'])} tokens"}
                found.append(row(label, tints[run.label], protocol, one["position"], one["loss"], tip))
    return found


def _recall(report: Report, tints: dict[str, int]) -> list[Row]:
    found = []
    for run in report.runs:
        for one in run.rows("recall"):
            value, trials = finite(one["accuracy"]), one["trials"]
            error = (
                math.sqrt(value * (1 - value) / trials) if value and trials and trials > 0 and 0 < value < 1 else 0.0
            )
            bar = () if value is None else (max(0.0, value - error), min(1.0, value + error))
            tip = {"distance": f"{one['distance']:,}", "recalled": shown(value, 3), "n": f"{shown(trials)} trials"}
            found.append(row(run.label, tints[run.label], "full", one["distance"], value, tip, bar))
    return found


# Maps: a panel per run, at the longest length that was analysed.


def _maps(report: Report, kind: str) -> list[Any]:
    cells = {run.label: _cells(run, kind) for run in report.runs if run.rows(kind)}
    most = 1.0 if kind == "reach" else max((one["shade"] or 0 for some in cells.values() for one in some), default=0)
    return [_map(some, kind, label, most or 1.0, label == list(cells)[-1]) for label, some in cells.items()]


def _cells(run: Run, kind: str) -> list[Row]:
    length = max(one["length"] for one in run.rows(kind))
    found = []
    for one in [one for one in run.rows(kind) if one["length"] == length]:
        cell = {"length": f"{length:,}", "layer": f"{one['layer']}", "head": f"{one['head']}"}
        if kind == "reach":
            shade = one["share"] if one["share"] is not None or one["reach"] is None else one["reach"] / length
            cell |= {"keys read back": shown(one["reach"], 3)}
        else:
            shade = one["weight"]
            cell |= {"row": f"{one['layer']}.{one['head']}", "distance": f"{one['distance']:,}"}
        found.append({**cell, "shade": finite(shade), "fraction": shown(shade, 3)})
    return found


def _map(cells: list[Row], kind: str, label: str, most: float, last: bool) -> Any:
    reach = kind == "reach"
    across, down = ("head", "layer") if reach else ("distance", "row")
    high, wide = (len({cell[key] for cell in cells}) for key in (down, across))
    what = "fraction of scores" if reach else "fraction of attention"
    legend = alt.Legend(title=what, orient="bottom", gradientLength=140, tickCount=3) if last else None
    scale = alt.Scale(scheme="blues", domain=[0, most], type="linear" if reach else "sqrt")
    base = alt.Chart(alt.InlineData(values=cells)).encode(
        x=alt.X(f"{across}:N", sort=None, axis=alt.Axis(labelAngle=0 if reach else -60)),
        y=alt.Y(f"{down}:N", sort=None, title="layer" if reach else "layer.head"),
        tooltip=[alt.Tooltip(field=key, type="nominal") for key in cells[0] if key not in ("shade", "row")],
    )
    dark = alt.condition("datum.shade > 0.55", alt.value("white"), alt.value("#222222"))
    text = base.mark_text(fontSize=10).encode(text="keys read back:N", color=dark)
    rect = base.mark_rect().encode(color=alt.Color("shade:Q", scale=scale, legend=legend))
    size = {"width": 44 * wide, "height": 26 * high} if reach else {"width": 22 * wide, "height": 13 * high}
    title = alt.TitleParams(f"{label}, length {cells[0]['length']}", anchor="start", fontSize=12, fontWeight="normal")
    return alt.layer(rect, *([text] if reach else [])).properties(title=title, **size)
