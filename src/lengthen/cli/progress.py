"""Progress of a long task: a live line in a terminal, and elsewhere a plain line every few seconds.

    with show_progress() as progress:
        for done in …:
            progress("tokenising", done, total)

The stage's name, what is done and what there is to do; a total of 0 is one that is not known. Calls may be as many as
one likes: most of them return at once. A terminal gets a bar, the rate and the time left if rich is installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Protocol

PLAIN_SECONDS = 5.0  # between two plain lines
LIVE_SECONDS = 0.1  # between two updates of the bar


class Progress(Protocol):
    """What a task calls to say how far it is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Say that `done` of `total` is done in this stage."""


@contextmanager
def show_progress(stream: IO[str] | None = None, *, unit: str = "B") -> Iterator[Progress]:
    """Give a function to call with the stage, what is done and the total; unit "B" shows MB, any other counts."""
    stream = sys.stdout if stream is None else stream
    if stream.isatty():
        try:
            import rich.progress
        except ImportError:
            pass
        else:
            with _bar(rich, stream, unit) as bar:
                live = _Live(bar)
                yield live
                live.close()
            return
    plain = _Plain(stream, unit)
    try:
        yield plain
    finally:
        plain.close()


class _Plain:
    """A line when a stage begins to take long, every few seconds after that, and when it ends."""

    def __init__(self, stream: IO[str], unit: str) -> None:
        self._stream, self._unit = stream, unit
        self._stage = ""
        self._began = self._said = time.monotonic()
        self._done = self._total = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self.close()
            self._stage, self._began, self._said = stage, now, now
        # The line is only made when it is due: a task may call a million times.
        self._done, self._total = done, total
        if now - self._said >= PLAIN_SECONDS:
            self._said = now
            self._print()

    def close(self) -> None:
        """Say how the stage ended."""
        if self._stage:
            self._print()
        self._stage = ""

    def _print(self) -> None:
        line = describe(self._stage, self._done, self._total, time.monotonic() - self._began, self._unit)
        print(line, file=self._stream, flush=True)


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


class _Live:
    """A bar a stage; the finished ones stay."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task: Any = None
        self._stage = ""
        self._state = (0, 0)
        self._said = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.close()
            self._task, self._stage, self._said = self._bar.add_task(stage, total=total or None), stage, 0.0
        self._state = (done, total)
        now = time.monotonic()
        if now - self._said >= LIVE_SECONDS:
            self._said = now
            self._bar.update(self._task, completed=done, total=total or None)

    def close(self) -> None:
        """Bring the stage's bar to where the stage ended."""
        if self._task is not None:
            done, total = self._state
            self._bar.update(self._task, completed=done, total=total or done)
            self._bar.stop_task(self._task)


@contextmanager
def _bar(rich: Any, stream: IO[str], unit: str) -> Iterator[Any]:
    from rich.console import Console

    kit = rich.progress
    if unit == "B":
        counts = [kit.DownloadColumn(), kit.TransferSpeedColumn()]
    else:
        counts = [kit.MofNCompleteColumn(), kit.TextColumn(unit)]
    columns = [kit.TextColumn("{task.description:<24}"), kit.BarColumn(), *counts, kit.TimeRemainingColumn()]
    with kit.Progress(*columns, kit.TimeElapsedColumn(), console=Console(file=stream)) as bar:
        yield bar
