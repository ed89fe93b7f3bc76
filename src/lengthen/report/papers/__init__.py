"""The papers' tables as data: perplexity.csv, resolution.csv, speed_memory.csv beside this file.

    ALiBi   Ofir Press, Noah A. Smith, Mike Lewis: Train Short, Test Long: Attention with Linear Biases Enables Input
            Length Extrapolation. https://arxiv.org/abs/2108.12409
    LEX     Yutao Sun and others: A Length-Extrapolatable Transformer. https://arxiv.org/abs/2212.10554

Each row names its paper and table. The corpora, vocabularies and models differ from anybody's own, so perplexities are
compared as ratios: at a length over that at the training length. The protocol `full` of LEX is one pass over the whole
input, with no overlap. What a paper has as OOM, out of memory, is None.
"""

from __future__ import annotations

import csv
from importlib import resources
from typing import Any

Row = dict[str, Any]
SOURCES = {
    "ALiBi": ("Press, Smith, Lewis: Train Short, Test Long", "https://arxiv.org/abs/2108.12409"),
    "LEX": ("Sun et al.: A Length-Extrapolatable Transformer", "https://arxiv.org/abs/2212.10554"),
}
SETS = {  # what is shown beside own curves, and the tables it is from
    "ALiBi, table 2, trained at 512, and LEX, tables 2 and 5, at 1,024": ("ALiBi T2", "LEX T2", "LEX T5"),
    "ALiBi, table 3: WikiText-103, trained at 1,024": ("ALiBi T3",),
    "ALiBi, table 4: WikiText-103, trained at 3,072": ("ALiBi T4",),
    "ALiBi, table 5: WikiText-103, ALiBi by training length": ("ALiBi T5",),
    "ALiBi, table 8: books, trained at 512 and 1,024": ("ALiBi T8",),
    "ALiBi, table 12: CC100 and RoBERTa's, 1.3B parameters": ("ALiBi T12 (50k updates)",),
    "ALiBi, tables 13 to 15: WikiText-103, sliding, stride 1": ("ALiBi T13", "ALiBi T14", "ALiBi T15"),
}


def perplexity() -> list[Row]:
    """Return the papers' perplexities: a row per method, training length, evaluation length and protocol."""
    return _read("perplexity")


def resolution() -> list[Row]:
    """Return the attention resolutions of LEX's table 3."""
    return _read("resolution")


def speed_memory() -> list[Row]:
    """Return speed and memory on one V100, ALiBi's table 1."""
    return _read("speed_memory")


def ratios(name: str) -> list[Row]:
    """Return the points of a set's curves that have two points or more and a perplexity at the training length.

    A point has `times`, its length over the training length, and `ratio`, its perplexity over that at this length.
    """
    groups: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in perplexity():
        if f"{row['paper']} {row['table']}" in SETS[name] and row["perplexity"]:
            model = (row["paper"], row["method"], row["corpus"], row["split"], row["train_length"])
            key = (*model, row["protocol"], row["stride_or_block"])
            groups.setdefault(key, {}).setdefault(row["eval_length"], row)
    found = []
    for key, points in groups.items():
        paper, method, _, _, trained, protocol, block = key
        start = points.get(trained) or groups.get((*key[:5], "full", None), {}).get(trained)
        if start is not None and len(points) > 1:
            words = {"nonoverlapping": [], "full": [], "blockwise": [f"blockwise {block}"]}.get(protocol, [protocol])
            label = " · ".join([f"{paper}: {method} @ {trained:,}", *words])
            for length, row in sorted(points.items()):
                ratio = row["perplexity"] / start["perplexity"]
                found.append({**row, "label": label, "times": length / trained, "ratio": ratio})
    return found


def _read(name: str) -> list[Row]:
    text = (resources.files(__name__) / f"{name}.csv").read_text(encoding="utf-8")
    return [{key: _value(value) for key, value in row.items()} for row in csv.DictReader(text.splitlines())]


def _value(text: str) -> Any:
    known: Row = {"": None, "OOM": None, "yes": True, "no": False}
    if text in known:
        return known[text]
    return int(text) if text.isdigit() else float(text) if text.replace(".", "", 1).isdigit() else text
