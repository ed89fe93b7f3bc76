"""Decoding: one or a few queries against many keys, the keys split over programs.

All queries of the heads that share keys are rows of one tile. A flat head reaches far and gets many programs, a steep
one gets one. A program reads the nearest keys, to know how far back its rows reach, and its share of the blocks within
that. All programs of a head come to the same answer, so none waits for another. `join` adds the shares up. One query
sees all values that are let into the product, or none of them; of several, some may not see a value that is not
finite, so those are counted apart, as in repair.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.kernels.ball import SLACK
from lengthen.attention.kernels.forward import GIVEN, lowest, one_less_exp, reach
from lengthen.attention.kernels.tile import (
    LINEAR,
    LOG2E,
    SIZES,
    entries,
    interval,
    let_next_begin,
    row_term,
    scores,
    wait_for_last,
)

USUAL = tl.constexpr(24.0)  # how much of a bias lies between a query and the end of its reach, for the cut alone
FROM_UNIT = tl.constexpr(80.0)  # log₂ of the largest weight, and of the smallest that must not be lost
NOBODYS = tl.constexpr(1 << 30)  # a key behind all
TRIED = tl.constexpr(16)  # how many cuts are looked at


@triton.jit  # type: ignore[untyped-decorator]
def shares(  # type: ignore[no-untyped-def]
    slopes, group, key_heads, keys, programs, N: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    REACH: tl.constexpr,
):  # fmt: skip
    """Return how many programs each head of keys has, and where the first of the next head stands, `[HEADS]` each.

    Every program gets as many blocks as any other, or fewer: as few as there are programs for.
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
    # A cut into pieces of total / programs would do if no head were smaller than its last piece; with one program a
    # head to spare, any will do. The first between these two that fits is taken.
    total = tl.sum(blocks, 0)
    least = total / programs.to(tl.float32)
    most = tl.maximum(total / tl.maximum((programs - key_heads).to(tl.float32), 0.5), least)
    step = tl.arange(0, TRIED).to(tl.float32) * (1 / (TRIED - 1))
    pieces = tl.maximum(least + (most - least) * step, 1.0)
    needed = tl.sum(tl.ceil(blocks[None, :] / pieces[:, None]), 1)
    fits = needed <= programs.to(tl.float32)
    piece = tl.min(tl.where(fits, pieces, float("inf")), 0)
    count = tl.where(one < key_heads, tl.maximum(tl.ceil(blocks / piece), 1.0), 0.0).to(tl.int32)
    return count, tl.cumsum(count, 0)


@triton.jit  # type: ignore[untyped-decorator]
def take(  # type: ignore[no-untyped-def]
    acc, odd, total, top, searching, queries_here, keys_here, values, key, position, begin, end, scale, slope, ahead,
    table, here,
    MASK: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, SEVERAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to a softmax: Σ weight·v, the weights themselves, and the score whose weight is 1.

    Where that score is not known to be high enough for all, the highest is searched for, and what was summed rescaled.
    """
    of_table = tl.where(key == NOBODYS, here - 1, key)[None, :]  # some distance that the table has
    entry = entries(table, position[:, None], of_table, begin[:, None], end[:, None], True, MASK, BIAS)
    score = scores(
        tl.dot(queries_here, tl.trans(keys_here), input_precision=PRECISION), position[:, None], key[None, :],
        begin[:, None], end[:, None], scale, slope[:, None], ahead[:, None], entry, here,
        True, MASK, BIAS, TWO_SIDED,
    )  # fmt: skip
    if searching:
        highest = tl.maximum(top, tl.ceil(tl.max(score, 1)))
        fade = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
        total *= fade[:, None]
        acc *= fade[:, None]
        top = highest
    weight = tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total += weight
    if SEVERAL:
        finite = tl.abs(values.to(tl.float32)) < float("inf")
        if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
            seen = (key[None, :] >= begin[:, None]) & (key[None, :] <= end[:, None])
            odd = tally(odd, seen, weight, values.to(tl.float32))
            values = tl.where(finite, values, 0.0).to(values.dtype)
    acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc, odd, total, top


@triton.jit  # type: ignore[untyped-decorator]
def rows(x, stride, start, from_key, to_key, width, N: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return N rows of keys or values; 0 outside [from_key, to_key)."""
    key = start + tl.arange(0, N)
    feature = tl.arange(0, WIDTH)
    there = ((key >= from_key) & (key < to_key))[:, None] & (feature[None, :] < width)
    place = x + start.to(tl.int64) * stride + tl.arange(0, N)[:, None] * stride + feature[None, :]
    return tl.load(place, mask=there, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def numbered(start, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers of a block's keys; those before the first key stand behind all, where nobody sees them."""
    key = start + tl.arange(0, N)
    return tl.where(key < 0, NOBODYS, key)


@triton.jit  # type: ignore[untyped-decorator]
def behind(parts, rows, DV: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where the units and the sums of weights of so many rows lie: behind their parts of the output."""
    units = parts + rows.to(tl.int64) * DV
    return units, units + rows


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def split(  # type: ignore[no-untyped-def]
    q, k, v, parts, lows, slopes, slopes_ahead, table, first, last, key_norm,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, group,
    table_stride, mask_stride, key_heads, queries, keys, q_start, size, splits, scale, exact,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr,
    REACH: tl.constexpr, STEADY: tl.constexpr, SEVERAL: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write one share of one head of keys: Σ weight·v, Σ weight and the score whose weight is 1, for every row."""
    let_next_begin(EARLY)
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
    some = begin <= end
    hi = tl.max(tl.where(some, end + 1, 0), 0)
    lo = tl.minimum(tl.min(tl.where(some, begin, 1 << 30), 0), hi)

    # Blocks are counted from the last key; a share takes every each_of-th. Its first is on the way before it is known
    # whether it is in reach: it nearly always is.
    start = hi - (share + 1) * N
    feature = tl.arange(0, WIDTH)
    place = q + b.to(tl.int64) * qb + h[:, None].to(tl.int64) * qh + query[:, None].to(tl.int64) * ql + feature[None, :]
    queries_here = tl.load(place, mask=there[:, None] & (feature[None, :] < D), other=0.0)
    nearest = rows(k, kl, hi - N, lo, hi, D, N, WIDTH) if REACH == GIVEN else queries_here
    keys_here = rows(k, kl, start, lo, hi, D, N, WIDTH)
    values = rows(v, vl, start, lo, hi, DV, N, VALUES)
    slope = position.to(tl.float32) * 0
    ahead = slope
    if BIAS == LINEAR:
        slope = tl.load(slopes + h).to(tl.float32) * LOG2E
        ahead = tl.load(slopes_ahead + h).to(tl.float32) * LOG2E
    table = table + h[:, None].to(tl.int64) * table_stride
    scale2 = scale * LOG2E

    lowest_read = lo
    unit = tl.full([ROWS], float("-inf"), tl.float32)
    searching = True
    if REACH == GIVEN:
        key = numbered(hi - N, N)
        score = scores(
            tl.dot(queries_here, tl.trans(nearest), input_precision=PRECISION), position[:, None], key[None, :],
            begin[:, None], end[:, None], scale2, slope[:, None], ahead[:, None], 0.0, hi,
            True, MASK, BIAS, TWO_SIDED,
        )  # fmt: skip
        top = tl.max(score, 1)
        total = tl.sum(tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
        wide = queries_here.to(tl.float32)
        most = tl.abs(scale2) * tl.sqrt(tl.sum(wide * wide, 1)) * (1 + SLACK) * tl.load(key_norm + head)
        bound = most + exact - tl.log2(one_less_exp(slope))
        place = reach(top, total, bound, position.to(tl.float32) * 0, slope, (begin >= hi - N) | (begin > end))
        lowest_read = lowest(place, hi, lo, tl.maximum(hi - N, lo), 1)
        if STEADY:  # no score is above `most`: with a unit between it and the nearest, no weight is lost
            known = (begin > end) | (most - top <= 2 * FROM_UNIT)
            searching = tl.min(known.to(tl.int32), 0) == 0
            if not searching:
                unit = tl.where(begin > end, 0.0, tl.maximum(top, most - FROM_UNIT))
    blocks = (hi - lowest_read + (N - 1)) // N
    if share == 0:
        tl.store(lows + head, tl.maximum(hi - blocks * N, lo))
        tl.store(lows + tl.num_programs(0) * key_heads + head, hi)

    acc = tl.zeros([ROWS, VALUES], tl.float32)
    odd = tl.zeros([ROWS, VALUES], tl.float32)
    total = tl.zeros([ROWS, N], tl.float32)
    if share < blocks:
        acc, odd, total, unit = take(
            acc, odd, total, unit, searching, queries_here, keys_here, values, numbered(start, N), position, begin, end,
            scale2, slope, ahead, table, hi, MASK, BIAS, TWO_SIDED, SEVERAL, PRECISION,
        )  # fmt: skip
    for block in tl.range(share + each_of, blocks, each_of):
        start = hi - (block + 1) * N
        keys_here = rows(k, kl, start, lo, hi, D, N, WIDTH)
        values = rows(v, vl, start, lo, hi, DV, N, VALUES)
        acc, odd, total, unit = take(
            acc, odd, total, unit, searching, queries_here, keys_here, values, numbered(start, N), position, begin, end,
            scale2, slope, ahead, table, hi, MASK, BIAS, TWO_SIDED, SEVERAL, PRECISION,
        )  # fmt: skip
    acc = tl.where(odd == 0, acc, odd)
    unit = tl.where(unit == float("-inf"), unit, unit - row_term(position, hi, slope, BIAS, TWO_SIDED))

    at = (b * splits + program) * (group * queries) + row
    units, totals = behind(parts, tl.num_programs(0) * splits * (group * queries), DV)
    tl.store(units + at, unit, mask=there)
    tl.store(totals + at, tl.sum(total, 1), mask=there)
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
    parts, out, lse, slopes, ob, oh, ol, group, key_heads, queries, keys, splits,
    DV: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, REACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write a row's output, VALUES features of it, and its lse from its shares."""
    head, row, part_of = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, key_head = head // key_heads, head % key_heads
    h, query = key_head * group + row // queries, row % queries
    counts, ends = shares(slopes, group, key_heads, keys, splits, N, HEADS, GROUP, REACH)
    mine = tl.arange(0, HEADS) == key_head
    count = tl.sum(tl.where(mine, counts, 0), 0)
    first = b * splits + tl.sum(tl.where(mine, ends, 0), 0) - count
    feature = part_of * VALUES + tl.arange(0, VALUES)
    units, totals = behind(parts, tl.num_programs(0) // key_heads * splits * (group * queries), DV)
    wait_for_last(EARLY)
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
    if part_of > 0:
        return
    log_sum = tl.where(top == float("inf"), top, top + tl.log2(whole))
    log_sum = tl.where(whole == 0, float("-inf"), log_sum) / LOG2E
    tl.store(lse + (b * key_heads * group + h).to(tl.int64) * queries + query + tl.arange(0, 1), log_sum)
