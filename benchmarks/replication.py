"""The papers' claims: a campaign of models, each trained short and evaluated long, one JSON for each run and seed.

    python benchmarks/replication.py --train books-train.txt.xz --test books=books-test.txt.xz \\
        --test wikitext=wikitext-103-test.txt.xz --work work
    python benchmarks/replication.py … --minutes 25                # starts no run that may not end by then
    python benchmarks/replication.py … --runs alibi,rotary --seeds 1
    python benchmarks/replication.py … --scale tiny                # the same runs, small enough for a laptop
    CUDA_VISIBLE_DEVICES=1 python benchmarks/replication.py …      # beside it: takes runs that no other has
    python benchmarks/replication.py --plan                        # what is done, what is left

What is trained, and how it is evaluated, is in `replication.toml`, or in another file (`--campaign`). A run is done if
its JSON in `--out` is of that very plan. The campaign can be stopped at any moment; the same command resumes it:
training at its last checkpoint, evaluation at the next length. For that, `--work` has to be the same folder. Any number
of processes may work on one folder: one on each GPU, or on a CPU one for each core, with OMP_NUM_THREADS=1. So the
speeds in the JSON say how long it took, and claims about speed are `training_speed.py`'s. `replication_claims.py` makes
the table of claims.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from records import machine, software

from lengthen import alibi_slopes
from lengthen.data import Corpus, prepare
from lengthen.evaluation import evaluate, open_run, protocol
from lengthen.evaluation.analyses import induction, resolution
from lengthen.evaluation.runs import Subject
from lengthen.io import read_toml, write_text
from lengthen.training import Watcher, load, train, world
from lengthen.training.log import Record

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "replication"
QUARTERS = 4  # of training, after each of which copying is measured
FAR = (1, 2, 4, 8)  # training lengths that resolution is measured at


@dataclass(frozen=True)
class Scale:
    """How large the models of a campaign are, and how long they train."""

    preset: str
    length: int  # L: of a training window
    batch: int  # windows in a step
    steps: int
    vocabulary: int  # of the BPE
    tokens: int  # scored at each length
    set: dict[str, Any] = field(default_factory=dict)  # further keys of the config
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # of position methods, by name


@dataclass(frozen=True)
class Run:
    """One model: how it differs from the others, and how it is evaluated."""

    name: str
    seeds: int
    claims: list[str]
    positions: str | None = None  # none: the run's name
    options: dict[str, Any] = field(default_factory=dict)  # of the position method
    flattest: float | None = None  # ALiBi's smallest slope, in place of the paper's
    kind: str = "decoder"
    window: int = 1  # of training, in training lengths; the tokens of a step are the same
    times: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])  # training lengths that it is evaluated at
    protocols: list[str] = field(default_factory=lambda: ["nonoverlapping", "blockwise"])
    sliding: list[list[float]] = field(default_factory=list)  # length and stride, in training lengths
    resolution: bool = False
    induction: bool = False  # at a quarter, a half, three quarters and the end of training

    def overrides(self, scale: Scale, seed: int) -> dict[str, Any]:
        """Return the keys of the config in which this run differs from its preset."""
        positions, windows = self.positions or self.name, scale.batch // self.window
        options = {**scale.options.get(positions, {}), **self.options}
        if self.flattest is not None:
            heads = load(scale.preset).model.heads
            slopes = alibi_slopes(heads).tolist()
            options["slopes"] = [self.flattest if slope == min(slopes) else slope for slope in slopes]
        return {
            "model.kind": self.kind,
            "model.positions": positions,
            "model.position_options": options,
            "model.train_length": self.window * scale.length,
            "train.seed": seed,
            "train.batch": windows,
            "train.micro_batch": windows,
            "train.steps": round(scale.steps * scale.batch / (self.window * windows)),
            "schedule.shape": "trapezoid",
            "evaluation.every": 0,
            "checkpoint.every": scale.steps // QUARTERS if self.induction else 0,  # 0: at the end, or when stopped
            "checkpoint.keep": QUARTERS,
            **scale.set,
        }


@dataclass(frozen=True)
class Campaign:
    """Runs, and the scales that they can be done at."""

    scales: dict[str, Scale]
    runs: list[Run]

    def jobs(self) -> list[tuple[Run, int]]:
        """Return runs and seeds in the order in which they are done: all runs with one seed, then with the next."""
        return [
            (run, seed) for seed in range(max(run.seeds for run in self.runs)) for run in self.runs if seed < run.seeds
        ]


class Pace(Watcher):
    """Prints a line every ten seconds; remembers the first loss and the speed."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.told = name, steps, 0.0
        self.initial: float | None = None  # the loss before any update; none where training was resumed
        self.speeds: list[float] = []

    def stepped(self, record: Record) -> None:
        """Say how far it is."""
        if record["step"] == 1:
            self.initial = record["loss"]
        self.speeds.append(record["tokens_per_second"])
        if time.monotonic() - self.told > 10 or record["step"] == self.steps:
            self.told = time.monotonic()
            speed = f"{record['tokens_per_second']:,.0f} tokens/s"
            print(f"{self.name}: step {record['step']}/{self.steps}, loss {record['loss']:.3f}, {speed}", flush=True)


def corpora(scale: Scale, arguments: argparse.Namespace) -> tuple[Corpus, dict[str, Corpus]]:
    """Return the corpus to train on, and those to test on, with its tokenizer; those that are there already serve."""
    options: dict[str, Any] = {"separator": arguments.separator.encode().decode("unicode_escape"), "validation": 0}
    folder = arguments.work / "train"
    with locked(arguments.work / "corpora.lock"):  # another process may be preparing them
        training = made(arguments.train, folder, {"tokenizer": "bpe", "vocab_size": scale.vocabulary, **options})
        tests = {}
        for word in arguments.test:
            name, _, path = word.partition("=")
            split: dict[str, Any] = (
                {"split_before": "^ = [^=].* = $", "validation": 0} if "wikitext" in name else options
            )
            tests[name] = made(path, arguments.work / name, {"tokenizer": str(folder), **split})
    return training, tests


def made(text: str | Path, folder: Path, options: dict[str, Any]) -> Corpus:
    """Return the corpus of a text, prepared into a folder unless it is there."""
    return Corpus.open(folder) if folder.is_dir() else prepare([text], folder, **options)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a lock against other processes; yield whether it is held, which may be false if it was not waited for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def trained(run: Run, seed: int, scale: Scale, corpus: Corpus, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one model, or resume its training; return how that went."""
    config = load(scale.preset, run.overrides(scale, seed), corpus.vocab_size)
    name, folder, began = f"{run.name}, seed {seed}", folder_of(run, seed, arguments), time.monotonic()
    pace = Pace(name, config.train.steps)
    with world(arguments.device) as here:
        outcome = train(config, corpus, folder, here, watchers=[pace])
    if outcome.step < config.train.steps:
        raise KeyboardInterrupt  # training heard the signal, and saved
    tokens = outcome.step * config.train.batch * config.model.train_length
    speed = statistics.median(pace.speeds) if pace.speeds else None
    found = {"config": dataclasses.asdict(config), "tokens": tokens, "initial_loss": pace.initial}
    return {**found, "loss": outcome.loss, "seconds": time.monotonic() - began, "tokens_per_second": speed}


def readings(
    run: Run, seed: int, scale: Scale, tests: dict[str, Corpus], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Evaluate one model at every length, under every protocol, unless it was evaluated before."""
    subject, found = open_run(folder_of(run, seed, arguments), device=arguments.device), []
    base = subject.model.config.train_length
    for text, corpus in tests.items():
        lengths = [times * scale.length for times in run.times]
        chosen = [protocol(kind, n, base) for n in lengths if n < len(corpus["train"]) for kind in run.protocols]
        for times in run.sliding:
            length, stride = (round(one * scale.length) for one in times)
            chosen.append(protocol("sliding", length, base, stride))
        for one in evaluate(subject, corpus, chosen, split="train", tokens=scale.tokens):
            print(f"{run.name} on {text} at {one.length:,}, {one.protocol}: {one.perplexity:.3f}", flush=True)
            found.append({"text": text, **one.record()})
    return found


def analyses(
    run: Run, seed: int, scale: Scale, tests: dict[str, Corpus], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the analyses that the run asks for, on the first text."""
    text, corpus = next(iter(tests.items()))
    folder, found = folder_of(run, seed, arguments), []
    options: dict[str, Any] = {"split": "train", "tokens": scale.tokens // 4}

    def subject(path: Path) -> Subject:
        return open_run(path, device=arguments.device)

    if run.resolution:
        lengths = [times * scale.length for times in FAR]
        one = resolution.analyse(subject(folder), corpus, lengths, blockwise=True, **options)
        found.append({"analysis": "resolution", "text": text, **one})
    if run.induction:
        for path in sorted((folder / "checkpoints").glob("step-*")):
            one = induction.analyse(subject(path), corpus, [scale.length // 2], **options)
            found.append({"analysis": "induction", "text": text, "step": int(path.name.removeprefix("step-")), **one})
    return found


def folder_of(run: Run, seed: int, arguments: argparse.Namespace) -> Path:
    """Return where a run is trained."""
    return Path(arguments.work) / "runs" / f"{run.name}-{seed}"


def result_of(run: Run, seed: int, out: Path) -> Path:
    """Return where a run's result goes."""
    return out / f"{run.name}-{seed}.json"


def planned(run: Run, scale: Scale) -> dict[str, Any]:
    """Return what is asked of a run, whichever claims it is for."""
    asked = {key: value for key, value in dataclasses.asdict(run).items() if key not in ("seeds", "claims")}
    return {"run": asked, "scale": dataclasses.asdict(scale)}


def is_done(run: Run, seed: int, scale: Scale, out: Path) -> bool:
    """Return whether there is a result with all that is asked of a run."""
    path = result_of(run, seed, out)
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("plan") == planned(run, scale)


def plan(campaign: Campaign, scale: Scale, out: Path) -> str:
    """Return what is done and what is left."""
    lines = []
    for run, seed in campaign.jobs():
        done = "done" if is_done(run, seed, scale, out) else "left"
        lines.append(f"{done}  {run.name}, seed {seed}: {', '.join(run.claims)}")
    left = sum(line.startswith("left") for line in lines)
    return "\n".join([*lines, f"{len(lines) - left} of {len(lines)} runs are done"])


def do(
    run: Run,
    seed: int,
    scale: Scale,
    training: Corpus,
    tests: dict[str, Corpus],
    arguments: argparse.Namespace,
) -> None:
    """Train and evaluate one model, and write what was found."""
    torch.compiler.reset()  # torch compiles a function for eight models at the most, and then runs it uncompiled
    record = {"run": run.name, "seed": seed, **software(), "machine": machine(arguments.device)}
    record["plan"] = planned(run, scale)
    record["training"] = trained(run, seed, scale, training, arguments)
    record["readings"] = readings(run, seed, scale, tests, arguments)
    record["analyses"] = analyses(run, seed, scale, tests, arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_text(result_of(run, seed, arguments.out), json.dumps(record) + "\n")


def go(campaign: Campaign, jobs: list[tuple[Run, int]], arguments: argparse.Namespace) -> int:
    """Do the jobs that are neither done nor taken, as long as there is time; return how many failed."""
    began, longest, failed = time.monotonic(), 0.0, 0
    scale = campaign.scales[arguments.scale]
    training, tests = corpora(scale, arguments)
    for run, seed in jobs:
        started = time.monotonic()
        with locked(folder_of(run, seed, arguments).with_suffix(".lock"), wait=False) as free:
            if not free or is_done(run, seed, scale, arguments.out):
                continue
            if arguments.minutes is not None and started - began + longest > 60 * arguments.minutes:
                print(f"the time is up before {run.name}, seed {seed}; the same command resumes there")
                break
            try:
                do(run, seed, scale, training, tests, arguments)
            except Exception:  # the others are worth having
                failed += 1
                traceback.print_exc()
                continue
        longest = max(longest, time.monotonic() - started)
        print(f"{run.name}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
    print(plan(campaign, scale, arguments.out).splitlines()[-1])
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--campaign", type=Path, default=HERE / "replication.toml", help="which runs (replication.toml)"
    )
    parser.add_argument("--train", type=Path, metavar="FILE", help="the text to train on")
    parser.add_argument("--test", action="append", metavar="NAME=FILE", help="a text to test on; may be given again")
    parser.add_argument("--separator", default="\\0", help="what stands between documents (\\0)")
    parser.add_argument("--scale", default="small", help="of models and training: small, tiny (small)")
    parser.add_argument("--work", type=Path, default=Path("work"), help="corpora and checkpoints, by scale (work)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON, by scale (benchmarks/results/replication)")
    parser.add_argument("--runs", help="some runs alone, with commas")
    parser.add_argument("--seeds", type=int, help="of each run, at most")
    parser.add_argument("--minutes", type=float, help="start nothing that may take longer than this in all")
    parser.add_argument("--plan", action="store_true", help="say what is done and what is left")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    campaign = read_toml(arguments.campaign, Campaign)
    if arguments.scale not in campaign.scales:
        parser.error(f"--scale: expected one of {', '.join(campaign.scales)}, got {arguments.scale}")
    arguments.work, arguments.out = arguments.work / arguments.scale, arguments.out / arguments.scale
    if arguments.plan:
        print(plan(campaign, campaign.scales[arguments.scale], arguments.out))
        return 0
    if arguments.train is None or not arguments.test:
        parser.error("--train and --test: expected a text for each, got none")
    names = [run.name for run in campaign.runs]
    wanted = arguments.runs.split(",") if arguments.runs else names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--runs: expected some of {', '.join(names)}, got {', '.join(unknown)}")
    most = campaign.jobs() if arguments.seeds is None else [job for job in campaign.jobs() if job[1] < arguments.seeds]
    try:
        failed = go(campaign, [(run, seed) for run, seed in most if run.name in wanted], arguments)
    except KeyboardInterrupt:
        print("stopped; the same command resumes there")
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
