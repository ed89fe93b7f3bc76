"""Training as a live view on a terminal: progress, loss curve, tokens/s, validation at each length, time left."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from lengthen.cli.lines import Clock, conclusion, introduction
from lengthen.training import Outcome, Watcher
from lengthen.training.events import Start
from lengthen.training.log import Record

BARS = "▁▂▃▄▅▆▇█"
COURSE = 60  # columns of the loss's course
MOST = 2047  # losses that it is drawn from; when there are more, neighbours are joined


class Live(Watcher):
    """Draws the run, a few times a second."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.progress = Progress(
            TextColumn("[bold]{task.fields[now]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            expand=True,
        )
        self.screen: Screen | None = None
        self.record: Record = {}
        self.losses: list[float] = []
        self.smooth: float | None = None
        self.evaluations: dict[int, deque[tuple[int, float]]] = {}
        self.saved_at: str = "none yet"

    def started(self, start: Start) -> None:
        """Begin to draw."""
        self.said(introduction(start))
        self.clock = Clock()
        self.train_length = start.config.model.train_length
        self.task = self.progress.add_task(
            "", total=start.config.train.steps, completed=start.first, now="training", left=""
        )
        # The picture is made when it is drawn, not when something happens: steps may be many a second.
        self.screen = Screen(get_renderable=self._picture, console=self.console, refresh_per_second=4, transient=True)
        self.screen.start()

    def stepped(self, record: Record) -> None:
        """Draw the step."""
        self.record = record
        loss = record["loss"]
        self.smooth = loss if self.smooth is None else 0.95 * self.smooth + 0.05 * loss
        self.losses.append(self.smooth)
        if len(self.losses) > MOST:
            self.losses = [(a + b) / 2 for a, b in zip(self.losses[0::2], self.losses[1::2], strict=True)]
        total = self.progress.tasks[self.task].total or record["step"]
        left = self.clock.left(record["step"], int(total))
        self.progress.update(self.task, completed=record["step"], now="training", left=left)

    def evaluating(self, step: int, length: int, fraction: float) -> None:
        """Say what is going on instead of training."""
        self.progress.update(self.task, now=f"validation at {length:,}: {fraction:.0%}")

    def evaluated(self, record: Record) -> None:
        """Draw the length's perplexity beside the earlier ones."""
        kept = self.evaluations.setdefault(record["length"], deque(maxlen=4))
        kept.append((record["step"], record["perplexity"]))

    def saved(self, path: Path, step: int) -> None:
        """Note the checkpoint."""
        self.saved_at = path.name

    def said(self, text: str) -> None:
        """Print it above the picture."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)  # a path stays in one piece

    def ended(self, outcome: Outcome) -> None:
        """Leave the last picture standing, and say where the result is."""
        self.progress.update(self.task, now="done" if outcome.finished else "stopped", left="")
        picture = self._picture()
        self.close()
        self.console.print(picture)
        self.said(conclusion(outcome))

    def close(self) -> None:
        """Stop drawing."""
        if self.screen is not None:
            self.screen.stop()
            self.screen = None

    def _picture(self) -> RenderableType:
        parts: list[RenderableType] = [self.progress]
        if self.record:
            numbers = Table.grid(padding=(0, 3))
            used = self.record["mfu"]
            numbers.add_row(
                f"loss [bold]{self.smooth:.4f}[/]",
                f"{self.record['tokens_per_second']:,.0f} tokens/s",
                "" if used is None else f"{used:.1%} MFU",
                f"lr {self.record['lr']:.2e}",
                f"grad_norm {self.record['grad_norm']:.2f}",
                f"checkpoint {self.saved_at}",
            )
            parts += [numbers, f"[cyan]{course(self.losses, COURSE)}[/]"]
        if self.evaluations:
            parts.append(self._validation())
        return Group(*parts)

    def _validation(self) -> Table:
        table = Table(title="validation perplexity", title_justify="left", box=None, padding=(0, 2))
        table.add_column("length")
        steps = [step for step, _ in next(iter(self.evaluations.values()))]
        for step in steps:
            table.add_column(f"step {step:,}", justify="right")
        for length, kept in self.evaluations.items():
            times = f"{length:,}" if length == self.train_length else f"{length:,} ({length / self.train_length:g}×)"
            known = dict(kept)  # while an evaluation is on, the longer lengths do not have its step yet
            table.add_row(times, *(f"{known[step]:.3f}" if step in known else "" for step in steps))
        return table


def course(values: list[float], columns: int) -> str:
    """Return numbers as a row of bars, the lowest a thin one; each column is the mean of its part of them.

    A column that is not finite is left blank: the run is about to say so, and stop.
    """
    if not values:
        return ""
    columns = min(columns, len(values))
    means = []
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    heights = [(mean - low) / ((high - low) or 1) for mean in means]
    return "".join(BARS[int(height * (len(BARS) - 1))] if math.isfinite(height) else " " for height in heights)
