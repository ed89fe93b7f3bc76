"""Progress of a long task: bars in a terminal, and elsewhere a plain line every few seconds.

    with show_progress() as progress:
        for done in …:
            progress("tokenising", done, total)

Arguments are the stage's name, the amount done and the total; a total of 0 means unknown. Calls are cheap: most of them
return at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Protocol


class Progress(Protocol):
    """What a task calls to say how far it is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Say that `done` of `total` is done in this stage."""


@contextmanager
def show_progress(stream: IO[str] | None = None, *, unit: str = "B") -> Iterator[Progress]:
    """Give a function to call with the stage, what is done and the total; unit "B" shows MB, any other counts."""
    stream = sys.stdout if stream is None else stream
    shown = _Bars(stream, unit) if stream.isatty() else _Lines(stream, unit)
    try:
        yield shown
    finally:
        shown.end_stage()
        shown.close()


class _Lines:
    """A line when a stage begins to take long, every few seconds after that, and when it ends."""

    every = 5.0  # seconds between two of them

    def __init__(self, stream: IO[str], unit: str) -> None:
        self.stream, self.unit = stream, unit
        self.stage = ""
        self.began = self.said = 0.0
        self.done = self.total = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Say it if it is time to: a task may call a million times."""
        now = time.monotonic()
        if stage != self.stage:
            self.end_stage()
            self.stage, self.began, self.said = stage, now, now
        self.done, self.total = done, total
        if now - self.said >= self.every:
            self.said = now
            self.show()

    def end_stage(self) -> None:
        """Say how the stage ended."""
        if self.stage:
            self.show()

    def show(self) -> None:
        """Print the line."""
        seconds = time.monotonic() - self.began
        print(describe(self.stage, self.done, self.total, seconds, self.unit), file=self.stream, flush=True)

    def close(self) -> None:
        """End, after the last stage."""


class _Bars(_Lines):
    """A bar per stage, with the speed and the time left; the finished ones stay."""

    every = 0.1

    def __init__(self, stream: IO[str], unit: str) -> None:
        from rich import progress as kit
        from rich.console import Console

        super().__init__(stream, unit)
        counts: list[kit.ProgressColumn] = [kit.DownloadColumn(), kit.TransferSpeedColumn()]
        if unit != "B":
            counts = [kit.MofNCompleteColumn(), kit.TextColumn(unit)]
        columns = (kit.TextColumn("{task.description:<24}"), kit.BarColumn(), *counts, kit.TimeRemainingColumn())
        self.bars = kit.Progress(*columns, kit.TimeElapsedColumn(), console=Console(file=stream))
        self.tasks: dict[str, kit.TaskID] = {}
        self.bars.start()

    def show(self) -> None:
        """Move the stage's bar."""
        if self.stage not in self.tasks:
            self.tasks[self.stage] = self.bars.add_task(self.stage, total=None)
        self.bars.update(self.tasks[self.stage], completed=self.done, total=self.total or None)

    def end_stage(self) -> None:
        """Bring the stage's bar to its end."""
        self.total = self.total or self.done
        super().end_stage()

    def close(self) -> None:
        """Leave the bars standing."""
        self.bars.stop()


def describe(stage: str, done: int, total: int, seconds: float, unit: str = "B") -> str:
    """Return a plain line: the stage, how much of how much, the rate, and the time left."""
    words = f"{stage}: {amount(done, unit)}"
    if total:
        words += f" of {amount(total, unit)} ({100 * done // total} %)"
    words += f", {duration(seconds)}"
    if done and seconds >= 1:
        words += f", {amount(done / seconds, unit)}/s"
        if done < total:
            words += f", {duration(seconds * (total - done) / done)} left"
    return words


def amount(number: float, unit: str = "B") -> str:
    """Return a number of bytes as kB, MB or GB, or a count of something else with commas."""
    if unit != "B":
        return f"{number:,.0f} {unit}"
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= scale:
            return f"{number / scale:.1f} {name}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """Return seconds as 7 s, 3 min 20 s or 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
