"""Grids, block shapes and arguments: between the registered op and the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from lengthen.attention.kernels import backward, ball, forward, repair, table
from lengthen.attention.kernels.shapes import Shape, span, uses_reach

NO_REACH, MEASURED, GIVEN = 0, 1, 2
NONE, LINEAR, TABLE = 0, 1, 2
BALL_ROWS, BALL_KEYS = 64, 512  # keys that a program of the pass over them loads at once, and takes in all
REPAIRERS = 264  # programs of the repair, which end at once unless there is something to repair


@dataclass(eq=False)
class Call:
    """The arguments that all kernels of a call take, ready to be passed on."""

    q: Tensor
    k: Tensor
    v: Tensor
    behind: Tensor | None
    ahead: Tensor | None
    first: Tensor | None
    last: Tensor | None
    key_norm: Tensor | None
    mask: int
    size: int
    linear: bool
    two_sided: bool
    scale: float
    q_start: int
    tolerance: float

    def __post_init__(self) -> None:
        self.batch, self.heads, self.queries, self.head_dim = self.q.shape
        self.key_heads, self.keys, self.value_dim = self.k.shape[1], self.k.shape[2], self.v.shape[3]
        self.group = self.heads // self.key_heads
        self.bias = NONE if self.behind is None else LINEAR if self.linear else TABLE
        self.slopes = self.slopes_ahead = self.table = self.q
        self.table_zero = self.table_stride = 0
        if self.behind is not None and self.linear:
            self.slopes = self.behind.float()
            self.slopes_ahead = self.slopes if self.ahead is None else self.ahead.float()
        elif self.behind is not None:
            self.table, self.table_zero = joined(self.behind, self.ahead, self.two_sided)
            self.table_stride = self.table.shape[1]
        self.mask_stride = self.queries if self.first is not None and self.first.shape[0] > 1 else 0

    @property
    def widths(self) -> dict[str, Any]:
        """How wide keys and values are, and the blocks that hold them."""
        return {
            "D": self.head_dim,
            "DV": self.value_dim,
            "WIDTH": max(16, triton.next_power_of_2(self.head_dim)),
            "VALUES": max(16, triton.next_power_of_2(self.value_dim)),
        }

    @property
    def biases(self) -> tuple[Any, ...]:
        """Slopes, table, and the mask's numbers: pointers that no kernel reads where it does not ask for them."""
        table = self.table if self.bias != TABLE else self.table[0, self.table_zero :]
        none = self.q
        return (
            self.slopes,
            self.slopes_ahead,
            table,
            none if self.first is None else self.first,
            none if self.last is None else self.last,
        )

    @property
    def precision(self) -> str:
        """How float32 products are computed: in full, unless torch was told otherwise."""
        if self.q.dtype != torch.float32:
            return "tf32"  # not asked: 16-bit products are exact
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"

    def notes(self, empty: bool = False) -> Tensor:
        """Return room for what programs tell each other: radius, farthest, oddity, order; see forward.py."""
        size = self.batch * self.key_heads + 2 * self.batch * self.heads + 1 + self.heads
        return self.q.new_empty(size, dtype=torch.int32) if empty else self.q.new_zeros(size, dtype=torch.int32)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of a batch, a head and a row."""
    return x.stride(0), x.stride(1), x.stride(2)


def joined(behind: Tensor, ahead: Tensor | None, two_sided: bool) -> tuple[Tensor, int]:
    """Return a table of both sides in float32 and units of log 2, `[heads, …]`, and where its distance 0 is."""
    behind = behind.float()
    if two_sided:
        other = behind if ahead is None else ahead.float()
        return torch.cat((other[:, 1:].flip(1), behind), dim=1) * math.log2(math.e), other.shape[1] - 1
    return behind * math.log2(math.e), 0


def run_forward(call: Call, out: Tensor, lse: Tensor, spans: Tensor, notes: Tensor) -> None:
    """Launch the forward into its results."""
    shape = Shape.of("forward", call.head_dim, call.value_dim, call.q.dtype)
    rows = span(call.head_dim, call.value_dim, call.q.dtype)
    blocks = triton.cdiv(call.queries, rows)
    reach, centre = NO_REACH, call.q
    if call.linear and uses_reach(call.tolerance, call.keys, call.key_norm is not None):
        reach = GIVEN
        if call.key_norm is None:
            reach = MEASURED
            centre = call.q.new_empty(call.batch * call.key_heads * call.head_dim, dtype=torch.float32)
            ball.ball[(triton.cdiv(call.keys, BALL_KEYS), call.batch * call.key_heads)](
                call.k, centre, notes, call.slopes, *strides(call.k), call.batch, call.key_heads, call.heads,
                call.keys, BALL_KEYS, D=call.head_dim, WIDTH=call.widths["WIDTH"], ROWS=BALL_ROWS,
                HEADS=triton.next_power_of_2(call.heads), CENTRED=True, num_warps=4,
            )  # fmt: skip
    share = call.tolerance / 2 if call.two_sided else call.tolerance
    forward.forward[(blocks * call.batch * call.heads,)](
        call.q, call.k, call.v, out, lse, spans, notes, *call.biases, centre,
        call.q if call.key_norm is None else call.key_norm,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(out), call.table_stride, call.mask_stride,
        call.batch, call.heads, call.group, call.queries, call.keys, blocks, call.q_start, call.size, call.scale, share,
        **call.widths, M=rows, N=shape.keys, MASK=call.mask, BIAS=call.bias, TWO_SIDED=call.two_sided, REACH=reach,
        PRECISION=call.precision, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    small = 32
    small_blocks = triton.cdiv(call.queries, small)
    repair.repair[(min(REPAIRERS, small_blocks * call.batch * call.heads),)](
        call.q, call.k, call.v, out, lse, notes, *call.biases,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(out), call.table_stride, call.mask_stride,
        call.batch, call.heads, call.group, call.queries, call.keys, small_blocks, call.q_start, call.size, call.scale,
        **call.widths, M=small, N=small, MASK=call.mask, BIAS=call.bias, TWO_SIDED=call.two_sided,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def run_backward(
    call: Call, out: Tensor, lse: Tensor, spans: Tensor, notes: Tensor, d_out: Tensor, d_lse: Tensor | None, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v and of the bias's two tensors (None: not asked for)."""
    d_q, d_k, d_v = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    shares = torch.empty_like(lse)
    ordered = call.linear and uses_reach(call.tolerance, call.keys, call.key_norm is not None) and call.key_norm is None
    slopes_wanted = bias and call.bias == LINEAR
    rows = span(call.head_dim, call.value_dim, call.q.dtype)
    common = {"MASK": call.mask, "BIAS": call.bias, "TWO_SIDED": call.two_sided, "PRECISION": call.precision}

    shape = Shape.of("of_queries", call.head_dim, call.value_dim, call.q.dtype)
    blocks = triton.cdiv(call.queries, shape.queries)
    parts = lse.new_empty((2, call.batch, call.heads, blocks) if slopes_wanted else 1)
    backward.of_queries[(blocks * call.batch * call.heads,)](
        call.q, call.k, call.v, out, lse, d_out, lse if d_lse is None else d_lse, d_q, shares, parts, spans, notes,
        *call.biases, *strides(call.q), *strides(call.k), *strides(call.v), *strides(out), *strides(d_out),
        *strides(d_q), call.table_stride, call.mask_stride, call.batch, call.heads, call.group, call.queries, call.keys,
        blocks, call.q_start, call.size, call.scale, spans.shape[3], **call.widths, **common, M=shape.queries,
        N=shape.keys, SPAN=rows, SLOPES=slopes_wanted, ORDERED=ordered, LSE=d_lse is not None,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip

    shape = Shape.of("of_keys", call.head_dim, call.value_dim, call.q.dtype)
    blocks = triton.cdiv(call.keys, shape.keys)
    backward.of_keys[(blocks * call.batch * call.key_heads,)](
        call.q, call.k, call.v, lse, d_out, shares, d_k, d_v, spans, notes, *call.biases,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(d_out), *strides(d_k), *strides(d_v),
        call.table_stride, call.mask_stride, call.batch, call.heads, call.group, call.queries, call.keys, blocks,
        call.q_start, call.size, call.scale, spans.shape[3], **call.widths, **common, M=shape.queries, N=shape.keys,
        SPAN=rows, ORDERED=ordered and call.group == 1, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip

    d_behind = d_ahead = None
    if slopes_wanted:
        sums = parts.double().sum(dim=(1, 3))
        assert call.behind is not None
        d_behind, d_ahead = _sides(sums[0], sums[1], call.behind, call.ahead)
    elif bias and call.bias == TABLE:
        d_behind, d_ahead = _of_table(call, lse, d_out, shares)
    return d_q, d_k, d_v, d_behind, d_ahead


def _sides(d_behind: Tensor, d_onward: Tensor, behind: Tensor, ahead: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the two tensors of a bias; one that serves both sides gets both."""
    if ahead is None:
        return (d_behind + d_onward).to(behind.dtype), None
    return d_behind.to(behind.dtype), d_onward.to(ahead.dtype)


def _of_table(call: Call, lse: Tensor, d_out: Tensor, shares: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a table's two sides."""
    assert call.behind is not None
    shape = Shape.of("of_table", call.head_dim, call.value_dim, call.q.dtype)
    side, ends = shape.keys, call.behind.shape[1]
    ends_ahead = 1 if not call.two_sided else (call.behind if call.ahead is None else call.ahead).shape[1]
    farthest = min(ends - 1, call.q_start + call.queries - 1)
    onward = min(ends_ahead - 1, call.keys - 1 - call.q_start)
    least, most = -(-min(-onward, 0) // -side) if onward > 0 else 0, max(farthest, 0) // side + 1
    least = -math.ceil(onward / side) if onward > 0 else 0
    shifts = most - least + 1
    splits = max(1, min(call.batch, 1024 // max(1, shifts * call.heads)))
    per_split = triton.cdiv(call.batch, splits)
    splits = triton.cdiv(call.batch, per_split)
    tiles = lse.new_empty(splits, call.heads, shifts, side, side)
    table.gather[(shifts * call.heads * splits,)](
        call.q, call.k, call.v, lse, d_out, shares, tiles, *call.biases[2:],
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(d_out), call.table_stride, call.mask_stride,
        call.batch, call.heads, call.group, call.queries, call.keys, call.q_start, call.size, call.scale,
        least, shifts, splits, per_split, **call.widths, SIDE=side, MASK=call.mask, PRECISION=call.precision,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    both = lse.new_zeros(call.heads, ends_ahead - 1 + ends)
    table.fold[(shifts + 1, call.heads)](
        tiles, both, call.heads, shifts, splits, least, ends, ends_ahead, SIDE=side, PART=min(side, 32), num_warps=4,
    )  # fmt: skip
    d_behind = both[:, ends_ahead - 1 :]
    if not call.two_sided:
        return d_behind.to(call.behind.dtype), None if call.ahead is None else torch.zeros_like(call.ahead)
    d_onward = torch.nn.functional.pad(both[:, : ends_ahead - 1].flip(1), (1, 0))
    if call.ahead is None:
        return (d_behind + d_onward).to(call.behind.dtype), None
    return d_behind.to(call.behind.dtype), d_onward.to(call.ahead.dtype)
