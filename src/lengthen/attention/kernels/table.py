"""The gradient of a table of distances, without atomics: the scores' gradient summed along its diagonals.

All tiles whose keys stand Δ·SIDE positions behind their queries have the same distances in the same places. So a
program takes one Δ of one head, adds up its tiles elementwise, over queries and sequences, and writes one tile; `fold`
then sums each written tile along its diagonals.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.kernels.tile import LOG2E, SIZES, interval, load


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def gather(  # type: ignore[no-untyped-def]
    q, k, v, sums, d_out, shares, tiles, table, first, last,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, gb, gh, gl, group,
    table_stride, mask_stride, batch, heads, queries, keys, q_start, size, least, shifts, splits, ends, ends_ahead,
    scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, SIDE: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sum of a head's tiles at one shift, over one share of them: `[splits, heads, shifts]`.

    The table goes from −ends_ahead + 1 to ends − 1.
    """
    program = tl.program_id(0)
    shift = program // (heads * splits)
    h = program // splits % heads
    split = program % splits
    behind = (least + shift) * SIDE
    blocks = (queries + (SIDE - 1)) // SIDE
    # Blocks of queries that have any key there: SIDE·block + q_start − behind between −SIDE and keys.
    from_block = (tl.maximum(behind - q_start - (SIDE - 1), 0) + (SIDE - 1)) // SIDE
    to_block = tl.minimum((tl.maximum(keys + behind - q_start, 0) + (SIDE - 1)) // SIDE, blocks)
    count = tl.maximum(to_block - from_block, 0)
    acc = tl.zeros([SIDE, SIDE], tl.float32)
    one = tl.arange(0, SIDE)
    distance = behind + one[:, None] - one[None, :]
    known = (distance < ends) & (distance > -ends_ahead)
    entry = tl.load(table + h.to(tl.int64) * table_stride + distance, mask=known, other=float("-inf"))
    each = (batch * count + splits - 1) // splits
    for item in range(split * each, tl.minimum((split + 1) * each, batch * count)):
        b, block = item // count, from_block + item % count
        row = tl.minimum(block * SIDE + one, queries - 1)
        begin, end = interval(row, row + q_start, first + b * mask_stride, last + b * mask_stride, keys, size, MASK)
        key = block * SIDE + q_start - behind + one
        of_key = tl.minimum(tl.maximum(key, 0), keys - 1).to(tl.int64)
        base_q = q + b.to(tl.int64) * qb + h.to(tl.int64) * qh
        base_g = d_out + b.to(tl.int64) * gb + h.to(tl.int64) * gh
        base_k = k + b.to(tl.int64) * kb + (h // group).to(tl.int64) * kh
        base_v = v + b.to(tl.int64) * vb + (h // group).to(tl.int64) * vh
        queries_here = load(base_q, row.to(tl.int64), ql, D, queries, WIDTH, False)
        keys_here = load(base_k, of_key, kl, D, keys, WIDTH, False)
        d_out_here = load(base_g, row.to(tl.int64), gl, DV, queries, VALUES, False)
        values = load(base_v, of_key, vl, DV, keys, VALUES, False)
        of_rows = (b * heads + h).to(tl.int64) * queries
        log_sum = tl.where(block * SIDE + one < queries, tl.load(sums + of_rows + row), float("inf"))
        share = tl.load(shares + of_rows + row)
        product = tl.dot(queries_here, tl.trans(keys_here), input_precision=PRECISION)
        weight = tl.exp2(product * (scale * LOG2E) + (entry - log_sum[:, None]))
        d_weight = tl.dot(d_out_here, tl.trans(values), input_precision=PRECISION)
        seen = (key[None, :] >= begin[:, None]) & (key[None, :] <= end[:, None])
        acc += tl.where(seen, weight * (d_weight - share[:, None]), 0.0)
    place = tiles + ((split * heads + h).to(tl.int64) * shifts + shift) * (SIDE * SIDE)
    tl.store(place + one[:, None] * SIDE + one[None, :], acc)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def fold(tiles, d_table, heads, shifts, least, ends, ends_ahead, SIDE: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum tiles along their diagonals, SIDE distances a program: `[splits, heads, ends_ahead − 1 + ends]`."""
    shift, h, split = tl.program_id(0) - 1, tl.program_id(1), tl.program_id(2)
    offset = tl.arange(0, SIDE)
    acc = tl.zeros([SIDE], tl.float32)
    for half in tl.static_range(2):  # this shift's tile below its diagonal, the next one's above it
        here = shift + half
        base = tiles + ((split * heads + h).to(tl.int64) * shifts + here) * (SIDE * SIDE)
        for start in range(0, SIDE, PART):
            row = start + tl.arange(0, PART)
            column = row[:, None] - offset[None, :] + half * SIDE
            inside = (column >= 0) & (column < SIDE) & (column * 0 + here >= 0) & (column * 0 + here < shifts)
            acc += tl.sum(tl.load(base + row[:, None] * SIDE + column, mask=inside, other=0.0), 0)
    distance = (least + shift) * SIDE + offset
    place = d_table + (split * heads + h).to(tl.int64) * (ends_ahead - 1 + ends) + (ends_ahead - 1) + distance
    tl.store(place, acc, mask=(distance < ends) & (distance > -ends_ahead))
