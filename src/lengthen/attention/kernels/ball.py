"""A ball around the keys of each head, for reach, in one pass over them; and the order in which heads get their turn.

Any centre will do, so a program takes the mean of a few keys, the same few in every program, and no pass before this
one is needed. The radius is the largest distance from it, by an atomic maximum of integers, whose order does not
matter: positive floats compare as their bits do. A distance that is NaN counts as infinite. Heads whose slope is
so flat that reach would save less than the pass costs are passed over: they read everything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.kernels.tile import SIZES, load

SAMPLE = tl.constexpr(16)  # keys whose mean is the centre
SLACK = tl.constexpr(1e-4)  # by which norms are widened: more than rounding can hide in them, or in the scores read
FLAT = tl.constexpr(30.0)  # a bias that falls by less than this over all keys leaves too few unread to pay


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def ball(  # type: ignore[no-untyped-def]
    k, centre, notes, slopes, kb, kh, kl, batch, key_heads, heads, keys, per_program,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the centre `[batch·key_heads, D]` and the radius, as bits, of one head of keys; ∞ where nobody asks."""
    radius = notes
    order = radius + batch * key_heads + 2 * batch * heads + 1
    head, part = tl.program_id(0), tl.program_id(1)
    one = tl.arange(0, HEADS)
    slope = tl.load(slopes + one, mask=one < heads, other=float("inf"))
    if part == 0 and head == 0:  # the flattest head reads most: it comes first, so that the last to finish are short
        tied = (slope[:, None] == slope[None, :]) & (one[:, None] > one[None, :])
        rank = tl.sum(((slope[:, None] > slope[None, :]) | tied).to(tl.int32), 1)
        tl.store(order + rank, one, mask=one < heads)
    group = heads // key_heads
    steepest = tl.max(tl.where(one // group == head % key_heads, tl.where(one < heads, slope, 0.0), 0.0), 0)
    feature = tl.arange(0, WIDTH)
    if steepest * keys < FLAT:
        if part == 0:
            tl.store(centre + head * D + feature, tl.zeros([WIDTH], tl.float32), mask=feature < D)
            tl.store(radius + head, 0x7F800000)
        return
    base = k + (head // key_heads).to(tl.int64) * kb + (head % key_heads).to(tl.int64) * kh
    chosen = (tl.arange(0, SAMPLE).to(tl.int64) * keys) // SAMPLE
    some = tl.load(base + chosen[:, None] * kl + feature[None, :], mask=feature[None, :] < D, other=0.0)
    middle = tl.sum(some.to(tl.float32), 0) / SAMPLE
    if part == 0:
        tl.store(centre + head * D + feature, middle, mask=feature < D)
    worst = tl.zeros([ROWS], tl.float32)
    begin = part * per_program
    for start in tl.range(begin, tl.minimum(begin + per_program, keys), ROWS):
        start = tl.multiple_of(start, ROWS)
        row = tl.minimum(tl.arange(0, ROWS), keys - 1 - start)  # rows past the end repeat the last
        away = load(base + start.to(tl.int64) * kl, row, kl, D, keys, WIDTH, False).to(tl.float32) - middle[None, :]
        square = tl.sum(away * away, 1)
        square = tl.where(square == square, square, float("inf"))
        worst = tl.maximum(worst, square)
    size = tl.sqrt(tl.max(worst, 0))
    size += SLACK * (size + tl.sqrt(tl.sum(middle * middle, 0)))
    size = tl.where(size == size, size, float("inf"))
    tl.atomic_max(radius + head, size.to(tl.int32, bitcast=True), sem="relaxed")
