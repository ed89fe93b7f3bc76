"""Decoding: one or a few queries against many keys, the keys split over programs.

All queries of the heads that share keys are rows of one tile. A flat head reaches far and gets many programs, a steep
one gets one. A program reads the nearest keys first, to know how far back its rows reach, and then its share of what
they reach; all programs of a head come to the same answer, so none waits for another. `join` adds the shares up. One
query sees all values that are let into the product, or none of them; of several, some may not see a value that is not
finite, so those are counted apart, as in repair.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.kernels.ball import SLACK
from lengthen.attention.kernels.forward import GIVEN, lowest, one_less_exp, reach
from lengthen.attention.kernels.tile import LINEAR, LOG2E, SIZES, above, below, interval, load, row_term, scores

USUAL = tl.constexpr(24.0)  # how much of a bias lies between a query and the end of its reach, for the cut alone


@triton.jit  # type: ignore[untyped-decorator]
def shares(  # type: ignore[no-untyped-def]
    slopes, group, key_heads, keys, programs, N: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    REACH: tl.constexpr,
):  # fmt: skip
    """Return how many programs each head of keys has, and where the first of the next head stands, `[HEADS]` each.

    In proportion to how far it may reach, and one at least: in all, no more than there are.
    """
    one = tl.arange(0, HEADS)
    blocks = tl.zeros([HEADS], tl.float32) + ((keys + (N - 1)) // N).to(tl.float32)
    if REACH == GIVEN:
        member = tl.arange(0, GROUP)
        there = (one[:, None] < key_heads) & (member[None, :] < group)
        slope = tl.load(slopes + one[:, None] * group + member[None, :], mask=there, other=float("inf"))
        flattest = tl.maximum(tl.min(slope.to(tl.float32), 1), 1e-30)
        blocks = tl.minimum(blocks, tl.ceil((1.0 / flattest) * (USUAL / N)))
    blocks = tl.where(one < key_heads, tl.maximum(blocks, 1.0), 0.0)
    spare = (programs - key_heads).to(tl.float32) * (1 - 1e-5)
    more = tl.minimum(tl.floor(blocks * (spare / tl.sum(blocks, 0))), blocks - 1)
    count = tl.where(one < key_heads, 1 + more.to(tl.int32), 0)
    return count, tl.cumsum(count, 0)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def split(  # type: ignore[no-untyped-def]
    q, k, v, parts, units, totals, lows, slopes, slopes_ahead, table, first, last, key_norm,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, group,
    table_stride, mask_stride, key_heads, queries, keys, q_start, size, splits, scale, exact,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr,
    REACH: tl.constexpr, SEVERAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write one share of one head of keys: Σ weight·v, Σ weight and the score whose weight is 1, for every row."""
    b, program = tl.program_id(0), tl.program_id(1)
    count, ends = shares(slopes, group, key_heads, keys, splits, N, HEADS, GROUP, REACH)
    one = tl.arange(0, HEADS)
    key_head = tl.sum(((one < key_heads) & (ends <= program)).to(tl.int32), 0)
    if key_head >= key_heads:
        return
    mine = one == key_head
    each_of = tl.sum(tl.where(mine, count, 0), 0)
    share = program - (tl.sum(tl.where(mine, ends, 0), 0) - each_of)
    head = b * key_heads + key_head
    k += b.to(tl.int64) * kb + key_head.to(tl.int64) * kh
    v += b.to(tl.int64) * vb + key_head.to(tl.int64) * vh
    row = tl.arange(0, ROWS)
    there = row < group * queries
    member = tl.where(there, row // queries, 0)
    query = tl.where(there, row % queries, 0)
    h = key_head * group + member
    position = query + q_start
    begin, end = interval(query, position, first + b * mask_stride, last + b * mask_stride, keys, size, MASK)
    end = tl.where(there, end, -1)
    feature = tl.arange(0, WIDTH)
    place = q + b.to(tl.int64) * qb + h[:, None].to(tl.int64) * qh + query[:, None].to(tl.int64) * ql + feature[None, :]
    queries_here = tl.load(place, mask=there[:, None] & (feature[None, :] < D), other=0.0)
    slope = position.to(tl.float32) * 0
    ahead = slope
    if BIAS == LINEAR:
        slope = tl.load(slopes + h).to(tl.float32) * LOG2E
        ahead = tl.load(slopes_ahead + h).to(tl.float32) * LOG2E
    table = table + h[:, None].to(tl.int64) * table_stride
    scale2 = scale * LOG2E

    some = begin <= end
    hi = tl.max(tl.where(some, end + 1, 0), 0)
    lowest_seen = tl.minimum(tl.min(tl.where(some, begin, 1 << 30), 0), hi)
    lo = below(lowest_seen, N)
    here = hi
    if REACH == GIVEN:
        near = tl.maximum(hi - N, 0)  # the last N keys, wherever blocks begin
        key = near + tl.arange(0, N)
        keys_here = load(k + near.to(tl.int64) * kl, tl.arange(0, N), kl, D, keys - near, WIDTH, True)
        score = scores(
            tl.dot(queries_here, tl.trans(keys_here), input_precision=PRECISION), position[:, None], key[None, :],
            begin[:, None], end[:, None], scale2, slope[:, None], ahead[:, None], table, here,
            True, MASK, BIAS, TWO_SIDED,
        )  # fmt: skip
        top = tl.max(score, 1)
        total = tl.sum(tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
        wide = queries_here.to(tl.float32)
        bound = tl.abs(scale2) * tl.sqrt(tl.sum(wide * wide, 1)) * (1 + SLACK) * tl.load(key_norm + head)
        bound += exact - tl.log2(one_less_exp(slope))
        needed = reach(top, total, bound, position.to(tl.float32) * 0, slope, (begin >= near) | (begin > end))
        lo = lowest(needed, here, lo, near, N)
    if share == 0:
        tl.store(lows + head, lo)
        tl.store(lows + tl.num_programs(0) * key_heads + head, hi)

    each = (above(hi - lo, N) // N + each_of - 1) // each_of * N
    from_key = lo + share * each
    to_key = tl.minimum(from_key + each, hi)
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    odd = tl.zeros([ROWS, VALUES], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for start in tl.range(from_key, to_key, N):
        start = tl.multiple_of(start, N)
        key = start + tl.arange(0, N)
        keys_here = load(k + start.to(tl.int64) * kl, tl.arange(0, N), kl, D, keys - start, WIDTH, True)
        value = tl.arange(0, VALUES)
        let_in = ((key >= lowest_seen) & (key < hi))[:, None] & (value[None, :] < DV)
        values = tl.load(v + start.to(tl.int64) * vl + tl.arange(0, N)[:, None] * vl + value, mask=let_in, other=0.0)
        score = scores(
            tl.dot(queries_here, tl.trans(keys_here), input_precision=PRECISION), position[:, None], key[None, :],
            begin[:, None], end[:, None], scale2, slope[:, None], ahead[:, None], table, here,
            True, MASK, BIAS, TWO_SIDED,
        )  # fmt: skip
        highest = tl.maximum(top, tl.ceil(tl.max(score, 1)))
        unit = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - unit[:, None])
        fade = tl.exp2(top - unit)
        total = total * fade + tl.sum(weight, 1)
        if SEVERAL:
            finite = tl.abs(values.to(tl.float32)) < float("inf")
            if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
                seen = (key[None, :] >= begin[:, None]) & (key[None, :] <= end[:, None])
                odd = tally(odd, seen, weight, values.to(tl.float32))
                values = tl.where(finite, values, 0.0).to(values.dtype)
        acc = tl.dot(weight.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
        top = highest
    acc = tl.where(odd == 0, acc, odd)
    top = tl.where(top == float("-inf"), top, top - row_term(position, here, slope, BIAS, TWO_SIDED))

    at = (b * splits + program) * (group * queries) + row
    tl.store(units + at, top, mask=there)
    tl.store(totals + at, total, mask=there)
    feature = tl.arange(0, VALUES)
    tl.store(
        parts + at[:, None].to(tl.int64) * DV + feature[None, :], acc, mask=there[:, None] & (feature[None, :] < DV)
    )


@triton.jit
def tally(odd, seen, weight, values):  # type: ignore[no-untyped-def]
    """Return odd with what visible values that are not finite add to each result: NaN, ∞, −∞, or 0 for nothing.

    The products count ones, which is exact in any precision.
    """
    one = seen.to(tl.float32)
    nan = tl.dot(one, (values != values).to(tl.float32), input_precision="tf32")
    infinite = (tl.abs(values) == float("inf")).to(tl.float32)
    nan = tl.dot((seen & (weight == 0)).to(tl.float32), infinite, nan, input_precision="tf32")  # 0·∞
    plus = tl.dot(one, (values == float("inf")).to(tl.float32), input_precision="tf32")
    minus = tl.dot(one, (values == float("-inf")).to(tl.float32), input_precision="tf32")
    odd += tl.where(plus > 0, float("inf"), 0.0)
    odd += tl.where(minus > 0, float("-inf"), 0.0)
    return odd + tl.where(nan > 0, float("nan"), 0.0)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def join(  # type: ignore[no-untyped-def]
    parts, units, totals, out, lse, slopes, ob, oh, ol, group, key_heads, queries, keys, splits,
    DV: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Write a row's output and lse from its shares."""
    head, row = tl.program_id(0), tl.program_id(1)
    b, key_head = head // key_heads, head % key_heads
    h, query = key_head * group + row // queries, row % queries
    counts, ends = shares(slopes, group, key_heads, keys, splits, N, HEADS, GROUP, REACH)
    mine = tl.arange(0, HEADS) == key_head
    count = tl.sum(tl.where(mine, counts, 0), 0)
    first = b * splits + tl.sum(tl.where(mine, ends, 0), 0) - count
    feature = tl.arange(0, VALUES)
    top = tl.full([1], float("-inf"), tl.float32)
    whole = tl.zeros([1], tl.float32)
    result = tl.zeros([VALUES], tl.float32)
    for start in range(0, count, CHUNK):
        share = start + tl.arange(0, CHUNK)
        at = (first + share) * (group * queries) + row
        unit = tl.load(units + at, mask=share < count, other=float("-inf"))
        total = tl.load(totals + at, mask=share < count, other=0.0)
        used = (share[:, None] < count) & (feature[None, :] < DV)
        part = tl.load(parts + at[:, None].to(tl.int64) * DV + feature[None, :], mask=used, other=0.0)
        highest = tl.maximum(top, tl.max(unit, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.where(total == 0, 0.0, tl.exp2(unit - base))  # a share that saw nothing has no unit
        fade = tl.where(whole == 0, 0.0, tl.exp2(top - base))
        whole = whole * fade + tl.sum(total * weight, 0)
        result = result * fade + tl.sum(part * weight[:, None], 0)
        top = highest
    result = result / tl.where(whole == 0, 1.0, whole)
    place = out + b.to(tl.int64) * ob + h.to(tl.int64) * oh + query.to(tl.int64) * ol + feature
    tl.store(place, result.to(out.dtype.element_ty), mask=feature < DV)
    log_sum = tl.where(top == float("inf"), top, top + tl.log2(whole))
    log_sum = tl.where(whole == 0, float("-inf"), log_sum) / LOG2E
    tl.store(lse + (b * key_heads * group + h).to(tl.int64) * queries + query + tl.arange(0, 1), log_sum)
