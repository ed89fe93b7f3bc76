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


@triton.jit(do_not_specialize=["scale", "neg_log2_tolerance"])
def enclose(
    q, k, v, out, residual, lse, spans, rates, mask, bias, ball, sizes, segment, scale, neg_log2_tolerance,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, ALIGN: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr,
    STEADY: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the centre and the radius of one part of one head of keys into the ball that the forward then reads.

    Its arguments are the forward's: kernels that take the same share what Triton compiles to launch them.
    """
    item, part = tl.program_id(0), tl.program_id(1)
    one = tl.arange(0, HEADS)
    falls = fall(bias, one, sizes.heads, sizes.keys, BIAS)
    feature = tl.arange(0, WIDTH)
    centre, radius = ball.centre + item * D + feature, ball.radius + item * ball.parts + part
    if tl.max(tl.where(one // sizes.group == item % sizes.key_heads, falls, 0.0), 0) < FLAT:
        tl.store(centre, feature * 0.0, mask=feature < D)
        tl.store(radius, float("inf"))
        return
    base = of_head(k, item // sizes.key_heads, item % sizes.key_heads, ALIGN)
    chosen = (tl.arange(0, SAMPLE).to(tl.int64) * sizes.keys) // SAMPLE
    some = tl.load(base + chosen[:, None] * k.row * ALIGN + feature[None, :], mask=feature[None, :] < D, other=0.0)
    middle = (tl.sum(some.to(tl.float32), 0) / SAMPLE).to(some.dtype).to(tl.float32)  # which a product takes as it is
    if part == 0:
        tl.store(centre, middle, mask=feature < D)
    worst = tl.zeros([ROWS], tl.float32)
    each = (sizes.keys + (ball.parts * ROWS - 1)) // (ball.parts * ROWS) * ROWS
    for start in tl.range(part * each, tl.minimum(part * each + each, sizes.keys), ROWS):
        start = tl.multiple_of(start, ROWS)
        row = tl.minimum(tl.arange(0, ROWS), sizes.keys - 1 - start)  # rows past the end repeat the last
        away = load(base, row, k.row, start, D, WIDTH, ALIGN).to(tl.float32) - middle[None, :]
        square = tl.sum(away * away, 1)
        worst = tl.maximum(worst, tl.where(square == square, square, float("inf")))
    size = tl.sqrt(tl.max(worst, 0))
    size += SLACK * (size + tl.sqrt(tl.sum(middle * middle, 0)))
    tl.store(radius, tl.where(size == size, size, float("inf")))
