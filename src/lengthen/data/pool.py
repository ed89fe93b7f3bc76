"""Several worker processes, each with a thread that hands it jobs: no queue, so what is in flight is one job a worker.

A thread takes the next job when its worker is free. Reading the sources therefore happens between two jobs, one
thread at a time, never far ahead of the encoding; the memory does not depend on the size of the corpus.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthen.data.readers import Piece
from lengthen.data.worker import Encoder

SCRIPT = Path(__file__).with_name("worker.py")


@dataclass
class Job:
    """A part to encode: its pieces, where it is to be written, and, once done, what the worker says of it."""

    split: str
    number: int
    pieces: list[Piece]
    key: str  # the sha256 of the pieces
    out: str
    answer: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of text."""
        return sum(len(piece) for piece, _ in self.pieces)


class Worker:
    """One process of `worker.py`; used as a context, it is ended on leaving."""

    def __init__(self, threads: int = 1) -> None:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environment["RAYON_NUM_THREADS"] = str(threads)
        environment["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        # -P: the folder of the script holds modules of this package, and must not stand in for others.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its workers
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def send(self, job: dict[str, Any], payload: Iterable[bytes] = ()) -> None:
        """Write one job."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            for data in payload:
                self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildProcessError(self._died()) from None

    def send_texts(self, texts: Iterable[bytes]) -> None:
        """Write texts to train on, each after its length, and a length of 0 at the end."""
        assert self._process.stdin is not None
        try:
            for text in texts:
                self._process.stdin.write(len(text).to_bytes(8, "little") + text)
            self._process.stdin.write(bytes(8))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildProcessError(self._died()) from None

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to a job; an error there is raised here."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(self._died())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(f"tokenizer: {answer['error']}")
        return answer

    def _died(self) -> str:
        status = self._process.wait()
        return (
            f"a worker process ended with status {status}; if that is −9, memory may have run out: use fewer processes"
        )

    def end(self) -> None:
        """End the process and wait for it."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()


def encode(jobs: Iterator[Job], settings: dict[str, Any], processes: int) -> Iterator[Job]:
    """Yield each job with its answer when it is done, in no fixed order."""
    if processes == 1 and settings["kind"] == "bytes":  # too little work for a process
        encoder = Encoder(settings)
        for job in jobs:
            job.answer = encoder.part(job.pieces, job.out)
            yield job
        return
    results: queue.Queue[Job | BaseException | None] = queue.Queue()
    taking = threading.Lock()
    stopped = threading.Event()
    workers = [Worker() for _ in range(processes)]

    def serve(worker: Worker) -> None:
        try:
            worker.send({"do": "settings", "settings": settings})
            worker.answer()
            while not stopped.is_set():
                with taking:
                    job = next(jobs, None)
                if job is None:
                    break
                lengths = [(len(piece), ends) for piece, ends in job.pieces]
                worker.send({"do": "part", "pieces": lengths, "out": job.out}, (piece for piece, _ in job.pieces))
                job.answer = worker.answer()
                results.put(job)
            results.put(None)
        except BaseException as problem:
            results.put(problem)

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                running -= 1
            else:
                yield result
    finally:
        stopped.set()
        for worker in workers:
            worker.end()
        for thread in threads:
            thread.join(timeout=5)


def train_tokenizer(texts: Iterable[bytes], vocab_size: int, special: list[str], out: Path, threads: int) -> None:
    """Train a byte-level BPE in a process of its own, so that its memory goes when it does."""
    with Worker(threads=threads) as worker:
        worker.send({"do": "train", "vocab_size": vocab_size, "special": special, "out": str(out)})
        worker.send_texts(texts)
        worker.answer()
