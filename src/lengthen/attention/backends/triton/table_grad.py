"""The gradient of a table of distances, without atomics: the scores' gradient summed along its diagonals.

All tiles whose keys stand Δ·SIDE positions behind their queries have the same distances in the same places. So a
program takes one Δ of one head, adds up its tiles elementwise, over queries and sequences, and writes one tile; `fold`
then sums each written tile along its diagonals. Distances that no block of the head read have a gradient of 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.backends.triton.tile import LOG2E, first_position, interval, load, of_head


@triton.jit
def gather(
    q, k, v, do, log_sums, deltas, far, tiles, mask, bias, sizes, least, shifts, splits, ends, ends_ahead, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, SIDE: tl.constexpr,
    SPAN: tl.constexpr, ALIGN: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sum of a head's tiles at one shift, over one of the splits of them: `[splits, heads, shifts]`.

    The distances that are asked for are −ends_ahead + 1 … ends − 1.
    """
    program = tl.program_id(0)
    shift, h, split = program // (sizes.heads * splits), program // splits % sizes.heads, program % splits
    behind = (least + shift) * SIDE
    one = tl.arange(0, SIDE)
    distance = behind + one[:, None] - one[None, :]
    known = (distance < ends) & (distance > -ends_ahead)
    entry = tl.load(bias.table + h.to(tl.int64) * bias.stride + distance, mask=known, other=float("-inf"))
    acc = tl.zeros([SIDE, SIDE], tl.float32)
    for sequence in range(sizes.batch):
        b = h * 0 + sequence  # a number of Triton's, in its interpreter too
        q_start = first_position(mask, b)
        item = b * sizes.heads + h
        # Blocks of queries that have any key there: SIDE·block + q_start − behind between −SIDE and keys.
        from_block = (tl.maximum(behind - q_start - (SIDE - 1), 0) + (SIDE - 1)) // SIDE
        to_block = (tl.maximum(sizes.keys + behind - q_start, 0) + (SIDE - 1)) // SIDE
        to_block = tl.minimum(to_block, (sizes.queries + (SIDE - 1)) // SIDE)
        unread = behind - SIDE >= tl.load(far + item) + SPAN
        unread = unread | (-behind - SIDE >= tl.load(far + sizes.batch * sizes.heads + item))
        to_block = tl.where(unread, from_block, to_block)
        each = (tl.maximum(to_block - from_block, 0) + splits - 1) // splits
        first = from_block + split * each
        for turn in range(first, tl.minimum(first + each, to_block)):
            block = h * 0 + turn
            row = tl.minimum(block * SIDE + one, sizes.queries - 1)
            begin, end = interval(row, row + q_start, mask, b, sizes.keys, TWO_SIDED, True)
            key = block * SIDE + q_start - behind + one
            place = tl.minimum(tl.maximum(key, 0), sizes.keys - 1).to(tl.int64)
            nowhere = block * 0
            queries = load(of_head(q, b, h, ALIGN), row.to(tl.int64), q.row, nowhere, D, WIDTH, ALIGN)
            keys = load(of_head(k, b, h // sizes.group, ALIGN), place, k.row, nowhere, D, WIDTH, ALIGN)
            d_outs = load(of_head(do, b, h, ALIGN), row.to(tl.int64), do.row, nowhere, DV, VALUES, ALIGN)
            values = load(of_head(v, b, h // sizes.group, ALIGN), place, v.row, nowhere, DV, VALUES, ALIGN)
            of_rows = item.to(tl.int64) * ((sizes.queries + (SPAN - 1)) // SPAN * SPAN)
            log_sum = tl.load(log_sums + of_rows + row)
            delta = tl.load(deltas + of_rows + row)
            product = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            p = tl.exp2(product * (scale * LOG2E) + (entry - log_sum[:, None]))
            dp = tl.dot(d_outs, tl.trans(values), input_precision=PRECISION)
            visible = (key[None, :] >= begin[:, None]) & (key[None, :] <= end[:, None])
            visible = visible & (block * SIDE + one[:, None] < sizes.queries)
            acc += tl.where(visible, p * (dp - delta[:, None]), 0.0)
    place = tiles + ((split * sizes.heads + h).to(tl.int64) * shifts + shift) * (SIDE * SIDE)
    tl.store(place + one[:, None] * SIDE + one[None, :], acc)


@triton.jit
def fold(tiles, d_table, sizes, least, shifts, ends, ends_ahead, SIDE: tl.constexpr, PART: tl.constexpr):
    """Sum tiles along their diagonals, SIDE distances a program: `[splits, heads, ends_ahead − 1 + ends]`."""
    shift, h, split = tl.program_id(0) - 1, tl.program_id(1), tl.program_id(2)
    offset = tl.arange(0, SIDE)
    acc = tl.zeros([SIDE], tl.float32)
    for half in tl.static_range(2):  # this shift's tile below its diagonal, the next one's above it
        here = shift + half
        base = tiles + ((split * sizes.heads + h).to(tl.int64) * shifts + here) * (SIDE * SIDE)
        for start in range(0, SIDE, PART):
            row = start + tl.arange(0, PART)
            column = row[:, None] - offset[None, :] + half * SIDE
            inside = (column >= 0) & (column < SIDE) & (column * 0 + here >= 0) & (column * 0 + here < shifts)
            acc += tl.sum(tl.load(base + row[:, None] * SIDE + column, mask=inside, other=0.0), 0)
    distance = (least + shift) * SIDE + offset
    place = d_table + (split * sizes.heads + h).to(tl.int64) * (ends_ahead - 1 + ends) + (ends_ahead - 1) + distance
    tl.store(place, acc, mask=(distance < ends) & (distance > -ends_ahead))
