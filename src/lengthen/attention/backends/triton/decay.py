"""Queries and keys with a decay in them: each feature times its power, from the start of the row's segment."""

from __future__ import annotations

import triton
import triton.language as tl

from lengthen.attention.backends.triton.tile import load, of_head, power


@triton.jit
def scale_rows(
    x, y, rates, heads, rows, segment, start, shared,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr, GROW: tl.constexpr,
):  # fmt: skip
    """Write x, whose first row stands at `start`, times its decay since the start of its segment; with GROW divided.

    `shared` heads of queries, whose rates are the same, share one head of x.
    """
    blocks = (rows + (ROWS - 1)) // ROWS
    block, b, h = tl.program_id(0) % blocks, tl.program_id(0) // blocks // heads, tl.program_id(0) // blocks % heads
    local = tl.minimum(tl.arange(0, ROWS), rows - 1 - block * ROWS)  # rows past the end repeat the last
    steps = (start + block * ROWS + local) % segment
    factor = power(rates, h * shared, -steps if GROW else steps, D, WIDTH)
    scaled = load(of_head(x, b, h, ALIGN), local, x.row, block * ROWS, D, WIDTH, ALIGN) * factor
    row, feature = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    place = of_head(y, b, h, ALIGN) + (block * ROWS).to(tl.int64) * y.row * ALIGN + row * (y.row * ALIGN) + feature
    tl.store(place, scaled.to(y.data.dtype.element_ty), mask=(row < rows - block * ROWS) & (feature < D))
