"""Callbacks of a run: a live view, TensorBoard, a test. A `Watcher` overrides the methods that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lengthen.config import Config
from lengthen.training.log import Record


@dataclass(frozen=True)
class Start:
    """A run as it begins."""

    config: Config
    out: Path
    first: int  # steps taken before
    device: str
    processes: int
    parameters: int
    train_tokens: int
    epochs: float  # how often the data will have been read at the end


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool  # or stopped on request
    checkpoint: Path
    loss: float | None  # of the last step, if one was taken


class Watcher:
    """Callbacks, called on the first process; each does nothing by default."""

    def started(self, start: Start) -> None:
        """The model is built, a checkpoint read if there was one, and the first step is next."""

    def stepped(self, record: Record) -> None:
        """A step was taken; called for every step, in order, some steps late."""

    def evaluating(self, step: int, length: int, fraction: float) -> None:
        """A fraction of the validation tokens was scored at a length."""

    def evaluated(self, record: Record) -> None:
        """The validation loss at a length is known."""

    def saved(self, path: Path, step: int) -> None:
        """A checkpoint is complete."""

    def said(self, text: str) -> None:
        """A message for the user."""

    def ended(self, outcome: Outcome) -> None:
        """The run is over, or stopped, without an error."""

    def close(self) -> None:
        """The last call, however the run ended."""


class TensorBoard(Watcher):
    """Writes loss, lr, grad_norm and tokens/s for TensorBoard, which then hides what it had of steps after `step`."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError(
                "log.tensorboard: expected the tensorboard package, got none; pip install tensorboard"
            ) from None
        self.writer = SummaryWriter(str(folder), purge_step=step and step + 1)

    def stepped(self, record: Record) -> None:
        """Write the step's numbers."""
        for name in ("loss", "lr", "grad_norm", "tokens_per_second", "mfu"):
            if record.get(name) is not None:
                self.writer.add_scalar(f"train/{name}", record[name], record["step"])

    def evaluated(self, record: Record) -> None:
        """Write the validation loss of one length."""
        self.writer.add_scalar(f"validation/{record['length']}", record["loss"], record["step"])

    def close(self) -> None:
        """Put everything on the disk."""
        self.writer.close()
