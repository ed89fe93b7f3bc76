"""Grids, block shapes and arguments: between the registered ops and the kernels.

CUDA lets a grid's second number be 65,535 at most, so what grows with a batch is the first. All launches stand in one
file, since all are made from one `Call`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from lengthen.attention.kernels import backward, ball, decaying, decoding, forward, repair, shapes, table
from lengthen.attention.kernels.codes import CAUSAL, FULL, GIVEN, LEVEL, LINEAR, LISTED, MEASURED, NO_REACH, NONE, TABLE
from lengthen.attention.kernels.launcher import Launcher, facts
from lengthen.attention.kernels.plans import make
from lengthen.attention.kernels.shapes import Shape

LOG2E = math.log2(math.e)
BALL_ROWS, BALL_KEYS = 64, 256  # keys that a program of the pass over them loads at once, and takes in all
REPAIRED, REPAIRERS = 32, 264  # rows of the repair's blocks, and its programs, which mostly end at once
MOST_SPLITS, DECODERS = 192, 448  # programs of decoding, for a sequence and in all
JOINED, JOINED_SHARES = 64, 128  # features and shares that a program joins at once
ROOM = 168  # registers that a thread gets at least where there is more to hold, so that few are kept in memory
SCALED = 64  # rows of a program that puts a decay into queries or keys
AHEAD = 512  # values before a table: more than a block of queries and one of keys can be apart
PROGRAMS = 396  # of the pass for a table's gradient: enough to fill a GPU

_ball, _forward, _repair = Launcher(ball.ball), Launcher(forward.forward), Launcher(repair.repair)
_of_queries, _of_keys = Launcher(backward.of_queries), Launcher(backward.of_keys)
_gather, _fold = Launcher(table.gather), Launcher(table.fold)
_scale_rows = Launcher(decaying.scale_rows)
_split, _join = Launcher(decoding.split), Launcher(decoding.join)


class Call:
    """What all kernels of a call take, in the order in which they take it."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        behind: Tensor | None,
        ahead: Tensor | None,
        first: Tensor | None,
        last: Tensor | None,
        rates: Tensor | None,
        mask: int,
        size: int,
        linear: bool,
        two_sided: bool,
        scale: float,
        q_start: int,
        tolerance: float,
        segment: int,
        level: int,
    ) -> None:
        self.q, self.k, self.v, self.behind, self.ahead = q, k, v, behind, ahead
        self.batch, self.heads, self.queries, head_dim = q.shape
        self.key_heads, self.keys, value_dim = k.shape[1], k.shape[2], v.shape[3]
        self.group = self.heads // self.key_heads
        self.mask, self.size, self.linear, self.two_sided = mask, size, linear, two_sided
        self.scale, self.q_start, self.tolerance = scale, q_start, tolerance if rates is None else 0.0
        self.rates, self.segment = rates, segment
        self.level = level if 0 <= level < q_start + self.queries else -1
        self.bias = NONE if behind is None else LINEAR if linear else TABLE if self.level < 0 else LEVEL
        slopes = slopes_ahead = joined = q  # pointers that no kernel reads where it does not ask for them
        self.table_stride = 0
        if behind is not None and linear:
            slopes = behind.float().contiguous()
            slopes_ahead = slopes if ahead is None else ahead.float().contiguous()
        elif behind is not None:
            joined, self.table_stride = _joined(behind, ahead, two_sided)
        self.slopes = slopes
        self.biases = (slopes, slopes_ahead, joined, *(q if x is None else x for x in (first, last, rates)))
        self.mask_stride = self.queries if first is not None and first.shape[0] > 1 else 0
        self.widths = (head_dim, value_dim, _block(head_dim), _block(value_dim))
        self.rows = shapes.span(head_dim, value_dim, q.dtype)  # of the forward's blocks
        self.early = lets_begin_early(q.device)

    def shape(self, kernel: str) -> Shape:
        """Return how this kernel cuts its work."""
        shape = Shape.of(kernel, self.widths[0], self.widths[1], self.q.dtype)
        if self.rates is not None and max(self.widths) > 64:
            return replace(shape, registers=None)
        if shape.registers is None or not (self.linear and self.mask != CAUSAL):
            return shape
        return replace(shape, registers=max(shape.registers, ROOM))

    def sizes(self, blocks: int) -> tuple[int, ...]:
        """Return the numbers that every kernel takes, for one that has so many blocks."""
        return (
            *(self.table_stride, self.mask_stride, self.batch, self.heads, self.queries, self.keys),
            *(blocks, self.q_start, self.size, self.segment, self.level),
        )

    @property
    def precision(self) -> str:
        """How float32 products are computed: from three TF32 products, unless torch was told that one will do."""
        return "tf32" if self.q.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "tf32x3"

    @property
    def exact(self) -> float:
        """−log₂ of the tolerance, of which each side gets half; 0 where everything is read."""
        return 0.0 if self.tolerance == 0 else float(self.two_sided) - math.log2(self.tolerance)

    @property
    def steady(self) -> bool:
        """Whether the unit of weights stays after the near keys: that needs float32's range, and near keys to see."""
        return self.q.dtype != torch.float16 and self.mask not in (FULL, LISTED)

    def measures(self, given: bool) -> bool:
        """Return whether the forward has a pass over the keys before it."""
        return self.linear and not given and self.tolerance > 0 and self.keys > shapes.SHORT


@functools.cache
def lets_begin_early(device: torch.device) -> bool:
    """Return whether this device can start a kernel's programs before the last kernel has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _block(width: int) -> int:
    """Return the power of two that holds a width; a matrix product needs 16 at least."""
    return max(16, 1 << (width - 1).bit_length())


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of a batch, a head and a row."""
    return x.stride()[:3]


def _joined(behind: Tensor, ahead: Tensor | None, two_sided: bool) -> tuple[Tensor, int]:
    """Return a table of both sides from its distance 0 on, float32 in units of log 2, and how far heads are apart.

    What stands before it is a part of it: the other side, or room for distances that a mask will hide.
    """
    if not two_sided:
        room = behind.new_empty(AHEAD + behind.numel(), dtype=torch.float32)
        torch.mul(behind, LOG2E, out=room[AHEAD:].view(behind.shape))
        return room[AHEAD:], behind.shape[1]
    other = behind if ahead is None else ahead
    joined = torch.cat((other[:, 1:].flip(1), behind), dim=1).float() * LOG2E
    return joined[0, other.shape[1] - 1 :], joined.shape[1]


def run_forward(call: Call, out: Tensor, lse: Tensor, spans: Tensor, notes: Tensor, key_norm: Tensor | None) -> None:
    """Launch the forward into its results; notes must be 0."""
    q, k, v, shape = call.q, call.k, call.v, call.shape("forward")
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(out), call.group)
    given = q if key_norm is None else key_norm
    known = facts((q, k, v, out, lse, spans, notes, *call.biases, given), strides)  # a new tensor is always aligned
    reach, centre = NO_REACH, q
    if call.linear and key_norm is not None and call.tolerance > 0:
        reach = GIVEN
    elif call.measures(key_norm is not None):
        reach = MEASURED
        centre = make(q, call.batch * call.key_heads * call.widths[0])
        _ball(
            (call.batch * call.key_heads, -(-call.keys // BALL_KEYS), 1),
            (k, centre, notes, call.slopes),
            _strides(k),
            (call.batch, call.key_heads, call.heads, call.keys, BALL_KEYS),
            (),
            (call.widths[0], call.widths[2], BALL_ROWS, 1 << (call.heads - 1).bit_length()),
            warps=4,
            stages=3,
            known=known,
        )
    blocks = spans.shape[3]
    _forward(
        (blocks * call.batch, call.heads, 1),
        (q, k, v, out, lse, spans, notes, *call.biases, centre, given),
        strides,
        call.sizes(blocks),
        (call.scale, call.exact),
        (
            *(*call.widths, call.rows, shape.keys, call.mask, call.bias, call.two_sided, reach),
            *(call.steady, call.rates is not None, call.precision, call.early),
        ),
        shape.warps,
        shape.stages,
        shape.registers,
        known,
    )
    blocks = -(-call.queries // REPAIRED)
    _repair(
        (min(REPAIRERS, blocks * call.batch * call.heads), 1, 1),
        (q, k, v, out, lse, notes, *call.biases),
        strides,
        call.sizes(blocks),
        (call.scale,),
        (*call.widths, REPAIRED, REPAIRED, call.mask, call.bias, call.two_sided, call.rates is not None, call.early),
        warps=4,
        stages=1,
        known=known,
        early=call.early,
    )


def run_decode(call: Call, out: Tensor, lse: Tensor, lows: Tensor, key_norm: Tensor | None) -> None:
    """Launch the kernels for few queries into their results."""
    q, k, v, shape = call.q, call.k, call.v, call.shape("decode")
    rows = call.group * call.queries
    most = DECODERS if call.group == 1 else DECODERS * 6 // 7  # where heads share keys, fewer are on the GPU at once
    most = min(MOST_SPLITS, most // call.batch, call.key_heads * -(-call.keys // shape.keys))
    programs = max(call.key_heads, most)
    parts = make(q, call.batch * programs * rows * (call.widths[1] + 2))  # with a unit and a sum for each row
    reach = call.linear and key_norm is not None and call.tolerance > 0 and not call.two_sided
    cut = (shape.keys, 1 << (call.key_heads - 1).bit_length(), 1 << (call.group - 1).bit_length())
    norms = q if key_norm is None else key_norm
    _split(
        (call.batch, programs, 1),
        (q, k, v, parts, lows, *call.biases[:5], norms),
        (*_strides(q), *_strides(k), *_strides(v), call.group),
        (
            *(call.table_stride, call.mask_stride, call.key_heads, call.queries, call.keys, call.q_start, call.size),
            programs,
        ),
        (call.scale, call.exact),
        (
            *(*call.widths, max(16, 1 << (rows - 1).bit_length()), *cut, call.mask, call.bias, call.two_sided),
            *(GIVEN if reach else NO_REACH, q.dtype != torch.float16, call.queries > 1, call.precision, call.early),
        ),
        shape.warps,
        shape.stages,
        shape.registers,
    )
    width = min(call.widths[3], JOINED)
    _join(
        (call.batch * call.key_heads, rows, -(-call.widths[1] // width)),
        (parts, out, lse, call.slopes),
        (*_strides(out), call.group),
        (call.key_heads, call.queries, call.keys, programs),
        (),
        (*(call.widths[1], width, JOINED_SHARES, *cut, GIVEN if reach else NO_REACH, call.early),),
        warps=4,
        stages=1,
        early=call.early,
    )


def run_backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    notes: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    given: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v and of the bias's two tensors (None: not asked for, or there is none)."""
    q, k, v = call.q, call.k, call.v
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sums, shares = torch.empty_like(lse), torch.empty_like(lse)
    ordered, slopes = call.measures(given), bias and call.bias == LINEAR
    strides = (*_strides(q), *_strides(k), *_strides(v))

    faded = q if call.rates is None else scaled_rows(q, call.rates, call.segment, 0, grow=False)
    shape = call.shape("of_queries")
    blocks = -(-call.queries // shape.queries)
    parts = lse.new_empty((2, call.batch, call.heads, blocks)) if slopes else lse
    _of_queries(
        (blocks * call.batch * call.heads, 1, 1),
        (
            *(q, k, v, out, lse, d_out, lse if d_lse is None else d_lse, d_q, sums, shares, parts, spans, notes),
            *call.biases,
        ),
        (*strides, *_strides(out), *_strides(d_out), *_strides(d_q), call.group),
        (*call.sizes(blocks), spans.shape[3]),
        (call.scale,),
        (
            *(*call.widths, shape.queries, shape.keys, call.rows, call.mask, call.bias, call.two_sided),
            *(slopes, ordered, d_lse is not None, call.rates is not None, call.precision),
        ),
        shape.warps,
        shape.stages,
        shape.registers,
    )
    shape = call.shape("of_keys")
    blocks = -(-call.keys // shape.keys)
    _of_keys(
        (blocks * call.batch * call.key_heads, 1, 1),
        (faded, k, v, sums, d_out, shares, d_k, d_v, spans, notes, *call.biases),
        (*_strides(faded), *strides[3:], *_strides(d_out), *_strides(d_k), *_strides(d_v), call.group),
        (*call.sizes(blocks), spans.shape[3]),
        (call.scale,),
        (
            *(*call.widths, shape.queries, shape.keys, call.rows, call.mask, call.bias, call.two_sided),
            *(ordered and call.group == 1, call.rates is not None),
            *(call.queries % shape.queries == 0, call.precision),
        ),
        shape.warps,
        shape.stages,
        shape.registers,
    )
    d_behind = d_ahead = None
    if slopes:
        assert call.behind is not None
        sums_behind, sums_ahead = parts.double().sum(dim=(1, 3))
        d_behind, d_ahead = _sides(sums_behind, sums_ahead, call.behind, call.ahead)
    elif bias and call.bias in (TABLE, LEVEL):
        d_behind, d_ahead = _of_table(call, sums, d_out, shares)
        if call.bias == LEVEL:
            d_behind = _with_level(call, d_behind, lse, d_lse)
    return d_q, d_k, d_v, d_behind, d_ahead


def scaled_rows(x: Tensor, rates: Tensor, segment: int, start: int, grow: bool) -> Tensor:
    """Return x `[batch, heads, rows, D]` with the decay since the start of a row's segment in it, or taken out of it.

    The first row stands at `start`. rates are in units of log 2, `[heads, D]` or the same for all heads.
    """
    y = torch.empty_like(x)
    batch, heads, rows, width = x.shape
    blocks = -(-rows // SCALED)
    _scale_rows(
        (blocks * batch * heads, 1, 1),
        (x, y, rates),
        (*_strides(x), *_strides(y)),
        (heads, rows, blocks, segment, start),
        (),
        (width, _block(width), SCALED, grow),
        warps=4,
        stages=1,
    )
    return y


def _sides(d_behind: Tensor, d_onward: Tensor, behind: Tensor, ahead: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the two tensors of a bias; one that serves both sides gets both."""
    if ahead is None:
        return (d_behind + d_onward).to(behind.dtype), None
    return d_behind.to(behind.dtype), d_onward.to(ahead.dtype)


def _with_level(call: Call, near: Tensor, lse: Tensor, d_lse: Tensor | None) -> Tensor:
    """Return the gradient of a whole table from that of the values before its level.

    Those of a row's scores add up to the gradient of its lse; so what is not near is known without another pass.
    """
    assert call.behind is not None
    total = near.new_zeros(call.heads, dtype=torch.float64)
    if d_lse is not None:
        total = d_lse.double().where(lse > float("-inf"), 0).sum(dim=(0, 2))
    d_behind = torch.zeros_like(call.behind)
    d_behind[:, : call.level] = near
    d_behind[:, call.level] = total - near.double().sum(1)
    return d_behind


def _of_table(call: Call, sums: Tensor, d_out: Tensor, shares: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a table's two sides."""
    behind, ahead = call.behind, call.ahead
    assert behind is not None
    q, k, v, shape = call.q, call.k, call.v, call.shape("of_table")
    side, ends = shape.keys, call.level if call.bias == LEVEL else behind.shape[1]
    ends_ahead = (behind if ahead is None else ahead).shape[1] if call.two_sided else 1
    # Tiles for the distances −onward … farthest, that of shift s for SIDE·s − SIDE + 1 … SIDE·s + SIDE − 1.
    farthest = max(0, min(ends - 1, call.q_start + call.queries - 1))
    onward = max(0, min(ends_ahead - 1, call.keys - 1 - call.q_start))
    least, most = -math.ceil(onward / side), farthest // side + 1
    shifts = most - least + 1
    splits = max(1, min(call.batch * -(-call.queries // side), PROGRAMS // (shifts * call.heads)))
    tiles = sums.new_empty(splits, call.heads, shifts, side, side)
    _gather(
        (shifts * call.heads * splits, 1, 1),
        (q, k, v, sums, d_out, shares, tiles, *call.biases[2:5]),
        (*_strides(q), *_strides(k), *_strides(v), *_strides(d_out), call.group),
        (
            *(call.table_stride, call.mask_stride, call.batch, call.heads, call.queries, call.keys),
            *(call.q_start, call.size, least, shifts, splits, behind.shape[1], ends_ahead),
        ),
        (call.scale,),
        (*call.widths, side, call.mask, call.precision),
        shape.warps,
        shape.stages,
        shape.registers,
    )
    folded = sums.new_zeros(splits, call.heads, ends_ahead - 1 + ends)
    _fold(
        (shifts + 1, call.heads, splits),
        (tiles, folded),
        (),
        (call.heads, shifts, least, ends, ends_ahead),
        (),
        (side, min(side, 32)),
        warps=4,
        stages=2,
    )
    both = folded.sum(0)
    d_behind = both[:, ends_ahead - 1 :]
    if not call.two_sided:
        return d_behind.to(behind.dtype), None if ahead is None else torch.zeros_like(ahead)
    d_onward = torch.nn.functional.pad(both[:, : ends_ahead - 1].flip(1), (1, 0))
    return _sides(d_behind, d_onward, behind, ahead)
