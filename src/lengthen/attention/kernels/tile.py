"""What every kernel shares: which keys a query sees, and the scores of a tile of queries and keys.

Scores are held in units of log 2, since a GPU has exp2 and no exp. A tile may be [queries, keys] or [keys, queries]:
positions and keys come in as a column and a row, whichever way round.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lengthen.attention.kernels import codes

# The codes that these kernels ask for, as Triton wants a constant.
CAUSAL, WINDOW, BLOCKWISE = tl.constexpr(codes.CAUSAL), tl.constexpr(codes.WINDOW), tl.constexpr(codes.BLOCKWISE)
FULL, LISTED = tl.constexpr(codes.FULL), tl.constexpr(codes.LISTED)
NONE, LINEAR = tl.constexpr(codes.NONE), tl.constexpr(codes.LINEAR)
TABLE, LEVEL = tl.constexpr(codes.TABLE), tl.constexpr(codes.LEVEL)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as when the kernels were made
LOG2E = tl.constexpr(1.4426950408889634)

# Which keys of a tile may be hidden: none, any, or only those too far behind.
SHOWN, EDGES, BEHIND = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Numbers of a call that no kernel is compiled again for.
SIZES = (
    *("table_stride", "mask_stride", "batch", "heads", "key_heads", "queries", "keys", "blocks", "span_blocks"),
    *("q_start", "size", "segment", "level", "per_program", "splits", "least", "shifts", "ends", "ends_ahead"),
)


@triton.jit  # type: ignore[untyped-decorator]
def let_next_begin(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel's programs come while the last of this one's still run: they wait by `wait_for_last`."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_last(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all that the kernel before this one wrote is there, if this one was let begin early."""
    if EARLY:
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def interval(row, position, first, last, keys, size, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first and the last key that queries see, as `Mask.interval` does."""
    if MASK == LISTED:
        return tl.load(first + row), tl.load(last + row)
    begin = position * 0
    end = tl.minimum(position, keys - 1)
    if MASK == WINDOW:
        begin = tl.maximum(position - size + 1, 0)
    if MASK == BLOCKWISE:
        begin = tl.maximum((position // size - 1) * size, 0)
    if MASK == FULL:
        end = begin + (keys - 1)
    return begin, end


@triton.jit  # type: ignore[untyped-decorator]
def scores(  # type: ignore[no-untyped-def]
    product, position, key, first, last, scale, slope, ahead, entry, here,
    MASKED: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile from q·k; hidden ones, of those that MASKED says may be, are −∞.

    `entry` is what `entries` loads of a table.

    With keys behind the query alone, ALiBi's bias is a number a key, slope·(key − here): what it lacks,
    −slope·(position − here), is the same along a row, and `row_term` adds it to the log-sum-exp.
    """
    score = product * scale
    if BIAS == LINEAR:
        if TWO_SIDED:
            distance = (position - key).to(tl.float32)
            score += tl.where(distance >= 0, -slope * distance, ahead * distance)
        else:
            score += slope * (key - here).to(tl.float32)
    if BIAS == TABLE or BIAS == LEVEL:  # noqa: SIM109
        score += entry
    if MASKED != SHOWN:
        score = tl.where(is_seen(key, first, last, MASKED, MASK), score, float("-inf"))
    return score


@triton.jit  # type: ignore[untyped-decorator]
def entries(table, position, key, first, last, MASKED: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a table's values for a tile, anything where hidden; without a table, nothing to speak of.

    With a causal mask, hidden keys stand a little ahead of the query: before a table's values there is room for them.
    A load that Triton knows would go through shared memory twice: into the loop's pipeline, and out of it to those
    who want it. Written as an instruction, it goes to them at once.
    """
    entry = 0.0
    if BIAS == TABLE or BIAS == LEVEL:  # noqa: SIM109
        place = table - key.to(tl.int64) + position.to(tl.int64)  # in 64 bits, offsets become part of the instruction
        if MASKED != SHOWN and MASK != CAUSAL:
            place = tl.where(is_seen(key, first, last, MASKED, MASK), place, table)
        if INTERPRETED:
            entry = tl.load(place)
        else:
            entry = tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [place.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
            )
    return entry


@triton.jit  # type: ignore[untyped-decorator]
def is_seen(key, first, last, MASKED: tl.constexpr, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether a query sees a key, asking only for the edge of its interval that may lie here."""
    if MASKED == BEHIND:
        return key >= first
    if MASK == CAUSAL or MASK == FULL:  # noqa: SIM109 (Triton knows no `in`)
        return key <= last
    return (key >= first) & (key <= last)


@triton.jit  # type: ignore[untyped-decorator]
def row_term(position, here, slope, BIAS: tl.constexpr, TWO_SIDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what `scores` left out of a row, with its sign turned."""
    if BIAS == LINEAR and not TWO_SIDED:
        return slope * (position - here).to(tl.float32)
    return position.to(tl.float32) * 0


@triton.jit  # type: ignore[untyped-decorator]
def beyond(table, level, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bias of all distances from `level` on, where a table has such a level."""
    if BIAS == LEVEL:
        return tl.load(table + level)
    return 0.0


@triton.jit  # type: ignore[untyped-decorator]
def fading(rates, h, steps, D: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a head's decay over so many steps, `[steps, WIDTH]`; rates are in units of log 2, `[heads, D]`."""
    feature = tl.arange(0, WIDTH)
    rate = tl.load(rates + h * D + feature, mask=feature < D, other=0.0)
    return tl.exp2(rate[None, :] * steps[:, None].to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def faded_rows(base, row, stride, rates, h, steps, rows, D: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return rows of a matrix with a head's decay over so many steps in them.

    A loop over segments computes the next one's at its end: what comes into a loop from outside goes to shared memory,
    which products read from; what is computed inside would be held in registers.
    """
    here = load(base, row, stride, D, rows, WIDTH, False)
    return (here * fading(rates, h, steps, D, WIDTH)).to(here.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def below(x, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the multiple of N at or below x, for x of at least 0."""
    return x // N * N


@triton.jit  # type: ignore[untyped-decorator]
def above(x, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the multiple of N at or above x, for x of at least 0."""
    return (x + (N - 1)) // N * N


@triton.jit  # type: ignore[untyped-decorator]
def load(base, row, stride, width, rows, WIDTH: tl.constexpr, MASKED: tl.constexpr, start=0):  # type: ignore[no-untyped-def]
    """Return rows `[rows, WIDTH]` of a matrix from `start` on; 0 past its width, and where MASKED past its end.

    What changes from block to block is added last, so that a loop need not compute the rest again.
    """
    feature = tl.arange(0, WIDTH)
    place = (base + (row[:, None] * stride + feature[None, :])) + start * stride
    if MASKED:
        return tl.load(place, mask=(row[:, None] < rows) & (feature[None, :] < width), other=0.0)
    if width == WIDTH:
        return tl.load(place)
    return tl.load(place, mask=feature[None, :] < width, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def visible(begin, end, start, stop, first, last, keys, size, N: tl.constexpr, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the keys that some query of a block sees, and those that all see, cut to whole blocks of N keys.

    As [lo, hi) and inside it [full_lo, full_hi), all but hi multiples of N. `begin` and `end` are what each query sees,
    `start` and `stop` the first and last query's position: unless they are listed, a later query sees later keys, so
    that these two tell for all.
    """
    if MASK == LISTED:
        some = begin <= end
        lo = tl.min(tl.where(some, begin, 1 << 30), 0)
        hi = tl.max(tl.where(some, end + 1, 0), 0)
        full_lo = tl.max(begin, 0)
        full_hi = tl.min(end, 0) + 1
    else:
        lo, full_hi = interval(start, start, first, last, keys, size, MASK)
        full_lo, hi = interval(stop, stop, first, last, keys, size, MASK)
        full_hi, hi = full_hi + 1, tl.maximum(hi + 1, 0)
    lo = below(tl.minimum(lo, hi), N)
    full_hi = tl.maximum(below(tl.maximum(full_hi, 0), N), lo)
    full_lo = tl.minimum(tl.maximum(above(full_lo, N), lo), full_hi)
    return lo, hi, full_lo, full_hi
