"""What the forward could not be trusted with, once more: with a running maximum, and everything that is seen is read.

That is a block of queries whose weights were lost or too large; and where a result is not finite, all blocks of the
head, since a value that is NaN counts for queries that left it unread too. Nearly always there is none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.backends.triton.forward import (
    EDGES,
    RUNNING,
    Head,
    Rows,
    attend_tile,
    faded_rows,
    store_rows,
    tile_scores,
)
from lengthen.attention.backends.triton.tile import (
    LOG2E,
    first_position,
    interval,
    load,
    load_before,
    of_head,
    slopes_of,
    wait_for_last,
)

FLAGS = tl.constexpr(128)  # blocks whose flags are looked at together
VANISHED = tl.constexpr(-150.0)  # the logarithm of a weight that float32 rounds to 0; a GPU may do so sooner


@triton.jit(do_not_specialize=["scale", "neg_log2_tolerance"])
def repair(
    q, k, v, out, residual, lse, spans, rates, mask, bias, ball, sizes, segment, scale, neg_log2_tolerance,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ALIGN: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr, STEADY: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Do again what the forward could not be trusted with; its arguments are the forward's, and N is also the rows.

    A program is one of several of a head. It looks at the flags of all the head's blocks, and does every so many-th.
    """
    wait_for_last(EARLY)
    item = tl.program_id(0)
    b, h = item // sizes.heads, item % sizes.heads
    blocks = (sizes.queries + (M - 1)) // M
    items = sizes.batch * sizes.heads
    lost, odd = spans + (4 * items + item) * blocks, spans + (5 * items + item) * blocks
    worst = tl.zeros([FLAGS], tl.int32)
    for start in range(0, blocks, FLAGS):
        block = start + tl.arange(0, FLAGS)
        worst = tl.maximum(worst, tl.load(lost + block, mask=block < blocks, other=0))
        worst = tl.maximum(worst, 2 * tl.load(odd + block, mask=block < blocks, other=0))
    whole = tl.max(worst, 0)
    if whole == 0:
        return
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        if (whole == 2) | (tl.load(lost + block) != 0):
            lo, hi = item * 0 + sizes.keys, item * 0
            for start in range(block * M, tl.minimum(block * M + M, sizes.queries), N):
                row_lo, row_hi = repair_rows(
                    item * 0 + start, b, h, q, k, v, out, residual, lse, rates, mask, bias, sizes, segment, scale,
                    D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGED, DECAY, PRECISION,
                )  # fmt: skip
                lo, hi = tl.minimum(lo, row_lo), tl.maximum(hi, row_hi)
            tl.store(spans + item * blocks + block, tl.minimum(lo, hi))
            tl.store(spans + (items + item) * blocks + block, hi)


@triton.jit
def repair_rows(
    start, b, h, q, k, v, out, residual, lse, rates, mask, bias, sizes, segment, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, ALIGN: tl.constexpr,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write N rows of out and lse from all keys that they see; return which those are.

    Where the result is still not finite, a second sweep sums weights that are at most 1, so that no sum of finite
    values overflows, and counts visible values that are not finite apart from the others.
    """
    local = tl.minimum(tl.arange(0, N), sizes.queries - 1 - start)
    here = first_position(mask, b) + start
    position = here + local
    begin, end = interval(start + local, position, mask, b, sizes.keys, TWO_SIDED, EDGED)
    some = begin <= end
    hi = tl.max(tl.where(some, end + 1, 0), 0)
    lo = tl.minimum(tl.min(tl.where(some, begin, 1 << 30), 0), hi)
    slope, ahead = slopes_of(bias, h, BIAS)
    rows = Rows(position, begin, end, slope * local.to(tl.float32))
    head = Head(
        of_head(k, b, h // sizes.group, ALIGN), of_head(v, b, h // sizes.group, ALIGN), k.row, v.row, lo, hi, slope,
        ahead, bias.table + h.to(tl.int64) * bias.stride,
    )  # fmt: skip
    base_q = of_head(q, b, h, ALIGN)
    queries = load(base_q, local, q.row, start, D, WIDTH, ALIGN)
    m_i = tl.full([N], float("-inf"), tl.float32)
    l_i = tl.zeros([N], tl.float32)
    acc = tl.zeros([N, VALUES], tl.float32)
    for key_lo in range(lo // N * N, hi, N):
        if DECAY:
            steps = position - key_lo // segment * segment
            queries = faded_rows(base_q, local, q.row, start, rates, h, steps, D, WIDTH, ALIGN)
        acc, l_i, m_i = attend_tile(
            acc, l_i, m_i, queries, head, rows, bias, here, key_lo, tl.minimum(key_lo + N, hi), scale * LOG2E, 0.0,
            D, DV, WIDTH, VALUES, N, ALIGN, BIAS, TWO_SIDED, EDGES, RUNNING, PRECISION,
        )  # fmt: skip
    log_sum = tl.where((m_i == float("inf")) | (l_i == 0), m_i, m_i + tl.log2(l_i))
    acc = acc * (1 / tl.where(l_i == 0, 1.0, l_i))[:, None]
    total = tl.sum(tl.sum(acc, 1), 0)
    if total - total != 0.0:
        acc = tl.zeros([N, VALUES], tl.float32)
        odd = tl.zeros([N, VALUES], tl.float32)
        unit = tl.where(log_sum == float("-inf"), 0.0, log_sum)
        for key_lo in range(lo // N * N, hi, N):
            key_lo = tl.multiple_of(key_lo, N)
            if DECAY:
                steps = position - key_lo // segment * segment
                queries = faded_rows(base_q, local, q.row, start, rates, h, steps, D, WIDTH, ALIGN)
            score = tile_scores(
                queries, head, rows, bias, here, key_lo, scale * LOG2E, 0.0, D, WIDTH, N, ALIGN, BIAS, TWO_SIDED, EDGES,
                PRECISION,
            )  # fmt: skip
            key = key_lo + tl.arange(0, N)
            visible = (key[None, :] >= begin[:, None]) & (key[None, :] <= end[:, None])
            values = load_before(head.v, tl.arange(0, N), head.v_row, key_lo, hi, DV, VALUES, ALIGN)
            odd = tally(odd, visible, score - unit[:, None] <= VANISHED, values.to(tl.float32))
            values = tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0).to(values.dtype)
            p = tl.where(visible, tl.exp2(score - unit[:, None]), 0.0)
            acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
        acc += odd
    store_rows(out, residual, lse, acc, log_sum / LOG2E, b, h, start, sizes, DV, N, VALUES, ALIGN)
    return lo, hi


@triton.jit
def tally(odd, visible, vanished, values):
    """Return odd with what visible values that are not finite add to each result: NaN, ∞, −∞, or 0 for nothing.

    The products count ones, which is exact in any precision. A weight that has vanished makes NaN of ∞.
    """
    one = visible.to(tl.float32)
    nan = tl.dot(one, (values != values).to(tl.float32), input_precision="tf32")
    infinite = (tl.abs(values) == float("inf")).to(tl.float32)
    nan = tl.dot((visible & vanished).to(tl.float32), infinite, nan, input_precision="tf32")
    plus = tl.dot(one, (values == float("inf")).to(tl.float32), input_precision="tf32")
    minus = tl.dot(one, (values == float("-inf")).to(tl.float32), input_precision="tf32")
    odd += tl.where(plus > 0, float("inf"), 0.0)
    odd += tl.where(minus > 0, float("-inf"), 0.0)
    return odd + tl.where(nan > 0, float("nan"), 0.0)
