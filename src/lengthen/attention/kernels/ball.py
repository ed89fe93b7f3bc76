"""A ball around the keys of each head, for reach, in one pass over them; and the order in which heads get their turn.

Any centre will do, so a program takes the mean of a few keys, the same few in every program, and no pass before this
one is needed. The radius is the largest distance from it, by an atomic maximum of integers, whose order does not
matter: positive floats compare as their bits do. A distance that is NaN counts as infinite.
"""

from __future__ import annotations

import triton
import triton.language as tl

SAMPLE = tl.constexpr(64)  # keys whose mean is the centre


@triton.jit  # type: ignore[untyped-decorator]
def ball(  # type: ignore[no-untyped-def]
    k, centre, notes, slopes, kb, kh, kl, batch, key_heads, heads, keys, per_program,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Write the centre `[batch·key_heads, D]` and the square of the radius, as bits, of one head of keys."""
    radius = notes
    order = radius + batch * key_heads + 2 * batch * heads + 1
    part, head = tl.program_id(0), tl.program_id(1)
    base = k + (head // key_heads).to(tl.int64) * kb + (head % key_heads).to(tl.int64) * kh
    feature = tl.arange(0, WIDTH)
    middle = tl.zeros([WIDTH], tl.float32)
    if CENTRED:
        chosen = (tl.arange(0, SAMPLE).to(tl.int64) * keys) // SAMPLE
        some = tl.load(base + chosen[:, None] * kl + feature[None, :], mask=feature[None, :] < D, other=0.0)
        middle = tl.sum(some.to(tl.float32), 0) / SAMPLE
    if part == 0:
        tl.store(centre + head * D + feature, middle, mask=feature < D)
        if head == 0:  # the flattest head reads most: it comes first, so that the last to finish are short
            one = tl.arange(0, HEADS)
            slope = tl.load(slopes + one, mask=one < heads, other=float("inf"))
            sooner = (slope[:, None] > slope[None, :]) | (
                (slope[:, None] == slope[None, :]) & (one[:, None] > one[None, :])
            )
            rank = tl.sum(sooner.to(tl.int32), 1)
            tl.store(order + rank, one, mask=one < heads)
    worst = tl.zeros([ROWS], tl.float32)
    begin = part * per_program
    for start in range(begin, tl.minimum(begin + per_program, keys), ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < keys) & (feature[None, :] < D)
        away = tl.load(base + row[:, None].to(tl.int64) * kl + feature[None, :], mask=inside, other=0.0).to(tl.float32)
        away = tl.where(inside, away - middle[None, :], 0.0)
        square = tl.sum(away * away, 1)
        square = tl.where(square == square, square, float("inf"))
        worst = tl.maximum(worst, square)
    tl.atomic_max(radius + head, tl.max(worst, 0).to(tl.int32, bitcast=True), sem="relaxed")
