"""Training speed on one GPU: tokens per second and model FLOP utilisation (MFU), one row a model and position method.

    python benchmarks/training_gpu.py                    # small and xl, every method; writes benchmarks/results
    python benchmarks/training_gpu.py --models small --methods sinusoidal,alibi --lengths 512,1024,2048,16384 --steps 60

Each row is the real loop (`lengthen.training.train`) on real windows with a vocabulary of 50,304, bf16 autocast and
torch.compile, at the lengths that are asked for; the first steps, which compile, are not counted. A row's speed is the
median over stretches of ten steps. Sinusoidal, the yardstick, is measured before and after the others: the two tell how
far the machine drifts. Utilisation counts the operations that the model needs (`ModelConfig.flops_per_token`: attention
at half of its square, nothing recomputed) over the data sheet's dense bf16 peak.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lengthen.data import Corpus, prepare
from lengthen.io import literal
from lengthen.training import Watcher, load, train, world
from lengthen.training.log import Record

VOCABULARY = 50_304  # GPT-2's, padded to a multiple of 64
TOKENS = {"small": 1 << 16, "xl": 1 << 14}  # in one pass: enough to fill the GPU
STRETCH = 10  # steps between two readings of the speed
METHODS = ("sinusoidal", "rotary", "xpos", "alibi", "t5")


class EnoughError(Exception):
    """The run has shown its speed."""


class Meter(Watcher):
    """Collects the speed of every stretch between two readings after the first few, and then ends the run."""

    def __init__(self, skip: int, steps: int) -> None:
        self.skip, self.steps = skip, steps
        self.speeds: dict[float, None] = {}  # one entry a stretch: all its steps carry the same number
        self.losses: list[float] = []
        self.began = time.perf_counter()
        self.ready: float | None = None

    def stepped(self, record: Record) -> None:
        """Note the stretch's speed."""
        self.losses.append(record["loss"])
        if record["step"] > self.skip:
            self.ready = self.ready or time.perf_counter() - self.began
            self.speeds[record["tokens_per_second"]] = None
        if record["step"] >= self.steps:
            raise EnoughError


def measure(model: str, method: str, length: int, corpus: Corpus, steps: int, extra: dict[str, Any]) -> Record:
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    overrides = {
        "model.positions": method,
        "model.vocab_size": VOCABULARY,
        "model.train_length": length,
        "train.batch": TOKENS[model] // length,
        "train.micro_batch": TOKENS[model] // length,
        "train.steps": steps + 3 * STRETCH,
        "schedule.warmup": 20,
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "log.every": STRETCH,
        **extra,
    }
    config = load(model, overrides)
    meter = Meter(skip=STRETCH, steps=steps)
    with tempfile.TemporaryDirectory() as out, world("cuda") as here:
        with contextlib.suppress(EnoughError):
            train(config, corpus, out, here, watchers=[meter])
        peak = here.peak_flops()
    speed = statistics.median(meter.speeds)
    needed = config.model.flops_per_token(config.model.train_length)
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "model": model,
        "method": method,
        "parameters": config.model.parameters,
        "length": config.model.train_length,
        "windows": config.train.batch,
        "tokens_per_second": speed,
        "spread": (max(meter.speeds) - min(meter.speeds)) / speed,
        "mfu": None if peak is None else speed * needed / peak,
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
        "seconds_to_ready": meter.ready,
        "last_loss": meter.losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,xl", help="presets, with commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="position methods, with commas")
    parser.add_argument("--steps", type=int, default=80, help="steps of each row")
    parser.add_argument("--lengths", default="1024", help="training lengths, with commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    parser.add_argument("--data", type=Path, help="token shards; without it, the standard library's source")
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: benchmarks/results, with the date)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and torch sees none")
    extra = {key: literal(value) for key, _, value in (word.partition("=") for word in arguments.set)}
    today = datetime.date.today().isoformat()
    path = arguments.out or Path(__file__).parent / "results" / f"training_gpu-{today}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus.open(arguments.data) if arguments.data else prepare(None, folder)
        for model in arguments.models.split(","):
            for length, (method, again) in itertools.product(
                [int(word) for word in arguments.lengths.split(",")], order(arguments.methods.split(","))
            ):
                rows.append({**measure(model, method, length, corpus, arguments.steps, extra), "again": again})
                print(told(rows[-1], rows), flush=True)
                result: dict[str, Any] = {
                    "benchmark": "training_gpu",
                    "date": today,
                    "device": torch.cuda.get_device_name(),
                }
                result |= {"torch": torch.__version__, "rows": rows}
                path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def order(methods: list[str]) -> list[tuple[str, bool]]:
    """Return the methods, and the yardstick once more after them."""
    yardstick = [("sinusoidal", True)] if "sinusoidal" in methods else []
    return [*((method, False) for method in methods), *yardstick]


def told(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    yardsticks = [
        r["tokens_per_second"]
        for r in rows
        if (r["model"], r["length"], r["method"]) == (row["model"], row["length"], "sinusoidal")
    ]
    against = f"{row['tokens_per_second'] / statistics.mean(yardsticks):6.3f}× sinusoidal" if yardsticks else ""
    used = "" if row["mfu"] is None else f"{row['mfu']:6.1%} MFU"
    return (
        f"{row['model']:<6} {row['length']:>6,} {row['method']:<11} {row['tokens_per_second']:>10,.0f} tokens/s  "
        f"{used}  {against}  "
        f"{row['gigabytes']:5.1f} GB  spread {row['spread']:.1%}  ready after {row['seconds_to_ready']:.0f} s"
    )


if __name__ == "__main__":
    main()
