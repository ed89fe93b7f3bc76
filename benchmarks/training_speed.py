"""Speed of training and reading, MFU and memory: one row per model, method and length.

    python benchmarks/training_speed.py                  # the rows behind docs/training.md; writes benchmarks/results
    python benchmarks/training_speed.py small:sinusoidal:16384 small:alibi:16384 --steps 60
    python benchmarks/training_speed.py --device cpu tiny:sinusoidal:128 tiny:alibi:128

A row is the real loop (`lengthen.training.train`) on real windows, on a GPU with bf16 autocast and torch.compile; the
first steps, which compile, are not counted. Its speed is the median over stretches of ten steps. Reading is what
evaluation does, a forward pass with its loss, under bf16 autocast on a GPU, not compiled: the median of ten. On a CPU
memory is not measured.
Sinusoidal, the yardstick at each length, may be asked for twice: the two tell how far the machine drifts. MFU, model
FLOP utilisation, counts the operations that the model needs (`ModelConfig.flops_per_token`: attention at half of its
square, nothing recomputed) over the data sheet's dense bf16 peak.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from records import machine, software

from lengthen import ModelConfig, Transformer
from lengthen.data import Corpus, prepare
from lengthen.io import literal
from lengthen.training import Watcher, load, train, world
from lengthen.training.log import Record

GPT2 = 50_304  # its vocabulary, padded to a multiple of 64
VOCABULARIES = {"small": GPT2, "xl": GPT2, "tiny": 1024}
TOKENS = {"small": 1 << 16, "xl": 1 << 14, "tiny": 1 << 12}  # in one pass: enough to fill the GPU, or a CPU's cores
STRETCH = 10  # steps between two readings of the speed
READINGS = 10  # timed forward passes, after two that are not
ROWS = (
    *("small:sinusoidal:512", "small:rotary:512", "small:xpos:512", "small:alibi:512", "small:t5:512"),
    *("small:sinusoidal:512", "small:sinusoidal:3072", "small:alibi:3072", "small:sinusoidal:3072"),
    *("xl:sinusoidal:1024", "xl:alibi:1024", "xl:sinusoidal:2048", "xl:sinusoidal:1024"),
)


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


def measure(
    model: str, method: str, length: int, corpus: Corpus, steps: int, extra: dict[str, Any], device: str
) -> Record:
    torch.compiler.reset()
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    overrides = {
        "model.positions": method,
        "model.vocab_size": VOCABULARIES[model],
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
    with tempfile.TemporaryDirectory() as out, world(device) as here:
        with contextlib.suppress(EnoughError):
            train(config, corpus, out, here, watchers=[meter])
        peak = here.peak_flops()
    speed = statistics.median(meter.speeds)
    needed = config.model.flops_per_token(config.model.train_length)
    memory = {"gigabytes": torch.cuda.max_memory_allocated() / 1e9} if device == "cuda" else {}
    return {
        "model": model,
        "method": method,
        "parameters": config.model.parameters,
        "length": config.model.train_length,
        "windows": config.train.batch,
        "tokens_per_second": speed,
        "reading_tokens_per_second": reading(config.model, config.train.batch, device),
        "spread": (max(meter.speeds) - min(meter.speeds)) / speed,
        "mfu": None if peak is None else speed * needed / peak,
        **memory,
        "seconds_to_ready": meter.ready,
        "last_loss": meter.losses[-1],
    }


def reading(config: ModelConfig, windows: int, device: str) -> float:
    """Return the tokens per second of forward passes with their loss."""
    with torch.device(device):
        model = Transformer(config).eval()
        ids = torch.randint(config.vocabulary, (windows, config.train_length))
    times = []
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        for _ in range(2 + READINGS):
            began = time.perf_counter()
            model(ids, targets=ids).item()  # waits for the device
            times.append(time.perf_counter() - began)
    return ids.numel() / statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=ROWS, metavar="PRESET:METHOD:LENGTH", help="what is measured")
    parser.add_argument("--steps", type=int, default=60, help="steps of each row (60)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    parser.add_argument("--data", type=Path, help="token shards; without it, the standard library's source")
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: benchmarks/results, with the date)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and torch sees none")
    extra = {key: literal(value) for key, _, value in (word.partition("=") for word in arguments.set)}
    facts = {"benchmark": "training_speed", **software(), "device": machine(arguments.device)}
    name = f"training_{'gpu' if arguments.device == 'cuda' else 'cpu'}-{datetime.date.today().isoformat()}.json"
    path = arguments.out or Path(__file__).parent / "results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus.open(arguments.data) if arguments.data else prepare(None, folder)
        for model, method, length in (word.split(":") for word in arguments.rows):
            rows.append(measure(model, method, int(length), corpus, arguments.steps, extra, arguments.device))
            print(told(rows[-1], rows), flush=True)
            path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def told(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    yardsticks = [
        r["tokens_per_second"]
        for r in rows
        if (r["model"], r["length"], r["method"]) == (row["model"], row["length"], "sinusoidal")
    ]
    against = f"{row['tokens_per_second'] / statistics.mean(yardsticks):6.3f}× sinusoidal" if yardsticks else ""
    memory = f"{row['gigabytes']:5.1f} GB" if "gigabytes" in row else ""
    used = "" if row["mfu"] is None else f"{row['mfu']:6.1%} MFU"
    return (
        f"{row['model']:<6} {row['length']:>6,} {row['method']:<11} {row['tokens_per_second']:>10,.0f} tokens/s  "
        f"reads {row['reading_tokens_per_second']:>10,.0f}  "
        f"{used}  {against}  "
        f"{memory}  spread {row['spread']:.1%}  ready after {row['seconds_to_ready']:.0f} s"
    )


if __name__ == "__main__":
    main()
