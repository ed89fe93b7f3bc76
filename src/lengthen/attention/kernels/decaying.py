"""Queries and keys with a decay in them: each feature times its power, from the start of the row's segment."""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.kernels.tile import SIZES, fading, load


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def scale_rows(  # type: ignore[no-untyped-def]
    x, y, rates, xb, xh, xl, yb, yh, yl, heads, keys, blocks, segment, q_start,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GROW: tl.constexpr,
):  # fmt: skip
    """Write x, whose first row stands at q_start, times its decay since the start of its segment; with GROW divided."""
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = head // heads, head % heads
    row = block * ROWS + tl.arange(0, ROWS)
    steps = (q_start + row) % segment
    factor = fading(rates, h, -steps if GROW else steps, D, WIDTH)
    within = tl.minimum(row, keys - 1).to(tl.int64)  # rows past the end repeat the last
    rows = load(x + b.to(tl.int64) * xb + h.to(tl.int64) * xh, within, xl, D, keys, WIDTH, False)
    feature = tl.arange(0, WIDTH)
    place = y + b.to(tl.int64) * yb + h.to(tl.int64) * yh + row[:, None].to(tl.int64) * yl + feature[None, :]
    tl.store(place, (rows * factor).to(y.dtype.element_ty), mask=(row[:, None] < keys) & (feature[None, :] < D))
