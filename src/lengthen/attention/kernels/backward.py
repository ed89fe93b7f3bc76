"""The backward, in two kernels that sum in a fixed order: one for queries, then one for keys and values.

Weights are computed again from the forward's lse. `of_queries` goes over the keys that its block read; `of_keys` over
the blocks of queries that read its keys, which it finds in what the forward noted. Neither uses an atomic, so two runs
are equal to the bit. They stand in one file, since they are one computation from two sides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.kernels.tile import (
    BEHIND,
    BLOCKWISE,
    CAUSAL,
    EDGES,
    FULL,
    LEVEL,
    LINEAR,
    LISTED,
    LOG2E,
    NONE,
    SHOWN,
    SIZES,
    WINDOW,
    below,
    beyond,
    entries,
    faded_rows,
    fading,
    interval,
    load,
    row_term,
    scores,
    visible,
)

SCAN = tl.constexpr(128)  # blocks of queries that `of_keys` looks at together


@triton.jit  # type: ignore[untyped-decorator]
def pull_queries(  # type: ignore[no-untyped-def]
    d_q, along, ahead_along, q, d_out, k, v, kl, vl, lo, hi, keys, log_sum, share, position, begin, end, scale, slope,
    ahead, table, here,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, MASKED: tl.constexpr, SLOPES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys [lo, hi) give to the gradient of a block of queries, and to that of its slope."""
    for start in tl.range(lo, hi, N):
        start = tl.multiple_of(start, N)
        key = start + tl.arange(0, N)
        onward = start.to(tl.int64)
        keys_here = load(k, tl.arange(0, N), kl, D, keys - start, WIDTH, MASKED == EDGES, onward)
        values = load(v, tl.arange(0, N), vl, DV, keys - start, VALUES, MASKED == EDGES, onward)
        entry = entries(table, position[:, None], key[None, :], begin[:, None], end[:, None], MASKED, MASK, BIAS)
        product = tl.dot(q, tl.trans(keys_here), input_precision=PRECISION)
        score = scores(
            product, position[:, None], key[None, :], begin[:, None], end[:, None], scale, slope, ahead, entry,
            here if TWO_SIDED else start, MASKED, MASK, BIAS, TWO_SIDED,
        )  # fmt: skip
        weight = tl.exp2(score - (log_sum - row_term(start, here, slope, BIAS, TWO_SIDED))[:, None])
        d_weight = tl.dot(d_out, tl.trans(values), input_precision=PRECISION)
        d_score = weight * (d_weight - share[:, None])
        if SLOPES:
            distance = (position[:, None] - key[None, :]).to(tl.float32)
            weighed = d_score * distance
            along += tl.sum(tl.where(distance > 0, weighed, 0.0), 1)
            ahead_along += tl.sum(tl.where(distance < 0, -weighed, 0.0), 1)
        d_q = tl.dot(d_score.to(keys_here.dtype), keys_here, d_q, input_precision=PRECISION)
    return d_q, along, ahead_along


@triton.jit  # type: ignore[untyped-decorator]
def pull_interval(  # type: ignore[no-untyped-def]
    d_q, along, ahead_along, q, d_out, k, v, kl, vl, lo, hi, full_lo, full_hi, keys, log_sum, share, position, begin,
    end, scale, slope, ahead, table, here, level,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, SLOPES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys [lo, hi) give, with a mask only outside [full_lo, full_hi), where not every query sees them."""
    d_q, along, ahead_along = pull_queries(
        d_q, along, ahead_along, q, d_out, k, v, kl, vl, tl.maximum(lo, full_hi), hi, keys, log_sum, share, position,
        begin, end, scale, slope, ahead, table, here,
        D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, EDGES, SLOPES, PRECISION,
    )  # fmt: skip
    inner_lo, inner_hi = tl.maximum(lo, full_lo), tl.minimum(hi, full_hi)
    if BIAS == LEVEL:  # keys that every query sees from afar all have the same bias
        uneven = tl.maximum(inner_lo, tl.minimum(below(tl.maximum(here - level + 1, 0), N), inner_hi))
        d_q, along, ahead_along = pull_queries(
            d_q, along, ahead_along, q, d_out, k, v, kl, vl, inner_lo, uneven, keys,
            log_sum - beyond(table, level, BIAS), share, position, begin, end, scale, slope, ahead, table, here,
            D, DV, WIDTH, VALUES, N, MASK, NONE, TWO_SIDED, SHOWN, SLOPES, PRECISION,
        )  # fmt: skip
        inner_lo = uneven
    d_q, along, ahead_along = pull_queries(
        d_q, along, ahead_along, q, d_out, k, v, kl, vl, inner_lo, inner_hi, keys,
        log_sum, share, position, begin, end, scale, slope, ahead, table, here,
        D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, SHOWN, SLOPES, PRECISION,
    )  # fmt: skip
    if MASK != CAUSAL and MASK != FULL:
        d_q, along, ahead_along = pull_queries(
            d_q, along, ahead_along, q, d_out, k, v, kl, vl, lo, tl.minimum(hi, full_lo), keys, log_sum, share,
            position, begin, end, scale, slope, ahead, table, here,
            D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, BEHIND, SLOPES, PRECISION,
        )  # fmt: skip
    return d_q, along, ahead_along


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def of_queries(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, d_out, d_lse, d_q, sums, shares, d_slopes, spans, notes, slopes, slopes_ahead, table, first,
    last, rates,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, gb, gh, gl, db, dh, dl, group,
    table_stride, mask_stride, batch, heads, queries, keys, blocks, q_start, size, segment, level, span_blocks, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SPAN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, SLOPES: tl.constexpr,
    ORDERED: tl.constexpr, LSE: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the queries' gradient, and each block's share of the slopes'.

    And for the kernels after this one: lse in units of log 2, and Σ_j weight·d_weight, of each query.
    """
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    b = program // blocks % batch
    h = heads - 1 - program // (blocks * batch)
    if ORDERED:
        order = notes + batch * (heads // group) + 2 * batch * heads + 1
        h = tl.load(order + program // (blocks * batch))
    of_head = b * heads + h
    q += b.to(tl.int64) * qb + h.to(tl.int64) * qh
    k += b.to(tl.int64) * kb + (h // group).to(tl.int64) * kh
    v += b.to(tl.int64) * vb + (h // group).to(tl.int64) * vh

    actual = block * M + tl.arange(0, M)
    row = tl.minimum(actual, queries - 1)
    position = row + q_start
    begin, end = interval(row, position, first + b * mask_stride, last + b * mask_stride, keys, size, MASK)
    here = q_start + block * M
    stop = tl.minimum(here + M, q_start + queries) - 1
    some, most, full_lo, full_hi = visible(begin, end, here, stop, first, last, keys, size, N, MASK)
    lo = tl.load(spans + of_head * span_blocks + block * M // SPAN)
    hi = tl.load(spans + (batch * heads + of_head) * span_blocks + block * M // SPAN)
    lo, hi = tl.maximum(below(lo, N), some), tl.minimum(hi, most)
    full_hi = tl.maximum(full_hi, lo)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), full_hi)

    queries_here = load(q, row.to(tl.int64), ql, D, queries, WIDTH, False)
    d_out_here = load(
        d_out + b.to(tl.int64) * gb + h.to(tl.int64) * gh, row.to(tl.int64), gl, DV, queries, VALUES, False
    )
    out_here = load(out + b.to(tl.int64) * ob + h.to(tl.int64) * oh, row.to(tl.int64), ol, DV, queries, VALUES, False)
    share = tl.sum(d_out_here.to(tl.float32) * out_here.to(tl.float32), 1)
    of_rows = of_head.to(tl.int64) * queries
    if LSE:
        share -= tl.load(d_lse + of_rows + row)
    tl.store(shares + of_rows + actual, share, mask=actual < queries)

    scale2 = scale * LOG2E
    slope, ahead = 0.0, 0.0
    if BIAS == LINEAR:
        slope = tl.load(slopes + h).to(tl.float32) * LOG2E
        ahead = tl.load(slopes_ahead + h).to(tl.float32) * LOG2E
    table += h.to(tl.int64) * table_stride
    log_sum = tl.load(lse + of_rows + row)
    log_sum = tl.where(log_sum == float("-inf"), float("inf"), log_sum) * LOG2E  # a row that saw nothing has no weight
    tl.store(sums + of_rows + actual, log_sum, mask=actual < queries)
    log_sum += row_term(position, here, slope, BIAS, TWO_SIDED)

    acc = tl.zeros([M, WIDTH], tl.float32)
    along = tl.zeros([M], tl.float32)
    onward = tl.zeros([M], tl.float32)
    if DECAY:  # keys are scaled from the start of their segment: for each, so are the queries
        at, segment_lo = lo, lo // segment * segment
        faded = faded_rows(q, row.to(tl.int64), ql, rates, h, position - segment_lo, queries, D, WIDTH)
        while at < hi:  # from the farthest, so that what is summed so far only ever fades
            until = tl.minimum(hi, segment_lo + segment)
            acc *= fading(rates, h, tl.zeros([1], tl.int32) + segment, D, WIDTH)
            acc, along, onward = pull_interval(
                acc, along, onward, faded, d_out_here, k, v, kl, vl, at, until, full_lo, full_hi, keys, log_sum,
                share, position, begin, end, scale2, slope, ahead, table, here, level,
                D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, SLOPES, PRECISION,
            )  # fmt: skip
            at, segment_lo = until, segment_lo + segment
            if at < hi:
                faded = faded_rows(q, row.to(tl.int64), ql, rates, h, position - segment_lo, queries, D, WIDTH)
        acc *= fading(rates, h, position - tl.maximum(hi - 1, 0) // segment * segment, D, WIDTH)
    else:
        acc, along, onward = pull_interval(
            acc, along, onward, queries_here, d_out_here, k, v, kl, vl, lo, hi, full_lo, full_hi, keys, log_sum,
            share, position, begin, end, scale2, slope, ahead, table, here, level,
            D, DV, WIDTH, VALUES, N, MASK, BIAS, TWO_SIDED, SLOPES, PRECISION,
        )  # fmt: skip

    feature = tl.arange(0, WIDTH)
    place = d_q + b.to(tl.int64) * db + h.to(tl.int64) * dh + actual[:, None].to(tl.int64) * dl + feature[None, :]
    inside = (actual[:, None] < queries) & (feature[None, :] < D)
    tl.store(place, (acc * scale).to(d_q.dtype.element_ty), mask=inside)
    if SLOPES:
        inside = actual < queries
        tl.store(d_slopes + of_head * blocks + block, -tl.sum(tl.where(inside, along, 0.0), 0))
        tl.store(d_slopes + (batch * heads + of_head) * blocks + block, -tl.sum(tl.where(inside, onward, 0.0), 0))


@triton.jit  # type: ignore[untyped-decorator]
def pull_keys(  # type: ignore[no-untyped-def]
    d_k, d_v, k, v, q, d_out, ql, gl, sums, shares, first, last, from_block, to_block, queries, keys,
    q_start, size, key, key_lo, scale, slope, ahead, table, even,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, MASKED: tl.constexpr, FILLED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what blocks of queries give to the gradients of a block of keys and values."""
    for block in tl.range(from_block, to_block):
        start = block * M
        row = start + tl.arange(0, M)
        if not FILLED:
            row = tl.minimum(row, queries - 1)
        position = row + q_start
        local = row - start
        onward = start.to(tl.int64)
        queries_here = load(q, local, ql, D, queries, WIDTH, False, onward)
        log_sum = tl.load(sums + row) - even
        if BIAS == LINEAR:
            log_sum += row_term(position, key_lo, slope, BIAS, TWO_SIDED)
        if not FILLED:
            log_sum = tl.where(start + tl.arange(0, M) < queries, log_sum, float("inf"))  # no weight past the end
        begin, end = position, position
        if MASKED != SHOWN:
            begin, end = interval(row, position, first, last, keys, size, MASK)
        entry = entries(table, position[None, :], key[:, None], begin[None, :], end[None, :], MASKED, MASK, BIAS)
        product = tl.dot(k, tl.trans(queries_here), input_precision=PRECISION)
        score = scores(
            product, position[None, :], key[:, None], begin[None, :], end[None, :], scale, slope, ahead, entry, key_lo,
            MASKED, MASK, BIAS, TWO_SIDED,
        )  # fmt: skip
        weight = tl.exp2(score - log_sum[None, :])
        d_out_here = load(d_out, local, gl, DV, queries, VALUES, False, onward)
        d_v = tl.dot(weight.to(d_out_here.dtype), d_out_here, d_v, input_precision=PRECISION)
        share = tl.load(shares + row)
        d_weight = tl.dot(v, tl.trans(d_out_here), input_precision=PRECISION)
        d_score = weight * (d_weight - share[None, :])
        d_k = tl.dot(d_score.to(queries_here.dtype), queries_here, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit  # type: ignore[untyped-decorator]
def pull_rows(  # type: ignore[no-untyped-def]
    d_k, d_v, k, v, q, d_out, ql, gl, sums, shares, first, last, from_block, to_block, full_from, full_to, queries,
    keys, q_start, size, key, key_lo, scale, slope, ahead, table, level,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, FILLED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what blocks of queries give, with a mask only outside [full_from, full_to), where not every key is seen."""
    d_k, d_v = pull_keys(
        d_k, d_v, k, v, q, d_out, ql, gl, sums, shares, first, last, from_block, tl.minimum(full_from, to_block),
        queries, keys, q_start, size, key, key_lo, scale, slope, ahead, table, 0.0,
        D, DV, WIDTH, VALUES, M, MASK, BIAS, TWO_SIDED, EDGES, FILLED, PRECISION,
    )  # fmt: skip
    inner_from, inner_to = tl.maximum(full_from, from_block), tl.minimum(full_to, to_block)
    if BIAS == LEVEL:  # queries that see every key from afar all have the same bias
        afar = (tl.maximum(tl.minimum(key_lo + k.shape[0], keys) - 1 + level - q_start, 0) + (M - 1)) // M
        afar = tl.maximum(inner_from, tl.minimum(afar, inner_to))
        d_k, d_v = pull_keys(
            d_k, d_v, k, v, q, d_out, ql, gl, sums, shares, first, last, afar, inner_to, queries, keys, q_start, size,
            key, key_lo, scale, slope, ahead, table, beyond(table, level, BIAS),
            D, DV, WIDTH, VALUES, M, MASK, NONE, TWO_SIDED, SHOWN, FILLED, PRECISION,
        )  # fmt: skip
        inner_to = afar
    d_k, d_v = pull_keys(
        d_k, d_v, k, v, q, d_out, ql, gl, sums, shares, first, last, inner_from, inner_to, queries, keys, q_start, size,
        key, key_lo, scale, slope, ahead, table, 0.0,
        D, DV, WIDTH, VALUES, M, MASK, BIAS, TWO_SIDED, SHOWN, FILLED, PRECISION,
    )  # fmt: skip
    if MASK != CAUSAL and MASK != FULL:
        d_k, d_v = pull_keys(
            d_k, d_v, k, v, q, d_out, ql, gl, sums, shares, first, last, tl.maximum(full_to, from_block), to_block,
            queries, keys, q_start, size, key, key_lo, scale, slope, ahead, table, 0.0,
            D, DV, WIDTH, VALUES, M, MASK, BIAS, TWO_SIDED, EDGES if MASK == LISTED else BEHIND, FILLED, PRECISION,
        )  # fmt: skip
    return d_k, d_v


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def of_keys(  # type: ignore[no-untyped-def]
    q, k, v, sums, d_out, shares, d_k, d_v, spans, notes, slopes, slopes_ahead, table, first, last, rates,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, gb, gh, gl, dkb, dkh, dkl, dvb, dvh, dvl, group,
    table_stride, mask_stride, batch, heads, queries, keys, blocks, q_start, size, segment, level, span_blocks, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SPAN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, ORDERED: tl.constexpr,
    DECAY: tl.constexpr, FILLED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys and values, summed over the heads of queries that share them.

    FILLED says that no block of queries goes past their end.
    """
    program = tl.program_id(0)
    key_heads = heads // group
    block = program % blocks
    b = program // blocks % batch
    key_head = program // (blocks * batch)
    far = notes + batch * key_heads
    if ORDERED:  # only where no heads share keys
        key_head = tl.load(far + 2 * batch * heads + 1 + key_head)
    k += b.to(tl.int64) * kb + key_head.to(tl.int64) * kh
    v += b.to(tl.int64) * vb + key_head.to(tl.int64) * vh
    key_lo = block * N
    key_hi = tl.minimum(key_lo + N, keys)
    actual = key_lo + tl.arange(0, N)
    key = tl.minimum(actual, keys - 1)
    keys_here = load(k, key.to(tl.int64), kl, D, keys, WIDTH, False)
    values = load(v, key.to(tl.int64), vl, DV, keys, VALUES, False)
    first += b * mask_stride
    last += b * mask_stride
    scale2 = scale * LOG2E
    d_k = d_k + b.to(tl.int64) * dkb + key_head.to(tl.int64) * dkh
    d_v = d_v + b.to(tl.int64) * dvb + key_head.to(tl.int64) * dvh

    # The positions [all_from, all_to) from which a query sees every key of this block.
    all_from, all_to = key_hi - 1, queries + q_start
    if MASK == WINDOW:
        all_to = tl.minimum(all_to, key_lo + size)
    if MASK == BLOCKWISE:
        all_to = tl.minimum(all_to, (key_lo // size + 2) * size)
    if MASK == FULL:
        all_from = q_start
    if MASK == LISTED:
        all_to = all_from
    inner_from = (tl.maximum(all_from - q_start, 0) + (M - 1)) // M
    inner_to = tl.maximum(all_to - q_start, 0) // M
    if all_to == queries + q_start:  # rows past the end have no weight
        inner_to = (queries + (M - 1)) // M

    acc_k = tl.zeros([N, WIDTH], tl.float32)
    acc_v = tl.zeros([N, VALUES], tl.float32)
    for member in range(group):
        h = key_head * group + member
        of_head = b * heads + h
        slope, ahead = 0.0, 0.0
        if BIAS == LINEAR:
            slope = tl.load(slopes + h).to(tl.float32) * LOG2E
            ahead = tl.load(slopes_ahead + h).to(tl.float32) * LOG2E
        spans_lo = spans + of_head * span_blocks
        spans_hi = spans + (batch * heads + of_head) * span_blocks
        # No block of queries reads farther than `far` says; among those that may, find the first and last that did.
        scan_from = tl.maximum(key_lo - tl.load(far + 2 * of_head + 1) - q_start, 0) // SPAN
        scan_to = tl.maximum(key_hi + tl.load(far + 2 * of_head) - q_start, 0) // SPAN
        scan_to = tl.minimum(scan_to, span_blocks)
        least = scan_to * 0 + span_blocks
        most = scan_to * 0
        for start in range(scan_from, scan_to, SCAN):
            one = start + tl.arange(0, SCAN)
            low = tl.load(spans_lo + one, mask=one < scan_to, other=1 << 30)
            high = tl.load(spans_hi + one, mask=one < scan_to, other=0)
            did = (low < key_hi) & (high > key_lo)
            least = tl.minimum(least, tl.min(tl.where(did, one, 1 << 30), 0))
            most = tl.maximum(most, tl.max(tl.where(did, one + 1, 0), 0))
        from_block = least * (SPAN // M)
        to_block = tl.minimum(most * (SPAN // M), (queries + (M - 1)) // M)
        if MASK != FULL and MASK != LISTED:  # a span's blocks before these keys see none of them
            from_block = tl.maximum(from_block, tl.maximum(key_lo - q_start, 0) // M)
        to_block = tl.maximum(to_block, from_block)
        full_from = tl.minimum(tl.maximum(inner_from, from_block), to_block)
        full_to = tl.maximum(tl.minimum(inner_to, to_block), full_from)
        base_q = q + b.to(tl.int64) * qb + h.to(tl.int64) * qh
        base_g = d_out + b.to(tl.int64) * gb + h.to(tl.int64) * gh
        of_rows = of_head.to(tl.int64) * queries
        base_table = table + h.to(tl.int64) * table_stride
        if DECAY:  # queries are scaled from the start of their segment of rows: for each, so are the keys
            until = to_block
            part = acc_k  # zeros, where no heads share keys
            if group > 1:
                part = tl.zeros([N, WIDTH], tl.float32)
            steps = tl.zeros([1], tl.int32) + (q_start - key_lo // segment * segment)
            segment_row = tl.maximum(until - 1, 0) * M // segment * segment
            faded = faded_rows(k, key.to(tl.int64), kl, rates, h, steps + segment_row, keys, D, WIDTH)
            while until > from_block:  # from the farthest, so that what is summed so far only ever fades
                at = tl.maximum(from_block, segment_row // M)
                part *= fading(rates, h, tl.zeros([1], tl.int32) + segment, D, WIDTH)
                part, acc_v = pull_rows(
                    part, acc_v, faded, values, base_q, base_g, ql, gl, sums + of_rows, shares + of_rows, first, last,
                    at, until, full_from, full_to, queries, keys, q_start, size, key, key_lo, scale2, slope, ahead,
                    base_table, level, D, DV, WIDTH, VALUES, M, MASK, BIAS, TWO_SIDED, FILLED, PRECISION,
                )  # fmt: skip
                until, segment_row = at, segment_row - segment
                if until > from_block:
                    faded = faded_rows(k, key.to(tl.int64), kl, rates, h, steps + segment_row, keys, D, WIDTH)
            part *= fading(rates, h, steps + from_block * M // segment * segment, D, WIDTH)
            acc_k = acc_k + part if group > 1 else part
        else:
            acc_k, acc_v = pull_rows(
                acc_k, acc_v, keys_here, values, base_q, base_g, ql, gl, sums + of_rows, shares + of_rows, first, last,
                from_block, to_block, full_from, full_to, queries, keys, q_start, size, key, key_lo, scale2, slope,
                ahead, base_table, level, D, DV, WIDTH, VALUES, M, MASK, BIAS, TWO_SIDED, FILLED, PRECISION,
            )  # fmt: skip

    feature = tl.arange(0, WIDTH)
    place = d_k + actual[:, None].to(tl.int64) * dkl + feature[None, :]
    tl.store(place, (acc_k * scale).to(d_k.dtype.element_ty), mask=(actual[:, None] < keys) & (feature[None, :] < D))
    feature = tl.arange(0, VALUES)
    place = d_v + actual[:, None].to(tl.int64) * dvl + feature[None, :]
    tl.store(place, acc_v.to(d_v.dtype.element_ty), mask=(actual[:, None] < keys) & (feature[None, :] < DV))
