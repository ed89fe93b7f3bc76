"""One chart of curves over lengths: a colour and a marker per run, a dash pattern per protocol, names at line ends.

Curves that lie on each other are told apart: markers are hollow, each curve is thinner than the one that it covers, and
each has a name. The colours are those of Okabe and Ito, which people with colour-blindness tell apart, the yellow left
out, and three more; each has a contrast of at least 3 to the page's white and to its black.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from lengthen.report.collect import finite

Row = dict[str, Any]
COLOURS = ("#0072b2", "#d55e00", "#009473", "#b8548a", "#b87a00", "#3590c8", "#8d66b0", "#9a6733", "#7d7d7d")
SHAPES = (  # one more than colours, so that no two of 90 runs look the same
    *("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left"),
    *("M-1,-1L1,1M1,-1L-1,1", "M0,-1.2L0,1.2M-1.2,0L1.2,0"),
)
DASHES = {"nonoverlapping": [1, 0], "full": [1, 0], "blockwise": [2, 3], "sliding": [7, 3], "window": [8, 3, 2, 3]}
LOOK = ("label", "x", "y", "low", "high", "colour", "shape", "dash", "thick")  # the rest is the tooltip
HEIGHT, GAP = 340, 15  # pixels: of a plot, and between two names
LIMIT = "min(280, 0.45 * windowSize()[0])"  # of a name's width, for a phone's sake; outside a browser there is none


def row(label: str, colour: int, protocol: str, x: float, y: Any, tip: Row, bar: Sequence[float] = ()) -> Row:
    """Return one point of a curve."""
    dash = DASHES.get(protocol, [4, 2, 1, 2, 1, 2])
    look = {"colour": COLOURS[colour % len(COLOURS)], "shape": SHAPES[colour % len(SHAPES)], "dash": dash}
    return {"label": label, "x": x, "y": y, **look, **tip, **dict(zip(("low", "high"), bar, strict=False))}


def lines(rows: Iterable[Row], x: str, y: str, width: Any, log: bool = False, marks: Iterable[int] = ()) -> Any:
    """Return the curves, with bars of one standard error and a rule at training lengths; none without a point."""
    at, back = (math.log, math.exp) if log else (float, float)
    data = [one | {"y": _drawn(one["y"], log)} for one in rows if one["x"] > 0]
    points = [one for one in data if one["y"] is not None]  # where there is none, the curve is broken
    if not points:
        return None
    labels = list(dict.fromkeys(one["label"] for one in data))
    keys = dict.fromkeys(key for one in points for key in one if key not in LOOK)  # no dots: they are paths to Vega
    data = [
        dict.fromkeys(keys, "n.a.") | one | {"thick": 3.5 - 2 * (labels.index(one["label"]) + 1) / len(labels)}
        for one in data
    ]
    low, high = (extreme(at(one["y"]) for one in points) for extreme in (min, max))
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - pad, high + pad
    height = max(HEIGHT, GAP * (len(labels) + 1))

    pick = alt.selection_point(name="pick", fields=["label"], on="click", clear="dblclick")
    faded = alt.OpacityValue(0.12, condition={"param": "pick", "value": 1.0})
    pale = alt.OpacityValue(0.35, condition={"param": "pick", "value": 0.8, "empty": False})
    colour = alt.Color("colour:N", scale=None)
    across = alt.Axis(tickCount=10, format=",.8~g", labelOverlap="greedy", labelSeparation=4, grid=False)
    up = alt.Axis(values=_ticks(back(low), back(high), log), format=".3~s" if "bytes" in y else ",.6~g")
    kind: Row = {"type": "log"} if log else {"type": "linear", "zero": False}
    base = alt.Chart().encode(
        x=alt.X("x:Q", title=x, scale=alt.Scale(type="log", base=2, nice=False, padding=10), axis=across),
        y=alt.Y("y:Q", title=None, scale=alt.Scale(domain=[back(low), back(high)], nice=False, **kind), axis=up),
        color=colour,
        detail=alt.Detail("label:N"),
    )
    tips = [alt.Tooltip("label:N", title="curve")]
    tips += [alt.Tooltip(field=key, type="nominal", title=key) for key in keys]
    said = alt.DescriptionValue(alt.ExprRef("datum.label + ', ' + datum.x + ': ' + datum.y"))  # for screen readers
    dots = base.mark_point(size=50, fill="transparent", strokeWidth=1.7).encode(
        shape=alt.Shape("shape:N", scale=None), opacity=faded, tooltip=tips, description=said
    )
    barred = [one for one in data if "low" in one]
    for one in barred:  # bars end with the plot
        one |= {"low": max(one["low"], back(low)), "high": min(one["high"], back(high))}
    bars = base.transform_filter("isValid(datum.low)").mark_rule()
    ends = _names(points, low, height / (high - low), height, log)
    names = alt.Chart(alt.InlineData(values=ends)).encode(y="y:Q", color=colour)
    start = [{"x": mark, "text": f"trained at {mark:,}" if mark > 1 else "training length"} for mark in marks]
    trained = alt.Chart(alt.InlineData(values=start)).encode(x=alt.X("x:Q"))
    layers = [
        *([bars.encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), opacity=pale)] if barred else []),
        trained.mark_rule(strokeDash=[3, 3], color="#8a8a8a"),
        trained.mark_text(align="left", baseline="bottom", dx=-4, dy=-4, color="#767676", aria=False).encode(
            y=alt.value(0), text=alt.Text("text:N")
        ),
        names.mark_rule(strokeWidth=0.7, opacity=0.4).encode(
            x=alt.X("x:Q"), x2=alt.value("width"), y=alt.Y("end:Q"), y2=alt.Y2("y:Q")
        ),
        names.mark_text(align="left", dx=9, limit=alt.ExprRef(LIMIT)).encode(
            x=alt.value("width"), text=alt.Text("label:N"), opacity=faded
        ),
        base.mark_line().encode(
            strokeDash=alt.StrokeDash("dash:N", scale=None), size=alt.Size("thick:Q", scale=None), opacity=faded
        ),
        dots.add_params(pick).properties(name="points"),
    ]
    return alt.layer(*layers, data=alt.InlineData(values=data)).properties(width=width, height=height, title=y)


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
