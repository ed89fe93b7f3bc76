"""The forward: a block of queries reads its keys from the diagonal outwards, and stops where reach says that it may.

A program holds a block of queries of one head. The keys that only some of them see (at the diagonal, at a window's far
edge) are read with a mask, those between without one. With ALiBi the program asks after every few blocks how far back
anything can still matter (reach.py has the proof) and ends its loop there; nothing outside the kernel has to know.
What it read is noted for the backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.kernels import codes
from lengthen.attention.kernels.ball import SLACK
from lengthen.attention.kernels.tile import (
    BEHIND,
    CAUSAL,
    EDGES,
    FULL,
    LEVEL,
    LINEAR,
    LOG2E,
    NONE,
    SHOWN,
    SIZES,
    above,
    below,
    beyond,
    entries,
    faded_rows,
    interval,
    let_next_begin,
    load,
    row_term,
    scores,
    visible,
)

AGAIN = tl.constexpr(1024)  # keys that are read before reach is asked once more
HIGHEST, WHOLE, STAYING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the score whose weight is 1
LOST = tl.constexpr(2.0**-90)  # how small a sum of weights is not trusted

NO_REACH, MEASURED, GIVEN = (
    tl.constexpr(codes.NO_REACH),
    tl.constexpr(codes.MEASURED),
    tl.constexpr(codes.GIVEN),
)


@triton.jit  # type: ignore[untyped-decorator]
def absorb(  # type: ignore[no-untyped-def]
    acc, total, top, q, k, v, kl, vl, lo, hi, keys, position, begin, end, scale, slope, ahead, table, here,
    even,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, MASKED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Read the keys [lo, hi) into a running softmax: Σ weight·v, Σ weight, and the score whose weight is 1.

    UNIT says which score that is. HIGHEST: the highest so far. WHOLE: the whole number above it, so that weights are
    rounded alike whatever else was read. STAYING: the one it was; nothing then has to be searched or rescaled.
    `even` is a bias that all of them have.
    """
    for start in tl.range(lo, hi, N):
        start = tl.multiple_of(start, N)
        key = start + tl.arange(0, N)
        onward = start.to(tl.int64)
        keys_here = load(k, tl.arange(0, N), kl, D, keys - start, WIDTH, MASKED == EDGES, onward)
        entry = entries(table, position[:, None], key[None, :], begin[:, None], end[:, None], MASKED, MASK, BIAS)
        product = tl.dot(q, tl.trans(keys_here), input_precision=PRECISION)
        # ALiBi's bias in two parts: along the block, which is the same for all blocks, and up to it, a single number.
        score = scores(
            product, position[:, None], key[None, :], begin[:, None], end[:, None], scale, slope, ahead, entry,
            here if TWO_SIDED else start, MASKED, MASK, BIAS, TWO_SIDED,
        )  # fmt: skip
        up_to = row_term(start, here, slope, BIAS, TWO_SIDED) + even
        values = load(v, tl.arange(0, N), vl, DV, keys - start, VALUES, MASKED == EDGES, onward)
        if UNIT == STAYING:
            weight = tl.exp2(score - (top - up_to)[:, None])
            total += tl.sum(weight, 1)
        else:
            highest = tl.max(score, 1) + up_to
            if UNIT == WHOLE:
                highest = tl.ceil(highest)
            highest = tl.maximum(top, highest)
            unit = tl.where(highest == float("-inf"), 0.0, highest)
            weight = tl.exp2(score - (unit - up_to)[:, None])
            fade = tl.exp2(top - unit)
            total = total * fade + tl.sum(weight, 1)
            acc = acc * fade[:, None]
            top = highest
        acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc, total, top


@triton.jit  # type: ignore[untyped-decorator]
def absorb_interval(  # type: ignore[no-untyped-def]
    acc, total, top, q, k, v, kl, vl, lo, hi, full_lo, full_hi, keys, position, begin, end, scale, slope, ahead, table,
    here, level,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Read the keys [lo, hi), with a mask only outside [full_lo, full_hi), where not every query sees them."""
    acc, total, top = absorb(
        acc, total, top, q, k, v, kl, vl, tl.maximum(lo, full_hi), hi, keys, position, begin, end, scale, slope, ahead,
        table, here, 0.0, D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, EDGES, NEAR, PRECISION,
    )  # fmt: skip
    if FAR == STAYING:
        top = tl.where(top == float("-inf"), 0.0, top)
    inner_lo, inner_hi = tl.maximum(lo, full_lo), tl.minimum(hi, full_hi)
    if BIAS == LEVEL:  # keys that every query sees from afar all have the same bias
        uneven = tl.maximum(inner_lo, tl.minimum(below(tl.maximum(here - level + 1, 0), N), inner_hi))
        acc, total, top = absorb(
            acc, total, top, q, k, v, kl, vl, inner_lo, uneven, keys, position, begin, end, scale, slope, ahead, table,
            here, beyond(table, level, BIAS), D, DV, WIDTH, VALUES, N, MASK, NONE, TWO_SIDED, SHOWN, FAR, PRECISION,
        )  # fmt: skip
        inner_lo = uneven
    acc, total, top = absorb(
        acc, total, top, q, k, v, kl, vl, inner_lo, inner_hi, keys, position, begin, end, scale, slope, ahead, table,
        here, 0.0, D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, SHOWN, FAR, PRECISION,
    )  # fmt: skip
    if MASK != CAUSAL and MASK != FULL:
        acc, total, top = absorb(
            acc, total, top, q, k, v, kl, vl, lo, tl.minimum(hi, full_lo), keys, position, begin, end, scale, slope,
            ahead, table, here, 0.0, D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, BEHIND, FAR, PRECISION,
        )  # fmt: skip
    return acc, total, top


@triton.jit
def reach(top, total, bound, rest, slope, unread_side):  # type: ignore[no-untyped-def]
    """Return how far from `here` each query's keys may be left unread; −∞ where nothing may.

    bound is the highest score that any key can have plus what tolerance and the geometric series ask for, rest the
    query's own place and what `scores` left out of its row.
    """
    far = (bound + rest - (top + tl.log2(total))) / slope
    place = tl.where(unread_side, float("inf"), -far)
    return tl.where(place == place, place, float("-inf"))


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def forward(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, spans, notes, slopes, slopes_ahead, table, first, last, rates, centre, key_norm,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, group,
    table_stride, mask_stride, batch, heads, queries, keys, blocks, q_start, size, segment, level, scale, exact,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, REACH: tl.constexpr, STEADY: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write out, lse and the keys that each block of queries read; `exact` is −log₂ of the tolerance."""
    let_next_begin(EARLY)
    radius = notes
    far = radius + batch * (heads // group)
    odd = far + 2 * batch * heads
    order = odd + 1
    NEAR: tl.constexpr = HIGHEST if STEADY else WHOLE
    FAR: tl.constexpr = STAYING if STEADY else WHOLE
    tl.static_assert(AGAIN % N == 0, "reach asks at whole blocks of keys")
    block = blocks - 1 - tl.program_id(0) % blocks
    b = tl.program_id(0) // blocks
    h = heads - 1 - tl.program_id(1)
    if REACH == MEASURED:
        h = tl.load(order + tl.program_id(1))
    of_head = b * heads + h
    of_keys = b * (heads // group) + h // group
    q += b.to(tl.int64) * qb + h.to(tl.int64) * qh
    k += b.to(tl.int64) * kb + (h // group).to(tl.int64) * kh
    v += b.to(tl.int64) * vb + (h // group).to(tl.int64) * vh

    local = tl.minimum(tl.arange(0, M), queries - 1 - block * M)  # rows past the end repeat the last
    row = block * M + local
    position = row + q_start
    begin, end = interval(row, position, first + b * mask_stride, last + b * mask_stride, keys, size, MASK)
    here = q_start + block * M
    stop = tl.minimum(here + M, q_start + queries) - 1
    lo, hi, full_lo, full_hi = visible(begin, end, here, stop, first, last, keys, size, N, MASK)
    queries_here = load(q + (block * M).to(tl.int64) * ql, local, ql, D, queries, WIDTH, False)
    scale2 = scale * LOG2E
    slope, ahead = 0.0, 0.0
    if BIAS == LINEAR:
        slope = tl.load(slopes + h).to(tl.float32) * LOG2E
        ahead = tl.load(slopes_ahead + h).to(tl.float32) * LOG2E
    table += h.to(tl.int64) * table_stride

    acc = tl.zeros([M, VALUES], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)

    if REACH != NO_REACH:
        wide = queries_here.to(tl.float32)
        length = tl.sqrt(tl.sum(wide * wide, 1)) * (1 + SLACK)
        if REACH == GIVEN:
            bound = tl.abs(scale2) * length * tl.load(key_norm + of_keys) + exact
        else:
            feature = tl.arange(0, WIDTH)
            middle = tl.load(centre + of_keys * D + feature, mask=feature < D, other=0.0)
            ball = tl.load(radius + of_keys).to(tl.float32, bitcast=True)
            bound = scale2 * tl.sum(wide * middle[None, :], 1) + tl.abs(scale2) * length * ball + exact
        offset = (position - here).to(tl.float32)

    if DECAY:  # keys are scaled from the start of their segment: for each, so are the queries
        until, segment_lo = hi, tl.maximum(hi - 1, 0) // segment * segment
        base = q + (block * M).to(tl.int64) * ql
        faded = faded_rows(base, local, ql, rates, h, position - segment_lo, queries, D, WIDTH)
        while until > lo:
            start = tl.maximum(segment_lo, lo)
            acc, total, top = absorb_interval(
                acc, total, top, faded, k, v, kl, vl, start, until, full_lo, full_hi, keys, position,
                begin, end, scale2, slope, ahead, table, here, level, D, DV,
                WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, NEAR, FAR, PRECISION,
            )  # fmt: skip
            until, segment_lo = start, segment_lo - segment
            if until > lo:
                faded = faded_rows(base, local, ql, rates, h, position - segment_lo, queries, D, WIDTH)
    elif REACH == NO_REACH:
        acc, total, top = absorb_interval(
            acc, total, top, queries_here, k, v, kl, vl, lo, hi, full_lo, full_hi, keys, position, begin, end, scale2,
            slope, ahead, table, here, level, D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, NEAR, FAR, PRECISION,
        )  # fmt: skip
    elif TWO_SIDED:
        near_lo = tl.minimum(tl.maximum(below(tl.maximum(here, 0), N), lo), above(hi, N))
        near_hi = tl.maximum(tl.minimum(here + M, hi), near_lo)
        acc, total, top = absorb(
            acc, total, top, queries_here, k, v, kl, vl, near_lo, near_hi, keys, position, begin, end, scale2,
            slope, ahead, table, here, 0.0, D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, EDGES, NEAR, PRECISION,
        )  # fmt: skip
        near_hi = tl.minimum(above(near_hi, N), above(hi, N))
        behind = bound - tl.log2(one_less_exp(slope))
        low = lo
        while near_lo > low:
            place = reach(top, total, behind, -offset * slope, slope, begin >= near_lo)
            low = tl.maximum(low, lowest(place, here, lo, near_lo, N))
            start = tl.maximum(low, near_lo - AGAIN)
            acc, total, top = absorb(
                acc, total, top, queries_here, k, v, kl, vl, start, near_lo, keys, position, begin, end, scale2,
                slope, ahead, table, here, 0.0, D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, EDGES, NEAR, PRECISION,
            )  # fmt: skip
            near_lo = start
        onward = bound - tl.log2(one_less_exp(ahead))
        high = hi
        while near_hi < high:
            place = reach(top, total, onward, offset * ahead, ahead, end < near_hi)
            high = tl.minimum(high, highest_needed(place, here, near_hi, hi))
            stop = tl.minimum(high, near_hi + AGAIN)
            acc, total, top = absorb(
                acc, total, top, queries_here, k, v, kl, vl, near_hi, stop, keys, position, begin, end, scale2,
                slope, ahead, table, here, 0.0, D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, EDGES, NEAR, PRECISION,
            )  # fmt: skip
            near_hi = tl.maximum(above(stop, N), near_hi)
        lo, hi = near_lo, tl.minimum(near_hi, hi)
    else:
        start = full_hi
        acc, total, top = absorb(
            acc, total, top, queries_here, k, v, kl, vl, start, hi, keys, position, begin, end, scale2,
            slope, ahead, table, here, 0.0, D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, EDGES, NEAR, PRECISION,
        )  # fmt: skip
        if FAR == STAYING:
            top = tl.where(top == float("-inf"), 0.0, top)
        behind = bound - tl.log2(one_less_exp(slope))
        low, more = lo, AGAIN + 0
        while start > tl.maximum(low, full_lo):
            place = reach(top, total, behind, 0.0, slope, begin >= start)
            low = tl.maximum(low, lowest(place, here, lo, start, N))
            since = start
            start = tl.maximum(tl.maximum(low, full_lo), since - more)
            acc, total, top = absorb(
                acc, total, top, queries_here, k, v, kl, vl, start, since, keys, position, begin, end, scale2,
                slope, ahead, table, here, 0.0, D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, SHOWN, FAR, PRECISION,
            )  # fmt: skip
            more = keys
        if MASK != CAUSAL:
            if start > low:
                place = reach(top, total, behind, 0.0, slope, begin >= start)
                low = tl.maximum(low, lowest(place, here, lo, start, N))
            acc, total, top = absorb(
                acc, total, top, queries_here, k, v, kl, vl, low, start, keys, position, begin, end, scale2,
                slope, ahead, table, here, 0.0, D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, BEHIND, FAR, PRECISION,
            )  # fmt: skip
        lo = tl.minimum(low, start)

    result = acc * (1 / tl.where(total == 0, 1.0, total))[:, None]
    log_sum = top + tl.log2(total) - row_term(position, here, slope, BIAS, TWO_SIDED)
    log_sum = tl.where(top == float("inf"), top, log_sum) / LOG2E
    log_sum = tl.where(total == 0, float("-inf"), log_sum)
    one = tl.arange(0, M)
    actual = block * M + one
    feature = tl.arange(0, VALUES)
    place = out + b.to(tl.int64) * ob + h.to(tl.int64) * oh + (block * M).to(tl.int64) * ol
    inside = (actual[:, None] < queries) & (feature[None, :] < DV)
    tl.store(place + one[:, None] * ol + feature[None, :], result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + of_head.to(tl.int64) * queries + actual, log_sum, mask=actual < queries)

    tl.store(spans + of_head * blocks + block, lo)
    tl.store(spans + (batch * heads + of_head) * blocks + block, hi)
    tl.atomic_max(far + 2 * of_head, here + M - lo, sem="relaxed")
    tl.atomic_max(far + 2 * of_head + 1, hi - here, sem="relaxed")
    # A value that is not finite shows in what its own block reads: then `repair` does the whole call again.
    # The same where the steady unit was so far from other scores that weights were lost, or too large.
    whole = tl.sum(result, 1)
    strange = (whole - whole != 0.0) | ((begin <= end) & ~((total >= LOST) & (total < float("inf"))))
    tl.store(odd + row * 0, 1, mask=strange)


@triton.jit
def one_less_exp(slope2):  # type: ignore[no-untyped-def]
    """Return 1 − e^(−m), or a little less, for a slope in units of log 2."""
    m = slope2 / LOG2E
    return tl.where(m < 0.5, m - 0.5 * m * m, 1.0 - tl.exp2(-slope2))


@triton.jit  # type: ignore[untyped-decorator]
def lowest(place, here, lo, unread, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the block that reading may end at, between lo and unread; one key more makes up for rounding."""
    low = tl.floor(tl.maximum(tl.min(place, 0) - 1.0, (lo - here).to(tl.float32)))
    low = tl.minimum(low, (unread - here).to(tl.float32))
    return tl.maximum(below(tl.maximum(here + low.to(tl.int32), 0), N), lo)


@triton.jit
def highest_needed(place, here, unread, hi):  # type: ignore[no-untyped-def]
    """Return the key that reading ahead may end at (exclusive), between unread and hi."""
    high = tl.minimum(-tl.min(place, 0) + 2.0, (hi - here).to(tl.float32))
    high = tl.maximum(high, (unread - here).to(tl.float32))
    return here + tl.ceil(high).to(tl.int32)
