"""Decoding: one or a few queries against many keys, the keys split over programs.

All queries of the heads that share keys are rows of one tile. A flat head reaches far and gets many programs, a steep
one gets one. With a ball, a program of `split` reads the nearest keys, to know how far back its rows reach, and then
every so many-th block within that; all programs of a head come to the same answer, so none waits for another. `join`
adds up what they found. One query sees all values that are let into the product, or none of them; of several, some may
not see a value that is not finite, so those are counted apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.backends.triton.ball import SLACK
from lengthen.attention.backends.triton.forward import one_less_exp
from lengthen.attention.backends.triton.repair import tally
from lengthen.attention.backends.triton.tile import (
    LINEAR,
    LOG2E,
    entries,
    first_position,
    interval,
    let_next_begin,
    linear,
    of_head,
    wait_for_last,
)

USUAL = tl.constexpr(24.0)  # how much a bias falls between a query and the end of its reach, for the cut alone
FROM_UNIT = tl.constexpr(80.0)  # log₂ of the largest weight, and of the smallest that must not be lost
NOBODYS = tl.constexpr(1 << 30)  # a key behind all
TRIED = tl.constexpr(16)  # how many cuts are looked at


@triton.jit
def programs_of(slopes, sizes, programs, N: tl.constexpr, HEADS: tl.constexpr, REACH: tl.constexpr):
    """Return how many programs each head of keys has, and where the first of the next head stands, `[HEADS]` each.

    Every program gets as many blocks as any other, or fewer: as few as there are programs for.
    """
    one, key_heads = tl.arange(0, HEADS), sizes.key_heads
    blocks = tl.zeros([HEADS], tl.float32) + ((sizes.keys + (N - 1)) // N).to(tl.float32)
    if REACH:
        slope = tl.load(slopes + one, mask=one < sizes.heads, other=float("inf")).to(tl.float32)
        slope = tl.where((one // sizes.group)[None, :] == one[:, None], slope[None, :], float("inf"))
        blocks = tl.minimum(blocks, tl.ceil((1.0 / tl.maximum(tl.min(slope, 1), 1e-30)) * (USUAL / N)))
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


@triton.jit
def attend_block(
    acc, odd, l_i, m_i, running, queries, keys, values, key, position, begin, end, bias, table, slope, ahead, scale,
    here,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, SEVERAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to a softmax: Σ p·v, the weights themselves, and the score whose weight is 1.

    Where that score is not known to be high enough for all (`running`), it is the highest so far.
    """
    visible = (key[None, :] >= begin[:, None]) & (key[None, :] <= end[:, None])
    score = scores(
        queries, keys, key, position, visible, bias, table, slope, ahead, scale, here, BIAS, TWO_SIDED, PRECISION
    )
    if running:
        m_new = tl.maximum(m_i, tl.ceil(tl.max(score, 1)))
        alpha = tl.exp2(m_i - tl.where(m_new == float("-inf"), 0.0, m_new))
        l_i *= alpha[:, None]
        acc *= alpha[:, None]
        m_i = m_new
    p = tl.exp2(score - tl.where(m_i == float("-inf"), 0.0, m_i)[:, None])
    l_i += p
    if SEVERAL:
        finite = tl.abs(values.to(tl.float32)) < float("inf")
        if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
            odd = tally(odd, visible, p == 0, values.to(tl.float32))
            values = tl.where(finite, values, 0.0).to(values.dtype)
    acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc, odd, l_i, m_i


@triton.jit
def scores(
    queries, keys, key, position, visible, bias, table, slope, ahead, scale, here,
    BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of a block of keys, −∞ where hidden."""
    entry = entries(table, position[:, None], key[None, :], visible, bias, True, BIAS)
    score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    if BIAS == LINEAR:
        score += linear(position[:, None], key[None, :], here, slope[:, None], ahead[:, None], TWO_SIDED)
    else:
        score += entry
    return tl.where(visible, score, float("-inf"))


@triton.jit
def load_keys(x, stride, start, lo, hi, width, N: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Return N rows of keys or values; 0 outside [lo, hi)."""
    key = start + tl.arange(0, N)
    feature = tl.arange(0, WIDTH)
    there = ((key >= lo) & (key < hi))[:, None] & (feature[None, :] < width)
    place = x + start.to(tl.int64) * stride * ALIGN + tl.arange(0, N)[:, None] * (stride * ALIGN) + feature[None, :]
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def numbered(start, N: tl.constexpr):
    """Return the numbers of a block's keys; those before the first key stand behind all, where nobody sees them."""
    key = start + tl.arange(0, N)
    return tl.where(key < 0, NOBODYS, key)


@triton.jit
def split(
    q, k, v, parts, units, totals, read, mask, bias, ball, sizes, programs, scale, neg_log2_tolerance,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr, ALIGN: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr, EDGED: tl.constexpr,
    REACH: tl.constexpr, STEADY: tl.constexpr, SEVERAL: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write what one program finds in its keys of one head, for every row: Σ p·v, Σ p, the score whose weight is 1."""
    let_next_begin(EARLY)
    b, program = tl.program_id(0), tl.program_id(1)
    key_heads = sizes.key_heads
    count, ends = programs_of(bias.slopes, sizes, programs, N, HEADS, REACH)
    one = tl.arange(0, HEADS)
    key_head = tl.sum(((one < key_heads) & (ends <= program)).to(tl.int32), 0)
    if key_head >= key_heads:
        return
    mine = one == key_head
    each_of = tl.sum(tl.where(mine, count, 0), 0)
    number = program - (tl.sum(tl.where(mine, ends, 0), 0) - each_of)
    item = b * key_heads + key_head
    base_k, base_v = of_head(k, b, key_head, ALIGN), of_head(v, b, key_head, ALIGN)
    row = tl.arange(0, ROWS)
    there = row < sizes.group * sizes.queries
    member = tl.where(there, row // sizes.queries, 0)
    query = tl.where(there, row % sizes.queries, 0)
    h = key_head * sizes.group + member
    position = query + first_position(mask, b)
    begin, end = interval(query, position, mask, b, sizes.keys, TWO_SIDED, EDGED)
    end = tl.where(there, end, -1)
    some = begin <= end
    hi = tl.max(tl.where(some, end + 1, 0), 0)
    lo = tl.minimum(tl.min(tl.where(some, begin, 1 << 30), 0), hi)

    # Blocks are counted from the last key; a program takes every each_of-th. Its first is on the way before it is known
    # whether it is in reach: it nearly always is.
    start = hi - (number + 1) * N
    feature = tl.arange(0, WIDTH)
    place = q.data + b.to(tl.int64) * q.batch * ALIGN + h[:, None].to(tl.int64) * q.head * ALIGN
    place += query[:, None].to(tl.int64) * q.row * ALIGN + feature[None, :]
    queries = tl.load(place, mask=there[:, None] & (feature[None, :] < D), other=0.0)
    keys = load_keys(base_k, k.row, start, lo, hi, D, N, WIDTH, ALIGN)
    values = load_keys(base_v, v.row, start, lo, hi, DV, N, VALUES, ALIGN)
    slope = position.to(tl.float32) * 0
    ahead = slope
    if BIAS == LINEAR:
        slope = tl.load(bias.slopes + h).to(tl.float32) * LOG2E
        ahead = tl.load(bias.ahead + h).to(tl.float32) * LOG2E
    table = bias.table + h[:, None].to(tl.int64) * bias.stride
    scale2 = scale * LOG2E

    low = lo
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    running = True
    if REACH:
        key = numbered(hi - N, N)
        nearest = load_keys(base_k, k.row, hi - N, lo, hi, D, N, WIDTH, ALIGN)
        visible = (key[None, :] >= begin[:, None]) & (key[None, :] <= end[:, None])
        score = scores(
            queries, nearest, key, position, visible, bias, table, slope, ahead, scale2, hi, BIAS, TWO_SIDED, PRECISION
        )
        top = tl.max(score, 1)
        total = tl.sum(tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
        wide = queries.to(tl.float32)
        length = tl.sqrt(tl.sum(wide * wide, 1)) * (1 + SLACK)
        centre = tl.load(ball.centre + item * D + feature, mask=feature < D, other=0.0)
        most = scale2 * tl.sum(wide * centre[None, :], 1) + tl.abs(scale2) * length * tl.load(ball.radius + item)
        # Rows stand at most `position − hi` behind the last key that any sees: distances are counted from there.
        spare = top + tl.log2(total) - most - neg_log2_tolerance
        far = -(spare + tl.log2(one_less_exp(slope))) / slope - (position - hi).to(tl.float32)
        far = tl.where(far == far, far, float("inf"))
        more = some & (begin < hi - N)
        far = tl.max(tl.where(more, far, float("-inf")), 0)
        low = tl.floor(tl.maximum(-far - 1.0, (lo - hi).to(tl.float32)))
        low = hi + tl.minimum(low, (tl.maximum(hi - N, lo) - hi).to(tl.float32)).to(tl.int32)
        if STEADY:  # no score is above `most`: with a unit between it and the nearest, no weight is lost
            known = (begin > end) | (most - top <= 2 * FROM_UNIT)
            running = tl.min(known.to(tl.int32), 0) == 0
            if not running:
                m_i = tl.where(begin > end, 0.0, tl.maximum(top, most - FROM_UNIT))
    blocks = (hi - low + (N - 1)) // N
    if number == 0:
        tl.store(read + item, tl.maximum(hi - blocks * N, lo))
        tl.store(read + tl.num_programs(0) * key_heads + item, hi)

    acc = tl.zeros([ROWS, VALUES], tl.float32)
    odd = tl.zeros([ROWS, VALUES], tl.float32)
    l_i = tl.zeros([ROWS, N], tl.float32)
    if number < blocks:
        acc, odd, l_i, m_i = attend_block(
            acc, odd, l_i, m_i, running, queries, keys, values, numbered(start, N), position, begin, end, bias, table,
            slope, ahead, scale2, hi, BIAS, TWO_SIDED, SEVERAL, PRECISION,
        )  # fmt: skip
    for block in tl.range(number + each_of, blocks, each_of):
        start = hi - (block + 1) * N
        keys = load_keys(base_k, k.row, start, lo, hi, D, N, WIDTH, ALIGN)
        values = load_keys(base_v, v.row, start, lo, hi, DV, N, VALUES, ALIGN)
        acc, odd, l_i, m_i = attend_block(
            acc, odd, l_i, m_i, running, queries, keys, values, numbered(start, N), position, begin, end, bias, table,
            slope, ahead, scale2, hi, BIAS, TWO_SIDED, SEVERAL, PRECISION,
        )  # fmt: skip
    acc += odd
    at = (b * programs + program) * (sizes.group * sizes.queries) + row
    tl.store(units + at, m_i, mask=there)
    tl.store(totals + at, tl.sum(l_i, 1), mask=there)
    feature = tl.arange(0, VALUES)
    place = parts + at[:, None].to(tl.int64) * DV + feature[None, :]
    tl.store(place, acc, mask=there[:, None] & (feature[None, :] < DV))


@triton.jit
def join(
    parts, units, totals, out, lse, bias, sizes, programs,
    DV: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
    ALIGN: tl.constexpr, REACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write a row's output, VALUES features of it, and its lse from what the programs of its head found."""
    item, row, slice_of = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_heads = sizes.key_heads
    b, key_head = item // key_heads, item % key_heads
    h, query = key_head * sizes.group + row // sizes.queries, row % sizes.queries
    counts, ends = programs_of(bias.slopes, sizes, programs, N, HEADS, REACH)
    mine = tl.arange(0, HEADS) == key_head
    count = tl.sum(tl.where(mine, counts, 0), 0)
    first = b * programs + tl.sum(tl.where(mine, ends, 0), 0) - count
    feature = slice_of * VALUES + tl.arange(0, VALUES)
    wait_for_last(EARLY)
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([VALUES], tl.float32)
    for start in range(0, count, CHUNK):
        number = start + tl.arange(0, CHUNK)
        at = (first + number) * (sizes.group * sizes.queries) + row
        unit = tl.load(units + at, mask=number < count, other=float("-inf"))
        total = tl.load(totals + at, mask=number < count, other=0.0)
        used = (number[:, None] < count) & (feature[None, :] < DV)
        part = tl.load(parts + at[:, None].to(tl.int64) * DV + feature[None, :], mask=used, other=0.0)
        m_new = tl.maximum(m_i, tl.max(unit, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.where(total == 0, 0.0, tl.exp2(unit - base))  # who saw nothing has no unit
        alpha = tl.where(l_i == 0, 0.0, tl.exp2(m_i - base))
        l_i = l_i * alpha + tl.sum(total * weight, 0)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        m_i = m_new
    result = acc / tl.where(l_i == 0, 1.0, l_i)
    place = of_head(out, b, h, ALIGN) + query.to(tl.int64) * out.row * ALIGN + feature
    tl.store(place, result.to(out.data.dtype.element_ty), mask=feature < DV)
    if slice_of > 0:
        return
    log_sum = tl.where(m_i == float("inf"), m_i, m_i + tl.log2(l_i))
    log_sum = tl.where(l_i == 0, float("-inf"), log_sum) / LOG2E
    tl.store(lse + (b * sizes.heads + h).to(tl.int64) * sizes.queries + query + tl.arange(0, 1), log_sum)
