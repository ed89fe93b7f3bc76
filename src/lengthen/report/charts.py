"""The figures, each described once: Altair charts that the page shows and that `write_figures` saves.

`figures(report)` has, for each section, its figures; the first is shown, the others can be chosen. A figure of curves
is made from rows {"label", "x", "y", "low", "high", "colour", "shape", "dash", …}; what else a row has is its tooltip.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from lengthen.report import papers
from lengthen.report.collect import Curve, Measurement, Report, Run, finite
from lengthen.report.style import METHODS, colours, look
from lengthen.report.tables import rows

FORMATS = ("svg", "pdf", "png")
HEIGHT, WIDTH, GAP = 320, 430, 14  # pixels: of a plot, of one in a paper, and between two labels
COLUMNS = {"label", "x", "y", "low", "high", "colour", "shape", "dash"}  # of a row; the others are its tooltip
Row = dict[str, Any]
Ends = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """One figure: the name of its file, what it shows, and its panels, one but for maps."""

    name: str
    title: str
    panels: list[alt.TopLevelMixin]
    static: bool = True  # whether `write_figures` saves it


def write_figures(report: Report, folder: str | Path, formats: Sequence[str] = ("svg", "pdf")) -> list[Path]:
    """Draw every figure that the runs have numbers for, in each format; return the paths."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ValueError(f"formats: expected some of {', '.join(FORMATS)}, got {', '.join(unknown) or 'none'}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in [one for found in figures(report, WIDTH).values() for one in found if one.static]:
        chart = styled(alt.concat(*figure.panels, columns=2 if len(figure.panels) < 5 else 3) if len(figure.panels) > 1 else figure.panels[0])
        for form in formats:
            written.append(folder / f"{figure.name}.{form}")
            chart.save(written[-1], format=form, **({"scale_factor": 2} if form == "png" else {}))
    return written


def figures(report: Report, width: int | str = "container") -> dict[str, list[Figure]]:
    """Return the figures of each section that the runs have numbers for."""
    made = {
        "perplexity": _perplexity(report, width),
        "resolution": _resolution(report, width),
        "positions": _positions(report, width),
        "reach": _map(report, "reach"),
        "distance": _map(report, "distance"),
        "recall": _recall(report, width),
        "speed": _speed(report, width),
    }
    return {section: found for section, found in made.items() if found}


def shown(value: Any, digits: int = 4) -> str:
    """Return a number for reading: ∞ and n.a. for what is not one."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return "n.a."
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if isinstance(value, int) or 10 ** (digits - 1) <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".").replace("e+0", "e").replace("e+", "e")


def plus_minus(one: Measurement) -> str:
    """Return a perplexity with its standard error, to first order perplexity × that of the loss."""
    value, error = one.perplexity, finite(one.loss_se)
    if value is None or finite(value) is None or error is None:
        return shown(value)
    return f"{shown(value)} ± {shown(value * error, 2)}"


# Curves.


def lines(
    found: Iterable[Row], x: str, y: str, width: int | str, *, log: bool = False, marks: Iterable[int] = ()
) -> alt.LayerChart | None:
    """Return curves over lengths, named at their ends, with bars of one standard error; none without a point."""
    data = [{**row, "y": _drawn(row["y"], log)} for row in found if row["x"] > 0]
    points = [row for row in data if row["y"] is not None]
    if not points:
        return None
    tips = [alt.Tooltip("label:N", title="curve")]
    tips += [alt.Tooltip(field=key, type="nominal", title=key) for key in points[0] if key not in COLUMNS]
    low, high = _domain([row["y"] for row in points], log)
    most = len({row["label"] for row in points})
    height = max(HEIGHT, GAP * (most + 1))
    pick = alt.selection_point(name="pick", fields=["label"], on="click[datum && datum.label]", clear="dblclick")
    faded = alt.condition(pick, alt.value(1.0), alt.value(0.12))
    colour = alt.Color("colour:N", scale=None)
    across = alt.X(
        "x:Q",
        title=x,
        scale=alt.Scale(type="log", base=2, nice=False, padding=10),
        axis=alt.Axis(values=_lengths(row["x"] for row in points), format=",.4~g", labelOverlap="greedy", grid=False),
    )
    up = alt.Y(
        "y:Q",
        title=None,
        scale=alt.Scale(type="log" if log else "linear", domain=[low, high], nice=False, zero=False),
        axis=alt.Axis(values=_ticks(low, high, log), format=",.6~g"),
    )
    said = alt.value(alt.ExprRef("datum.label + ', ' + datum.x + ': ' + datum.y"))  # for screen readers
    base = alt.Chart().encode(x=across, y=up, color=colour, detail="label:N")
    bars = base.transform_filter("isValid(datum.low)").mark_rule(clip=True).encode(y="low:Q", y2="high:Q")
    curve = base.mark_line(strokeWidth=2).encode(strokeDash=alt.StrokeDash("dash:N", scale=None), opacity=faded)
    dots = base.mark_point(filled=True, size=45, opacity=1).encode(
        shape=alt.Shape("shape:N", scale=None), opacity=faded, tooltip=tips, description=said
    )
    ends = alt.Chart(alt.Data(values=_ends(points, (low, high), log, height)))
    names = ends.mark_text(align="left", dx=9, fontSize=11, limit=190).encode(
        x=alt.value("width"), y=alt.Y("y:Q"), text="label:N", color=colour, opacity=faded
    )
    start = alt.Chart(alt.Data(values=[{"x": mark, "text": f"trained at {mark:,}" if mark > 1 else "training length"} for mark in marks]))
    rule = start.mark_rule(strokeDash=[3, 3], color="#8a8a8a").encode(x="x:Q")
    note = start.mark_text(align="left", baseline="bottom", dx=-4, dy=-4, color="#767676").encode(
        x="x:Q", y=alt.value(0), text="text:N"
    )
    wide = [_at(row["high"], log) - _at(row["low"], log) for row in points if "low" in row]
    hide = statistics.median(wide or [0.0]) > 0.3 * (_at(high, log) - _at(low, log))  # bars would hide the curves
    layers = [
        bars.encode(opacity=alt.condition(pick, alt.value(0.5), alt.value(0.0), empty=not hide)),
        curve,
        ends.mark_rule(strokeWidth=0.7, opacity=0.4).encode(x="x:Q", x2=alt.value("width"), y="at:Q", y2="y:Q", color=colour),
        dots.add_params(pick).properties(name="points"),
        names,
        *([rule, note] if start.data.values else []),
    ]
    title = alt.TitleParams(y, anchor="start", fontSize=12, fontWeight="normal", frame="bounds", offset=14)
    return alt.layer(*layers, data=alt.Data(values=data)).properties(width=width, height=height, title=title)


def styled(chart: Any) -> Any:
    """Return the chart for paper: dark on white, few lines."""
    font = "Helvetica, Arial, sans-serif"
    return (
        chart.configure(font=font, background="white")
        .configure_view(stroke=None)
        .configure_axis(domainColor="#8a8a8a", tickColor="#8a8a8a", gridColor="#e4e4e4", titleFontWeight="normal")
    )


def _drawn(value: Any, log: bool) -> float | None:
    number = finite(value)
    return None if number is None or (log and number <= 0) else number


def _domain(values: Sequence[float], log: bool) -> Ends:
    low, high = min(values), max(values)
    if log:
        pad = max(0.05 * math.log(high / low), 0.01)
        return low * math.exp(-pad), high * math.exp(pad)
    pad = 0.05 * (high - low) or max(0.05 * abs(high), 1e-9)
    return low - pad, high + pad


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """Return about six round numbers between two."""
    if log and high / low >= 5:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if len(decades) < 5 else (1,)
        return [s * 10.0**d for d in decades[:: len(decades) // 8 + 1] for s in steps if low <= s * 10.0**d <= high]
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(s * unit for s in (1, 2, 5, 10) if s * unit >= rough)
    first = math.ceil(low / step)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step) + 1)]


def _lengths(values: Iterable[float]) -> list[float]:
    found = sorted(set(values))
    powers = [2.0**i for i in range(math.floor(math.log2(found[0])), math.ceil(math.log2(found[-1])) + 1)]
    return found if len(found) < 10 else [p for p in powers if found[0] <= p <= found[-1]]


def _ends(points: Sequence[Row], ends: Ends, log: bool, height: int) -> list[Row]:
    """Return a name for each curve beside its last point, moved up or down so that none stand on each other."""
    last = {row["label"]: row for row in sorted(points, key=lambda row: float(row["x"]))}
    low, high = (_at(end, log) for end in ends)
    scale = height / (high - low)
    order = sorted(last.values(), key=lambda row: float(row["y"]))
    wanted = [(_at(row["y"], log) - low) * scale for row in order]
    free = 0.0
    for place, at in enumerate(wanted):  # upwards: each at least a gap above the one below it
        wanted[place] = free = max(at, free)
        free += GAP
    room = float(height)
    for place in reversed(range(len(wanted))):  # downwards: none above the plot
        wanted[place] = room = min(wanted[place], room)
        room -= GAP
    values = [math.exp(low + at / scale) if log else low + at / scale for at in wanted]
    return [
        {"label": row["label"], "colour": row["colour"], "x": row["x"], "at": row["y"], "y": value}
        for row, value in zip(order, values, strict=True)
    ]


def _at(value: float, log: bool) -> float:
    return math.log(value) if log else value


def _marks(report: Report) -> list[int]:
    return sorted({run.train_length for run in report.runs})


def _looks(report: Report) -> dict[str, tuple[int, int]]:
    """Return the colour and the marker of each run by its label."""
    return {run.label: (c, n) for n, (run, c) in enumerate(zip(report.runs, colours(report.runs), strict=True))}


def _figure(name: str, title: str, chart: Any, static: bool = True) -> list[Figure]:
    return [] if chart is None else [Figure(name, title, [chart], static)]


def _measured(report: Report, key: str) -> list[Row]:
    looks, found = _looks(report), []
    for curve in report.curves:
        style = look(*looks[curve.run.label], curve.first.protocol)
        for one in curve.records:
            value, error = _value(curve, one, key), finite(one.loss_se)
            if value is None:
                continue
            row = {"label": curve.label, "x": one.length, "y": value, **style}
            if key == "perplexity_relative":
                row["x"] = one.length / curve.run.train_length
            elif error is not None and finite(value) is not None and 0 <= error < 100:
                spread = {"loss": (value - error, value + error)}
                spread["perplexity"] = (value * math.exp(-error), finite(value * math.exp(error)) or value)
                row |= dict(zip(("low", "high"), spread.get(key, ()), strict=False))
            row |= {"length": f"{one.length:,}", NAMES[key]: shown(value)}
            row |= {"± 1 s.e. of the loss": shown(one.loss_se, 2), "protocol": one.how}
            row |= {"n": f"{shown(one.tokens)} tokens, {shown(one.documents)} documents"}
            found.append({**row, "checkpoint": one.checkpoint or "n.a."})
    return found


NAMES = {
    **{"perplexity": "perplexity per token", "loss": "loss, nats per token"},
    **{"perplexity_per_word": "perplexity per word", "bits_per_byte": "bits per byte"},
    **{"perplexity_relative": "perplexity ÷ that at the training length"},
    **{"tokens_per_second": "tokens/s", "peak_bytes": "peak memory, MB"},
}


def _value(curve: Curve, one: Measurement, key: str) -> float | None:
    if key == "peak_bytes":
        return None if one.peak_bytes is None else one.peak_bytes / 1e6
    if key != "perplexity_relative":
        return getattr(one, key)  # type: ignore[no-any-return]
    start = curve.reference.perplexity if curve.reference else None
    return one.perplexity / start if one.perplexity is not None and start and math.isfinite(start) else None


def _perplexity(report: Report, width: int | str) -> list[Figure]:
    made = []
    for key in ("perplexity", "loss", "perplexity_per_word", "bits_per_byte"):
        log = key.startswith("perplexity")
        chart = lines(_measured(report, key), "length in tokens", NAMES[key], width, log=log, marks=_marks(report))
        made += _figure(key, NAMES[key], chart)
    own = _measured(report, "perplexity_relative")
    for place, name in enumerate(papers.SETS if own else []):
        theirs = []
        for line in papers.curves(name):
            style = look(METHODS[line.method], METHODS[line.method], line.protocol)
            for length, value in line.points:
                row = {"label": line.label, "x": length / line.train_length, "y": value / line.reference, **style}
                row |= {"length": f"{length:,}", "perplexity": shown(value)}
                theirs.append({**row, "protocol": line.protocol, "n": line.corpus})
        title = NAMES["perplexity_relative"]
        chart = lines(own + theirs, "length ÷ training length", title, width, log=True, marks=[1])
        made += _figure("perplexity_relative", f"beside {name}", chart, static=place == 0)
    return made


def _resolution(report: Report, width: int | str) -> list[Figure]:
    looks, own, relative = _looks(report), [], []
    for run in report.runs:
        for row in [row for row in rows(run, "resolution") if row["layer"] is None]:
            protocol = "blockwise" if row["blockwise"] else "nonoverlapping"
            label = f"{run.label} · blockwise {row['block'] or ''}".rstrip() if row["blockwise"] else run.label
            tip = {"length": f"{row['length']:,}", "resolution": shown(row["resolution"], 3)}
            point = {"label": label, "y": row["resolution"], **look(*looks[run.label], protocol), **tip}
            own.append({**point, "x": row["length"]})
            relative.append({**point, "x": row["length"] / run.train_length})
    theirs = []
    for row in papers.resolution():
        label = f"LEX: {row['method']}{' · blockwise' if row['blockwise'] else ''}"
        style = look(*[METHODS[row["method"]]] * 2, "blockwise" if row["blockwise"] else "full")
        tip = {"length": f"{row['eval_length']:,}", "resolution": shown(row["resolution"], 3)}
        x = row["eval_length"] / row["train_length"]
        theirs.append({"label": label, "x": x, "y": row["resolution"], **style, **tip})
    chart = lines(own, "length in tokens", "resolution", width, marks=_marks(report))
    beside = lines(relative + theirs, "length ÷ training length", "resolution", width, marks=[1]) if chart else None
    title = "beside LEX, table 3: arXiv, trained at 1,024"
    return _figure("resolution", "resolution", chart) + _figure("resolution_relative", title, beside)


def _positions(report: Report, width: int | str) -> list[Figure]:
    looks, found = _looks(report), []
    for run in report.runs:
        lengths = sorted({row.length for row in run.rows("positions")})
        for row in rows(run, "positions"):
            if row["length"] not in (lengths[0], lengths[-1]):
                continue  # those between are in the CSV
            protocol = "nonoverlapping" if row["length"] == lengths[-1] else "blockwise"
            label = f"{run.label} · length {row['length']:,}"
            point = {"label": label, "x": row["position"], "y": row["loss"]}
            tip = {"position": f"up to {row['position']:,}", "loss": shown(row["loss"])}
            found.append({**point, **look(*looks[run.label], protocol), **tip, "n": f"{shown(row['count'])} tokens"})
    title = "loss, nats per token"
    chart = lines(found, "position in the input", title, width, marks=_marks(report))
    return _figure("loss_by_position", title, chart)


def _recall(report: Report, width: int | str) -> list[Figure]:
    looks, found = _looks(report), []
    for run in report.runs:
        for row in rows(run, "recall"):
            value, trials = finite(row["accuracy"]), row["trials"]
            point = {"label": run.label, "x": row["distance"], "y": value}
            if value is not None and trials and 0 <= value <= 1:
                error = math.sqrt(value * (1 - value) / trials)
                point |= {"low": max(0.0, value - error), "high": min(1.0, value + error)}
            tip = {"distance": f"{row['distance']:,}", "recalled": shown(row["accuracy"], 3)}
            found.append({**point, **look(*looks[run.label], "full"), **tip, "n": f"{shown(trials)} trials"})
    chart = lines(found, "distance in tokens", "fraction recalled", width, marks=_marks(report))
    return _figure("recall", "fraction recalled", chart)


def _speed(report: Report, width: int | str) -> list[Figure]:
    made = []
    for key, name in (("tokens_per_second", "speed"), ("peak_bytes", "memory")):
        chart = lines(
            _measured(report, key), "length in tokens", NAMES[key], width, log=True, marks=_marks(report)
        )
        made += _figure(name, NAMES[key], chart)
    return made


# Maps: a panel per run, at the longest length that was analysed.

KEYS = "keys read back"


def _map(report: Report, kind: str) -> list[Figure]:
    cells = {run.label: _cells(run, kind) for run in report.runs if run.rows(kind)}
    most = max((cell["shade"] or 0.0 for found in cells.values() for cell in found), default=0.0)
    last = list(cells)[-1:]
    panels = [_panel(f, kind, label, most or 1.0, [label] == last) for label, f in cells.items() if f]
    return [Figure(kind, kind, panels)] if panels else []


def _cells(run: Run, kind: str) -> list[Row]:
    length = max(row.length for row in run.rows(kind))
    found: list[Row] = []
    for row in rows(run, kind):
        if row["length"] != length:
            continue
        place = {"length": f"{length:,}", "layer": f"{row['layer']}", "head": f"{row['head']}"}
        if kind == "reach":
            shade = row["share"] if row["share"] is not None else (row["reach"] or 0) / length
            found.append({**place, KEYS: shown(row["reach"], 3), "shade": finite(shade), "fraction": shown(shade, 3)})
        else:
            place |= {"row": f"{row['layer']}.{row['head']}", "distance": f"{row['distance']:,}"}
            found.append({**place, "shade": finite(row["weight"]), "fraction": shown(row["weight"], 3)})
    return found


def _panel(found: list[Row], kind: str, label: str, most: float, last: bool) -> Any:
    reach = kind == "reach"
    across, down = ("head", "layer") if reach else ("distance", "row")
    high, wide = (len({cell[key] for cell in found}) for key in (down, across))
    scale = alt.Scale(scheme="blues", domain=[0, 1 if reach else most], type="linear" if reach else "sqrt")
    what = "fraction of scores" if reach else "fraction of attention"
    legend = alt.Legend(title=what, orient="bottom", gradientLength=140, tickCount=3) if last else None
    base = alt.Chart(alt.Data(values=found)).encode(
        x=alt.X(f"{across}:N", sort=None, axis=alt.Axis(labelAngle=0 if reach else -60)),
        y=alt.Y(f"{down}:N", sort=None, title="layer" if reach else "layer.head"),
        tooltip=[alt.Tooltip(field=key, type="nominal") for key in found[0] if key not in ("shade", "row")],
    )
    layers = [base.mark_rect().encode(color=alt.Color("shade:Q", scale=scale, legend=legend))]
    if reach:
        dark = alt.condition("datum.shade > 0.55", alt.value("white"), alt.value("#222222"))
        layers.append(base.mark_text(fontSize=10).encode(text=f"{KEYS}:N", color=dark))
    width, height = (44 * wide, 26 * high) if reach else (22 * wide, 13 * high)
    title = alt.TitleParams(f"{label}, length {found[0]['length']}", anchor="start", fontSize=12, fontWeight="normal")
    return alt.layer(*layers).properties(width=width, height=height, title=title)
