"""What the forward cannot do at speed: values that are NaN or infinite, as the reference has them.

A tensor core multiplies a weight of 0 by NaN and gets NaN, so a value that a query does not see would spoil it; and
reach leaves values unread that the reference would have met. The forward notes when a result of its own is not finite,
or cannot be trusted. Then, and only then, this kernel computes the call once more, reading everything: visible values
that are not finite are counted apart from the others. Otherwise its programs look at the note and end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.kernels.tile import (
    LINEAR,
    LOG2E,
    SIZES,
    entries,
    fading,
    interval,
    load,
    row_term,
    scores,
    visible,
    wait_for_last,
)

VANISHED = tl.constexpr(-150.0)  # the logarithm of a weight that float32 rounds to 0; a GPU may do so sooner


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def repair(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, notes, slopes, slopes_ahead, table, first, last, rates,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, group,
    table_stride, mask_stride, batch, heads, queries, keys, blocks, q_start, size, segment, level, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, DECAY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the output again if the note says so."""
    wait_for_last(EARLY)
    if tl.load(notes + batch * (heads // group) + 2 * batch * heads) == 0:
        return
    one = tl.program_id(0)
    for turn in tl.range(0, (batch * heads * blocks - one + tl.num_programs(0) - 1) // tl.num_programs(0)):
        item = one + turn * tl.num_programs(0)
        block, h, b = item % blocks, item // blocks % heads, item // (blocks * heads)
        base_q = q + b.to(tl.int64) * qb + h.to(tl.int64) * qh
        base_k = k + b.to(tl.int64) * kb + (h // group).to(tl.int64) * kh
        base_v = v + b.to(tl.int64) * vb + (h // group).to(tl.int64) * vh
        actual = block * M + tl.arange(0, M)
        row = tl.minimum(actual, queries - 1)
        position = row + q_start
        begin, end = interval(row, position, first + b * mask_stride, last + b * mask_stride, keys, size, MASK)
        here = q_start + block * M
        stop = tl.minimum(here + M, q_start + queries) - 1
        lo, hi, _, _ = visible(begin, end, here, stop, first, last, keys, size, N, MASK)
        queries_here = load(base_q, row.to(tl.int64), ql, D, queries, WIDTH, False).to(tl.float32)
        slope, ahead = 0.0, 0.0
        if BIAS == LINEAR:
            slope = tl.load(slopes + h).to(tl.float32) * LOG2E
            ahead = tl.load(slopes_ahead + h).to(tl.float32) * LOG2E
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        for start in tl.range(lo, hi, N):
            start = tl.multiple_of(start, N)
            key = start + tl.arange(0, N)
            keys_here = load(base_k + start.to(tl.int64) * kl, tl.arange(0, N), kl, D, keys - start, WIDTH, True)
            faded = queries_here
            if DECAY:
                faded = queries_here * fading(rates, h, position - start // segment * segment, D, WIDTH)
            product = tl.dot(faded, tl.trans(keys_here.to(tl.float32)), input_precision="ieee")
            entry = entries(
                table + h.to(tl.int64) * table_stride, position[:, None], key[None, :], begin[:, None], end[:, None],
                True, MASK, BIAS,
            )  # fmt: skip
            score = scores(
                product, position[:, None], key[None, :], begin[:, None], end[:, None], scale * LOG2E, slope, ahead,
                entry, here, True, MASK, BIAS, TWO_SIDED,
            )  # fmt: skip
            highest = tl.maximum(top, tl.max(score, 1))
            unit = tl.where(highest == float("-inf"), 0.0, highest)
            total = total * tl.exp2(top - unit) + tl.sum(tl.exp2(score - unit[:, None]), 1)
            top = highest
        settled = (top == float("inf")) | (total == 0)
        log_sum = tl.where(settled, top, top + tl.log2(total))
        true = (log_sum - row_term(position, here, slope, BIAS, TWO_SIDED)) / LOG2E
        tl.store(lse + (b * heads + h).to(tl.int64) * queries + actual, true, mask=actual < queries)
        log_sum = tl.where(log_sum == float("-inf"), 0.0, log_sum)
        finite = tl.zeros([M, VALUES], tl.float32)
        nan = tl.zeros([M, VALUES], tl.float32)
        plus = tl.zeros([M, VALUES], tl.float32)
        minus = tl.zeros([M, VALUES], tl.float32)
        for start in tl.range(lo, hi, N):
            start = tl.multiple_of(start, N)
            key = start + tl.arange(0, N)
            keys_here = load(base_k + start.to(tl.int64) * kl, tl.arange(0, N), kl, D, keys - start, WIDTH, True)
            values = load(base_v + start.to(tl.int64) * vl, tl.arange(0, N), vl, DV, keys - start, VALUES, True)
            values = values.to(tl.float32)
            faded = queries_here
            if DECAY:
                faded = queries_here * fading(rates, h, position - start // segment * segment, D, WIDTH)
            product = tl.dot(faded, tl.trans(keys_here.to(tl.float32)), input_precision="ieee")
            entry = entries(
                table + h.to(tl.int64) * table_stride, position[:, None], key[None, :], begin[:, None], end[:, None],
                True, MASK, BIAS,
            )  # fmt: skip
            score = scores(
                product, position[:, None], key[None, :], begin[:, None], end[:, None], scale * LOG2E, slope, ahead,
                entry, here, True, MASK, BIAS, TWO_SIDED,
            )  # fmt: skip
            seen = (key[None, :] >= begin[:, None]) & (key[None, :] <= end[:, None])
            weight = tl.where(seen, tl.exp2(score - log_sum[:, None]), 0.0)
            usual = tl.abs(values) < float("inf")
            finite = tl.dot(weight, tl.where(usual, values, 0.0), finite, input_precision="ieee")
            is_nan, is_infinite = (values != values).to(tl.float32), (tl.abs(values) == float("inf")).to(tl.float32)
            nan = tl.dot(seen.to(tl.float32), is_nan, nan, input_precision="ieee")
            vanished = seen & (score - log_sum[:, None] <= VANISHED)  # 0·∞
            nan = tl.dot(vanished.to(tl.float32), is_infinite, nan, input_precision="ieee")
            plus = tl.dot(seen.to(tl.float32), (values == float("inf")).to(tl.float32), plus, input_precision="ieee")
            minus = tl.dot(seen.to(tl.float32), (values == float("-inf")).to(tl.float32), minus, input_precision="ieee")
        finite = tl.where(plus > 0, float("inf"), finite)
        finite = tl.where(minus > 0, float("-inf"), finite)
        finite = tl.where((nan > 0) | ((plus > 0) & (minus > 0)), float("nan"), finite)
        feature = tl.arange(0, VALUES)
        place = out + b.to(tl.int64) * ob + h.to(tl.int64) * oh + actual[:, None].to(tl.int64) * ol + feature[None, :]
        inside = (actual[:, None] < queries) & (feature[None, :] < DV)
        tl.store(place, finite.to(out.dtype.element_ty), mask=inside)
