"""Trains in a forked child that is killed again and again, until it ends by itself. Run by test_killed.py.

    python killing.py DATA OUT KILLS SEED

Half of the kills come at a random moment, some steps on; half strike the child just before its n-th fsync, rename or
removal, which is where a checkpoint would be half-written if it could be. Prints a line a kill: how, and which
checkpoints there are. Nothing depends on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from conftest import make_config

from lengthen.data import Corpus
from lengthen.training import World, train

STEPS = 280


def config() -> Any:
    return make_config(
        train__steps=STEPS, checkpoint__every=4, checkpoint__keep=2, evaluation__every=8, model__dropout=0.1
    )


def strike(at: int) -> None:
    """Have this process killed just before the `at`-th call of those that make writing safe."""
    calls = 0

    def deadly(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    os.fsync = deadly(os.fsync)
    Path.rename = deadly(Path.rename)  # type: ignore[method-assign]
    Path.replace = deadly(Path.replace)  # type: ignore[method-assign]
    shutil.rmtree = deadly(shutil.rmtree)


def wait(path: Path, steps: int) -> None:
    """Return when the log has grown by some lines: the child has begun, and taken some steps."""
    before, deadline = None, time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        before = lines if before is None or lines < before else before  # a child that goes on drops what it does anew
        if lines >= before + steps:
            return
        time.sleep(0.001)


def main() -> None:
    data, out, kills, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    draw = random.Random(seed)
    corpus = Corpus.open(data)
    for number in range(10 * kills):
        at = draw.randint(1, 80) if number % 2 else None  # a checkpoint makes some sixteen such calls
        steps, delay = draw.randint(1, 12), draw.uniform(0, 0.02)
        child = os.fork()
        if child == 0:
            if number < kills and at is not None:
                strike(at)
            train(config(), corpus, out, World(0, 1, torch.device("cpu")))
            os._exit(0)
        if number < kills and at is None:
            wait(out / "metrics.jsonl", steps)
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        there = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
        print(json.dumps({"killed": killed, "at": at or steps, "there": there}), flush=True)
        if not killed:
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
