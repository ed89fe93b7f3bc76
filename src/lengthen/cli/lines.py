"""Training progress as plain lines, for logs and pipes: one every few seconds, one per evaluation and checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

from lengthen.cli.progress import duration
from lengthen.training import Outcome, Watcher
from lengthen.training.events import Start
from lengthen.training.log import Record

SECONDS = 5.0  # between two lines about steps


class Lines(Watcher):
    """Prints what happens."""

    def __init__(self, every: float = SECONDS) -> None:
        self.every = every
        self.said_at = -every
        self.steps = 0
        self.clock = Clock()

    def started(self, start: Start) -> None:
        """Say what is trained, on what."""
        self.steps = start.config.train.steps
        print(introduction(start), flush=True)

    def stepped(self, record: Record) -> None:
        """Print a line every few seconds, and the last."""
        now, left = time.monotonic(), self.clock.left(record["step"], self.steps)
        if now - self.said_at < self.every and record["step"] != self.steps:
            return
        self.said_at = now
        parts = [
            f"step {record['step']:,}/{self.steps:,}",
            f"loss {record['loss']:.4f}",
            f"{record['tokens_per_second']:,.0f} tokens/s",
        ]
        if record["mfu"] is not None:
            parts.append(f"{record['mfu']:.1%} MFU")
        print("  ".join([*parts, left]) if left else "  ".join(parts), flush=True)

    def evaluated(self, record: Record) -> None:
        """Print one length's loss."""
        text = f"  validation at {record['length']:,}: loss {record['loss']:.4f}, perplexity {record['perplexity']:.3f}"
        print(text, flush=True)

    def saved(self, path: Path, step: int) -> None:
        """Say where the checkpoint is."""
        print(f"  saved {path}", flush=True)

    def said(self, text: str) -> None:
        """Pass it on."""
        print(text, flush=True)

    def ended(self, outcome: Outcome) -> None:
        """Say how it ended."""
        print(conclusion(outcome), flush=True)


class Clock:
    """The time left, from the pace since the first step that was seen: evaluations and checkpoints are in it."""

    def __init__(self) -> None:
        self.began: tuple[int, float] | None = None

    def left(self, step: int, steps: int) -> str:
        """Return "3 min 20 s left" after a step, or nothing while the pace is not known."""
        now = time.monotonic()
        if self.began is None:
            self.began = step, now
        first, at = self.began
        return f"{duration((now - at) / (step - first) * (steps - step))} left" if step > first else ""


def introduction(start: Start) -> str:
    """Return what is trained, on what, in two lines."""
    model, train = start.config.model, start.config.train
    where = start.device if start.processes == 1 else f"{start.processes} processes ({start.device})"
    begin = "training" if start.first == 0 else f"resuming after step {start.first:,}"
    return (
        f"{begin}: {start.parameters / 1e6:,.1f}M parameters, {model.positions}, at {model.train_length:,} tokens, "
        f"on {where}, into {start.out}\n"
        f"{train.steps:,} steps of {train.batch * model.train_length:,} tokens: "
        f"{start.epochs:,.2g} epochs of {start.train_tokens:,} tokens"
    )


def conclusion(outcome: Outcome) -> str:
    """Return how it ended, and where the result is."""
    if outcome.finished:
        return f"done after {outcome.step:,} steps; the model is {outcome.checkpoint / 'model.safetensors'}"
    return f"stopped after step {outcome.step:,}, saved as {outcome.checkpoint}; the same command resumes from there"
