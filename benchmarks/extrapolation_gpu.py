"""Train short, test long, at the size of GPT-2's smallest: four methods trained at 512 on one text, tested on any.

    python benchmarks/extrapolation_gpu.py --train books-train.txt.xz --separator '\\0' \\
        --test books=books-test.txt.xz --test wikitext=wikitext-103-test.txt.xz --out results.json

The preset `small`, its vocabulary a BPE of 16,384 trained on the training text. Every method takes the same steps on
the same windows from the same weights. Each is then read at 512 … 16,384 tokens, plain and blockwise (blocks of 256),
the same tokens at every length. Writes JSON, and prints a table with the papers' rows for the same lengths below.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lengthen.data import Corpus, prepare
from lengthen.evaluation import Result, evaluate, open_run, protocol
from lengthen.io import literal
from lengthen.report import papers
from lengthen.training import Watcher, load, train, world
from lengthen.training.log import Record

METHODS = ("sinusoidal", "rotary", "alibi", "xpos")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


class Pace(Watcher):
    """Prints a line every ten seconds."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.told = name, steps, 0.0
        self.initial = 0.0  # the loss of the first step, before any update

    def stepped(self, record: Record) -> None:
        """Say how far it is."""
        if record["step"] == 1:
            self.initial = record["loss"]
        if time.monotonic() - self.told > 10 or record["step"] == self.steps:
            self.told = time.monotonic()
            speed = f"{record['tokens_per_second']:,.0f} tokens/s"
            print(f"{self.name}: step {record['step']}/{self.steps}, loss {record['loss']:.3f}, {speed}", flush=True)


def corpora(arguments: argparse.Namespace, folder: Path) -> tuple[Corpus, dict[str, Corpus]]:
    """Return the corpus to train on, and those to test on, with its tokenizer; those that are there already serve."""
    options: dict[str, Any] = {"separator": arguments.separator.encode().decode("unicode_escape")}
    bpe: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": arguments.vocabulary, "validation": 0}
    training = made(arguments.train, folder / "train", bpe | options)
    tests = {}
    for word in arguments.test:
        name, _, path = word.partition("=")
        split: dict[str, Any] = {"split_before": "^ = [^=].* = $"} if "wikitext" in name else options
        same: dict[str, Any] = {"tokenizer": str(folder / "train"), "validation": 0}
        tests[name] = made(path, folder / name, same | split)
    return training, tests


def made(text: str | Path, folder: Path, options: dict[str, Any]) -> Corpus:
    """Return the corpus of a text, prepared into a folder unless it is there."""
    return Corpus.open(folder) if folder.is_dir() else prepare([text], folder, **options)


def trained(method: str, corpus: Corpus, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one model into a folder; return how."""
    overrides = {
        "model.positions": method,
        "model.train_length": LENGTHS[0],
        "train.steps": arguments.steps,
        "train.batch": 128,
        "train.micro_batch": 128,
        "schedule.shape": "trapezoid",
        "schedule.warmup": min(200, arguments.steps // 5),
        "evaluation.every": 0,
        "checkpoint.every": 0,
        **{key: literal(value) for key, _, value in (word.partition("=") for word in arguments.set)},
    }
    config = load("small", overrides, corpus.vocab_size)
    began, pace = time.monotonic(), Pace(method, arguments.steps)
    with world(arguments.device) as here:
        outcome = train(config, corpus, folder, here, watchers=[pace])
    if outcome.step < config.train.steps:  # by a signal: what it would be compared with took all steps
        raise SystemExit(f"{method}: stopped at step {outcome.step} of {config.train.steps}; it is not recorded")
    tokens = outcome.step * config.train.batch * config.model.train_length
    found = {"method": method, "seconds": time.monotonic() - began, "tokens": tokens, "loss": outcome.loss}
    return found | {"initial_loss": pace.initial, "steps": arguments.steps, "set": arguments.set}


def tested(folder: Path, name: str, corpus: Corpus, arguments: argparse.Namespace) -> list[Result]:
    """Read one model at every length, plain and blockwise."""
    subject = open_run(folder, device=arguments.device)
    base = subject.model.config.train_length
    fitting = [length for length in map(int, arguments.lengths.split(",")) if length < len(corpus["train"])]
    chosen = [protocol(kind, length, base) for length in fitting for kind in ("nonoverlapping", "blockwise")]
    results = evaluate(subject, corpus, chosen, split="train", tokens=arguments.tokens)
    for one in results:
        print(f"{one.positions} on {name} at {one.length:,}, {one.protocol}: {one.perplexity:.3f}", flush=True)
    return results


def table(rows: list[dict[str, Any]]) -> str:
    """Return perplexity by length, a line a method, protocol and text, in Markdown; and the papers' rows below."""
    lengths = sorted({row["length"] for row in rows})
    lines = [
        "| text | method | protocol | " + " | ".join(f"{n:,}" for n in lengths) + " |",
        "|---" * (3 + len(lengths)) + "|",
    ]
    groups: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        groups.setdefault((row["text"], row["positions"], row["protocol"]), {})[row["length"]] = row["perplexity"]
    for row in papers.perplexity():
        if (row["paper"], row["table"]) in (("ALiBi", "T2"), ("LEX", "T2"), ("LEX", "T5")) and row["perplexity"]:
            where = f"{row['corpus']} ({row['paper']}, trained at {row['train_length']:,})"
            groups.setdefault((where, row["method"], row["protocol"]), {})[row["eval_length"]] = row["perplexity"]
    for (text, method, kind), found in groups.items():
        cells = (f"{found[length]:.2f}" if length in found else "" for length in lengths)
        lines.append(f"| {text} | {method} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, type=Path, metavar="FILE", help="the text to train on")
    parser.add_argument("--test", required=True, action="append", metavar="NAME=FILE", help="a text to test on")
    parser.add_argument("--separator", default="\\0", help="what stands between documents (\\0)")
    parser.add_argument("--methods", default=",".join(METHODS), help="position methods, with commas")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="read at (512 to 16384)")
    parser.add_argument("--steps", type=int, default=700, help="of 65,536 tokens (700)")
    parser.add_argument("--vocabulary", type=int, default=16384, help="of the BPE (16384)")
    parser.add_argument("--tokens", type=int, default=262_144, help="scored at every length (262144)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep corpora and runs there (else they are removed)")
    parser.add_argument("--out", type=Path, help="the JSON (default: benchmarks/results, with the date)")
    arguments = parser.parse_args()
    today = datetime.date.today().isoformat()
    path = arguments.out or Path(__file__).parent / "results" / f"extrapolation_gpu-{today}.json"
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.keep or Path(name)
        training, tests = corpora(arguments, folder)
        for method in arguments.methods.split(","):
            runs.append(trained(method, training, folder / "runs" / method, arguments))
            for text, corpus in tests.items():
                found = tested(folder / "runs" / method, text, corpus, arguments)
                rows += [{"text": text, **one.record()} for one in found]
            device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
            result = {"benchmark": "extrapolation_gpu", "date": today, "torch": torch.__version__, "device": device}
            path.write_text(json.dumps({**result, "runs": runs, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
