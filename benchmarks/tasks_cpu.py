"""Can small models learn to find a pass key, and find it in longer texts than they were trained on? On the CPU.

    python benchmarks/tasks_cpu.py                    # about seven minutes of one core; writes benchmarks/results
    python benchmarks/tasks_cpu.py --quick            # does the script work: a few steps, means nothing
    python benchmarks/tasks_cpu.py --only rotary

Each method trains a decoder of 2 layers × 64 on documents of the passkey format, of 34 to 64 tokens, around a few
sentences in random order, with a BPE that has their words as tokens and digits by themselves. Documents do not see each
other: with several pass keys in view, models of this size had not learned to look at any in 2,500 steps. Then it is
asked at 40 to 512 tokens, 100 samples per length, the key at five depths. One seed, one thread. A record is an
accuracy: the fraction of samples whose five digits are all right. rotary and xPos are also read with blockwise
attention, in blocks of 64 tokens.

    section     what is measured
    alibi, rotary, xpos      the position method of that name
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import Report, parsed, parser_of, software

from lengthen.config import from_table
from lengthen.data import Corpus, prepare
from lengthen.evaluation import open_run
from lengthen.evaluation.runs import Subject
from lengthen.evaluation.tasks import Draws, evaluate
from lengthen.evaluation.tasks.training import make_corpus
from lengthen.training import World, train

METHODS = ("alibi", "rotary", "xpos")
BLOCKWISE = ("rotary", "xpos")
SENTENCES = (
    *("The sea is wide. ", "The hills are old. ", "The road is long. ", "Here we go. ", "There and back again. "),
    *("What is the pass? ", "The pass is high. ", "Remember it. ", "The key is lost. "),
)
DOCUMENT, TRAIN_LENGTH, LENGTHS = 64, 128, (40, 64, 128, 256, 512)
STEPS, QUICK_STEPS, BATCH = 2_500, 3, 16
DOCUMENTS, QUICK_DOCUMENTS = 16_000, 300


def config(method: str, vocabulary: int, steps: int) -> dict[str, Any]:
    """Return a run's settings."""
    size = {"layers": 2, "width": 64, "heads": 4, "train_length": TRAIN_LENGTH}
    return {
        "model": {"vocab_size": vocabulary, "positions": method, **size},
        "data": {"document_mask": True},
        "train": {"steps": steps, "batch": BATCH},
        "optimizer": {"lr": 3e-3},
        "schedule": {"shape": "trapezoid", "warmup": min(50, steps), "decay_fraction": 0.3},
        "evaluation": {"every": 0},
        "checkpoint": {"every": steps},
    }


def measure(report: Report, method: str, text: Corpus, data: Corpus, folder: Path, quick: bool) -> None:
    """Train with one method, and ask at every length."""
    steps, lengths = (QUICK_STEPS, LENGTHS[:2]) if quick else (STEPS, LENGTHS)
    table, began = config(method, text.vocab_size, steps), time.process_time()
    train(from_table(table, "benchmark"), data, folder / method, World(0, 1, torch.device("cpu")))
    took = time.process_time() - began
    note = f"trained in {took:.0f} s of CPU time"
    ask(report, method, open_run(folder / method), text, lengths, method in BLOCKWISE, note)


def ask(
    report: Report, method: str, subject: Subject, text: Corpus, lengths: Sequence[int], blockwise: bool, note: str
) -> None:
    """Ask for pass keys at every length, read plainly and, where it is wanted, in blocks; a record for each."""
    split = "validation" if "validation" in text.splits else "train"
    for how in ("nonoverlapping", *(["blockwise"] if blockwise else [])):
        for one in evaluate(subject, text, ["passkey"], lengths, how=how, split=split):
            depths = ", ".join(f"{right}/{count}" for right, count in zip(one.right, one.counts, strict=True))
            said = f"± {100 * one.standard_error:.1f} %; by depth {depths}; {100 * one.token_accuracy:.0f} % of tokens"
            at = {"read": how, "length": one.length}
            report.add(method, "passkey", at, 100 * one.accuracy, " %", note=f"{said}; {note}")


def main() -> int:
    options = parsed(parser_of(__doc__, METHODS), "tasks_cpu", METHODS)
    torch.set_num_threads(1)
    said = {"document": DOCUMENT, "train_length": TRAIN_LENGTH, "steps": STEPS, "batch": BATCH, "chance": "0.001 %"}
    report = Report({**software(), **said}, options.out)
    with tempfile.TemporaryDirectory() as scratch:
        folder, draws = Path(scratch), Draws(0)
        noise = ("".join(draws.one(SENTENCES) for _ in range(200)) for _ in range(20))
        (folder / "noise.txt").write_text("\0".join(noise), encoding="utf-8")
        how: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": 400, "validation": 0.2, "workers": 1}
        text = prepare(folder / "noise.txt", folder / "text", separator="\0", **how)
        count = QUICK_DOCUMENTS if options.quick else DOCUMENTS
        data = make_corpus("passkey", folder / "passkey", text, DOCUMENT, count)
        sections = {name: partial(measure, report, name, text, data, folder, options.quick) for name in options.only}
        return report.run(sections, options.strict)


if __name__ == "__main__":
    sys.exit(main())
