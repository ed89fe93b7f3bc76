"""From a problem to launches: grids and arguments.

CUDA lets a grid's second and third numbers be 65,535 at most, so what grows with a batch is the first. All launches
stand in one file, since all are made from one `Call`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lengthen.attention.backends.ops import Results
from lengthen.attention.backends.triton import backward, decode, forward, repair, segment_of, shapes, table_grad, tile
from lengthen.attention.backends.triton import ball as balls
from lengthen.attention.backends.triton import decay as decays
from lengthen.attention.backends.triton.kernel import Interpreted, Kernel, Variant
from lengthen.attention.backends.triton.shapes import Shape
from lengthen.attention.backends.triton.tile import Ball, Bias, Mask, Matrix, Sizes
from lengthen.attention.biases import Linear, Table
from lengthen.attention.problem import Problem

LOG2E = math.log2(math.e)
EVERYTHING = 1 << 29  # keys behind a query: more than kernels count
NONE, LINEAR, TABLE, EXTENDED = (x.value for x in (tile.NONE, tile.LINEAR, tile.TABLE, tile.EXTENDED))
BALL_ROWS, BALL_KEYS = 64, 256  # keys that a program of the pass over them loads at once, and takes in all at least
REPAIRED, REPAIRERS = 16, 264  # rows that `repair` does together, and its programs, which mostly end at once
MOST_SPLITS, DECODERS = 192, 448  # programs of decoding, for a sequence and in all
JOINED, JOINED_PARTS = 64, 128  # features and parts that a program joins at once
SCALED = 64  # rows of a program that puts a decay into queries or keys
PROGRAMS = 396  # of the pass for a table's gradient: enough to fill a GPU
BLOCKS = 1024  # blocks of queries that `farthest` looks at together

KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(balls.enclose),
        Kernel(forward.forward),
        Kernel(repair.repair, early=True),
        Kernel(backward.bwd_dq),
        Kernel(backward.farthest),
        Kernel(backward.bwd_dkv),
        Kernel(table_grad.gather),
        Kernel(table_grad.fold),
        Kernel(decays.scale_rows),
        Kernel(decode.split),
        Kernel(decode.join, early=True),
    )
}
Launch = Variant | Interpreted


def lets_begin_early(device: torch.device) -> bool:
    """Return whether this device can start a kernel's programs before the last kernel has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def power_of_2(n: int, at_least: int = 16) -> int:
    """Return the power of two that holds n; a matrix product needs 16 at least."""
    return max(at_least, 1 << (n - 1).bit_length())


class Widths:
    """What kernels are compiled for, but for bias and mask: worked out once for a device, a dtype and widths."""

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, precision: str) -> None:
        self.device, self.dtype, self.head_dim, self.value_dim = device, dtype, head_dim, value_dim
        self.precision, self.early = precision, lets_begin_early(device)
        self.sizes = head_dim, value_dim, power_of_2(head_dim), power_of_2(value_dim)
        self.align = 16 if head_dim % 16 == 0 and value_dim % 16 == 0 else 1  # what all strides are multiples of
        self.rows = shapes.span(head_dim, value_dim, dtype)  # queries in the forward's blocks
        self.known: dict[tuple[Any, ...], tuple[Launch, Launch]] = {}  # the forward and its repair, by bias and mask

    def shape(self, kernel: str, decayed: bool = False) -> Shape:
        """Return how a kernel cuts its work."""
        shape = Shape.of(kernel, self.head_dim, self.value_dim, self.dtype)
        return shapes.roomy(shape) if decayed and max(self.sizes) > 64 else shape

    def variant(self, kernel: str, shape: Shape, *constants: Any) -> Launch:
        """Return a kernel compiled for these constants."""
        return KERNELS[kernel].variant(self.device, self.dtype, shape, *constants)

    def forward(self, kind: int, two_sided: bool, edged: bool, decayed: bool) -> tuple[Launch, Launch]:
        """Return the forward and its repair."""
        key = kind, two_sided, edged, decayed
        if key not in self.known:
            steady = self.dtype != torch.float16 and not two_sided
            rest = (self.align, kind, two_sided, edged, steady, decayed, self.precision, self.early)
            shape, small = self.shape("forward", decayed), Shape(REPAIRED, REPAIRED, 4, 1)
            self.known[key] = (
                self.variant("forward", shape, *self.sizes, self.rows, shape.keys, *rest),
                self.variant("repair", small, *self.sizes, self.rows, REPAIRED, *rest),
            )
        return self.known[key]

    def enclosing(self, heads: int, kind: int) -> Launch:
        """Return the pass over the keys that measures their ball."""
        shape, rest = Shape(power_of_2(heads, 1), BALL_ROWS, 4, 3), (False,) * 4
        constants = (shape.queries, shape.keys, self.align, kind, *rest, self.precision, False)
        return self.variant("enclose", shape, *self.sizes, *constants)


@functools.cache
def widths_of(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, single: bool) -> Widths:
    """Return what kernels for these are compiled for; float32 products are made of three TF32 ones, or of a single."""
    precision = "tf32x3" if dtype == torch.float32 and not single else "tf32"
    return Widths(device, dtype, head_dim, value_dim, precision)


def dense(x: Tensor, align: int) -> Tensor:
    """Return x with features beside each other in memory, and its rows where kernels expect them: nearly always x."""
    batch, head, row, feature = x.stride()
    if feature == 1 and not ((batch | head | row) % align or x.data_ptr() % 16):
        return x
    placed = feature == 1 or x.shape[3] == 1
    if placed and align > 1:
        placed = x.data_ptr() % 16 == 0 and not any(x.stride(i) % align and x.shape[i] > 1 for i in range(3))
    return x if placed else x.clone(memory_format=torch.contiguous_format)


class Call:
    """What all kernels of a problem take."""

    def __init__(self, problem: Problem, rates: Tensor | None = None, segment: int = 1) -> None:
        q, k, v = problem.q, problem.k, problem.v
        batch, heads, queries, head_dim = q.shape
        _, key_heads, keys, _ = k.shape
        single = q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        self.widths = widths = widths_of(q.device, q.dtype, head_dim, v.shape[3], single)
        self.place: Callable[[Tensor], Any] = Tensor.data_ptr if q.is_cuda else _same
        align = widths.align
        self.q, self.k, self.v, self.problem = dense(q, align), dense(k, align), dense(v, align), problem
        self.sizes = Sizes(batch, heads, key_heads, heads // key_heads, queries, keys)
        self.two_sided, self.segment, self.nothing = problem.mask.two_sided, segment, self.place(self.q)
        self.rates = self.q if rates is None else rates  # of a decay, in units of log 2, [heads, head_dim]
        self.alive: list[Tensor] = []  # what must be there until all is launched
        self.reaches = problem.bias is not None and problem.tolerance > 0 and problem.decay is None
        self.mask, self.bias = self._mask(), self._bias()

    def matrix(self, x: Tensor) -> Matrix:
        """Return a tensor as kernels take it."""
        batch, head, row, _ = x.stride()
        align = self.widths.align
        return Matrix(self.place(x), batch // align, head // align, row // align)

    def _kept(self, x: Tensor) -> Any:
        """Return where a tensor is, which is then there until all is launched."""
        self.alive.append(x)
        return self.place(x)

    def _mask(self) -> Mask:
        problem, nothing, queries = self.problem, self.nothing, self.sizes.queries
        first, last, listed, stride, starts, moving, q_start = nothing, nothing, 0, 0, nothing, 0, problem.q_start
        formula = problem.mask.formula()
        shift, block = formula or (0, 1)
        if formula is None:
            lists = problem.mask.listed(queries, self.sizes.keys, problem.q_start, self.q.device)
            first, last, listed = self._kept(lists.first), self._kept(lists.last), 1
            stride = queries if lists.first.shape[0] > 1 else 0
        if isinstance(q_start, Tensor):
            near = q_start.clamp(-EVERYTHING, EVERYTHING).to(torch.int32)
            starts, moving, q_start = self._kept(near.expand(self.sizes.batch).contiguous()), 1, 0
        shift, block = min(shift, EVERYTHING), min(block, EVERYTHING)
        self.edged = shift < EVERYTHING  # some query may not see the first key
        return Mask(first, last, listed, stride, shift, block, starts, moving, q_start)

    def _bias(self) -> Bias:
        bias, nothing = self.problem.bias, self.nothing
        if isinstance(bias, Linear):
            self.kind = LINEAR
            slopes = self._kept(bias.slopes.float().contiguous())
            ahead = slopes if bias.ahead is None else self._kept(bias.ahead.float().contiguous())
            return Bias(slopes, ahead, nothing, 0, 0, 0, nothing, 0)
        if not isinstance(bias, Table):
            self.kind = NONE
            return Bias(nothing, nothing, nothing, 0, 0, 0, nothing, 0)
        self.kind = EXTENDED if bias.extended else TABLE
        behind, other = bias.values.detach(), (bias.values if bias.ahead is None else bias.ahead).detach()
        if bias.extended and other.shape[1] == 1:  # distance 0 is behind's: ahead begins at 1
            other = other.expand(-1, 2)
        level, level_ahead = behind.shape[1] - 1, other.shape[1] - 1 if self.two_sided else 0
        parts = (other[:, 1:].flip(1), behind) if self.two_sided else (behind,)
        table = torch.cat(parts, dim=1).float() * LOG2E  # both sides, of which distance 0 is level_ahead-th
        tails, steps = nothing, 0
        if self.reaches and self.sizes.keys > shapes.SHORT:
            found = self._tails(bias)
            tails, steps = self._kept(found), found.shape[2]
        return Bias(
            *(nothing, nothing, self._kept(table[0, level_ahead:]), table.shape[1]),
            *(level, level_ahead, tails, steps),
        )

    def _tails(self, bias: Table) -> Tensor:
        """Return both sides' tails in units of log 2, `[2, heads, steps]`."""
        q_start, queries, keys = self.problem.q_start, self.sizes.queries, self.sizes.keys
        if isinstance(q_start, Tensor):
            farthest = queries + keys
        else:
            farthest = max(0, q_start + queries - 1, keys - 1 - q_start if self.two_sided else 0)
        step = forward.TAIL_STEP.value
        sides = [bias.tails(farthest, side, step) for side in (False, True)[: 1 + self.two_sided]]
        return (torch.stack((sides[0], sides[-1])) * LOG2E).float()

    @property
    def neg_log2_tolerance(self) -> float:
        """−log₂ of the tolerance, of which each side gets half; 0 where everything is read."""
        return float(self.two_sided) - math.log2(self.problem.tolerance) if self.problem.tolerance > 0 else 0.0

    def ball(self) -> Ball:
        """Return the ball that reach uses, given or room for one; without one everything is read."""
        given, sizes = self.problem.ball, self.sizes
        if not self.reaches or (given is None and sizes.keys <= shapes.SHORT):
            return Ball(self.nothing, self.nothing, 0)
        if given is not None:
            return Ball(self._kept(given.centre.contiguous()), self._kept(given.radius.contiguous()), 1)
        per_part = max(BALL_KEYS, -(-sizes.keys // (balls.PARTS.value * BALL_ROWS)) * BALL_ROWS)
        parts, items = -(-sizes.keys // per_part), sizes.batch * sizes.key_heads
        centre = self._kept(self.q.new_empty(items * self.widths.head_dim))
        radius = self._kept(self.q.new_empty(items * parts, dtype=torch.float32))
        return Ball(centre, radius, parts)


def _same(x: Tensor) -> Tensor:
    return x


Pull = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def faded(problem: Problem) -> tuple[Call, Pull]:
    """Return a call with a decay in its keys, and what takes the gradients of its q, k and v back to the problem's.

    Keys are divided by their decay since the start of their segment; where one segment holds all, queries are
    multiplied by theirs, and the kernels know of no decay. Then, as where they do, everything is read.
    """
    decay = problem.decay
    if decay is None:
        return Call(problem), lambda d_q, d_k, d_v: (d_q, d_k, d_v)
    assert isinstance(problem.q_start, int)
    segment, q, k, v, start = segment_of(decay, problem.q.dtype), problem.q, problem.k, problem.v, problem.q_start
    rates = decay.rates.detach().double().log2().float().expand(q.shape[1], -1).contiguous()
    one = start >= 0 and max(start + q.shape[2], k.shape[2]) <= segment
    each = problem.group if decay.rates.dim() > 1 or not one else 1  # heads that share keys, and cannot here
    if each > 1:
        k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))
    given = Call(problem._replace(k=k, v=v), rates, segment)
    k = scaled_rows(given, given.k, 0, grow=True)
    q = scaled_rows(given, given.q, start, grow=False) if one else q
    call = Call(problem._replace(q=q, k=k, v=v, decay=None if one else decay, tolerance=0.0, ball=None), rates, segment)

    def pull(d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d_q = scaled_rows(given, d_q, start, grow=False) if one else d_q
        d_k = scaled_rows(given, d_k, 0, grow=True)
        if each > 1:
            d_k, d_v = (torch.unflatten(x, 1, (-1, each)).sum(dim=2) for x in (d_k, d_v))
        return d_q, d_k, d_v

    return call, pull


def scaled_rows(call: Call, x: Tensor, start: int, grow: bool) -> Tensor:
    """Return x `[batch, heads, rows, D]` with the decay since the start of a row's segment in it, or taken out of it.

    The first row stands at `start`.
    """
    y = torch.empty_like(x)
    batch, heads, rows, width = x.shape
    shape = Shape(SCALED, SCALED, 4, 1)
    scale = call.widths.variant("scale_rows", shape, width, power_of_2(width), SCALED, call.widths.align, grow)
    numbers = (heads, rows, call.segment, start, call.sizes.heads // heads)
    scale((-(-rows // SCALED) * batch * heads, 1, 1), call.matrix(x), call.matrix(y), call.place(call.rates), *numbers)
    return y


def run_forward(call: Call, out: Tensor, lse: Tensor, residual: Tensor | None, spans: Tensor) -> None:
    """Launch the forward into its results."""
    problem, place, sizes = call.problem, call.place, call.sizes
    attend, again = call.widths.forward(call.kind, call.two_sided, call.edged, problem.decay is not None)
    ball = call.ball()
    arguments = (
        *(call.matrix(call.q), call.matrix(call.k), call.matrix(call.v), call.matrix(out)),
        Matrix(call.nothing, 0, 0, 0) if residual is None else call.matrix(residual),
        *(place(lse), place(spans), place(call.rates), call.mask, call.bias, ball, sizes, call.segment),
        *(problem.scale, call.neg_log2_tolerance),
    )
    if ball.parts and problem.ball is None:
        call.widths.enclosing(sizes.heads, call.kind)((sizes.batch * sizes.key_heads, ball.parts, 1), *arguments)
    blocks, heads = spans.shape[3], sizes.batch * sizes.heads
    attend((blocks * sizes.batch, sizes.key_heads, sizes.group), *arguments)
    again((heads, min(blocks, -(-REPAIRERS // heads)), 1), *arguments)


def run_decode(call: Call, out: Tensor, lse: Tensor, read: Tensor) -> None:
    """Launch the kernels for few queries into their results."""
    widths, sizes, place = call.widths, call.sizes, call.place
    shape, rows, value_dim = widths.shape("decode"), sizes.group * sizes.queries, widths.value_dim
    most = DECODERS if sizes.group == 1 else DECODERS * 6 // 7  # where heads share keys, fewer are there at once
    most = min(MOST_SPLITS, most // sizes.batch, sizes.key_heads * -(-sizes.keys // shape.keys))
    programs = max(sizes.key_heads, most)
    count = sizes.batch * programs * rows
    room = call.q.new_empty(count * (value_dim + 2), dtype=torch.float32)  # one allocation for what programs hand on
    parts, units, totals = (place(x) for x in torch.split(room, [count * value_dim, count, count]))
    reaches = call.reaches and call.problem.ball is not None and call.kind == LINEAR and not call.two_sided
    ball = call.ball() if reaches else Ball(call.nothing, call.nothing, 0)
    heads, steady = power_of_2(sizes.heads, 1), call.q.dtype != torch.float16
    split = widths.variant(
        *("split", shape, *widths.sizes, 16 if rows <= 16 else 64, shape.keys, heads, widths.align, call.kind),
        *(call.two_sided, call.edged, reaches, steady, sizes.queries > 1, widths.precision, widths.early),
    )
    split(
        (sizes.batch, programs, 1),
        *(call.matrix(call.q), call.matrix(call.k), call.matrix(call.v), parts, units, totals, place(read), call.mask),
        *(call.bias, ball, sizes, programs, call.problem.scale, call.neg_log2_tolerance),
    )
    width = min(widths.sizes[3], JOINED)
    numbers = (value_dim, width, JOINED_PARTS, shape.keys, heads, widths.align, reaches, widths.early)
    join = widths.variant("join", Shape(1, 1, 4, 1), *numbers)
    join(
        (sizes.batch * sizes.key_heads, rows, -(-value_dim // width)),
        *(parts, units, totals, call.matrix(out), place(lse), call.bias, sizes, programs),
    )


def run_backward(
    call: Call, results: Results, d_out: Tensor, d_lse: Tensor | None, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v and of the bias's two tensors (None: not asked for, or there is none)."""
    out, lse, residual, spans = results
    q, k, v, problem, place, widths, sizes = call.q, call.k, call.v, call.problem, call.place, call.widths, call.sizes
    d_out, of_bias, decayed = dense(d_out, widths.align), of_bias and call.kind != NONE, problem.decay is not None
    of_lse, d_lse = int(d_lse is not None), lse if d_lse is None else d_lse.contiguous()
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sums = lse.new_empty(3, sizes.batch, sizes.heads, spans.shape[3] * widths.rows)
    log_sums, deltas = sums[:2], sums[2]  # of whole blocks of queries; log_sums twice, the second time for a ramp
    far = q.new_empty(2, sizes.batch, sizes.heads, dtype=torch.int32)
    of_dq, of_dkv = widths.shape("bwd_dq", decayed), widths.shape("bwd_dkv", decayed)
    blocks = -(-sizes.queries // of_dq.queries)
    parts = lse.new_empty((2, sizes.batch, sizes.heads, blocks)) if of_bias else lse

    def launch(kernel: str, shape: Shape, grid: tuple[int, int, int], of_q: Tensor, *kinds: Any) -> None:
        sides = (shape.queries, shape.keys, widths.rows, widths.align)
        widths.variant(kernel, shape, *widths.sizes, *sides, *kinds, widths.precision)(
            grid,
            *(call.matrix(x) for x in (of_q, k, v, out)),
            Matrix(call.nothing, 0, 0, 0) if residual is None else call.matrix(residual),
            *(call.matrix(x) for x in (d_out, d_q, d_k, d_v)),
            *(place(x) for x in (lse, d_lse, log_sums, deltas, parts, spans, far, call.rates)),
            *(call.mask, call.bias, sizes, call.segment, of_lse, problem.scale),
        )

    kinds = (call.kind, call.two_sided, call.edged, sizes.group > 1, of_bias, decayed)
    launch("bwd_dq", of_dq, (blocks * sizes.batch, sizes.key_heads, sizes.group), q, *kinds)
    launch("farthest", Shape(1, BLOCKS, 4, 1), (sizes.batch * sizes.heads, 1, 1), q, NONE, *(False,) * 5)
    faded_q = scaled_rows(call, q, 0, grow=False) if decayed else q
    launch("bwd_dkv", of_dkv, (-(-sizes.keys // of_dkv.keys) * sizes.batch, sizes.key_heads, 1), faded_q, *kinds)
    if not of_bias:
        return d_q, d_k, d_v, None, None
    assert problem.bias is not None
    d_behind, d_ahead = parts.double().sum(dim=(1, 3))
    if call.kind != LINEAR:
        of_table = _of_table(call, log_sums[0], d_out, deltas, far)
        if call.kind == EXTENDED:
            of_table[0][:, -1], of_table[1][:, -1] = d_behind, d_ahead
        d_behind, d_ahead = of_table
    behind, ahead = problem.bias.tensors
    if not call.two_sided:
        d_ahead.zero_()
    if ahead is None:  # one that serves both sides gets both
        return d_q, d_k, d_v, (d_behind + d_ahead).to(behind.dtype), None
    return d_q, d_k, d_v, d_behind.to(behind.dtype), d_ahead.to(ahead.dtype)


def _of_table(call: Call, log_sums: Tensor, d_out: Tensor, deltas: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a table's two sides, float32; an extended table's last values are not summed here."""
    bias, sizes, widths, two_sided, place = call.problem.bias, call.sizes, call.widths, call.two_sided, call.place
    assert isinstance(bias, Table)
    shape = widths.shape("table_grad")
    side, last = shape.keys, call.kind == EXTENDED
    lengths = [x.shape[1] for x in (bias.values, bias.values if bias.ahead is None else bias.ahead)]
    ends, ends_ahead = lengths[0] - last, max(1, lengths[1] - last) if two_sided else 1
    # Tiles for the distances −onward … farthest, that of shift s for SIDE·s − SIDE + 1 … SIDE·s + SIDE − 1.
    farthest, onward = max(0, ends - 1), ends_ahead - 1
    if isinstance(call.problem.q_start, int):
        farthest = max(0, min(farthest, call.problem.q_start + sizes.queries - 1))
        onward = max(0, min(onward, sizes.keys - 1 - call.problem.q_start))
    least, most = -math.ceil(onward / side), farthest // side + 1
    shifts = most - least + 1
    splits = max(1, min(-(-sizes.queries // side), PROGRAMS // (shifts * sizes.heads)))
    tiles = log_sums.new_empty(splits, sizes.heads, shifts, side, side)
    constants = (*widths.sizes, side, widths.rows, widths.align, two_sided, widths.precision)
    widths.variant("gather", shape, *constants)(
        (shifts * sizes.heads * splits, 1, 1),
        *(call.matrix(x) for x in (call.q, call.k, call.v, d_out)),
        *(place(x) for x in (log_sums, deltas, far, tiles)),
        *(call.mask, call.bias, sizes, least, shifts, splits, ends, ends_ahead, call.problem.scale),
    )
    folded = log_sums.new_zeros(splits, sizes.heads, ends_ahead - 1 + ends)
    widths.variant("fold", Shape(side, side, 4, 2), side, min(side, 32))(
        (shifts + 1, sizes.heads, splits), place(tiles), place(folded), sizes, least, shifts, ends, ends_ahead
    )
    both = folded.sum(0)
    grads = [both.new_zeros(sizes.heads, length) for length in lengths]
    grads[0][:, :ends] = both[:, ends_ahead - 1 :]
    grads[1][:, 1:ends_ahead] = both[:, : ends_ahead - 1].flip(1)
    return grads[0], grads[1]
