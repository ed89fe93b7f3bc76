"""Runs: blocks of queries that read their keys in one call, so that a few large calls do all the work.

A run is a row of equally tall blocks of queries, each with a window of keys:

    block b     queries start + b·rows …        window     keys lo + b·step … lo + b·step + width − 1

Blocks are the batch of the call, and windows are views that overlap in memory, so nothing is copied. With step = rows
the windows move with their blocks, as a band needs; with step = 0 all blocks read the same keys.

Inside a call rows stand in reverse order. Distance is then a function of row + column, so the bias of all blocks is one
vector per head, seen through strides (1, 1): nothing of the size of the scores is built for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

ROWS = 256  # queries in a block: fewer are slower for each score, more waste work on what they do not see
LEAST = 64  # queries in a block that is cut for there to be one for each thread
WASTE = 1.1  # how much more than needed a call may read, for there to be fewer calls
GRAIN = 1 << 17  # scores for each thread: up to so many, a call may read any amount more
NUMBERS = 1 << 21  # of the queries of one call: 8 MB, which memory is had for without asking the system each time

Window = tuple[int, int]  # keys [lo, hi); empty where lo ≥ hi


class Rows:
    """Numbers of all queries, `[batch or 1, heads or 1, queries, …]`, and the same with the last one first.

    They are reversed once for most runs: each copy of its own would be one more time that threads wait for each other.
    """

    def __init__(self, natural: Tensor) -> None:
        self.natural = natural

    @functools.cached_property
    def reversed(self) -> Tensor:
        """The last row first."""
        return self.natural.flip(2)


@dataclass(frozen=True)
class Run:
    """Some sequences' and heads' blocks of queries, and their windows; several blocks are of one sequence alone."""

    start: int
    blocks: int
    rows: int
    lo: int
    width: int
    step: int
    batch: slice = field(default_factory=lambda: slice(0, 1))
    heads: slice = field(default_factory=lambda: slice(0, 1))
    group: int = 1  # heads that share a key head

    @property
    def at(self) -> tuple[slice, slice, slice]:
        """Where the run's rows are in a tensor `[batch, heads, rows, …]`."""
        return self.batch, self.heads, slice(self.start, self.start + self.blocks * self.rows)

    @property
    def at_keys(self) -> tuple[slice, slice, slice]:
        """Where the keys of all its windows are in a tensor `[batch, key_heads, keys, …]`."""
        heads = slice(self.heads.start // self.group, (self.heads.stop - 1) // self.group + 1)
        return self.batch, heads, slice(self.lo, self.lo + (self.blocks - 1) * self.step + self.width)

    @property
    def last(self) -> int:
        """The row that stands first in the call."""
        return self.start + self.rows * (1 if self.step else self.blocks) - 1

    @property
    def count(self) -> int:
        """How many heads it is of."""
        return int(self.heads.stop - self.heads.start)

    @property
    def scores(self) -> int:
        """How many scores the call has."""
        return int(self.batch.stop - self.batch.start) * self.count * self.blocks * self.rows * self.width

    def take(self, x: Rows) -> Tensor:
        """Return the run's rows of x, `[1 or batch, 1 or heads, rows, …]`, as its call has them."""
        batch = self.batch if x.natural.shape[0] > 1 else slice(None)
        heads = self.heads if x.natural.shape[1] > 1 else slice(None)
        sizes = (self.blocks, self.rows)
        if self.step:
            return torch.unflatten(x.natural[batch, heads, self.at[2]][0], 1, sizes).flip(2).transpose(0, 1)
        end = x.natural.shape[2] - self.start
        rows = x.reversed[batch, heads, end - self.blocks * self.rows : end]
        return rows if self.blocks == 1 else torch.unflatten(rows[0], 1, sizes).transpose(0, 1)

    def restore(self, x: Tensor) -> Tensor:
        """Return what a call made, `[calls, heads, rows, …]`, in the rows' natural order."""
        if self.blocks == 1:
            return x.flip(2)
        x = x.transpose(0, 1)
        return (x.flip(2).flatten(1, 2) if self.step else x.flatten(1, 2).flip(1)).unsqueeze(0)

    def windows(self, x: Tensor) -> Tensor:
        """Return the keys or values of each block, `[calls, key_heads, width, features]`: a view."""
        x = x[self.at_keys]
        if self.step == 0:
            return x if self.blocks == 1 else x.expand(self.blocks, -1, -1, -1)
        return x[0].unfold(1, self.width, self.step).permute(1, 0, 3, 2)

    def add_windows(self, total: Tensor, part: Tensor) -> None:
        """Add what each block gives to the keys of its window to `total`, that of all keys, in a fixed order."""
        into = total[self.at_keys]
        if self.step == 0:
            into += part if self.blocks == 1 else part.sum(dim=0, keepdim=True)
            return
        for at in range(0, self.width, self.step):  # the same stretch of all windows: these do not overlap
            length = min(self.step, self.width - at)
            stretch = into[0, :, at:].unfold(1, length, self.step)[:, : self.blocks]
            stretch.transpose(2, 3).add_(part[:, :, at : at + length].transpose(0, 1))

    def part(self, block: int, blocks: int) -> Run:
        """Return some of the blocks as a run."""
        step = self.step if blocks > 1 else 0
        return replace(
            self, start=self.start + block * self.rows, blocks=blocks, lo=self.lo + block * self.step, step=step
        )

    def split(self, scores: int) -> Iterator[Run]:
        """Cut the run into some of no more than so many scores each, or of one row: by blocks, by heads, by rows."""
        if self.scores <= scores or self.blocks == self.rows == self.count == 1:
            yield self
        elif self.blocks > 1:
            half = self.blocks // 2
            yield from self.part(0, half).split(scores)
            yield from self.part(half, self.blocks - half).split(scores)
        elif self.count > 1:
            for head in range(self.heads.start, self.heads.stop):
                yield from replace(self, heads=slice(head, head + 1)).split(scores)
        else:
            half = self.rows // 2
            yield from replace(self, rows=half).split(scores)
            yield from replace(self, start=self.start + half, rows=self.rows - half).split(scores)

    def spread(self, threads: int) -> Run:
        """Return the run as so many blocks that each thread has one of some head, if rows can be cut like that.

        Torch's backward kernel gives a thread whole blocks, and its forward large parts of tall ones.
        """
        rows = max(LEAST, -(-self.rows * self.count // threads))
        if self.batch.stop - self.batch.start > 1 or self.blocks > 1 or rows >= self.rows or self.rows % rows:
            return self
        return replace(self, blocks=self.rows // rows, rows=rows)

    def of(self, batch: slice, heads: slice, group: int) -> Iterator[Run]:
        """Yield the run for some sequences and heads: its blocks together for each sequence, or sequences together."""
        run, sequences = replace(self, batch=batch, heads=heads, group=group), batch.stop - batch.start
        if sequences == 1 or self.blocks == 1:
            yield run
        elif self.blocks >= sequences:
            yield from (replace(run, batch=slice(b, b + 1)) for b in range(batch.start, batch.stop))
        else:
            yield from (run.part(block, 1) for block in range(self.blocks))


@dataclass(frozen=True)
class Heads:
    """Neighbouring heads whose blocks are read together, a window for each block, and how many keys they need."""

    at: slice
    windows: list[Window]
    needed: int

    def __add__(self, other: Heads) -> Heads:
        """Return both together."""
        pairs = zip(self.windows, other.windows, strict=True)
        windows = [a if b[0] >= b[1] else b if a[0] >= a[1] else (min(a[0], b[0]), max(a[1], b[1])) for a, b in pairs]
        return Heads(slice(self.at.start, other.at.stop), windows, self.needed + other.needed)

    @property
    def keys(self) -> int:
        """How many keys all their blocks read."""
        return int(self.at.stop - self.at.start) * width(self.windows)


def width(windows: Sequence[Window]) -> int:
    """Return how many keys the windows hold."""
    return sum(max(0, hi - lo) for lo, hi in windows)


def worth(read: int, needed: float, heads: int = 1) -> bool:
    """Return whether blocks may read so many keys in one call, in so many heads, where they need fewer."""
    return read <= WASTE * needed or read * ROWS * heads <= GRAIN * torch.get_num_threads()


def together(windows: Sequence[list[Window]], group: int, first: int = 0) -> list[Heads]:
    """Return the heads from `first` on, whose windows these are, in groups that are read together.

    Where heads share keys, a group is of one key head or of whole key heads, as a call can take them.
    """
    pieces = [Heads(slice(h, h + 1), own, width(own)) for h, own in enumerate(windows, first)]

    def joined(fit: Callable[[int, int], bool]) -> list[Heads]:
        done = pieces[:1]
        for piece in pieces[1:]:
            both = done[-1] + piece
            if fit(both.at.start, both.at.stop) and worth(both.keys, both.needed):
                done[-1] = both
            else:
                done.append(piece)
        return done

    if group > 1:
        pieces = joined(lambda start, stop: start // group == (stop - 1) // group)
    return joined(lambda start, stop: start % group == 0 and stop % group == 0)


def plan(
    windows: Sequence[Window], queries: int, keys: int, heads: int, features: int, ends: str = "", before: int = 0
) -> Iterator[Run]:
    """Yield runs in which each block of `ROWS` queries reads its window, or a little more, in so many heads at once.

    Windows that move with their blocks are read together; of the others, neighbouring blocks become one while that
    reads little more, or keeps threads busy. `ends` says of which end nothing more may be read: "lo", "hi", or neither;
    a block has read `before` keys there, on average, and little more than them and what it needs is little too.
    """
    most, little = max(1, NUMBERS // (heads * ROWS * features)), (1 - 1 / WASTE) * before

    def ends_alike(lo: int, hi: int, next_lo: int, next_hi: int) -> bool:
        return (ends != "lo" or lo == next_lo) and (ends != "hi" or hi == next_hi)

    i = 0
    while i < len(windows):
        (lo, hi), here = windows[i], i * ROWS
        n, needed, low, high = 1, hi - lo, lo - here, hi - here  # low and high are relative to the block
        blocks, reach = n, needed
        while needed > 0 and blocks < most and here + (blocks + 1) * ROWS <= queries:
            next_lo, next_hi = (key - here - blocks * ROWS for key in windows[i + blocks])
            wide_lo, wide_hi, blocks = min(low, next_lo), max(high, next_hi), blocks + 1
            reach += max(0, next_hi - next_lo)
            inside = here + wide_lo >= 0 and here + (blocks - 1) * ROWS + wide_hi <= keys
            empty = next_lo >= next_hi
            if not inside or not ends_alike(low, high, next_lo, next_hi) or (empty and not ends):
                break
            if not empty:
                if not worth(blocks * (wide_hi - wide_lo), reach + blocks * little, heads):
                    break
                low, high, needed, n = wide_lo, wide_hi, reach, blocks
        if n > 1:
            yield Run(here, n, ROWS, here + low, high - low, ROWS)
        elif needed > 0:
            while i + n < len(windows) and n < most:
                next_lo, next_hi = windows[i + n]
                wide_lo, wide_hi, more = min(lo, next_lo), max(hi, next_hi), needed + next_hi - next_lo
                if next_lo >= next_hi or not ends_alike(lo, hi, next_lo, next_hi):
                    break
                if not worth((n + 1) * (wide_hi - wide_lo), more, heads):
                    break
                lo, hi, needed, n = wide_lo, wide_hi, more, n + 1
            yield Run(here, 1, min(n * ROWS, queries - here), lo, hi - lo, 0)
        i += n
