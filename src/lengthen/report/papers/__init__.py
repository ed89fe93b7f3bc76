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
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

Row = dict[str, Any]
KEY = ("paper", "corpus", "split", "method", "train_length")

SOURCES = {
    "ALiBi": ("Press, Smith, Lewis: Train Short, Test Long", "https://arxiv.org/abs/2108.12409"),
    "LEX": ("Sun et al.: A Length-Extrapolatable Transformer", "https://arxiv.org/abs/2212.10554"),
}
WHOLE = {"train_length", "eval_length", "stride_or_block"}
REAL = {
    *("perplexity", "words_per_second", "resolution"),
    *("train_words_per_second", "eval_words_per_second", "memory_gb"),
}
SETS: dict[str, tuple[tuple[str, str], ...]] = {
    "ALiBi, table 2, trained at 512, and LEX, tables 2 and 5, at 1,024": (
        ("ALiBi", "T2"),
        ("LEX", "T2"),
        ("LEX", "T5"),
    ),
    "ALiBi, table 3: WikiText-103, trained at 1,024": (("ALiBi", "T3"),),
    "ALiBi, table 4: WikiText-103, trained at 3,072": (("ALiBi", "T4"),),
    "ALiBi, table 5: WikiText-103, ALiBi by training length": (("ALiBi", "T5"),),
    "ALiBi, table 8: books, trained at 512 and 1,024": (("ALiBi", "T8"),),
    "ALiBi, table 12: CC100 and RoBERTa's, 1.3B parameters": (("ALiBi", "T12 (50k updates)"),),
    "ALiBi, tables 13 to 15: WikiText-103, sliding, stride 1": (("ALiBi", "T13"), ("ALiBi", "T14"), ("ALiBi", "T15")),
}  # what is shown beside own curves, and the tables it is from


@dataclass(frozen=True)
class PaperCurve:
    """One line of a paper: perplexity by length, and the perplexity at the training length that it is divided by."""

    paper: str
    corpus: str
    split: str
    method: str
    train_length: int
    protocol: str
    stride_or_block: int | None
    reference: float
    points: tuple[tuple[int, float], ...]

    @property
    def label(self) -> str:
        """The line's name in a legend."""
        how = "" if self.protocol in ("nonoverlapping", "full") else f" · {self.protocol}"
        block = f" {self.stride_or_block:,}" if how and self.protocol == "blockwise" else ""
        return f"{self.paper}: {self.method} @ {self.train_length:,}{how}{block}"


def perplexity() -> list[Row]:
    """Return the papers' perplexities: a row a method, training length, evaluation length and protocol."""
    return _read("perplexity")


def resolution() -> list[Row]:
    """Return the attention resolutions of LEX's table 3."""
    return _read("resolution")


def speed_memory() -> list[Row]:
    """Return speed and memory on one V100, ALiBi's table 1."""
    return _read("speed_memory")


def curves(name: str) -> list[PaperCurve]:
    """Return a set's lines that have two points or more and a perplexity at the training length."""
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in perplexity():
        if (row["paper"], row["table"]) in SETS[name] and row["perplexity"]:
            key = tuple(row[k] for k in (*KEY, "protocol", "stride_or_block"))
            groups.setdefault(key, {}).setdefault(row["eval_length"], row["perplexity"])
    found = []
    for key, points in groups.items():
        trained = key[len(KEY) - 1]
        start = points.get(trained) or groups.get((*key[: len(KEY)], "full", None), {}).get(trained)
        if start is not None and len(points) > 1:
            found.append(PaperCurve(*key, reference=start, points=tuple(sorted(points.items()))))
    return found


@cache
def _text(name: str) -> str:
    return (resources.files(__name__) / f"{name}.csv").read_text(encoding="utf-8")


def _read(name: str) -> list[Row]:
    return [{key: _value(key, text) for key, text in row.items()} for row in csv.DictReader(_text(name).splitlines())]


def _value(key: str, text: str) -> Any:
    if key in WHOLE:
        return int(text) if text else None
    if key in REAL:
        return None if text in ("", "OOM") else float(text)
    return text == "yes" if key == "blockwise" else text
