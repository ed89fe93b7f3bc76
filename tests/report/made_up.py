"""Folders of runs that were never trained: every file that a report reads, with numbers from formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LENGTHS = (64, 128, 256, 512, 1024)
GROWTH = {"alibi": -0.03, "xpos": 0.02, "rotary": 0.55, "sinusoidal": 0.9, "t5": 0.1}


def evaluation(positions: str, length: int, **other: Any) -> dict[str, Any]:
    """Return one line of evaluation.jsonl."""
    loss = 1.6 + GROWTH.get(positions, 0.2) * math.log2(length / 64)
    record = {
        "kind": "evaluation",
        "positions": positions,
        "train_length": 64,
        "checkpoint": "step-00002000",
        "step": 2000,
        "data": "9f86d081884c7d65",
        "split": "validation",
        "protocol": "nonoverlapping",
        "length": length,
        "stride": length,
        "block": None,
        "tokens": 65536,
        "documents": 37,
        "targets": 65536,
        "loss": loss,
        "segment_losses": [30000 * loss, 35536 * loss],
        "segment_counts": [32768, 32768],
        "unigram": 3.0,
        "precision": "float32",
        "document_mask": False,
        "position_options": {},
        "task": "next tokens",
        "version": "0.1.0",
        "per_document": None,
        "perplexity": math.exp(loss),
        "perplexity_per_word": math.exp(2.1 * loss),
        "bits_per_byte": loss / math.log(2),
        "tokens_per_second": 15000.0 / (1 + length / 1024) * (1 + len(positions) / 20),
        "seconds": 4.3,
        "peak_bytes": 20_000_000 + 90_000 * length,
        "device": "cpu",
        "weights": "5feceb66",
    }
    if other.get("protocol") == "blockwise":
        record["loss"] = loss = 1.6 + GROWTH.get(positions, 0.2) / 10 * math.log2(length / 64)
        record["perplexity"] = math.exp(loss)
        record["segment_losses"] = [30000 * loss, 35536 * loss]
    return {**record, **other}


def analyses(positions: str) -> dict[str, dict[str, Any]]:
    """Return what the files of analysis/ hold, by kind."""
    about = {"positions": positions, "train_length": 64, "checkpoint": "step-00002000", "data": "9f86d081884c7d65"}
    ends = [2**i for i in range(11)]
    slope = GROWTH.get(positions, 0.2)
    heads = [[8.0 * 2**h * (layer + 1) for h in range(4)] for layer in range(4)]
    rows: dict[str, list[dict[str, Any]]] = {
        "resolution": [
            {
                "length": n,
                "blockwise": False,
                "block": None,
                "resolution": 0.9 - slope * i / 5,
                "layers": [0.8, 0.9, 1.0],
            }
            for i, n in enumerate((64, 128, 256))
        ]
        + [{"length": 256, "blockwise": True, "block": 32, "resolution": 1.05 + slope / 9, "layers": [1.0, 1.1, 1.05]}],
        "positions": [
            {
                "length": n,
                "positions": [end for end in ends if end <= n],
                "loss": [3 - 0.2 * i + max(0, i - 6) * slope for i, end in enumerate(ends) if end <= n],
                "count": [64 * end for end in ends if end <= n],
            }
            for n in (64, 1024)
        ],
        "reach": [
            {"length": n, "reach": heads, "fraction": [[min(1, r / n) for r in row] for row in heads]}
            for n in (256, 1024)
        ],
        "distance": [
            {
                "length": 1024,
                "distances": [0, *ends],
                "weight": [[[2.0 ** -(b / (h + 1)) / 3 for b in range(12)] for h in range(4)] for _ in range(2)],
            }
        ],
        "induction": [
            {
                "length": n,
                "sequences": 8 + 1024 // n,
                "first": 4.5,
                "second": 3.5 + slope * i,
                "difference": -1.0 + slope * i,
                "standard_error": 0.05,
                "previous": [0.9, 0.2, 0.1 * i],
                "induction": [0.01, 0.3 + slope / 9, 0.5],
            }
            for i, n in enumerate((32, 64, 128))
        ],
        "longppl": [
            {"length": n, "candidates": 900, "key_tokens": 40, "long_ppl": 2.0 + slope * i, "standard_error": 0.1}
            | {"soft_long_ppl": 4.0, "perplexity": 5.0}
            for i, n in enumerate((64, 128, 256))
        ],
    }
    made: dict[str, dict[str, Any]] = {kind: {"kind": kind, **about, "rows": rows[kind]} for kind in rows}
    made["induction"] |= {"device": "cpu", "precision": "float32", "version": "0.1.0"}  # others' files are older
    made["positions"]["curse"] = {"short": 64, "long": 1024, "gain": 0.2, "from_context": 0.05, "from_curse": 0.15}
    return made


def tasks(positions: str) -> list[dict[str, Any]]:
    """What `lengthen eval --task passkey,variables` would leave: two lines are of one point, the later replaces."""
    slope = abs(GROWTH.get(positions, 0.2))
    about = {
        "kind": "task",
        "positions": positions,
        "checkpoint": "step-00002000",
        "data": "9f86d081884c7d65",
        "device": "cpu",
    }
    first = {"task": "passkey", "length": 64, "depths": [0], "right": [0], "counts": [9]}
    lines: list[dict[str, Any]] = [about | first]
    for i, length in enumerate(LENGTHS[:4]):
        right = [round(20 * max(0, 1 - slope * i * (2 - depth))) for depth in (0, 0.5, 1)]
        one = {"length": length, "depths": [0, 0.5, 1], "right": right, "counts": [20, 20, 20], "chance": 1e-5}
        lines.append(about | {"task": "passkey", "token_accuracy": 0.5, **one})
    other = {"depths": [None], "right": [7], "counts": [20], "protocol": "blockwise", "block": 32}
    return [*lines, about | {"task": "variables", "length": 256, "chance": 0.5, **other}]


def write(folder: Path, positions: str = "alibi", full: bool = True, lines: list[dict[str, Any]] | None = None) -> Path:
    """Write a run's folder; a full one has blockwise measurements and all analyses."""
    folder.mkdir(parents=True)
    if lines is None:
        lines = [evaluation(positions, length) for length in LENGTHS]
        if full:
            more = {"protocol": "blockwise", "block": 32}
            lines += [evaluation(positions, length, **more) for length in LENGTHS[1:]]
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if full:
        model = f'[model]\npositions = "{positions}"\ntrain_length = 64\nlayers = 4\nwidth = 144\nheads = 4\n'
        (folder / "config.toml").write_text(model, encoding="utf-8")
        told = "".join(json.dumps(line) + "\n" for line in tasks(positions))
        (folder / "tasks.jsonl").write_text(told, encoding="utf-8")
        (folder / "analysis").mkdir()
        for kind, analysis in analyses(positions).items():
            (folder / "analysis" / f"{kind}.json").write_text(json.dumps(analysis), encoding="utf-8")
    return folder
