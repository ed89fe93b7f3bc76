"""A ball around the keys of each head, for reach, in one pass over them.

Any centre will do, so a program takes the mean of a few keys, the same few in every program, and no pass before this
one is needed. Each program writes the largest distance from it among its part of the keys; who uses the ball takes the
largest of all parts. A distance that is NaN counts as infinite. Heads whose bias falls so little that reach would save
less than the pass costs are passed over: their radius is infinite, and they read everything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.backends.triton.tile import LINEAR, LOG2E, load, of_head

SAMPLE = tl.constexpr(16)  # keys whose mean is the centre
PARTS = tl.constexpr(32)  # of a head's keys, at most
SLACK = tl.constexpr(1e-4)  # by which norms are widened: more than rounding can hide in them, or in the scores read
FLAT = tl.constexpr(30.0)  # a bias that falls by less than this over all keys leaves too few unread to pay


@triton.jit
def fall(bias, head, heads, keys, BIAS: tl.constexpr):
    """Return by how much the biases of heads fall over all keys, both sides together; 0 where there is no head."""
    there = head < heads
    if BIAS == LINEAR:
        slope = tl.load(bias.slopes + head, mask=there, other=0.0).to(tl.float32)
        ahead = tl.load(bias.ahead + head, mask=there, other=0.0).to(tl.float32)
        return tl.maximum(slope, ahead) * keys
    tails = bias.tails + head * bias.steps
    first, last = tl.load(tails, mask=there, other=0.0), tl.load(tails + bias.steps - 2, mask=there, other=0.0)
    return tl.where(there, (first - last) / LOG2E, 0.0)


@triton.jit
def ball(
    k, centre, radius, bias, sizes, count, per_part,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, ALIGN: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Write the centre `[batch·key_heads, D]` and one part's radius `[batch·key_heads, count]` of one head of keys."""
    item, part = tl.program_id(0), tl.program_id(1)
    one = tl.arange(0, HEADS)
    falls = fall(bias, one, sizes.heads, sizes.keys, BIAS)
    feature = tl.arange(0, WIDTH)
    if tl.max(tl.where(one // sizes.group == item % sizes.key_heads, falls, 0.0), 0) < FLAT:
        tl.store(centre + item * D + feature, feature * 0.0, mask=feature < D)
        tl.store(radius + item * count + part, float("inf"))
        return
    base = of_head(k, item // sizes.key_heads, item % sizes.key_heads, ALIGN)
    chosen = (tl.arange(0, SAMPLE).to(tl.int64) * sizes.keys) // SAMPLE
    some = tl.load(base + chosen[:, None] * k.row * ALIGN + feature[None, :], mask=feature[None, :] < D, other=0.0)
    middle = (tl.sum(some.to(tl.float32), 0) / SAMPLE).to(some.dtype).to(tl.float32)  # which a product takes as it is
    if part == 0:
        tl.store(centre + item * D + feature, middle, mask=feature < D)
    worst = tl.zeros([ROWS], tl.float32)
    begin = part * per_part
    for start in tl.range(begin, tl.minimum(begin + per_part, sizes.keys), ROWS):
        start = tl.multiple_of(start, ROWS)
        row = tl.minimum(tl.arange(0, ROWS), sizes.keys - 1 - start)  # rows past the end repeat the last
        away = load(base, row, k.row, start, D, WIDTH, ALIGN).to(tl.float32) - middle[None, :]
        square = tl.sum(away * away, 1)
        worst = tl.maximum(worst, tl.where(square == square, square, float("inf")))
    size = tl.sqrt(tl.max(worst, 0))
    size += SLACK * (size + tl.sqrt(tl.sum(middle * middle, 0)))
    tl.store(radius + item * count + part, tl.where(size == size, size, float("inf")))
