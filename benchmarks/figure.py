"""The figures of the docs, from committed results.

    python benchmarks/figure.py                 # writes docs/figures/overview.svg and replication.svg

overview, the README's. Left, attention_gpu: tokens per second of one attention call, forward, 16 heads × 64 in
bfloat16. Middle, accelerate_gpu: peak memory of a forward pass of MPT's 1B shape in transformers, and with
`lengthen.accelerate`. Right, replication at the scale `small`, one seed: perplexity of models trained at 512 tokens,
read at longer lengths under plain causal attention.

replication: perplexity by length of the campaign's `tiny` models, trained at 128 tokens, under plain causal attention
and blockwise. A line is the mean over seeds, its bars go from the lowest to the highest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import altair as alt

from lengthen.report.lines import lines, row

ROOT = Path(__file__).parents[1]
SPEED = ROOT / "benchmarks" / "results" / "attention_gpu-2026-11-16.json"
MEMORY = ROOT / "benchmarks" / "results" / "accelerate_gpu-2026-11-18.json"
CAMPAIGN = ROOT / "benchmarks" / "results" / "replication"
CALLS = {"lengthen": "lengthen, ALiBi", "flex": "FlexAttention, ALiBi", "cudnn": "cuDNN, no bias"}
VARIANTS = {
    "accelerated": "with lengthen",
    "transformers": "transformers",
    "transformers, compiled": "compiled",
}
METHODS = {"alibi": "ALiBi", "xpos": "xPos", "rotary": "rotary", "sinusoidal": "sinusoidal", "t5": "T5"}
BLUE, RED, GREY, GREEN, ORANGE = "#0b62a4", "#c4472b", "#6f6f6f", "#3c8a3f", "#c98a1b"
METHOD_COLOURS = [BLUE, GREEN, GREY, RED, ORANGE]
POWER = "datum.value < 1024 ? datum.value : datum.value / 1024 + 'k'"  # how a length is written
LENGTHS = [1 << power for power in range(30)]
STYLE: dict[str, Any] = {
    "background": "white",
    "font": "Helvetica, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#e4e4e4", "labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal"},
    "title": {"anchor": "start", "fontSize": 14, "fontWeight": "normal", "frame": "group", "offset": 12},
}

Row = dict[str, Any]


def speeds() -> list[Row]:
    """Return tokens per second of each call at each length."""
    measured = json.loads(SPEED.read_text(encoding="utf-8"))["sections"]["lengths"]
    return [
        {"length": one["length"], "name": CALLS[name], "value": one["batch"] * one["length"] / (1e-3 * ms)}
        for one in measured
        if one["what"] == "forward against flex" and one["head_dim"] == 64
        for name, ms in one["ms"].items()
    ]


def memory() -> list[Row]:
    """Return the peak memory of each way to run the model, in GiB, at each length that fits."""
    measured = json.loads(MEMORY.read_text(encoding="utf-8"))["sections"]["mpt"]
    return [
        {"length": one["length"], "name": VARIANTS[one["variant"]], "value": one["value"]}
        for one in measured
        if one["what"] == "forward: peak memory" and one["value"] is not None
    ]


def perplexities(scale: str, protocol: str) -> list[Row]:
    """Return the perplexity of each method on books at each length: mean, lowest and highest of its seeds."""
    found: dict[tuple[str, int], list[float]] = {}
    for path in (CAMPAIGN / scale).glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        for one in record["readings"]:
            if record["run"] in METHODS and one["protocol"] == protocol and one["text"] == "books":
                found.setdefault((METHODS[record["run"]], one["length"]), []).append(one["perplexity"])
    return [
        {"length": length, "name": name, "value": statistics.mean(each), "low": min(each), "high": max(each)}
        for (name, length), each in sorted(found.items())
    ]


def panel(
    rows: list[Row], title: str, label: str, form: str, domain: list[float], names: list[str], colours: list[str]
) -> Any:
    """Return one panel: a line for each name, with the name at its end."""
    seen = [length for length in LENGTHS if any(row["length"] == length for row in rows)]
    last = {name: max(row["length"] for row in rows if row["name"] == name) for name in names}
    rows = [{**row, "last": row["length"] == last[row["name"]]} for row in rows]
    x = (
        alt.X("length:Q", title="length in tokens")
        .scale(type="log", base=2)
        .axis(values=seen, labelExpr=POWER, grid=False)
    )
    y = alt.Y("value:Q", title=label).scale(type="log", domain=domain).axis(format=form, tickCount=5)
    colour = alt.Color("name:N").scale(domain=names, range=colours).legend(None)
    base = alt.Chart(alt.InlineData(values=rows), title=title, width=300, height=260)
    curves = base.mark_line(point=alt.OverlayMarkDef(size=36), strokeWidth=2).encode(x, y, colour)
    ends = base.transform_filter("datum.last")
    marks = ends.mark_text(align="left", baseline="line-bottom", dx=8, dy=6, fontSize=12).encode(
        x, y, colour, alt.Text("name:N")
    )
    return curves + marks


def overview() -> Any:
    """Return the README's figure."""
    speed = panel(
        *(speeds(), "Attention on one H200", "tokens/s, forward", "~s", [1e6, 2e8]),
        [*CALLS.values()],
        [BLUE, RED, GREY],
    )
    perplexity = panel(
        *(
            perplexities("small", "nonoverlapping"),
            "Trained at 512 tokens, read at more",
            "perplexity",
            "d",
            [40.0, 400.0],
        ),
        *([*METHODS.values()], METHOD_COLOURS),
    )
    gigabytes = panel(
        *(memory(), "MPT, 1B shape, forward, on one H200", "peak memory, GiB", "d", [2.0, 100.0]),
        *([*VARIANTS.values()], [BLUE, RED, GREY]),
    )
    return alt.hconcat(speed, gigabytes, perplexity, spacing=40).resolve_scale(color="independent").configure(**STYLE)


def replication() -> Any:
    """Return the curves of the campaign's `tiny` models, as the report draws them."""
    rows = [
        row(f"{one['name']}{more}", colour, protocol, one["length"], one["value"], {}, (one["low"], one["high"]))
        for protocol, more in (("nonoverlapping", ""), ("blockwise", ", blockwise"))
        for colour, name in enumerate(METHODS.values())
        for one in perplexities("tiny", protocol)
        if one["name"] == name
    ]
    return lines(rows, "length in tokens", "perplexity", 640, log=True, marks=[128]).configure(**STYLE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures", help="the folder (docs/figures)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for figure in (overview, replication):
        path = out / f"{figure.__name__}.svg"
        figure().save(path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
