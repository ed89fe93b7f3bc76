"""Figures for a paper: SVG and PDF by matplotlib, in a column's width, with the page's colours, markers and dashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthen.report.collect import Report
from lengthen.report.series import Chart, amount, charts, maps
from lengthen.report.style import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "pdf", "png")
SIZE = (5.5, 3.4)  # inches: the text width of most conference styles
SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "legend.fontsize": 7,
    "svg.hashsalt": "lengthen",  # the same numbers give the same file
    "svg.fonttype": "path",  # looks the same where a font is missing
    "pdf.fonttype": 42,  # publishers refuse type 3
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def write_figures(report: Report, folder: str | Path, formats: Sequence[str] = ("svg", "pdf")) -> list[Path]:
    """Draw every figure that the runs have numbers for, in each format; return the paths."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ValueError(f"formats: expected some of {', '.join(FORMATS)}, got {', '.join(unknown) or 'none'}")
    try:
        import matplotlib
    except ImportError:
        raise ImportError('figures need matplotlib: pip install "lengthen[report]"') from None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(SETTINGS):
        for name, figure in _figures(report):
            for form in formats:
                path = folder / f"{name}.{form}"
                nothing: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})
                figure.savefig(path, format=form, metadata=nothing, dpi=200, bbox_inches="tight")
                written.append(path)
    return written


def _figures(report: Report) -> list[tuple[str, Figure]]:
    found = []
    for chart in charts(report):
        for measure in chart["measures"]:
            name = chart["id"] if measure is chart["measures"][0] else f"{chart['id']}_{measure['id']}"
            figure = _lines(chart, measure)
            if figure is not None:
                found.append((NAMES.get(name, name), figure))
    for kind in ("reach", "distance"):
        grids = [found for found in maps(report) if found["kind"] == kind]
        longest = {grid["label"]: max(g["length"] for g in grids if g["label"] == grid["label"]) for grid in grids}
        chosen = [grid for grid in grids if grid["length"] == longest[grid["label"]]]
        if chosen:
            found.append((kind, _grids(chosen)))
    return found


NAMES = {
    **{"perplexity_loss": "loss", "perplexity_perplexity_per_word": "perplexity_per_word"},
    **{"perplexity_bits_per_byte": "bits_per_byte", "positions": "loss_by_position", "speed_peak_bytes": "memory"},
}  # files, where the chart's name and its measure's would be clumsy


def _lines(chart: Chart, measure: dict[str, Any]) -> Figure | None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    figure = Figure(figsize=SIZE)
    axes = figure.add_subplot()
    key, drawn = measure["id"], 0
    for series in chart["series"]:
        if series["shown"] and (not series["group"] or measure["relative"]):
            points = _line(axes, series, key, measure["relative"])
            drawn += 0 if series["group"] else points
    if not drawn:
        return None
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if measure["log"]:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high / low < 1000:
            axes.yaxis.set_major_locator(MaxNLocator(6) if high / low < 5 else LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        write = amount if measure["form"] == "bytes" else _tick
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    for mark in [{"x": 1}] if measure["relative"] else chart["marks"]:
        axes.axvline(mark["x"], color="0.5", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xlabel(chart["rx"] if measure["relative"] else f"{chart['x']} (dotted: training length)")
    axes.set_ylabel(measure["label"])
    axes.grid(color="0.92", linewidth=0.6)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.02), handlelength=3)
    return figure


def _tick(value: float) -> str:
    return f"{value:,.4g}" if 0.001 <= value < 1e5 else f"{value:.0e}"


def _line(axes: Axes, series: dict[str, Any], key: str, relative: bool) -> int:
    """Draw one curve; return how many points it has."""
    points = [point for point in series["points"] if key in point["y"]]
    if not points:
        return 0
    x = [point["rx" if relative else "x"] for point in points]
    y = [point["y"][key][0] for point in points]
    paper = bool(series["group"])
    look: dict[str, Any] = {
        "color": COLOURS[series["colour"]],
        "linewidth": 0.8 if paper else 1.5,
        "alpha": 0.7 if paper else 1.0,
        "linestyle": (0, tuple(series["dash"])) if series["dash"] else "-",
        "marker": "" if paper and len(points) > 24 else MARKERS[series["marker"] % len(MARKERS)],
        "markersize": 3 if paper else 4,
        "markerfacecolor": "white" if paper else COLOURS[series["colour"]],
    }
    axes.plot(x, y, label=series["label"], **look)
    bars = [(at, *point["y"][key]) for at, point in zip(x, points, strict=True) if None not in point["y"][key]]
    if bars:
        axes.vlines(
            [bar[0] for bar in bars], [bar[2] for bar in bars], [bar[3] for bar in bars], color=look["color"], alpha=0.5
        )
    return len(points)


def _grids(grids: Sequence[Chart]) -> Figure:
    from matplotlib.figure import Figure

    draw: Callable[[Any], float] = lambda cell: float("nan") if cell["v"] is None else cell["v"]  # noqa: E731
    rows = max(len(grid["rows"]) for grid in grids)
    columns = max(len(grid["columns"]) for grid in grids)
    reach = grids[0]["kind"] == "reach"
    wide, high = (0.45 * columns + 0.9, 0.3 * rows + 0.7) if reach else (0.26 * columns + 0.9, 0.16 * rows + 0.8)
    across = min(4, len(grids))
    down = -(-len(grids) // across)
    figure = Figure(figsize=(wide * across + 0.8, high * down), layout="constrained")
    most = (
        1.0
        if reach
        else max((c["v"] for g in grids for line in g["cells"] for c in line if c["v"] is not None), default=1)
    )
    image = None
    panels = []
    for place, grid in enumerate(grids):
        axes = figure.add_subplot(down, across, place + 1)
        panels.append(axes)
        values = [[draw(cell) for cell in line] for line in grid["cells"]]
        image = axes.imshow(values, cmap="Blues", vmin=0, vmax=most, aspect="auto")
        axes.set_title(f"{grid['label']}, length {grid['length']:,}", fontsize=8)
        turn = 0 if reach else 60
        axes.set_xticks(
            range(len(grid["columns"])), [c.removeprefix("head ") for c in grid["columns"]], fontsize=6, rotation=turn
        )
        axes.set_yticks(range(len(grid["rows"])), grid["rows"], fontsize=6)
        axes.set_xlabel("head" if reach else "distance", fontsize=7)
        for i, line in enumerate(grid["cells"]):
            for j, cell in enumerate(line):
                axes.text(
                    j, i, cell["t"], ha="center", va="center", fontsize=6, color="w" if (cell["v"] or 0) > 0.55 else "k"
                )
    assert image is not None
    figure.colorbar(image, ax=panels).set_label(grids[0]["shade"], fontsize=7)
    return figure
