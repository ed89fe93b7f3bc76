"""Pass keys at up to sixteen times the training length: `small`, trained on books and then on the task's format.

    python benchmarks/tasks_gpu.py --work work/small     # after replication.py: its corpora and models are there
    python benchmarks/tasks_gpu.py --work work/small --only alibi,rotary
    python benchmarks/tasks_gpu.py --work work/small --device cpu --quick

A model of the replication campaign (512 tokens, 600 steps of books, the first seed) goes on for 200 steps of 128
windows of 512 tokens, which hold documents of the passkey format in books, of up to 256 tokens, that do not see each
other. Then it is asked for keys in books it has not seen, 100 samples per length, at five depths; rotary and xPos also
in blocks. A record is an accuracy: the fraction of samples with every token of the answer right.

    section                                  what is measured
    alibi, rotary, xpos, sinusoidal, t5, none      the position method of that name
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import Report, machine, parsed, parser_of, software
from tasks_cpu import BLOCKWISE, ask

from lengthen.data import Corpus
from lengthen.evaluation import open_run
from lengthen.evaluation.tasks.training import make_corpus
from lengthen.training import load, train, world

METHODS = ("alibi", "rotary", "xpos", "sinusoidal", "t5", "none")
DOCUMENT, DOCUMENTS, QUICK_DOCUMENTS = 256, 60_000, 300
STEPS, QUICK_STEPS = 200, 2
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
CHANGED: dict[str, Any] = {
    "data.document_mask": True,
    "optimizer.lr": 5e-4,
    "schedule.warmup": 20,
    "checkpoint.every": 0,
}


def measure(report: Report, method: str, work: Path, data: Corpus, text: Corpus, device: str, quick: bool) -> None:
    """Train a campaign's model on, and ask at every length."""
    begun = work / "runs" / f"{method}-0"
    quickly = {"train.batch": 2, "train.micro_batch": 2, "schedule.warmup": 1} if quick else {}
    config = load(begun / "config.toml", {**CHANGED, "train.steps": QUICK_STEPS if quick else STEPS, **quickly})
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder, world(device) as here:
        outcome = train(config, data, folder, here, init=open_run(begun).checkpoint.path)
        subject = open_run(folder, device=device)
        lengths = LENGTHS[:2] if quick else LENGTHS
        ask(report, method, subject, text, lengths, method in BLOCKWISE, f"loss {outcome.loss:.3f}")


def main() -> int:
    parser = parser_of(__doc__, METHODS)
    parser.add_argument("--work", type=Path, default=Path("work/small"), help="the campaign's folder (work/small)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parsed(parser, "tasks_gpu", METHODS)
    text, around = Corpus.open(options.work / "books"), Corpus.open(options.work / "train")
    facts = {
        "benchmark": "tasks_gpu",
        **software(),
        "document": DOCUMENT,
        "steps": STEPS,
        "machine": machine(options.device),
    }
    report = Report(facts, options.out)
    with tempfile.TemporaryDirectory() as scratch:
        count = QUICK_DOCUMENTS if options.quick else DOCUMENTS
        data = make_corpus("passkey", Path(scratch) / "passkey", around, DOCUMENT, count)
        rest = (options.work, data, text, options.device, options.quick)
        return report.run({name: partial(measure, report, name, *rest) for name in options.only}, options.strict)


if __name__ == "__main__":
    sys.exit(main())
