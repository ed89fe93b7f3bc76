"""Train six position methods at 64 tokens, evaluate each at up to 2,048, write one report: some minutes on a laptop.

  lengthen demo                               # into demo/: six runs, and demo/report.html
  lengthen demo --out elsewhere --steps 400   # longer, and better
  lengthen demo --methods alibi,rotary

Every method trains the same small model (the preset `tiny`: a million parameters, at 64 tokens) for the same steps from
the same weights on the source of Python's standard library. Each is then read at 1× to 32× that length, rotary and xPos
with blockwise attention too. The same seed gives the same numbers on the same machine. An interrupted demo
resumes; a finished one with the same settings is only shown again.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lengthen.cli.progress import duration, show_progress

if TYPE_CHECKING:
    from lengthen.data import Corpus
    from lengthen.evaluation import Result
    from lengthen.training import Config

METHODS = ("none", "sinusoidal", "rotary", "t5", "alibi", "xpos")
BLOCKWISE = ("rotary", "xpos")  # those that blockwise attention is for
TIMES = (1, 2, 4, 8, 16, 32)
ANALYSES = {"resolution": (1, 2, 4, 8, 16), "positions": (16,), "distance": (8,), "reach": (16,)}  # × training length
ANALYSED = 4_096  # tokens

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Arguments:
    """Arguments of `lengthen demo`."""

    out: Path = Path("demo")  # where everything goes
    methods: list[str] = field(default_factory=lambda: list(METHODS))  # position methods
    steps: int = 120  # of training, for each method
    tokens: int = 65_536  # scored at each length
    seed: int = 0  # of weights and data
    data: Path | None = None  # token shards of your own; none: the default corpus


def run(arguments: Arguments) -> int:
    """Train, evaluate, analyse, report; end with a table and the page's path."""
    from lengthen.cli.corpus import open_corpus
    from lengthen.config import DataConfig

    importlib.import_module("lengthen.report.page")  # so that what it needs is missed before the work, not after
    began = time.monotonic()
    methods = arguments.methods
    if not methods:
        raise ValueError("--methods: expected the name of at least one position method, got none")
    if len(set(methods)) < len(methods):
        raise ValueError(f"--methods: expected each method once, got {','.join(methods)}")
    configs = {name: config_of(name, arguments.steps, arguments.seed) for name in methods}  # a wrong name ends it here
    corpus = open_corpus(arguments.data, DataConfig())
    results: dict[str, list[Result]] = {}
    for number, (name, config) in enumerate(configs.items(), 1):
        with show_progress(unit="tokens") as progress:
            stage = f"{number}/{len(methods)} {name}"
            folder = arguments.out / name

            def tell(what: str, done: int, total: int, stage: str = stage) -> None:
                progress(f"{stage}: {what}", done, total)

            train_one(config, corpus, folder, tell)
            results[name] = evaluate_one(folder, corpus, arguments.tokens, tell)
            analyse_one(folder, corpus, tell)
    page = write_report([arguments.out / name for name in methods], arguments.out / "report.html")
    print(table(results))
    print(f"\n{duration(time.monotonic() - began)}; open {page} in a browser")
    return 0


def config_of(method: str, steps: int, seed: int) -> Config:
    """Return the preset `tiny` with this method."""
    from lengthen.training import load

    overrides = {"model.positions": method, "train.steps": steps, "train.seed": seed, "schedule.warmup": steps // 10}
    return load(
        "tiny", overrides | {"evaluation.every": 0, "checkpoint.every": 0, "checkpoint.keep": 1}, vocab_size=258
    )


def train_one(config: Config, corpus: Corpus, folder: Path, tell: Tell) -> None:
    """Train one model, or go on; a folder with a run of other settings is refused."""
    from lengthen.config import Config, differences
    from lengthen.io import read_toml
    from lengthen.training import Watcher, train, world
    from lengthen.training.log import Record

    there = folder / "config.toml"
    if there.exists():
        changes = differences(read_toml(there, Config), config)
        if changes:
            raise FileExistsError(
                f"{folder}: holds a run with other settings ({'; '.join(changes)}); choose another --out"
            )

    total = config.train.steps * config.train.batch * config.model.train_length

    class Bar(Watcher):
        def stepped(self, record: Record) -> None:
            tell("training", record["tokens"], total)

    with world() as here:
        outcome = train(config, corpus, folder, here, watchers=[Bar()])
    if not outcome.finished:  # a signal stopped it
        raise KeyboardInterrupt


def evaluate_one(folder: Path, corpus: Corpus, tokens: int, tell: Tell) -> list[Result]:
    """Return the results of one run at every length, under each protocol that is for it."""
    from lengthen.evaluation import evaluate, open_run, protocol
    from lengthen.training.parallel import pick_device

    subject = open_run(folder, device=pick_device())
    config = subject.model.config
    names = ["nonoverlapping", *(["blockwise"] if config.positions in BLOCKWISE else [])]
    base = config.train_length
    chosen = [protocol(name, base * times, base) for times in TIMES for name in names]
    order = {one: number for number, one in enumerate(sorted(chosen, key=lambda one: (one.length, one.name)))}
    return evaluate(
        subject,
        corpus,
        chosen,
        tokens=tokens,
        tell=lambda one, done, total: tell("reading", order[one] * total + done, len(order) * total),
    )


def analyse_one(folder: Path, corpus: Corpus, tell: Tell) -> None:
    """Look into one run, as `lengthen analyse` does, at a few lengths and on a little text."""
    from lengthen.evaluation import analyses, open_run
    from lengthen.io import read_json

    subject = open_run(folder)
    config = subject.model.config
    fitting = {name: times for name, times in ANALYSES.items() if name != "reach" or config.positions == "alibi"}
    for number, (name, times) in enumerate(fitting.items(), 1):
        path = folder / "analysis" / f"{name}.json"
        there = read_json(path, dict) if path.exists() else {}
        if (there.get("weights"), there.get("data")) != (subject.weights, corpus.fingerprint):
            lengths = [config.train_length * factor for factor in times]
            more = {"blockwise": True} if name == "resolution" and config.positions in BLOCKWISE else {}
            found = analyses.ANALYSES[name].analyse(subject, corpus, lengths, tokens=ANALYSED, **more)
            analyses.write(folder, found)
        tell("analysing", number * ANALYSED, len(fitting) * ANALYSED)


def table(results: dict[str, list[Result]]) -> str:
    """Return perplexity by method and length, as a table for the terminal."""
    first = next(iter(results.values()))[0]
    lengths = sorted({one.length for group in results.values() for one in group})
    head = f"{'perplexity at':<18}" + "".join(f"{length:>9,}" for length in lengths)
    times = f"{'× training length':<18}" + "".join(f"{length / first.train_length:>8g}×" for length in lengths)
    lines = [f"\ntrained at {first.train_length} tokens; {first.tokens:,} tokens scored at each length\n", head, times]
    for name, group in results.items():
        for protocol in sorted({one.protocol for one in group}, reverse=True):  # plain first
            found = {one.length: one.perplexity for one in group if one.protocol == protocol}
            label = name if protocol == "nonoverlapping" else f"{name}, {protocol}"
            cells = (f"{found[length]:>9.2f}" if length in found else f"{'–':>9}" for length in lengths)
            lines.append(f"{label:<18}" + "".join(cells))
    return "\n".join(lines)


def write_report(folders: list[Path], page: Path) -> Path:
    """Write the page of these runs."""
    from lengthen.report import collect, write_html

    write_html(collect(folders), page)
    return page
