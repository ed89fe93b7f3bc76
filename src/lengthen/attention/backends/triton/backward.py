"""The backward: FlashAttention's in two kernels, each over the keys that the forward read.

    p = exp2(s − lse)      dv = pᵀ·do      dp = do·vᵀ      ds = p·(dp − delta)      dq = ds·k      dk = dsᵀ·q

with delta = Σ_j p·dp = do·out, taken from out before its rounding, and less the gradient of lse.

bwd_dq holds a block of queries and goes over the keys that it read. It also writes delta, and its part of the gradient
of the slope, or of an extended table's last value. `farthest` notes how far any block of a head read. bwd_dkv holds a
block of keys and goes over the blocks of queries that read them, of all heads that share them. Weights are computed
again in each, so neither uses an atomic, and two runs are equal to the bit.

All three stand in one file, since they take the same arguments and two of them read what the first one writes.

Tiles in which all queries see all keys have no mask. Of the others, a pair that is hidden has a p and ds of 0; and as
0·NaN is NaN, what it is multiplied with is made finite too, where padding or other documents may be hidden (EDGED).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lengthen.attention.backends.triton.forward import Head, Rows, faded_rows
from lengthen.attention.backends.triton.tile import (
    EXTENDED,
    LINEAR,
    LOG2E,
    NONE,
    entries,
    extent,
    first_position,
    interval,
    linear,
    load,
    load_before,
    load_between,
    of_head,
    power,
    slopes_of,
)

SCAN = tl.constexpr(128)  # blocks of queries that are looked at together


class Sums(NamedTuple):
    """Of each query of a block: log₂ Σ exp2(s), ∞ if it saw nothing, and delta."""

    lse: Any
    delta: Any


@triton.jit
def finite_or_0(x):
    """Return x with 0 for what is not finite."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def weights(
    product, position, key, visible, unit, bias, table, slope, ahead, scale, here, tile_bias,
    MASKED: tl.constexpr, HIDES: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr,
):  # fmt: skip
    """Return p of a tile from q·k; hidden pairs may have any. `unit` is lse, less what a ramp leaves out of rows."""
    entry = entries(table, position, key, visible, bias, HIDES, BIAS)
    score = product * scale
    if BIAS == LINEAR:
        if MASKED or TWO_SIDED:
            score += linear(position, key, here, slope, ahead, TWO_SIDED)
        else:
            score += slope * (key - here).to(tl.float32)
    elif BIAS == NONE:
        score += tile_bias
    else:
        score += entry
    return tl.exp2(score - unit)


@triton.jit
def dq_tile(
    dq, d_bias, d_ahead, q, do, head, rows, sums, bias, here, start, scale, tile_bias,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, ALIGN: tl.constexpr,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr, MASKED: tl.constexpr, OF_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `start` on give to the gradient of a block of queries, and to that of its bias."""
    start = tl.multiple_of(start, N)
    column = tl.arange(0, N)
    key = start + column
    if MASKED and EDGED:
        k = load_between(head.k, column, head.k_row, start, head.lo, head.hi, D, WIDTH, ALIGN)
        v = load_between(head.v, column, head.v_row, start, head.lo, head.hi, DV, VALUES, ALIGN)
    elif MASKED:
        k = load_before(head.k, column, head.k_row, start, head.hi, D, WIDTH, ALIGN)
        v = load_before(head.v, column, head.v_row, start, head.hi, DV, VALUES, ALIGN)
    else:
        k = load(head.k, column, head.k_row, start, D, WIDTH, ALIGN)
        v = load(head.v, column, head.v_row, start, DV, VALUES, ALIGN)
    unit = sums.lse
    if BIAS == LINEAR and not (MASKED or TWO_SIDED):
        unit = (sums.lse + rows.offset) - head.slope * (start - here).to(tl.float32)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    visible = key[None, :] <= rows.end[:, None]
    if EDGED:
        visible = visible & (key[None, :] >= rows.begin[:, None])
    p = weights(
        product, rows.position[:, None], key[None, :], visible, unit[:, None], bias, head.table, head.slope, head.ahead,
        scale, start, tile_bias, MASKED, MASKED, BIAS, TWO_SIDED,
    )  # fmt: skip
    if MASKED:
        p = tl.where(visible, p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = p * (dp - sums.delta[:, None])
    if MASKED and EDGED:
        ds = tl.where(p == 0.0, 0.0, ds)
    if OF_BIAS:
        distance = rows.position[:, None] - key[None, :]
        if BIAS == LINEAR:
            weighed = ds * distance.to(tl.float32)
            d_bias -= tl.sum(tl.where(distance > 0, weighed, 0.0) if TWO_SIDED else weighed, 1)
            if TWO_SIDED:
                d_ahead += tl.sum(tl.where(distance < 0, weighed, 0.0), 1)
        elif BIAS == EXTENDED:  # the last value's; table_grad.py has the others'
            d_bias += tl.sum(tl.where(distance >= bias.level, ds, 0.0), 1)
            if TWO_SIDED:
                d_ahead += tl.sum(tl.where(distance <= -bias.level_ahead, ds, 0.0), 1)
        elif BIAS == NONE:
            d_bias += tl.sum(ds, 1)
    if MASKED and EDGED:
        k = finite_or_0(k)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION), d_bias, d_ahead


@triton.jit
def dq_keys(
    dq, d_bias, d_ahead, q, do, head, rows, sums, bias, here, lo, hi, full_lo, full_hi, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, ALIGN: tl.constexpr,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr, OF_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys [lo, hi) give, with a mask only outside [full_lo, full_hi)."""
    low = lo // N * N
    inner_hi = tl.maximum(tl.minimum(full_hi, hi // N * N), low)
    inner_lo = tl.minimum(tl.maximum(full_lo, (lo + (N - 1)) // N * N), inner_hi)
    near, far = (hi - inner_hi + (N - 1)) // N, (inner_lo - low) // N  # masked blocks at either end
    for turn in tl.range(0, near + far):
        start = tl.where(turn < near, inner_hi + turn * N, low + (turn - near) * N)
        dq, d_bias, d_ahead = dq_tile(
            dq, d_bias, d_ahead, q, do, head, rows, sums, bias, here, start, scale, 0.0,
            D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGED, True, OF_BIAS, PRECISION,
        )  # fmt: skip
    middle = inner_lo
    if BIAS == EXTENDED and not TWO_SIDED:  # keys that every query sees from afar all have the same bias
        middle = tl.maximum(inner_lo, tl.minimum(tl.maximum(here - bias.level + 1, 0) // N * N, inner_hi))
        tile_bias = tl.load(head.table + bias.level)
        for start in tl.range(inner_lo, middle, N):
            dq, d_bias, d_ahead = dq_tile(
                dq, d_bias, d_ahead, q, do, head, rows, sums, bias, here, start, scale, tile_bias,
                D, DV, WIDTH, VALUES, N, ALIGN, NONE, TWO_SIDED, EDGED, False, OF_BIAS, PRECISION,
            )  # fmt: skip
    for start in tl.range(middle, inner_hi, N):
        dq, d_bias, d_ahead = dq_tile(
            dq, d_bias, d_ahead, q, do, head, rows, sums, bias, here, start, scale, 0.0,
            D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGED, False, OF_BIAS, PRECISION,
        )  # fmt: skip
    return dq, d_bias, d_ahead


@triton.jit
def bwd_dq(
    q, k, v, out, residual, do, dq, dk, dv, lse, d_lse, log_sums, deltas, d_biases, spans, far, rates, mask, bias,
    sizes, segment, of_lse, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SPAN: tl.constexpr, ALIGN: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr,
    GROUPED: tl.constexpr, OF_BIAS: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the queries' gradient; each block's part of the bias's; and for bwd_dkv, log₂ Σ exp2(s) and delta."""
    blocks, span_blocks = (sizes.queries + (M - 1)) // M, (sizes.queries + (SPAN - 1)) // SPAN
    block = blocks - 1 - tl.program_id(0) % blocks
    b = tl.program_id(0) // blocks
    key_head = sizes.key_heads - 1 - tl.program_id(1)
    h = key_head * sizes.group + (sizes.group - 1 - tl.program_id(2))
    item = b * sizes.heads + h

    local = tl.minimum(tl.arange(0, M), sizes.queries - 1 - block * M)  # rows past the end repeat the last
    row = block * M + local
    here = first_position(mask, b) + block * M
    position = here + local
    begin, end = interval(row, position, mask, b, sizes.keys, TWO_SIDED, EDGED)
    count = tl.minimum(M, sizes.queries - block * M)
    lo, hi, full_lo, full_hi = extent(begin, end, block * M, here, count, mask, b, sizes.keys, TWO_SIDED, EDGED)
    full_hi = full_hi // N * N
    full_lo = tl.minimum((full_lo + (N - 1)) // N * N, full_hi)
    slope, ahead = slopes_of(bias, h, BIAS)
    rows = Rows(position, begin, end, slope * local.to(tl.float32))
    span = spans + item * span_blocks + block * M // SPAN
    read_lo = tl.maximum(tl.load(span), lo)
    read_hi = tl.minimum(tl.load(span + sizes.batch * sizes.heads * span_blocks), hi)
    head = Head(
        of_head(k, b, key_head, ALIGN), of_head(v, b, key_head, ALIGN), k.row, v.row, lo, hi, slope, ahead,
        bias.table + h.to(tl.int64) * bias.stride,
    )  # fmt: skip

    base_q = of_head(q, b, h, ALIGN)
    queries = load(base_q, local, q.row, block * M, D, WIDTH, ALIGN)
    d_outs = load(of_head(do, b, h, ALIGN), local, do.row, block * M, DV, VALUES, ALIGN)
    # The diagonal of do·outᵀ: a matrix product, since converting three tiles to float32 would take longer.
    outs = load(of_head(out, b, h, ALIGN), local, out.row, block * M, DV, VALUES, ALIGN)
    products = tl.dot(d_outs, tl.trans(outs), input_precision=PRECISION)
    if residual.row != 0:
        outs = load(of_head(residual, b, h, ALIGN), local, residual.row, block * M, DV, VALUES, ALIGN)
        products = tl.dot(d_outs, tl.trans(outs), products, input_precision=PRECISION)
    delta = tl.sum(tl.where(tl.arange(0, M)[:, None] == tl.arange(0, M)[None, :], products, 0.0), 1)
    of_rows = item.to(tl.int64) * sizes.queries
    if of_lse != 0:
        delta -= tl.load(d_lse + of_rows + row)
    log_sum = tl.load(lse + of_rows + row)
    log_sum = tl.where(log_sum == float("-inf"), float("inf"), log_sum) * LOG2E
    # For bwd_dkv rows are filled up to whole blocks, with such as have no weight.
    there = tl.arange(0, M) < sizes.queries - block * M
    padded = item.to(tl.int64) * (span_blocks * SPAN) + block * M + tl.arange(0, M)
    tl.store(deltas + padded, tl.where(there, delta, 0.0))
    tl.store(log_sums + padded, tl.where(there, log_sum, float("inf")))
    if BIAS == LINEAR and not TWO_SIDED:  # with what a ramp along a block of keys leaves out of a row
        ramped = log_sum + slope * (local + block * M % SPAN).to(tl.float32)
        all_rows = sizes.batch * sizes.heads.to(tl.int64) * (span_blocks * SPAN)
        tl.store(log_sums + all_rows + padded, tl.where(there, ramped, float("inf")))
    sums = Sums(log_sum, delta)

    acc = tl.zeros([M, WIDTH], tl.float32)
    d_bias = tl.zeros([M], tl.float32)
    d_ahead = tl.zeros([M], tl.float32)
    scale2 = scale * LOG2E
    if DECAY:  # keys are scaled from the start of their segment: for each, so are the queries
        at, segment_lo = read_lo, read_lo // segment * segment
        faded = faded_rows(base_q, local, q.row, block * M, rates, h, position - segment_lo, D, WIDTH, ALIGN)
        while at < read_hi:  # from the farthest, so that what is summed so far only ever fades
            until = tl.minimum(read_hi, segment_lo + segment)
            acc *= power(rates, h, tl.zeros([1], tl.int32) + segment, D, WIDTH)
            acc, d_bias, d_ahead = dq_keys(
                acc, d_bias, d_ahead, faded, d_outs, head, rows, sums, bias, here, at, until, full_lo, full_hi, scale2,
                D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGED, OF_BIAS, PRECISION,
            )  # fmt: skip
            at, segment_lo = until, segment_lo + segment
            if at < read_hi:
                faded = faded_rows(base_q, local, q.row, block * M, rates, h, position - segment_lo, D, WIDTH, ALIGN)
        acc *= power(rates, h, position - tl.maximum(read_hi - 1, 0) // segment * segment, D, WIDTH)
    else:
        acc, d_bias, d_ahead = dq_keys(
            acc, d_bias, d_ahead, queries, d_outs, head, rows, sums, bias, here, read_lo, read_hi, full_lo, full_hi,
            scale2, D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGED, OF_BIAS, PRECISION,
        )  # fmt: skip

    feature = tl.arange(0, WIDTH)
    place = of_head(dq, b, h, ALIGN) + (block * M).to(tl.int64) * dq.row * ALIGN
    place += tl.arange(0, M)[:, None] * (dq.row * ALIGN) + feature[None, :]
    tl.store(place, (acc * scale).to(dq.data.dtype.element_ty), mask=there[:, None] & (feature[None, :] < D))
    if OF_BIAS:
        part = d_biases + item * blocks + block
        tl.store(part, tl.sum(tl.where(there, d_bias, 0.0), 0))
        tl.store(part + sizes.batch * sizes.heads * blocks, tl.sum(tl.where(there, d_ahead, 0.0), 0))


@triton.jit
def farthest(
    q, k, v, out, residual, do, dq, dk, dv, lse, d_lse, log_sums, deltas, d_biases, spans, far, rates, mask, bias,
    sizes, segment, of_lse, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr,
    SPAN: tl.constexpr, ALIGN: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr,
    GROUPED: tl.constexpr, OF_BIAS: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write how far behind and ahead of its first query any block of a head read, int32 `[2, batch · heads]`.

    Its arguments are bwd_dq's: kernels that take the same share what Triton compiles to launch them.
    """
    item = tl.program_id(0)
    blocks = (sizes.queries + (SPAN - 1)) // SPAN
    q_start = first_position(mask, item // sizes.heads)
    behind = tl.zeros([BLOCKS], tl.int32)
    ahead = tl.zeros([BLOCKS], tl.int32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        span = spans + item * blocks + block
        here = q_start + block * SPAN
        lo = tl.load(span, mask=block < blocks, other=1 << 30)
        hi = tl.load(span + sizes.batch * sizes.heads * blocks, mask=block < blocks, other=0)
        behind = tl.maximum(behind, tl.where(block < blocks, here - lo, 0))
        ahead = tl.maximum(ahead, tl.where(block < blocks, hi - here, 0))
    tl.store(far + item, tl.max(behind, 0))
    tl.store(far + sizes.batch * sizes.heads + item, tl.max(ahead, 0))


class Side(NamedTuple):
    """The queries of a head as bwd_dkv loads them: where their rows, gradients, sums and deltas begin."""

    q: Any
    do: Any
    q_row: Any
    do_row: Any
    lse: Any
    ramped: Any  # lse + slope·(position − that of its span's first query)
    delta: Any
    q_start: Any


@triton.jit
def dkv_tile(
    dk, dv, k, v, side, head, mask, b, bias, key, key_lo, start, sizes, scale, tile_bias,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, SPAN: tl.constexpr,
    ALIGN: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `start` on give to the gradients of a block of keys and values."""
    start = tl.multiple_of(start, M)
    local = tl.arange(0, M)
    row = start + local
    position = side.q_start + row
    if MASKED and BIAS != LINEAR:  # of rows past the last, which have no weight, a table may not know the distance
        position = tl.minimum(position, side.q_start + sizes.queries - 1)
    if MASKED:
        q = load_before(side.q, local, side.q_row, start, sizes.queries, D, WIDTH, ALIGN)
        do = load_before(side.do, local, side.do_row, start, sizes.queries, DV, VALUES, ALIGN)
    else:
        q = load(side.q, local, side.q_row, start, D, WIDTH, ALIGN)
        do = load(side.do, local, side.do_row, start, DV, VALUES, ALIGN)
    RAMP: tl.constexpr = BIAS == LINEAR and not (MASKED or TWO_SIDED)
    unit = tl.load((side.ramped if RAMP else side.lse) + row)  # ∞ for rows past the last query: they have no weight
    delta = tl.load(side.delta + row)
    here = side.q_start + start // SPAN * SPAN if RAMP else key_lo
    product = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    visible = key[:, None] <= position[None, :]
    if EDGED and MASKED:
        begin, end = interval(tl.minimum(row, sizes.queries - 1), position, mask, b, sizes.keys, TWO_SIDED, EDGED)
        visible = (key[:, None] >= begin[None, :]) & (key[:, None] <= end[None, :])
    HIDES: tl.constexpr = MASKED and (EDGED or not TWO_SIDED)
    p = weights(
        product, position[None, :], key[:, None], visible, unit[None, :], bias, head.table, head.slope, head.ahead,
        scale, here, tile_bias, MASKED, HIDES, BIAS, TWO_SIDED,
    )  # fmt: skip
    if HIDES:
        p = tl.where(visible, p, 0.0)
    dv = tl.dot(p.to(do.dtype), finite_or_0(do) if MASKED and EDGED else do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    if MASKED and EDGED:
        ds = tl.where(p == 0.0, 0.0, ds)
        q = finite_or_0(q)
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit
def dkv_rows(
    dk, dv, k, v, side, head, mask, b, bias, key, key_lo, from_block, to_block, full_from, full_to, sizes, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SPAN: tl.constexpr, ALIGN: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what blocks of queries give, with a mask only outside [full_from, full_to)."""
    inner_from = tl.minimum(tl.maximum(full_from, from_block), to_block)
    inner_to = tl.maximum(tl.minimum(full_to, to_block), inner_from)
    near, far = inner_from - from_block, to_block - inner_to  # masked blocks at either end
    for turn in tl.range(0, near + far):
        start = tl.where(turn < near, from_block + turn, inner_to + (turn - near)) * M
        dk, dv = dkv_tile(
            dk, dv, k, v, side, head, mask, b, bias, key, key_lo, start, sizes, scale, 0.0,
            D, DV, WIDTH, VALUES, M, SPAN, ALIGN, BIAS, TWO_SIDED, EDGED, True, PRECISION,
        )  # fmt: skip
    if BIAS == EXTENDED and not TWO_SIDED:  # queries that see every key from afar all have the same bias
        afar = (tl.maximum(tl.minimum(key_lo + N, sizes.keys) - 1 + bias.level - side.q_start, 0) + (M - 1)) // M
        afar = tl.maximum(inner_from, tl.minimum(afar, inner_to))
        tile_bias = tl.load(head.table + bias.level)
        for block in tl.range(afar, inner_to):
            dk, dv = dkv_tile(
                dk, dv, k, v, side, head, mask, b, bias, key, key_lo, block * M, sizes, scale, tile_bias,
                D, DV, WIDTH, VALUES, M, SPAN, ALIGN, NONE, TWO_SIDED, EDGED, False, PRECISION,
            )  # fmt: skip
        inner_to = afar
    for block in tl.range(inner_from, inner_to):
        dk, dv = dkv_tile(
            dk, dv, k, v, side, head, mask, b, bias, key, key_lo, block * M, sizes, scale, 0.0,
            D, DV, WIDTH, VALUES, M, SPAN, ALIGN, BIAS, TWO_SIDED, EDGED, False, PRECISION,
        )  # fmt: skip
    return dk, dv


@triton.jit
def readers(
    spans, far, item, q_start, key_lo, key_hi, sizes, SPAN: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr
):
    """Return which blocks of queries of a head read any of these keys, and of these, which see all of them.

    As [least, most) and inside it [full_from, full_to), which is empty if others are between them.
    """
    blocks = (sizes.queries + (SPAN - 1)) // SPAN
    items = sizes.batch * sizes.heads
    behind, ahead = tl.load(far + item), tl.load(far + items + item)
    # No block reads farther than `far` says; among those that may have, find the first and last that did.
    scan_from = tl.maximum(key_lo - ahead - q_start, 0) // SPAN
    scan_to = tl.minimum((tl.maximum(key_hi + behind - q_start, 0) + (SPAN - 1)) // SPAN, blocks)
    least, most, full_from, full_to, count = blocks, scan_to * 0, blocks, scan_to * 0, scan_to * 0
    for start in range(scan_from, scan_to, SCAN):
        one = start + tl.arange(0, SCAN)
        place, there = spans + item * blocks + one, one < scan_to
        did = tl.load(place, mask=there, other=1 << 30) < key_hi
        did = did & (tl.load(place + items * blocks, mask=there, other=0) > key_lo)
        least = tl.minimum(least, tl.min(tl.where(did, one, 1 << 30), 0))
        most = tl.maximum(most, tl.max(tl.where(did, one + 1, 0), 0))
        if EDGED:
            all_see = did & (tl.load(place + 2 * items * blocks, mask=there, other=1 << 30) <= key_lo)
            all_see = all_see & (tl.load(place + 3 * items * blocks, mask=there, other=0) >= key_hi)
            full_from = tl.minimum(full_from, tl.min(tl.where(all_see, one, 1 << 30), 0))
            full_to = tl.maximum(full_to, tl.max(tl.where(all_see, one + 1, 0), 0))
            count += tl.sum(all_see.to(tl.int32), 0)
    if EDGED:
        full_to = tl.where(full_to - full_from == count, full_to, full_from)
    else:  # from the keys on, or all
        full_from = 0 * most if TWO_SIDED else (tl.maximum(key_hi - 1 - q_start, 0) + (SPAN - 1)) // SPAN
        full_to = blocks
    return least, most, full_from, full_to


@triton.jit
def bwd_dkv(
    q, k, v, out, residual, do, dq, dk, dv, lse, d_lse, log_sums, deltas, d_biases, spans, far, rates, mask, bias,
    sizes, segment, of_lse, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SPAN: tl.constexpr, ALIGN: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr,
    GROUPED: tl.constexpr, OF_BIAS: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys and values, summed over the heads that share them; its arguments are bwd_dq's."""
    blocks = (sizes.keys + (N - 1)) // N
    block, b = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    key_head = sizes.key_heads - 1 - tl.program_id(1)
    key_lo = block * N
    key_hi = tl.minimum(key_lo + N, sizes.keys)
    local = tl.minimum(tl.arange(0, N), sizes.keys - 1 - key_lo)
    key = key_lo + local
    base_k = of_head(k, b, key_head, ALIGN)
    keys = load(base_k, local, k.row, key_lo, D, WIDTH, ALIGN)
    values = load(of_head(v, b, key_head, ALIGN), local, v.row, key_lo, DV, VALUES, ALIGN)
    scale2 = scale * LOG2E
    q_start = first_position(mask, b)

    acc_k = tl.zeros([N, WIDTH], tl.float32)
    acc_v = tl.zeros([N, VALUES], tl.float32)
    for member in range(sizes.group if GROUPED else 1):
        h = key_head * sizes.group + member
        item = b * sizes.heads + h
        slope, ahead = slopes_of(bias, h, BIAS)
        head = Head(k.data, v.data, k.row, v.row, 0, 0, slope, ahead, bias.table + h.to(tl.int64) * bias.stride)
        of_rows = item.to(tl.int64) * ((sizes.queries + (SPAN - 1)) // SPAN * SPAN)
        ramped = log_sums + sizes.batch * sizes.heads.to(tl.int64) * ((sizes.queries + (SPAN - 1)) // SPAN * SPAN)
        side = Side(
            of_head(q, b, h, ALIGN), of_head(do, b, h, ALIGN), q.row, do.row, log_sums + of_rows, ramped + of_rows,
            deltas + of_rows, q_start,
        )  # fmt: skip
        least, most, full_from, full_to = readers(
            spans, far, item, q_start, key_lo, key_hi, sizes, SPAN, TWO_SIDED, EDGED
        )
        full_from, full_to = full_from * (SPAN // M), tl.minimum(full_to * (SPAN // M), sizes.queries // M)
        from_block = least * (SPAN // M)
        to_block = tl.minimum(most * (SPAN // M), (sizes.queries + (M - 1)) // M)
        if not TWO_SIDED:  # of the blocks of a span, those before these keys see none of them
            from_block = tl.maximum(from_block, tl.maximum(key_lo - q_start, 0) // M)
        to_block = tl.maximum(to_block, from_block)
        if DECAY:  # queries are scaled from the start of their segment of rows: for each, so are the keys
            until = to_block
            steps = tl.zeros([1], tl.int32) + (q_start - key_lo // segment * segment)
            segment_row = tl.maximum(until - 1, 0) * M // segment * segment
            faded = faded_rows(base_k, local, k.row, key_lo, rates, h, steps + segment_row, D, WIDTH, ALIGN)
            while until > from_block:  # from the farthest, so that what is summed so far only ever fades
                at = tl.maximum(from_block, segment_row // M)
                acc_k *= power(rates, h, tl.zeros([1], tl.int32) + segment, D, WIDTH)
                acc_k, acc_v = dkv_rows(
                    acc_k, acc_v, faded, values, side, head, mask, b, bias, key, key_lo, at, until, full_from, full_to,
                    sizes, scale2, D, DV, WIDTH, VALUES, M, N, SPAN, ALIGN, BIAS, TWO_SIDED, EDGED, PRECISION,
                )  # fmt: skip
                until, segment_row = at, segment_row - segment
                if until > from_block:
                    faded = faded_rows(base_k, local, k.row, key_lo, rates, h, steps + segment_row, D, WIDTH, ALIGN)
            acc_k *= power(rates, h, steps + from_block * M // segment * segment, D, WIDTH)
        else:
            acc_k, acc_v = dkv_rows(
                acc_k, acc_v, keys, values, side, head, mask, b, bias, key, key_lo, from_block, to_block, full_from,
                full_to, sizes, scale2, D, DV, WIDTH, VALUES, M, N, SPAN, ALIGN, BIAS, TWO_SIDED, EDGED, PRECISION,
            )  # fmt: skip

    there = tl.arange(0, N)[:, None] < sizes.keys - key_lo
    row, feature = tl.arange(0, N)[:, None], tl.arange(0, WIDTH)[None, :]
    place = of_head(dk, b, key_head, ALIGN) + key_lo.to(tl.int64) * dk.row * ALIGN + row * (dk.row * ALIGN) + feature
    tl.store(place, (acc_k * scale).to(dk.data.dtype.element_ty), mask=there & (feature < D))
    feature = tl.arange(0, VALUES)[None, :]
    place = of_head(dv, b, key_head, ALIGN) + key_lo.to(tl.int64) * dv.row * ALIGN + row * (dv.row * ALIGN) + feature
    tl.store(place, acc_v.to(dv.data.dtype.element_ty), mask=there & (feature < DV))
