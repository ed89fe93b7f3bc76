"""The page's figures as data: plain lists and numbers that its script draws, JSON without NaN.

A chart is {"id", "x", "rx", "log_x", "measures", "marks", "series"}; a series has points {"x", "rx", "y", "n", "tip"}.
`y` has for each measure [value, low, high]; `n` says in words what a value is that cannot be drawn; `rx` is x as a
multiple of the training length, which measures that are `relative` are drawn against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from lengthen.report import papers
from lengthen.report.collect import Curve, Record, Report, describe, finite, perplexity
from lengthen.report.style import METHODS, colours, dashes

Chart = dict[str, Any]
CROWD = 12  # curves of the headline figure; beyond it only two protocols are shown at first


def shown(value: Any, digits: int = 4) -> str:
    """Return a number for reading: ∞ and n.a. for what is not one."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return "n.a."
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if isinstance(value, int) or 10 ** (digits - 1) <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".").replace("e+0", "e").replace("e+", "e")


def amount(count: Any) -> str:
    """Return a number of bytes for reading."""
    value = finite(count)
    if value is None:
        return "n.a."
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def charts(report: Report) -> list[Chart]:
    """Return the charts that the runs have numbers for."""
    made = (make(report) for make in (_perplexity, _resolution, _positions, _speed, _recall))
    return [chart for chart in made if any(len(series["points"]) for series in chart["series"] if not series["group"])]


def maps(report: Report) -> list[Chart]:
    """Return reach and weight by distance as maps: a map a run and length, rows × columns of values."""
    found = []
    for run in report.runs:
        for row in run.analyses.get("reach", {"rows": []})["rows"]:
            found.append(_reach_map(run.label, row))
        for row in run.analyses.get("distance", {"rows": []})["rows"]:
            found.append(_distance_map(run.label, row))
    return found


def relative(curve: Curve, record: Record) -> float | None:
    """Return a record's perplexity over that at the training length."""
    reference = curve.reference
    start = None if reference is None else perplexity(reference)
    value = perplexity(record)
    return value / start if value is not None and start and math.isfinite(start) else None


def interval(value: float | None, error: Any) -> list[float | None]:
    """Return [value, low, high] of e^(loss ± standard error), given e^loss."""
    middle, spread = finite(value), finite(error)
    if middle is None or spread is None or not 0 <= spread <= 700:
        return [middle, None, None]
    return [middle, middle * math.exp(-spread), finite(middle * math.exp(spread))]


def plus_minus(record: Record) -> str:
    """Return a perplexity with its standard error, to first order perplexity × that of the loss."""
    value = perplexity(record)
    error = finite(record.get("loss_se"))
    if finite(value) is None or value is None or error is None:
        return shown(value)
    return f"{shown(value)} ± {shown(value * error, 2)}"


def _measure(name: str, label: str, log: bool = False, form: str = "number", relative: bool = False) -> Record:
    return {"id": name, "label": label, "log": log, "form": form, "relative": relative}


def _chart(name: str, x: str, measures: list[Record], log_x: bool = True) -> Chart:
    rx = f"{x} ÷ training length"
    return {"id": name, "x": x, "rx": rx, "log_x": log_x, "measures": measures, "marks": [], "series": []}


def _series(label: str, colour: int, marker: int, protocol: str, points: Iterable[Record], **more: Any) -> Record:
    plain = {"group": None, "shown": True, "protocol": protocol}
    about = {"label": label, "colour": colour, "marker": marker, "dash": list(dashes(protocol))}
    return {**about, **plain, **more, "points": list(points)}


def _point(x: Any, trained: int, values: dict[str, tuple[Any, list[float | None]]], tip: list[str]) -> Record:
    """Return a point from (the value as it is, [value, low, high]) of each measure."""
    notes = {key: shown(raw) for key, (raw, drawn) in values.items() if drawn[0] is None and raw is not None}
    drawn = {key: drawn for key, (raw, drawn) in values.items() if drawn[0] is not None}
    return {"x": x, "rx": x / trained, "y": drawn, "n": notes, "tip": tip}


def _marks(report: Report) -> list[Record]:
    lengths = sorted({run.train_length for run in report.runs})
    return [{"x": length, "label": f"trained at {length:,}"} for length in lengths]


def _perplexity(report: Report) -> Chart:
    curves = report.curves
    measures = [
        _measure("perplexity", "perplexity a token", log=True),
        _measure("loss", "loss, nats a token"),
        _measure("perplexity_per_word", "perplexity a word", log=True),
        _measure("bits_per_byte", "bits a byte"),
    ]
    has = {
        key for run in report.runs for record in run.evaluations for key, value in record.items() if value is not None
    }
    measures = [measure for measure in measures if measure["id"] in has | {"perplexity"}]
    measures.append(_measure("relative", "perplexity ÷ that at the training length", log=True, relative=True))
    chart = _chart("perplexity", "length in tokens", measures) | {"marks": _marks(report), "papers": "relative"}
    names = [id(run) for run in report.runs]
    tints = colours(report.runs)
    first = {"blockwise", *[curve.protocol for curve in curves][:1]}

    for curve in curves:
        place = names.index(id(curve.run))
        points = [_measured(curve, record) for record in curve.records]
        visible = len(curves) <= CROWD or curve.protocol in first
        chart["series"].append(
            _series(curve.label, tints[place], place, curve.protocol, points, shown=visible, run=curve.run.label)
        )
    for line in papers.curves():
        tip = [f"{line.paper}, table {line.table.removeprefix('T')}", f"{line.corpus}, {line.split}", line.protocol]
        points = []
        for length, value in line.points:
            ratio = value / line.reference
            values = {"relative": (ratio, [ratio, None, None])}
            points.append(_point(length, line.train_length, values, [f"perplexity {shown(value)}", *tip]))
        about = {"group": line.group, "shown": line.shown}
        colour = METHODS[line.method]
        chart["series"].append(_series(line.label, colour, colour, line.protocol, points, **about))
    return chart


def _measured(curve: Curve, record: Record) -> Record:
    error = record.get("loss_se")
    loss, spread = finite(record.get("loss")), finite(error)
    low, high = (loss - spread, loss + spread) if loss is not None and spread is not None else (None, None)
    ratio = relative(curve, record)
    values: dict[str, tuple[Any, list[float | None]]] = {
        "perplexity": (perplexity(record), interval(perplexity(record), error)),
        "loss": (record.get("loss"), [loss, low, high]),
        "relative": (ratio, [finite(ratio), None, None]),
    }
    for key in ("perplexity_per_word", "bits_per_byte"):
        values[key] = (record.get(key), [finite(record.get(key)), None, None])
    tip = [
        describe(curve.protocol, record.get("stride"), record.get("block")),
        f"{shown(record.get('tokens'))} tokens, {shown(record.get('documents'))} documents",
        f"{record.get('checkpoint') or 'checkpoint n.a.'}",
    ]
    return _point(record["length"], curve.run.train_length, values, tip)


def _each(report: Report, kind: str, chart: Chart, make: Callable[[Chart, Any, Record, int, int], None]) -> Chart:
    for place, (run, colour) in enumerate(zip(report.runs, colours(report.runs), strict=True)):
        if kind in run.analyses:
            make(chart, run, run.analyses[kind], colour, place)
    return chart


def _plain(value: Any) -> tuple[Any, list[float | None]]:
    return value, [finite(value), None, None]


def _resolution(report: Report) -> Chart:
    measures = [
        _measure("resolution", "resolution"),
        _measure("relative", "resolution, by multiple of the training length", relative=True),
    ]
    chart = _chart("resolution", "length in tokens", measures) | {"marks": _marks(report), "papers": "relative"}

    def make(chart: Chart, run: Any, analysis: Record, colour: int, place: int) -> None:
        kinds: dict[tuple[bool, Any], list[Record]] = {}
        for row in sorted(analysis["rows"], key=lambda row: int(row["length"])):
            kinds.setdefault((bool(row.get("blockwise")), row.get("block")), []).append(row)
        for (blockwise, block), rows in kinds.items():
            protocol = "blockwise" if blockwise else "nonoverlapping"
            label = f"{run.label} · {describe(protocol, None, block)}" if blockwise else run.label
            points = []
            for row in rows:
                layers = ", ".join(shown(value, 3) for value in row.get("layers") or [])
                values = {"resolution": _plain(row["resolution"]), "relative": _plain(row["resolution"])}
                points.append(
                    _point(row["length"], run.train_length, values, [f"by layer: {layers}"] if layers else [])
                )
            chart["series"].append(_series(label, colour, place, protocol, points))

    _each(report, "resolution", chart, make)
    lines: dict[tuple[str, bool], list[Record]] = {}
    for row in papers.resolution():
        lines.setdefault((row["method"], row["blockwise"]), []).append(row)
    for (method, blockwise), rows in lines.items():
        protocol = "blockwise" if blockwise else "nonoverlapping"
        label = f"LEX: {method}{' · blockwise' if blockwise else ''}"
        points = [
            _point(row["eval_length"], row["train_length"], {"relative": _plain(row["resolution"])}, ["LEX, table 3"])
            for row in rows
        ]
        colour = METHODS[method]
        group = "LEX, table 3: arXiv, trained at 1,024"
        chart["series"].append(_series(label, colour, colour, protocol, points, group=group))
    return chart


def _positions(report: Report) -> Chart:
    chart = _chart("positions", "position in the input", [_measure("loss", "loss, nats a token")])
    chart["marks"] = _marks(report)

    def make(chart: Chart, run: Any, analysis: Record, colour: int, place: int) -> None:
        rows = sorted(analysis["rows"], key=lambda row: int(row["length"]))
        for order, row in enumerate(rows):
            counts = row.get("count") or [None] * len(row["loss"])
            lows = [0, *row["positions"][:-1]]
            points = [
                _point(
                    end,
                    run.train_length,
                    {"loss": _plain(loss)},
                    [f"positions {low + 1:,} to {end:,}", f"{shown(count)} tokens"],
                )
                for low, end, loss, count in zip(lows, row["positions"], row["loss"], counts, strict=True)
            ]
            label = f"{run.label} · length {row['length']:,}"
            protocol = "nonoverlapping" if order == len(rows) - 1 else ("blockwise", "sliding", "window")[order % 3]
            chart["series"].append(_series(label, colour, place, protocol, points, shown=order in (0, len(rows) - 1)))

    return _each(report, "positions", chart, make)


def _speed(report: Report) -> Chart:
    measures = [
        _measure("tokens_per_second", "tokens a second", log=True),
        _measure("peak_bytes", "peak memory, bytes", log=True, form="bytes"),
    ]
    chart = _chart("speed", "length in tokens", measures) | {"marks": _marks(report)}
    tints = colours(report.runs)
    for curve in report.curves:
        place = [run is curve.run for run in report.runs].index(True)
        points = []
        for record in curve.records:
            values = {key: _plain(record.get(key)) for key in ("tokens_per_second", "peak_bytes")}
            tip = [
                f"{shown(record.get('tokens_per_second'))} tokens a second",
                f"peak memory {amount(record.get('peak_bytes'))}",
                describe(curve.protocol, record.get("stride"), record.get("block")),
                f"on {record.get('device') or 'n.a.'}",
            ]
            points.append(_point(record["length"], curve.run.train_length, values, tip))
        if any(point["y"] for point in points):
            chart["series"].append(_series(curve.label, tints[place], place, curve.protocol, points))
    used = {key for series in chart["series"] for point in series["points"] for key in point["y"]}
    chart["measures"] = [measure for measure in measures if measure["id"] in used] or measures[:1]
    return chart


def _recall(report: Report) -> Chart:
    chart = _chart("recall", "distance in tokens", [_measure("accuracy", "share recalled")])
    chart["marks"] = _marks(report)

    def make(chart: Chart, run: Any, analysis: Record, colour: int, place: int) -> None:
        points = []
        for row in sorted(analysis["rows"], key=lambda row: int(row["distance"])):
            value, trials = finite(row["accuracy"]), row.get("trials")
            drawn: list[float | None] = [value, None, None]
            if value is not None and trials and 0 <= value <= 1:
                error = math.sqrt(value * (1 - value) / trials)
                drawn = [value, max(0.0, value - error), min(1.0, value + error)]
            tip = [f"{shown(trials)} trials"]
            points.append(_point(row["distance"], run.train_length, {"accuracy": (row["accuracy"], drawn)}, tip))
        chart["series"].append(_series(run.label, colour, place, "nonoverlapping", points))

    return _each(report, "recall", chart, make)


def _reach_map(label: str, row: Record) -> Chart:
    shares = row.get("share")
    length = row["length"]
    shade = shares or [
        [value / length if finite(value) is not None else None for value in heads] for heads in row["reach"]
    ]
    what = "share of the causal scores read" if shares else "keys read back ÷ length"
    cells = [
        [
            {
                "v": finite(shade[i][j]),
                "t": shown(reach, 3),
                "tip": f"{shown(reach)} keys read back; {what}: {shown(shade[i][j], 3)}",
            }
            for j, reach in enumerate(heads)
        ]
        for i, heads in enumerate(row["reach"])
    ]
    rows = [f"layer {i}" for i in range(len(cells))]
    columns = [f"head {j}" for j in range(max(map(len, cells), default=0))]
    about = {"kind": "reach", "label": label, "length": length, "shade": what}
    return {**about, "rows": rows, "columns": columns, "cells": cells}


def _distance_map(label: str, row: Record) -> Chart:
    starts = row["distances"]
    columns = [f"{start:,}" for start in starts]
    rows, cells = [], []
    for layer, heads in enumerate(row["weight"]):
        for head, weights in enumerate(heads):
            rows.append(f"{layer}.{head}")
            cells.append(
                [
                    {"v": finite(w), "t": "", "tip": f"weight {shown(w, 3)} from distance {c} on"}
                    for w, c in zip(weights, columns, strict=True)
                ]
            )
    about = {"kind": "distance", "label": label, "length": row["length"], "shade": "attention weight in the bucket"}
    return {**about, "rows": rows, "columns": columns, "cells": cells}
