"""One chart of curves over lengths: a colour and a marker per run, a dash pattern per protocol, names at line ends.

The colours are those of Okabe and Ito, which people with colour-blindness tell apart, the yellow left out, and three
more; each has a contrast of at least 3 to the page's white and to its black.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from lengthen.report.collect import finite

Row = dict[str, Any]
COLOURS = ("#0072b2", "#d55e00", "#009473", "#b8548a", "#b87a00", "#3590c8", "#8d66b0", "#9a6733", "#7d7d7d")
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
DASHES = {"nonoverlapping": [1, 0], "full": [1, 0], "blockwise": [2, 3], "sliding": [7, 3], "window": [8, 3, 2, 3]}
LOOK = ("label", "x", "y", "low", "high", "trained", "colour", "shape", "dash")  # what else a row has is its tooltip
HEIGHT, GAP = 320, 14  # pixels: of a plot, and between two names
LIMIT = "windowSize()[0] < 500 ? 110 : 190"  # of a name's width: less on a phone


def row(label: str, colour: int, protocol: str, x: float, y: Any, tip: Row, bar: Sequence[float] = ()) -> Row:
    """Return one point of a curve."""
    dash = DASHES.get(protocol, [4, 2, 1, 2, 1, 2])
    look = {"colour": COLOURS[colour % len(COLOURS)], "shape": SHAPES[colour % len(SHAPES)], "dash": dash}
    return {"label": label, "x": x, "y": y, **look, **tip, **dict(zip(("low", "high"), bar, strict=False))}


def lines(rows: Iterable[Row], x: str, y: str, width: Any, log: bool = False, marks: Iterable[int] = ()) -> Any:
    """Return the curves, with bars of one standard error and a rule at training lengths; none without a point."""
    form = ".3~s" if "bytes" in y else ",.6~g"
    at, back = (math.log, math.exp) if log else (float, float)
    data = [one | {"y": _drawn(one["y"], log)} for one in rows if one["x"] > 0]
    points = [one for one in data if one["y"] is not None]  # where there is none, the curve is broken
    if not points:
        return None
    low, high = (extreme(at(one["y"]) for one in points) for extreme in (min, max))
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - pad, high + pad
    height = max(HEIGHT, GAP * (len({one["label"] for one in points}) + 1))
    pick = alt.selection_point(name="pick", fields=["label"], on="click", clear="dblclick")
    faded = alt.OpacityValue(0.12, condition={"param": "pick", "value": 1.0})
    colour = alt.Color("colour:N", scale=None)
    scale = alt.Scale(type="log", base=2, nice=False, padding=10)
    axis = alt.Axis(values=_lengths(points), format=",.4~g", labelOverlap="greedy", labelSeparation=4, grid=False)
    kind: Row = {"type": "log"} if log else {"type": "linear", "zero": False}
    up = alt.Scale(domain=[back(low), back(high)], nice=False, **kind)
    base = alt.Chart().encode(
        x=alt.X("x:Q", title=x, scale=scale, axis=axis),
        y=alt.Y("y:Q", title=None, scale=up, axis=alt.Axis(values=_ticks(back(low), back(high), log), format=form)),
        color=colour,
        detail=alt.Detail("label:N"),
    )
    wide = [at(one["high"]) - at(one["low"]) for one in points if "low" in one]
    for one in [one for one in data if "low" in one]:  # bars end with the plot
        one |= {"low": max(one["low"], back(low)), "high": min(one["high"], back(high))}
    clear = statistics.median(wide or [0.0]) < 0.3 * (high - low)  # else they would hide the curves
    bars = base.transform_filter("isValid(datum.low)").mark_rule()
    tips = [alt.Tooltip("label:N", title="curve")]
    keys = dict.fromkeys(key for one in points for key in one if key not in LOOK)  # no dots: they are paths to Vega
    tips += [alt.Tooltip(field=key, type="nominal", title=key) for key in keys]
    data = [dict.fromkeys(keys, "n.a.") | one for one in data]
    said = alt.DescriptionValue(alt.ExprRef("datum.label + ', ' + datum.x + ': ' + datum.y"))  # for screen readers
    dots = base.mark_point(filled=True, size=45, opacity=1).encode(
        shape=alt.Shape("shape:N", scale=None), opacity=faded, tooltip=tips, description=said
    )
    names = alt.Chart(alt.InlineData(values=_names(points, low, height / (high - low), height, log))).encode(
        y="y:Q", color=colour
    )
    start = [{"x": mark, "text": f"trained at {mark:,}" if mark > 1 else "training length"} for mark in marks]
    trained = alt.Chart(alt.InlineData(values=start)).encode(x=alt.X("x:Q"))
    shade = alt.OpacityValue(0.0, condition={"param": "pick", "value": 0.5, "empty": clear})
    layers = [
        *([bars.encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), opacity=shade)] if wide else []),
        trained.mark_rule(strokeDash=[3, 3], color="#8a8a8a"),
        trained.mark_text(align="left", baseline="bottom", dx=-4, dy=-4, color="#767676", aria=False).encode(
            y=alt.value(0), text=alt.Text("text:N")
        ),
        names.mark_rule(strokeWidth=0.7, opacity=0.4).encode(
            x=alt.X("x:Q"), x2=alt.value("width"), y=alt.Y("end:Q"), y2=alt.Y2("y:Q")
        ),
        names.mark_text(align="left", dx=9, fontSize=11, limit=alt.ExprRef(LIMIT)).encode(
            x=alt.value("width"), text=alt.Text("label:N"), opacity=faded
        ),
        base.mark_line(strokeWidth=2).encode(strokeDash=alt.StrokeDash("dash:N", scale=None), opacity=faded),
        dots.add_params(pick).properties(name="points"),
    ]
    title = alt.TitleParams(y, anchor="start", fontSize=12, fontWeight="normal", frame="bounds", offset=14)
    return alt.layer(*layers, data=alt.InlineData(values=data)).properties(width=width, height=height, title=title)


def _drawn(value: Any, log: bool) -> float | None:
    number = finite(value)
    return None if number is None or abs(number) > 1e100 or (log and number < 1e-100) else number


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """Return about six round numbers."""
    if log and high / low >= 5:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if len(decades) < 5 else (1,)
        return [s * 10.0**d for d in decades[:: len(decades) // 8 + 1] for s in steps if low <= s * 10.0**d <= high]
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(s * unit for s in (1, 2, 5, 10) if s * unit >= rough)
    return [float(f"{i * step:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _lengths(points: Sequence[Row]) -> list[float]:
    found = sorted({one["x"] for one in points})
    powers = [2.0**i for i in range(math.floor(math.log2(found[0])), math.ceil(math.log2(found[-1])) + 1)]
    return found if len(found) < 10 else [power for power in powers if found[0] <= power <= found[-1]]


def _names(points: Sequence[Row], low: float, scale: float, height: int, log: bool) -> list[Row]:
    """Return a name for each curve beside its last point, moved up or down so that none stand on each other."""
    last = {one["label"]: one for one in sorted(points, key=lambda one: float(one["x"]))}
    order = sorted(last.values(), key=lambda one: float(one["y"]))
    places = [((math.log(one["y"]) if log else one["y"]) - low) * scale for one in order]
    for i in range(1, len(places)):  # each at least a gap above the one below it
        places[i] = max(places[i], places[i - 1] + GAP)
    for i in reversed(range(len(places))):  # and none above the plot
        places[i] = min(places[i], height - GAP * (len(places) - 1 - i))
    values = [math.exp(low + place / scale) if log else low + place / scale for place in places]
    names = [{key: one[key] for key in ("label", "colour", "x")} | {"end": one["y"]} for one in order]
    return [one | {"y": value} for one, value in zip(names, values, strict=True)]
