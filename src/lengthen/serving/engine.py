"""Continuous batching: one thread owns the model, prefills prompts and decodes them together. No web code here.

    submit(jobs) ──▶ waiting ──▶ a Batch reads its prompts, a chunk at a time ──▶ decodes, one token of each per step

Jobs start, end and are cancelled between two steps. Waiting jobs with prompts of similar length start as one batch.
Decoding batches are joined where padding wastes little memory (not with the policy "reach", whose heads have evicted
different keys). The output of a job does not depend on the others: its positions count from its own first token, and it
has its own random generator (lengthen.model.generation).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from lengthen.checks import whole_number
from lengthen.model import Transformer
from lengthen.model.generation import generator
from lengthen.model.sampling import Sampling
from lengthen.model.stepping import CHUNK, read

WASTE = 2  # batches are joined if padding makes them at most so many times as large
NEWS = 0.1  # seconds between two looks at the size of the caches


@dataclass(frozen=True)
class Limits:
    """How much may be asked for."""

    context: int  # tokens of a prompt and its continuation
    sequences: int = 64  # decoded at once
    waiting: int = 256  # jobs that have not begun
    tokens: int | None = None  # of all sequences that are decoded, as many as they may become; None: any


@dataclass(frozen=True)
class Told:
    """What one step gave one sequence of a job."""

    sample: int
    token: int | None  # none if it was a stop token
    ended: str | None  # "stop" or "length"
    logprob: float = 0.0  # of the token
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, as many as the job asked for


@dataclass(eq=False)
class Job:
    """A prompt to continue. Its functions are called by the engine's thread."""

    prompt: list[int]
    max_new_tokens: int
    take: Callable[[Told], bool]  # gets each token; returns True if the sequence is to end with it
    fail: Callable[[str], None]  # called if it cannot be finished, with the reason
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    samples: int = 1
    stop: frozenset[int] = frozenset()  # tokens that end a sequence
    logprobs: int | None = None  # how many of the likeliest tokens are wanted, beside the token's own log-probability
    gone: bool = False  # set it to cancel the job: its room is freed before the next step

    def __post_init__(self) -> None:
        whole_number("max_new_tokens", self.max_new_tokens, at_least=1)
        whole_number("samples", self.samples, at_least=1)

    def give(self, told: Told) -> bool:
        """Pass a token on; return True if the sequence is to end. What goes wrong with it concerns this job alone."""
        try:
            return self.take(told)
        except BaseException as problem:  # a tokenizer's Rust may panic, which is no Exception
            self.fail(reason(problem))
            self.gone = True
            return True

    @property
    def length(self) -> int:
        """How long a sequence may become."""
        return len(self.prompt) + self.max_new_tokens


def reason(problem: BaseException) -> str:
    """Return what went wrong in one line."""
    return str(problem).strip().partition("\n")[0] or type(problem).__name__


class FullError(Exception):
    """Too many jobs wait already."""


@dataclass(frozen=True)
class Stats:
    """What the engine holds."""

    sequences: int = 0  # that are read or decoded
    waiting: int = 0  # jobs that have not begun
    batches: int = 0
    cache_bytes: int = 0  # on the device
    host_bytes: int = 0
    tokens: int = 0  # generated since it began
    bound: float = 0.0  # of the caches that there are: no row left a larger fraction of its softmax mass unread


@dataclass(eq=False)
class Row:
    """A sequence of a batch; while prompts are read, all samples of a job."""

    job: Job
    sample: int
    random: Random
    count: int = 0  # new tokens


class Batch:
    """Sequences that grow together, one token each per step."""

    def __init__(self, model: Transformer, jobs: Sequence[Job], chunk: int, options: dict[str, Any]) -> None:
        self.model, self.chunk, self.reading = model, chunk, True
        self.rows = [Row(job, 0, generator(job.seed, 0)) for job in jobs]
        longest = max(len(job.prompt) for job in jobs)
        starts = [longest - len(job.prompt) for job in jobs]
        self.cache = model.cache(starts=starts if any(starts) else None, **options)
        ids = [[0] * start + job.prompt for start, job in zip(starts, jobs, strict=True)]
        self.next = torch.tensor(ids, device=model.embedding.weight.device)  # tokens that are not read yet

    @property
    def sequences(self) -> int:
        """How many sequences it decodes, or will."""
        return sum(row.job.samples for row in self.rows) if self.reading else len(self.rows)

    @property
    def tokens(self) -> int:
        """How many tokens its sequences may come to."""
        return sum(row.job.length * (row.job.samples if self.reading else 1) for row in self.rows)

    def step(self) -> int:
        """Read a chunk of the prompts or a token of each sequence; tell what comes next; return how many tokens."""
        now, self.next = self.next[:, : self.chunk], self.next[:, self.chunk :]
        logits = read(self.model, now, self.cache)
        if self.next.shape[1]:
            return 0
        if self.reading:
            self.reading = False
            logits = self._multiply(logits)
        chosen = self._choose(logits)
        going = self._tell(chosen, logits)
        self.next = chosen.unsqueeze(1)
        count = len(self.rows)
        self.keep(going)
        return count

    def _multiply(self, logits: Tensor) -> Tensor:
        """Make a row for each sample of a job."""
        if all(row.job.samples == 1 for row in self.rows):
            return logits
        index = [at for at, row in enumerate(self.rows) for _ in range(row.job.samples)]
        jobs = [row.job for row in self.rows]
        self.rows = [Row(job, one, generator(job.seed, one)) for job in jobs for one in range(job.samples)]
        self.cache = self.cache.rows(index)
        return logits[torch.tensor(index, device=logits.device)]

    def _choose(self, logits: Tensor) -> Tensor:
        """Return the next token of each row, as its job has them drawn."""
        alike: dict[Sampling, list[int]] = {}
        for at, row in enumerate(self.rows):
            alike.setdefault(row.job.sampling, []).append(at)
        chosen = torch.empty(len(self.rows), dtype=torch.int64, device=logits.device)
        for sampling, rows in alike.items():
            index = torch.tensor(rows, device=logits.device)
            chosen[index] = sampling.choose(logits[index], None, [self.rows[at].random for at in rows])
        return chosen

    def _tell(self, chosen: Tensor, logits: Tensor) -> list[int]:
        """Tell each job its tokens; return the rows that go on."""
        tokens, scores, going = chosen.tolist(), self._scores(chosen, logits), []
        for at, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            job, row.count = row.job, row.count + 1
            stopped = token in job.stop
            ended = "stop" if stopped else "length" if row.count == job.max_new_tokens else None
            logprob, top = scores.get(at, (0.0, ()))
            enough = job.give(Told(row.sample, None if stopped else token, ended, logprob, top))
            if not (ended or enough):
                going.append(at)
        return going

    def _scores(self, chosen: Tensor, logits: Tensor) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
        """Return the log-probabilities that were asked for, by row."""
        asked = {at: row.job.logprobs for at, row in enumerate(self.rows) if row.job.logprobs is not None}
        if not asked:
            return {}
        index = torch.tensor(list(asked), device=logits.device)
        scores = logits[index].double().log_softmax(dim=-1)
        own = scores.gather(1, chosen[index].unsqueeze(1)).squeeze(1).tolist()
        values, ids = (x.tolist() for x in scores.topk(max(asked.values()), dim=-1))
        return {
            at: (own[i], tuple(zip(ids[i][:wanted], values[i][:wanted], strict=True)))
            for i, (at, wanted) in enumerate(asked.items())
        }

    def keep(self, rows: list[int]) -> None:
        """Keep these rows, and free the others."""
        if len(rows) == len(self.rows):
            return
        self.rows = [self.rows[at] for at in rows]
        self.next = self.next[torch.tensor(rows, dtype=torch.int64, device=self.next.device)]
        if rows:
            self.cache = self.cache.rows(rows)

    def leave(self) -> None:
        """Free the rows of jobs that nobody waits for."""
        self.keep([at for at, row in enumerate(self.rows) if not row.job.gone])

    def fits(self, other: Batch) -> bool:
        """Whether padding would waste little if both were one."""
        sizes = [len(one.rows) * one.cache.kept for one in (self, other)]
        together = (len(self.rows) + len(other.rows)) * max(self.cache.kept, other.cache.kept)
        return together <= WASTE * sum(sizes)

    def join(self, other: Batch) -> None:
        """Take the rows of another batch."""
        self.cache = self.cache.joined(other.cache)
        self.rows, self.next = self.rows + other.rows, torch.cat([self.next, other.next])


class Engine:
    """A thread that owns a model and works on what is submitted, until it is closed.

    Args:
        model: a decoder, in eval mode.
        limits: how much may be asked for.
        chunk: tokens of prompts that are read at once; between two chunks the others go on.
        cache: options of `model.cache`: policy, mode, mask, tolerance.
    """

    def __init__(self, model: Transformer, limits: Limits, chunk: int = CHUNK, **cache: Any) -> None:
        model.cache(**cache)  # what does not fit is refused here
        self.model, self.limits, self.chunk, self.options = model, limits, chunk, cache
        self.batches: list[Batch] = []
        self.waiting: deque[Job] = deque()
        self.stats = Stats()
        self._generated, self._looked, self._closed = 0, 0.0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Have jobs done, as soon as there is room: all, or none, with `FullError` if too many wait."""
        for job in jobs:
            most = self.limits.context if self.limits.tokens is None else min(self.limits.context, self.limits.tokens)
            if job.length > most:
                raise ValueError(
                    f"max_tokens: expected prompt and new tokens of at most {most:,} together, got "
                    f"{len(job.prompt):,} + {job.max_new_tokens:,}"
                )
            if self.limits.tokens is not None and job.length * job.samples > self.limits.tokens:
                raise ValueError(
                    f"n: expected samples of at most {self.limits.tokens:,} tokens together, got {job.samples} of up "
                    f"to {job.length:,}"
                )
            if job.samples > self.limits.sequences:
                raise ValueError(f"n: expected at most {self.limits.sequences}, got {job.samples}")
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._forget()
            if len(self.waiting) + len(jobs) > self.limits.waiting:
                raise FullError(f"{len(self.waiting)} prompts wait, and {self.limits.waiting} may; try again later")
            self.waiting.extend(jobs)
            self._changed.notify()

    def close(self) -> None:
        """Fail what is not finished, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._closed and not self.waiting and not self.batches:
                    self._look(0.0)
                    self._changed.wait()
                if self._closed:
                    break
                jobs = self._admitted()
            self._begin(jobs)
            for batch in self.batches:
                batch.leave()
                if batch.rows:
                    self._attempt(batch)
            self.batches = [batch for batch in self.batches if batch.rows]
            if self.options.get("policy", "full") != "reach":
                self._join()
            self._look(NEWS)
        rows = [row for batch in self.batches for row in batch.rows]
        for job in dict.fromkeys([*(row.job for row in rows), *self.waiting]):
            job.fail("the server stops")
        self.batches, self.stats = [], Stats()
        self.waiting.clear()

    def _admitted(self) -> list[Job]:
        """Return the jobs that there is room for, in the order in which they came."""
        self._forget()
        found: list[Job] = []
        sequences = sum(batch.sequences for batch in self.batches)
        tokens = sum(batch.tokens for batch in self.batches)
        while self.waiting:
            job, most = self.waiting[0], self.limits.tokens
            sequences, tokens = sequences + job.samples, tokens + job.length * job.samples
            if sequences > self.limits.sequences or (most is not None and tokens > most):
                break
            found.append(self.waiting.popleft())
        return found

    def _forget(self) -> None:
        """Take jobs that nobody waits for out of the queue."""
        if any(job.gone for job in self.waiting):
            self.waiting = deque(job for job in self.waiting if not job.gone)

    def _begin(self, jobs: list[Job]) -> None:
        """Make batches of jobs, each of prompts that are at most twice as long as one another."""
        sizes: dict[int, list[Job]] = {}
        for job in jobs:
            sizes.setdefault(len(job.prompt).bit_length(), []).append(job)
        for alike in sizes.values():
            try:
                self.batches.append(Batch(self.model, alike, self.chunk, self.options))
            except Exception as problem:
                for job in alike:
                    job.fail(reason(problem))

    def _attempt(self, batch: Batch) -> None:
        """Let a batch take a step; if it fails, its jobs fail, and the engine continues."""
        try:
            with torch.no_grad():
                self._generated += batch.step()
        except Exception as problem:  # out of memory, a model whose logits are not finite
            for job in dict.fromkeys(row.job for row in batch.rows):
                job.fail(reason(problem))
            batch.rows = []

    def _join(self) -> None:
        """Make one batch of those that decode, shortest first, as long as padding wastes little."""
        ready = sorted((one for one in self.batches if not one.reading), key=lambda one: one.cache.kept)
        for one, other in pairwise(ready):
            if not one.fits(other):
                continue
            try:
                other.join(one)
            except RuntimeError:  # no memory for a copy of both: they stay separate
                return
            self.batches.remove(one)

    def _look(self, every: float) -> None:
        """Write down what there is, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._looked < every:
            return
        self._looked, caches = now, [batch.cache for batch in self.batches]
        self.stats = Stats(
            sequences=sum(batch.sequences for batch in self.batches),
            waiting=len(self.waiting),
            batches=len(self.batches),
            cache_bytes=sum(cache.nbytes for cache in caches),
            host_bytes=sum(cache.host_nbytes for cache in caches),
            tokens=self._generated,
            bound=max((cache.bound for cache in caches), default=0.0),
        )
