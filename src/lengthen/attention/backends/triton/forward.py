"""The forward: FlashAttention's, from the diagonal outwards, ending where reach says that it may.

A program holds a block of M queries of one head, and a running softmax over the keys read so far:

    m_i   the score whose weight is 1        l_i   Σ_j exp2(s_ij − m_i)        acc   Σ_j exp2(s_ij − m_i)·v_j

1. It reads the keys at the diagonal, which only some of its queries see, with a mask.
2. It asks how far back anything can still matter (reach.py), reads up to AGAIN keys that all see, and asks again.
3. It reads the rest, and what only some see at a window's far edge.
4. It writes out = acc / l_i, lse = m_i + log l_i, the keys [lo, hi) that it read and those that all its queries see,
   and whether the result can be trusted.

m_i is the highest score at the diagonal, and stays: nothing is searched for or rescaled afterwards, and weights are
rounded alike whatever else is read. float16 cannot hold weights far above 1: there, and with keys ahead of the query,
m_i is the running maximum, rounded up to a whole number.

repair.py then does again the blocks that could not be trusted. The kernel is one long function, since its ways through
the keys (back alone, both ways, by segments of a decay) share the softmax above.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lengthen.attention.backends.triton.ball import PARTS, SLACK
from lengthen.attention.backends.triton.tile import (
    EXTENDED,
    LINEAR,
    LOG2E,
    NONE,
    entries,
    extent,
    first_position,
    interval,
    let_next_begin,
    linear,
    load,
    load_before,
    of_head,
    power,
    slopes_of,
)

AGAIN = tl.constexpr(1024)  # keys that are read before reach is asked once more
STAYING, RUNNING, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # m_i: as it is, the maximum, rounded up
LEAST = tl.constexpr(2.0**-90)  # how small an l_i is not trusted
SHOWN, AHEAD, EDGES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # which keys may be hidden: none, far ones, any
TAIL_STEP, TAILS = tl.constexpr(64), tl.constexpr(256)  # distances between a table's tails, and how many are looked at


class Rows(NamedTuple):
    """The queries of a block: where they stand, what they see, and slope·(position − here)."""

    position: Any
    begin: Any
    end: Any
    offset: Any


class Head(NamedTuple):
    """The keys and values of a head, those [lo, hi) of them that the block sees, and the head's bias."""

    k: Any
    v: Any
    k_row: Any
    v_row: Any
    lo: Any
    hi: Any
    slope: Any
    ahead: Any
    table: Any


@triton.jit
def tile_scores(
    q, head, rows, bias, here, start, scale, tile_bias,
    D: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, ALIGN: tl.constexpr, BIAS: tl.constexpr,
    TWO_SIDED: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of a block of keys, −∞ where hidden.

    Where all is seen, of ALiBi's bias only a ramp along the block is in them, the same for all blocks; what remains is
    a number for each row, slope·(position − start). At the diagonal distances are exact: there steep slopes must be.
    """
    column = tl.arange(0, N)
    key = start + column
    visible = key[None, :] <= rows.end[:, None]
    if HIDDEN == EDGES:
        visible = visible & (key[None, :] >= rows.begin[:, None])
    if HIDDEN == SHOWN:
        k = load(head.k, column, head.k_row, start, D, WIDTH, ALIGN)
    else:
        k = load_before(head.k, column, head.k_row, start, head.hi, D, WIDTH, ALIGN)
    entry = entries(head.table, rows.position[:, None], key[None, :], visible, bias, HIDDEN != SHOWN, BIAS)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if BIAS == LINEAR:
        if HIDDEN != SHOWN or TWO_SIDED:
            score += linear(rows.position[:, None], key[None, :], start, head.slope, head.ahead, TWO_SIDED)
        else:
            score += (head.slope * column.to(tl.float32))[None, :]
    elif BIAS == NONE:
        score += tile_bias
    else:
        score += entry
    if HIDDEN != SHOWN:
        score = tl.where(visible, score, float("-inf"))
    return score


@triton.jit
def attend_tile(
    acc, l_i, m_i, q, head, rows, bias, here, lo, hi, scale, tile_bias,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, ALIGN: tl.constexpr,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, HIDDEN: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Read the keys [lo, hi), lo a multiple of N, into the running softmax.

    HIDDEN says which of them some queries do not see: those too far ahead (AHEAD), or any (EDGES). `tile_bias` is one
    bias for the whole tile, used where there is no other.
    """
    RAMP: tl.constexpr = BIAS == LINEAR and HIDDEN == SHOWN and not TWO_SIDED
    for start in tl.range(lo, hi, N):
        start = tl.multiple_of(start, N)
        score = tile_scores(
            q, head, rows, bias, here, start, scale, tile_bias, D, WIDTH, N, ALIGN, BIAS, TWO_SIDED, HIDDEN, PRECISION
        )
        shift = head.slope * (start - here).to(tl.float32)
        if HIDDEN == SHOWN:
            v = load(head.v, tl.arange(0, N), head.v_row, start, DV, VALUES, ALIGN)
        else:
            v = load_before(head.v, tl.arange(0, N), head.v_row, start, head.hi, DV, VALUES, ALIGN)
        if UNIT == STAYING:
            p = tl.exp2(score - ((m_i + rows.offset) - shift if RAMP else m_i)[:, None])
            l_i += tl.sum(p, 1)
        else:
            highest = tl.max(score, 1) + (shift - rows.offset) if RAMP else tl.max(score, 1)
            m_new = tl.maximum(m_i, tl.ceil(highest) if UNIT == WHOLE else highest)
            unit = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(score - (unit + (rows.offset - shift) if RAMP else unit)[:, None])
            alpha = tl.exp2(m_i - unit)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            m_i = m_new
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l_i, m_i


@triton.jit
def attend(
    acc, l_i, m_i, q, head, rows, bias, here, lo, hi, full_lo, full_hi, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, ALIGN: tl.constexpr,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Read the keys [lo, hi), with a mask only outside [full_lo, full_hi), from the nearest to the farthest."""
    inner_hi = tl.maximum(tl.minimum(full_hi, tl.maximum(hi - 1, 0) // N * N), lo // N * N)
    inner_lo = tl.minimum(tl.maximum(full_lo, (lo + (N - 1)) // N * N), inner_hi)
    acc, l_i, m_i = attend_tile(
        acc, l_i, m_i, q, head, rows, bias, here, inner_hi, hi, scale, 0.0,
        D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGES if EDGED else AHEAD, NEAR, PRECISION,
    )  # fmt: skip
    if FAR == STAYING:
        m_i = tl.where((m_i == float("-inf")) & (inner_lo < inner_hi), 0.0, m_i)
    acc, l_i, m_i = attend_tile(
        acc, l_i, m_i, q, head, rows, bias, here, inner_lo, inner_hi, scale, 0.0,
        D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, SHOWN, FAR, PRECISION,
    )  # fmt: skip
    if EDGED:
        acc, l_i, m_i = attend_tile(
            acc, l_i, m_i, q, head, rows, bias, here, lo // N * N, inner_lo, scale, 0.0,
            D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGES, NEAR, PRECISION,
        )  # fmt: skip
    return acc, l_i, m_i


@triton.jit
def one_less_exp(slope2):
    """Return 1 − e^(−m), or a little less, for a slope in units of log 2."""
    m = slope2 / LOG2E
    return tl.where(m < 0.5, m - 0.5 * m * m, 1.0 - tl.exp2(-slope2))


@triton.jit
def reach(spare, local, slope, tails, steps, unread, BIAS: tl.constexpr):
    """Return how far from the block's first place the farthest key stands that some query must read; ∞: all there are.

    `spare` is lse + log tolerance − s, which the tail of the unread keys must be below. Queries stand `local` from that
    place, away from those keys; `unread` says which have more to read on that side.
    """
    if BIAS == LINEAR:
        far = -(spare + tl.log2(one_less_exp(slope))) / slope - local
        far = tl.where(far == far, far, float("inf"))
        return tl.max(tl.where(unread, far, float("-inf")), 0)
    spare = tl.where(spare == spare, spare, float("-inf"))
    least = tl.min(tl.where(unread, spare, float("inf")), 0)
    above, start = steps * 0, steps * 0
    while start < steps:  # a table's tails fall: as many as are above are the first ones
        step = start + tl.arange(0, TAILS)
        tail = tl.load(tails + step, mask=step < steps, other=float("-inf"))
        more = tl.sum((tail > least).to(tl.int32), 0)
        above += more
        start = tl.where(more == TAILS, start + TAILS, steps)
    far = (above * TAIL_STEP).to(tl.float32) - tl.min(local, 0)
    return tl.where(above == steps, float("inf"), far)


@triton.jit
def key_behind(far, here, lo, unread, N: tl.constexpr):
    """Return the block of keys that reading may end at, between lo and unread; one key more makes up for rounding."""
    low = tl.floor(tl.maximum(-far - 1.0, (lo - here).to(tl.float32)))
    low = tl.minimum(low, (unread - here).to(tl.float32))
    return tl.maximum(here + low.to(tl.int32), lo) // N * N


@triton.jit
def key_ahead(far, here, hi, unread):
    """Return the key that reading ahead may end at (exclusive), between unread and hi."""
    high = tl.ceil(tl.minimum(far + 2.0, (hi - here).to(tl.float32)))
    high = tl.maximum(high, (unread - here).to(tl.float32))
    return tl.minimum(here + high.to(tl.int32), hi)


@triton.jit(do_not_specialize=["scale", "neg_log2_tolerance"])
def forward(
    q, k, v, out, residual, lse, spans, rates, mask, bias, ball, sizes, segment, scale, neg_log2_tolerance,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ALIGN: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr, STEADY: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write out, lse, the keys that each block of queries read, and whether it can be trusted."""
    let_next_begin(EARLY)
    blocks = (sizes.queries + (M - 1)) // M
    block = blocks - 1 - tl.program_id(0) % blocks
    b = tl.program_id(0) // blocks
    key_head = sizes.key_heads - 1 - tl.program_id(1)  # ALiBi's flattest heads, which read most, are the last
    h = key_head * sizes.group + (sizes.group - 1 - tl.program_id(2))
    item, items = (b * sizes.heads + h) * blocks + block, sizes.batch * sizes.heads * blocks
    lost_here, odd_here = spans + 4 * items + item, spans + 5 * items + item
    tl.store(lost_here, 0)
    tl.store(odd_here, 0)
    tl.static_assert(AGAIN % N == 0, "reach asks at whole blocks of keys")
    NEAR: tl.constexpr = RUNNING if STEADY else WHOLE
    FAR: tl.constexpr = STAYING if STEADY else WHOLE
    of_keys = b * sizes.key_heads + key_head

    local = tl.minimum(tl.arange(0, M), sizes.queries - 1 - block * M)  # rows past the end repeat the last
    row = block * M + local
    here = first_position(mask, b) + block * M
    position = here + local
    begin, end = interval(row, position, mask, b, sizes.keys, TWO_SIDED, EDGED)
    count = tl.minimum(M, sizes.queries - block * M)
    lo, hi, seen_lo, seen_hi = extent(begin, end, block * M, here, count, mask, b, sizes.keys, TWO_SIDED, EDGED)
    full_hi = seen_hi // N * N
    full_lo = tl.minimum((seen_lo + (N - 1)) // N * N, full_hi)
    slope, ahead = slopes_of(bias, h, BIAS)
    away = local.to(tl.float32)
    rows = Rows(position, begin, end, slope * away)
    head = Head(
        of_head(k, b, key_head, ALIGN), of_head(v, b, key_head, ALIGN), k.row, v.row, lo, hi, slope, ahead,
        bias.table + h.to(tl.int64) * bias.stride,
    )  # fmt: skip
    base_q = of_head(q, b, h, ALIGN)
    queries = load(base_q, local, q.row, block * M, D, WIDTH, ALIGN)
    scale2 = scale * LOG2E

    acc = tl.zeros([M, VALUES], tl.float32)
    l_i = tl.zeros([M], tl.float32)
    m_i = tl.full([M], float("-inf"), tl.float32)

    if BIAS != NONE:  # the highest score that any key can have, less log tolerance: −spare is this − lse
        bound = tl.full([M], float("inf"), tl.float32)
        if ball.parts > 0:
            # By matrix products, since converting the queries to float32 would take longer.
            feature, part, row_of = tl.arange(0, WIDTH), tl.arange(0, PARTS), tl.arange(0, M)
            squares = tl.dot(queries, tl.trans(queries), input_precision=PRECISION)
            squares = tl.sum(tl.where(row_of[:, None] == row_of[None, :], squares, 0.0), 1)
            centre = tl.load(ball.centre + of_keys * D + feature, mask=feature < D, other=0.0)
            centre = (tl.zeros([16, WIDTH], tl.float32) + centre[None, :].to(tl.float32)).to(queries.dtype)
            along = tl.max(tl.dot(queries, tl.trans(centre), input_precision=PRECISION), 1)
            radius = tl.max(tl.load(ball.radius + of_keys * ball.parts + part, mask=part < ball.parts, other=0.0), 0)
            bound = scale2 * along + tl.abs(scale2) * tl.sqrt(squares) * (1 + SLACK) * radius + neg_log2_tolerance
        tails = bias.tails + h * bias.steps
        tails_ahead = tails + sizes.heads * bias.steps

    near = tl.minimum(full_hi, tl.maximum(hi - 1, 0) // N * N)
    if EDGED:
        near = tl.maximum(near, lo // N * N)
        narrow = (lo >= hi) | (seen_lo > near)  # then all keys are at the window's edges
        near, full_lo = tl.where(narrow, hi, near), tl.where(narrow, hi, full_lo)
    low = lo // N * N
    if DECAY:  # keys are scaled from the start of their segment: for each, so are the queries
        until, segment_lo = hi, tl.maximum(hi - 1, 0) // segment * segment
        faded = faded_rows(base_q, local, q.row, block * M, rates, h, position - segment_lo, D, WIDTH, ALIGN)
        while until > lo:
            start = tl.maximum(segment_lo, lo)
            acc, l_i, m_i = attend(
                acc, l_i, m_i, faded, head, rows, bias, here, start, until, full_lo, full_hi, scale2,
                D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGED, NEAR, FAR, PRECISION,
            )  # fmt: skip
            until, segment_lo = start, segment_lo - segment
            if until > lo:
                faded = faded_rows(base_q, local, q.row, block * M, rates, h, position - segment_lo, D, WIDTH, ALIGN)
    elif TWO_SIDED:
        if BIAS == NONE:
            acc, l_i, m_i = attend(
                acc, l_i, m_i, queries, head, rows, bias, here, lo, hi, full_lo, full_hi, scale2,
                D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGED, NEAR, FAR, PRECISION,
            )  # fmt: skip
        else:
            start = tl.minimum(tl.maximum(here // N * N, low), tl.maximum(hi - 1, 0) // N * N)
            stop = tl.maximum(tl.minimum(here + M, hi), start)
            acc, l_i, m_i = attend_tile(
                acc, l_i, m_i, queries, head, rows, bias, here, start, stop, scale2, 0.0,
                D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGES, NEAR, PRECISION,
            )  # fmt: skip
            stop = tl.minimum((stop + (N - 1)) // N * N, hi)
            while start > low:
                far = reach(m_i + tl.log2(l_i) - bound, away, slope, tails, bias.steps, begin < start, BIAS)
                low = tl.maximum(low, key_behind(far, here, lo, start, N))
                since = start
                start = tl.maximum(low, since - AGAIN)
                acc, l_i, m_i = attend_tile(
                    acc, l_i, m_i, queries, head, rows, bias, here, start, since, scale2, 0.0,
                    D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGES, NEAR, PRECISION,
                )  # fmt: skip
            low = start
            while stop < hi:
                far = reach(m_i + tl.log2(l_i) - bound, -away, ahead, tails_ahead, bias.steps, end >= stop, BIAS)
                hi = tl.minimum(hi, key_ahead(far, here, hi, stop))
                since = stop
                stop = tl.minimum(hi, since + AGAIN)
                acc, l_i, m_i = attend_tile(
                    acc, l_i, m_i, queries, head, rows, bias, here, since, stop, scale2, 0.0,
                    D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGES, NEAR, PRECISION,
                )  # fmt: skip
    else:
        start = near
        acc, l_i, m_i = attend_tile(
            acc, l_i, m_i, queries, head, rows, bias, here, start, hi, scale2, 0.0,
            D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, AHEAD, NEAR, PRECISION,
        )  # fmt: skip
        full_lo = tl.maximum(full_lo, low)
        if STEADY:
            m_i = tl.where((m_i == float("-inf")) & (start > full_lo), 0.0, m_i)
        more = AGAIN + 0
        while start > tl.maximum(low, full_lo):
            if BIAS != NONE:
                far = reach(m_i + tl.log2(l_i) - bound, away, slope, tails, bias.steps, begin < start, BIAS)
                low = tl.maximum(low, key_behind(far, here, lo, start, N))
            since = start
            start = tl.maximum(tl.maximum(low, full_lo), since - more)
            middle = start
            if BIAS == EXTENDED:  # keys that every query sees from afar all have the same bias
                middle = tl.minimum(tl.maximum(start, tl.maximum(here - bias.level + 1, 0) // N * N), since)
            acc, l_i, m_i = attend_tile(
                acc, l_i, m_i, queries, head, rows, bias, here, middle, since, scale2, 0.0,
                D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, SHOWN, FAR, PRECISION,
            )  # fmt: skip
            if BIAS == EXTENDED:
                acc, l_i, m_i = attend_tile(
                    acc, l_i, m_i, queries, head, rows, bias, here, start, middle, scale2,
                    tl.load(head.table + bias.level), D, DV, WIDTH, VALUES, N, ALIGN, NONE, TWO_SIDED, SHOWN, FAR,
                    PRECISION,
                )  # fmt: skip
            more = sizes.keys
        if EDGED:
            acc, l_i, m_i = attend_tile(
                acc, l_i, m_i, queries, head, rows, bias, here, low, start, scale2, 0.0,
                D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGES, NEAR, PRECISION,
            )  # fmt: skip

    result = acc * (1 / tl.where(l_i == 0, 1.0, l_i))[:, None]
    log_sum = tl.where(m_i == float("inf"), m_i, m_i + tl.log2(l_i)) / LOG2E
    log_sum = tl.where(l_i == 0, float("-inf"), log_sum)
    store_rows(out, residual, lse, result, log_sum, b, h, block * M, sizes, DV, M, VALUES, ALIGN)
    tl.store(spans + item, low)
    tl.store(spans + items + item, hi)
    if EDGED:
        tl.store(spans + 2 * items + item, seen_lo)
        tl.store(spans + 3 * items + item, seen_hi)
    # One thread has stored 0 here, and all have met at barriers since: who has something to say stores 1.
    total = tl.sum(result, 1)
    lost = (begin <= end) & ~((l_i >= LEAST) & (l_i < float("inf")))
    tl.store(lost_here + local * 0, 1, mask=lost)
    tl.store(odd_here + local * 0, 1, mask=total - total != 0.0)


@triton.jit
def store_rows(
    out, residual, lse, result, log_sum, b, h, start, sizes,
    DV: tl.constexpr, M: tl.constexpr, VALUES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write rows of out, what is lost of them in rounding where somebody wants it, and of lse."""
    row = tl.arange(0, M)
    feature = tl.arange(0, VALUES)
    there = (start + row[:, None] < sizes.queries) & (feature[None, :] < DV)
    offset = row[:, None] * (out.row * ALIGN) + feature[None, :] + start.to(tl.int64) * out.row * ALIGN
    rounded = result.to(out.data.dtype.element_ty)
    tl.store(of_head(out, b, h, ALIGN) + offset, rounded, mask=there)
    if residual.row != 0:
        rest = (result - rounded.to(tl.float32)).to(out.data.dtype.element_ty)
        tl.store(of_head(residual, b, h, ALIGN) + offset, rest, mask=there)
    of_rows = (b * sizes.heads + h).to(tl.int64) * sizes.queries
    tl.store(lse + of_rows + start + row, log_sum, mask=start + row < sizes.queries)


@triton.jit
def faded_rows(base, row, stride, start, rates, h, steps, D: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Return rows of a matrix with a head's decay over so many steps in them.

    A loop over segments computes the next one's at its end: what comes into a loop from outside goes to shared memory,
    which products read from; what is computed inside would be held in registers.
    """
    rows = load(base, row, stride, start, D, WIDTH, ALIGN)
    return (rows * power(rates, h, steps, D, WIDTH)).to(rows.dtype)
