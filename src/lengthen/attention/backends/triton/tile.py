"""What every kernel shares: its arguments, which keys a query sees, and the scores of a tile of queries and keys.

Scores are held in units of log 2, since a GPU has exp2 and no exp. A tile may be [queries, keys] or [keys, queries]:
positions and keys come in as a column and a row, whichever way round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as when the kernels were made
LOG2E = tl.constexpr(1.4426950408889634)
NONE, LINEAR, TABLE, EXTENDED = (tl.constexpr(i) for i in range(4))  # what a score gets added


class Matrix(NamedTuple):
    """A tensor `[batch, heads, rows, features]` with features beside each other; strides are in units of ALIGN."""

    data: Any
    batch: Any
    head: Any
    row: Any


class Mask(NamedTuple):
    """Which keys a query sees: a band (masks.py), or int32 lists `[batch or 1, queries]`; and where queries stand."""

    first: Any
    last: Any
    listed: Any  # 0: a band; 1: lists
    stride: Any  # from one sequence's list to the next's
    shift: Any
    block: Any
    starts: Any  # int32 [batch], where `moving`; else all sequences' first query stands at q_start
    moving: Any
    q_start: Any


class Bias(NamedTuple):
    """Slopes, or a table of both sides from its distance 0 on, in units of log 2; and a table's tails, for reach."""

    slopes: Any
    ahead: Any
    table: Any
    stride: Any  # from one head's table to the next's
    level: Any  # the distance from which on an extended table has its last value
    level_ahead: Any
    tails: Any  # T(D) at D = 0, TAIL_STEP, 2·TAIL_STEP, … of both sides: [2, heads, steps]
    steps: Any


class Ball(NamedTuple):
    """Balls around the keys `[batch · key_heads, …]`: a centre, and the radii of `parts` parts of them; 0: none."""

    centre: Any
    radius: Any
    parts: Any


class Sizes(NamedTuple):
    """How many there are of each."""

    batch: Any
    heads: Any
    key_heads: Any
    group: Any  # heads that share a key head
    queries: Any
    keys: Any


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Let the next kernel's programs come while the last of this one's still run: they wait by `wait_for_last`."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Wait until all that the kernel before this one wrote is there, if this one was let begin early."""
    if EARLY:
        gdc_wait()


@triton.jit
def of_head(x, b, h, ALIGN: tl.constexpr):
    """Return where the rows of one sequence and head begin."""
    return x.data + b.to(tl.int64) * x.batch * ALIGN + h.to(tl.int64) * x.head * ALIGN


@triton.jit
def load(base, row, stride, start, width, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Return the rows start + row of a matrix, `[rows, WIDTH]`; 0 past its width.

    What changes from block to block is added last, so that a loop need not compute the rest again.
    """
    feature = tl.arange(0, WIDTH)
    place = (base + (row[:, None] * (stride * ALIGN) + feature[None, :])) + start.to(tl.int64) * (stride * ALIGN)
    if width == WIDTH:
        return tl.load(place)
    return tl.load(place, mask=feature[None, :] < width, other=0.0)


@triton.jit
def load_between(base, row, stride, start, lo, hi, width, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Return the same; 0 for rows outside [lo, hi)."""
    feature = tl.arange(0, WIDTH)
    place = (base + (row[:, None] * (stride * ALIGN) + feature[None, :])) + start.to(tl.int64) * (stride * ALIGN)
    there = ((start + row)[:, None] >= lo) & ((start + row)[:, None] < hi)
    if width == WIDTH:
        return tl.load(place, mask=there, other=0.0)
    return tl.load(place, mask=there & (feature[None, :] < width), other=0.0)


@triton.jit
def load_before(base, row, stride, start, hi, width, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Return the same; 0 for rows from hi on."""
    feature = tl.arange(0, WIDTH)
    place = (base + (row[:, None] * (stride * ALIGN) + feature[None, :])) + start.to(tl.int64) * (stride * ALIGN)
    there = row[:, None] < hi - start
    if width == WIDTH:
        return tl.load(place, mask=there, other=0.0)
    return tl.load(place, mask=there & (feature[None, :] < width), other=0.0)


@triton.jit
def first_position(mask, b):
    """Return where a sequence's first query stands."""
    q_start = mask.q_start + 0
    if mask.moving != 0:
        q_start = tl.load(mask.starts + b)
    return q_start


@triton.jit
def interval(row, position, mask, b, keys, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr):
    """Return the first and the last key that queries see, as `Mask.interval` does; EDGED: the first may not be 0."""
    begin = position * 0
    end = begin + (keys - 1) if TWO_SIDED else tl.minimum(position, keys - 1)
    if EDGED:
        begin = position - mask.shift
        if mask.block > 1:
            begin = begin // mask.block * mask.block
        begin = tl.maximum(begin, 0)
        if mask.listed != 0:
            begin = tl.load(mask.first + b * mask.stride + row)
            end = tl.load(mask.last + b * mask.stride + row)
    return begin, end


@triton.jit
def extent(begin, end, start, here, rows, mask, b, keys, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr):
    """Return the keys [lo, hi) that some query of a block sees, and [full_lo, full_hi) that all see.

    `begin` and `end` are what each of the `rows` queries from `start` on sees, which stand from `here` on. In a band a
    later query sees later keys, so that the first and the last tell for all.
    """
    lo, full_hi = interval(start, here, mask, b, keys, TWO_SIDED, EDGED)
    full_lo, hi = interval(start + rows - 1, here + rows - 1, mask, b, keys, TWO_SIDED, EDGED)
    if EDGED:  # noqa: SIM102 (one is known when compiling, the other when running)
        if mask.listed != 0:
            some = begin <= end
            lo = tl.min(tl.where(some, begin, 1 << 30), 0)
            hi = tl.max(tl.where(some, end, -1), 0)
            full_lo = tl.max(begin, 0)
            full_hi = tl.min(end, 0)
    hi = tl.maximum(hi + 1, 0)
    return tl.minimum(lo, hi), hi, tl.maximum(full_lo, 0), tl.maximum(full_hi + 1, 0)


@triton.jit
def entries(table, position, key, visible, bias, MASKED: tl.constexpr, BIAS: tl.constexpr):
    """Return a table's values for a tile, anything where hidden; without a table, nothing to speak of.

    A load that Triton knows would go through shared memory twice: into the loop's pipeline, and out of it to those
    who want it. Written as an instruction, it goes to them at once.
    """
    entry = 0.0
    if BIAS == TABLE or BIAS == EXTENDED:  # noqa: SIM109 (Triton knows no `in`)
        distance = position - key
        if BIAS == EXTENDED:
            distance = tl.maximum(tl.minimum(distance, bias.level), -bias.level_ahead)
        if MASKED:
            distance = tl.where(visible, distance, 0)
        place = table + distance.to(tl.int64)  # in 64 bits, offsets become part of the instruction
        if INTERPRETED:
            entry = tl.load(place)
        else:
            entry = tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [place.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
            )
    return entry


@triton.jit
def linear(position, key, here, slope, ahead, TWO_SIDED: tl.constexpr):
    """Return ALiBi's bias for a tile, of distances that are exact: counted in floats from a place nearby."""
    distance = (position - here).to(tl.float32) - (key - here).to(tl.float32)
    if TWO_SIDED:
        return tl.where(distance >= 0, -slope * distance, ahead * distance)
    return -slope * distance


@triton.jit
def slopes_of(bias, h, BIAS: tl.constexpr):
    """Return a head's slopes behind and ahead, in units of log 2; 0 where there are none."""
    slope, ahead = 0.0, 0.0
    if BIAS == LINEAR:
        slope = tl.load(bias.slopes + h).to(tl.float32) * LOG2E
        ahead = tl.load(bias.ahead + h).to(tl.float32) * LOG2E
    return slope, ahead


@triton.jit
def power(rates, h, steps, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return a head's decay over so many steps, `[steps, WIDTH]`; rates are in units of log 2, `[heads, D]`."""
    feature = tl.arange(0, WIDTH)
    rate = tl.load(rates + h * D + feature, mask=feature < D, other=0.0)
    return tl.exp2(rate[None, :] * steps[:, None].to(tl.float32))
