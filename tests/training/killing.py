"""Trains in forked children, one of which is killed again and again, until they end by themselves.

    python killing.py DATA OUT STEPS KILLS SEED PROCESSES        run by test_killed.py

Half of the kills come at a random moment, some steps on; half strike the first child just before its n-th fsync, rename
or removal, which is where a checkpoint would be half-written if it could be. Prints a line a kill: how, and which
checkpoints there are. Nothing depends on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from conftest import make_config

from lengthen.data import Corpus
from lengthen.training import train, world


def config(steps: int, keep: int) -> Any:
    every = {"checkpoint__every": 4, "checkpoint__keep": keep, "evaluation__every": 8}
    return make_config(train__steps=steps, model__dropout=0.1, **every)


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


def run(rank: int, processes: int, port: int, settings: Any, corpus: Corpus, out: Path, at: int | None) -> None:
    """Train as one of the processes, and end."""
    status = 1
    try:
        if rank == 0 and at is not None:  # the process that writes
            strike(at)
        if processes > 1:
            about = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in about.items()})
        with world("cpu") as here:
            train(settings, corpus, out, here)
        status = 0
    finally:
        os._exit(status)


def ended(children: list[int]) -> list[int]:
    """Wait for all children, and return how each ended; once one does not end well, the others are killed."""
    found: list[int] = []
    while len(found) < len(children):
        _, status = os.wait()
        found.append(os.waitstatus_to_exitcode(status))
        if found[-1]:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
    return found


def main() -> None:
    data, out, total, kills, seed, processes = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:7])
    torch.set_num_threads(1)
    draw = random.Random(seed)
    corpus, settings = Corpus.open(data), config(total, 2 if kills else 10_000)  # all, of what others are compared with
    for number in range(10 * kills + 1):
        at = draw.randint(1, 80) if number % 2 else None  # a checkpoint makes some sixteen such calls
        steps, delay = draw.randint(1, 12), draw.uniform(0, 0.02)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(processes):
            children.append(os.fork())
            if children[-1] == 0:
                run(rank, processes, port, settings, corpus, out, at if number < kills else None)
        if number < kills and at is None:
            wait(out / "metrics.jsonl", steps)
            time.sleep(delay)
            os.kill(draw.choice(children), signal.SIGKILL)
        killed = -signal.SIGKILL in (statuses := ended(children))
        there = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
        print(json.dumps({"killed": killed, "at": at or steps, "there": there}), flush=True)
        if not killed:
            sys.exit(max(map(abs, statuses)))


if __name__ == "__main__":
    main()
