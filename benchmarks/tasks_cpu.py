"""Can small models learn to find a pass key, and find it in longer texts than they were trained on? On the CPU.

    python benchmarks/tasks_cpu.py                    # about six minutes on one thread; writes benchmarks/results
    python benchmarks/tasks_cpu.py --quick            # does the script work: a few steps, means nothing
    python benchmarks/tasks_cpu.py --only rotary

Each method trains a decoder of 2 layers × 64 over bytes on documents of the passkey format, of up to 128 tokens, around
a few sentences in random order; then it is asked at 128 to 2,048 tokens, 100 samples a length, the key at five depths. One
seed, one thread. A record is an accuracy: the fraction of samples whose five digits are all right. rotary and xPos are
also read with blockwise attention, in blocks of half the training length.

    section     what is measured
    none, sinusoidal, rotary, alibi, xpos      the position method of that name
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import Report, parsed, parser_of, software

from lengthen.config import from_table
from lengthen.data import Corpus, prepare
from lengthen.evaluation import open_run
from lengthen.evaluation.tasks import Draws, evaluate
from lengthen.evaluation.tasks.training import make_corpus
from lengthen.training import World, train

METHODS = ("none", "sinusoidal", "rotary", "alibi", "xpos")
BLOCKWISE = ("rotary", "xpos")
NOISE = ("The sea is wide. ", "The hills are old. ", "The road is long. ", "Here we go. ", "There and back again. ")
LENGTH, LENGTHS = 128, (128, 256, 512, 1024, 2048)
STEPS, QUICK_STEPS, BATCH = 1_200, 3, 32
DOCUMENTS, QUICK_DOCUMENTS = 16_000, 300


def config(method: str, steps: int) -> dict[str, Any]:
    """Return a run's settings."""
    return {
        "model": {
            "vocab_size": 258,
            "layers": 2,
            "width": 64,
            "heads": 4,
            "train_length": LENGTH,
            "positions": method,
        },
        "train": {"steps": steps, "batch": BATCH},
        "optimizer": {"lr": 3e-3},
        "schedule": {"shape": "trapezoid", "warmup": min(50, steps), "decay_fraction": 0.3},
        "evaluation": {"every": 0},
        "checkpoint": {"every": steps},
    }


def measure(report: Report, method: str, text: Corpus, data: Corpus, folder: Path, quick: bool) -> None:
    """Train with one method, and ask at every length."""
    steps, lengths = (QUICK_STEPS, LENGTHS[:2]) if quick else (STEPS, LENGTHS)
    began = time.monotonic()
    train(from_table(config(method, steps), "benchmark"), data, folder / method, World(0, 1, torch.device("cpu")))
    took = time.monotonic() - began
    subject = open_run(folder / method)
    for how in ("nonoverlapping", *(["blockwise"] if method in BLOCKWISE else [])):
        for one in evaluate(subject, text, ["passkey"], lengths, how=how):
            depths = ", ".join(f"{right}/{count}" for right, count in zip(one.right, one.counts, strict=True))
            at = {"read": how, "length": one.length}
            tokens = f"{100 * one.token_accuracy:.0f} % of tokens"
            note = f"± {100 * one.standard_error:.1f} %; by depth {depths}; {tokens}; trained in {took:.0f} s"
            report.add(method, "passkey", at, 100 * one.accuracy, " %", note=note)


def main() -> int:
    options = parsed(parser_of(__doc__, METHODS), "tasks_cpu", METHODS)
    torch.set_num_threads(1)
    facts = {**software(), "train_length": LENGTH, "steps": STEPS, "batch": BATCH, "chance": "0.001 %"}
    report = Report(facts, options.out)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        draws = Draws(0)
        noise = ("".join(draws.one(NOISE) for _ in range(200)) for _ in range(20))
        (folder / "noise.txt").write_text("\0".join(noise), encoding="utf-8")
        text = prepare(folder / "noise.txt", folder / "text", separator="\0", validation=0.2, workers=1)
        count = QUICK_DOCUMENTS if options.quick else DOCUMENTS
        data = make_corpus("passkey", folder / "passkey", text, LENGTH, count)
        sections = {name: partial(measure, report, name, text, data, folder, options.quick) for name in options.only}
        return report.run(sections, options.strict)


if __name__ == "__main__":
    sys.exit(main())
