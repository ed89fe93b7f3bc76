"""Tiles: a block of queries against chunks of keys, in plain torch.

Three choices make a tile fast without compiled code:

- Its rows stand in reverse order. Distance is then a function of row + column, so the bias of a chunk is one vector a
  head, seen through strides (1, 1): nothing of the chunk's size is built for it. In the backward, the same view turns
  the sum along diagonals (a bias's gradient) into a sum over rows.
- Masks are compared only in chunks that an interval's edge crosses, once for all heads.
- The nearest keys are read by several heads together and in short blocks of rows, since every head reads them and the
  diagonal cuts across them; farther ones head by head, since each reaches its own distance, and in
  tall blocks where many are read, so that a chunk of keys is loaded once for many rows.

Matrix products and sums are in float32 at least, cast chunk by chunk, so 16-bit inputs cost no second copy.

Shapes: b sequences, h heads, r rows (queries), n keys of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lengthen.attention import reach
from lengthen.attention.biases import Bias, Decay, Linear, Table
from lengthen.attention.sides import Side

TILE = 1 << 20  # scores held at once: 4 MB in float32, which a CPU's last cache keeps
ROWS = 256  # rows of a block at the diagonal: more waste work on what they do not see
TALL = 1024  # rows of a block of a head that looks far: fewer load far keys again and again
NEAR = 128  # keys read beside the diagonal before reach is asked for the first time
FEW = 32  # for so few queries, the pass over all keys that reach needs costs what it saves
SAFE_EXPONENT = 20.0  # over a chunk, decay stays above e^−20: far inside float32
USUAL_REACH = 28.0  # a head of slope m reaches about this over m, for choosing its rows; results do not depend on it


@dataclass(eq=False)
class Call:
    """What all tiles of a call share."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias | None
    decay: Decay | None
    first: Tensor
    last: Tensor
    scale: float
    q_start: int
    tolerance: float
    compute: torch.dtype = field(init=False)
    finite: bool = field(init=False)
    two_sided: bool = field(init=False)
    ball: reach.Ball | None = field(init=False, default=None)
    buffers: dict[int, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.compute = torch.promote_types(self.q.dtype, torch.float32)
        sequences, heads, queries, _ = self.q.shape
        keys, self.group = self.k.shape[2], heads // self.k.shape[1]
        position = torch.arange(queries, device=self.q.device) + self.q_start
        self.two_sided = bool((self.last > position).any())
        self.finite = self._is_finite()
        self.longest = keys
        if self.decay is not None:
            self.log_rates = self.decay.rates.double().log().expand(heads, -1)
            steepest = -self.log_rates.min().item()
            self.longest = min(keys, max(1, int(SAFE_EXPONENT / max(steepest, 1e-9))))
        if isinstance(self.bias, Linear) and self.tolerance > 0 and self.finite and queries > FEW:
            self.ball = reach.enclosing_ball(self.k, centred=self.decay is None)

    def _is_finite(self) -> bool:
        """Return whether no input, and no score, is NaN or infinite: then hidden keys cannot leak."""
        if not (self.q.numel() and self.v.numel()):
            return True
        extremes = [torch.stack(x.aminmax()).to(torch.float64).abs().amax() for x in (self.q, self.k, self.v)]
        q, k, v = torch.stack(extremes).tolist()
        return math.isfinite(v) and q * k * self.q.shape[3] * abs(self.scale) < torch.finfo(self.compute).max

    def product(self, a: Tensor, b: Tensor, place: int) -> Tensor:
        """Return a @ b.mT, `[b, h, r, n]`, in one of two buffers that all tiles use in turn."""
        shape = (*a.shape[:3], b.shape[2])
        if place not in self.buffers or self.buffers[place].numel() < math.prod(shape):
            self.buffers[place] = a.new_empty(max(TILE, math.prod(shape)))
        out = self.buffers[place][: math.prod(shape)].view(a.shape[0] * a.shape[1], *shape[2:])
        return torch.bmm(a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:]).mT, out=out).view(shape)

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles that see anything."""
        sequences, _, queries, _ = self.q.shape
        for heads, rows in self._groups():
            width = min(ROWS, rows) * min(self.k.shape[2], rows + NEAR)
            batch = max(1, TILE // max(1, width * (heads.stop - heads.start)))
            for b in range(0, sequences, batch):
                for i in range(0, queries, rows):
                    block = Block(self, slice(b, min(b + batch, sequences)), slice(i, min(i + rows, queries)))
                    if block.lo < block.hi:
                        yield Tile(self, block, heads)

    def _groups(self) -> Iterator[tuple[slice, int]]:
        """Yield neighbouring heads that read alike, as many as fit the budget, and the rows of their blocks."""
        count, queries = self.q.shape[1], self.q.shape[2]
        tall = [True] * count
        if self.ball is not None and isinstance(self.bias, Linear):
            tall = [USUAL_REACH > TALL * m for m in self.bias.slopes.tolist()]
        h = 0
        while h < count:
            rows = max(1, min(TALL if tall[h] else ROWS, queries, self.longest))
            fit = max(1, TILE // (min(ROWS, rows) * min(self.k.shape[2], rows + NEAR)))
            limit = min(count if self.group == 1 else h - h % self.group + self.group, h + fit)  # one key head or all
            end = h + 1
            while end < limit and tall[end] == tall[h]:
                end += 1
            yield slice(h, end), rows
            h = end


class Block:
    """A block of queries, last first, and the keys [lo, hi) that one or more of them see."""

    def __init__(self, call: Call, batch: slice, rows: slice) -> None:
        self.call, self.batch, self.rows = call, batch, rows
        self.low, self.high = call.q_start + self.rows.start, call.q_start + self.rows.stop - 1
        self.position = torch.arange(self.high, self.low - 1, -1, device=call.q.device)
        seen_by = batch if call.first.shape[0] > 1 else slice(None)
        self.first, self.last = (x[seen_by, None, self.rows].flip(2) for x in (call.first, call.last))  # [b or 1, 1, r]
        blind = self.first > self.last
        self.first, self.last = self.first.masked_fill(blind, call.k.shape[2]), self.last.masked_fill(blind, -1)
        edges = [self.first.amin(), self.last.amax(), self.first.amax(), self.last.amin()]
        edges.append((self.last == self.position).all().long())
        edges = torch.stack(edges).tolist()
        self.causal = bool(edges[4])  # every row sees just up to itself
        self.lo, self.inner_lo = edges[0], edges[2]  # every row sees all of [inner_lo, inner_hi)
        self.hi, self.inner_hi = edges[1] + 1, edges[3] + 1
        # What is read first, by all heads: the diagonal and its neighbourhood.
        self.start = max(self.lo, min(self.hi, self.low - NEAR))
        self.end = max(self.start, min(self.hi, self.high + 1 + (NEAR if call.two_sided else 0)))

    def all_see(self, lo: int, hi: int) -> bool:
        """Return whether every row sees all keys [lo, hi)."""
        return lo >= self.inner_lo and hi <= self.inner_hi

    def visible(self, lo: int, hi: int) -> Tensor:
        """Return which rows see which of the keys [lo, hi), `[b or 1, 1, r, n]`."""
        j = torch.arange(lo, hi, device=self.first.device)
        return (j >= self.first.unsqueeze(-1)) & (j <= self.last.unsqueeze(-1))


class Tile:
    """A block of queries of some heads: its scores against any chunk of keys, and how far it must read."""

    def __init__(self, call: Call, block: Block, heads: slice) -> None:
        self.call, self.block, self.heads = call, block, heads
        self.key_heads = slice(heads.start // call.group, (heads.stop - 1) // call.group + 1)
        self.bias = None if call.bias is None else call.bias.of(heads)
        self.q = call.q[block.batch, heads, block.rows].to(call.compute).flip(2) * call.scale
        if call.ball is not None:
            self.highest = call.ball.highest_score(self.q, block.batch, self.key_heads)

    def part(self, heads: slice = slice(None), rows: slice = slice(None)) -> Tile:
        """Return the tile of some of these heads and rows, both counted from this tile's first."""
        one = copy(self)
        h, r = heads.indices(self.q.shape[1]), rows.indices(self.q.shape[2])
        one.heads = slice(self.heads.start + h[0], self.heads.start + h[1])
        one.key_heads = slice(one.heads.start // self.call.group, (one.heads.stop - 1) // self.call.group + 1)
        one.q, one.bias = self.q[:, heads, rows], None if self.bias is None else self.bias.of(heads)
        if self.call.ball is not None:
            one.highest = self.highest[:, heads, rows]
        if rows != slice(None):
            end = self.block.rows.stop  # rows stand last first
            one.block = Block(self.call, self.block.batch, slice(end - r[1], end - r[0]))
        return one

    def near(self) -> Iterator[tuple[slice, Tile, int, int]]:
        """Yield what every head reads first: some rows, their tile, and the keys [lo, hi)."""
        block = self.block
        if self.q.shape[2] <= ROWS:
            yield slice(None), self, block.start, block.end
            return
        for r in range(0, self.q.shape[2], ROWS):
            rows = slice(r, min(r + ROWS, self.q.shape[2]))
            part = self.part(rows=rows)
            end = block.end if self.call.two_sided else max(block.start, min(block.end, part.block.high + 1))
            yield rows, part, block.start, end

    @property
    def size(self) -> int:
        """How many keys a chunk may have."""
        return max(1, min(self.call.longest, TILE // self.q[..., 0].numel()))

    def chunks(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """Cut [lo, hi) into chunks that fit, the last keys first."""
        for end in range(hi, lo, -self.size):
            yield max(lo, end - self.size), end

    def of_keys(self, x: Tensor, lo: int, hi: int) -> Tensor:
        """Return keys or values of a chunk, `[b, h, n, width]`, one for each query head."""
        x = x[self.block.batch, self.key_heads, lo:hi].to(self.call.compute)
        each = self.q.shape[1] // x.shape[1]
        return x if each == 1 else x.repeat_interleave(each, dim=1)

    def sides(self, lo: int, hi: int) -> list[Side]:
        """Return what a chunk multiplies: one side, or both where decay meets keys behind and ahead at once."""
        call, position, k = self.call, self.block.position, self.of_keys(self.call.k, lo, hi)
        if call.decay is None:
            return [Side(self.q, k)]
        j, log_rate = torch.arange(lo, hi, device=k.device), call.log_rates[self.heads].unsqueeze(1)
        behind = lo <= self.block.high or not call.two_sided
        ahead = hi - 1 > self.block.low and call.two_sided
        part = (j <= position.unsqueeze(-1)) if behind and ahead else None
        sides = []
        if behind:
            sides.append(Side(self.q, k, log_rate, (position - lo).clamp(min=0), j - lo, part))
        if ahead:
            other = None if part is None else ~part
            sides.append(Side(self.q, k, log_rate, (hi - 1 - position).clamp(min=0), hi - 1 - j, other))
        return sides

    def additive(self, lo: int, hi: int) -> tuple[Tensor | None, Tensor | None]:
        """Return what a chunk's scores get added (the bias) and which of them count (None: all).

        Where each row sees up to itself, the mask is a function of distance too and goes into the bias.
        """
        block, along, visible = self.block, None, None
        hides = not block.all_see(lo, hi)
        by_distance = hides and block.causal and block.inner_lo <= lo <= block.low and self.call.finite
        if hides and not by_distance:
            visible = block.visible(lo, hi)
        if self.bias is None and not by_distance:
            return None, visible
        distance = self.distances(lo, hi)
        if self.bias is None:
            along = torch.zeros(1, len(distance), dtype=self.call.compute, device=distance.device)
        else:
            seen = distance
            if isinstance(self.bias, Table):  # past a table's ends lies only what no query sees
                ends = [t.shape[1] - 1 for t in self.bias.tensors if t is not None]
                seen = distance.clamp(-ends[-1], ends[0])
            along = self.bias.at(seen, self.call.compute).contiguous()
        if by_distance:
            along = along.masked_fill(distance < 0, -torch.inf)
        shape = (1, along.shape[0], self.q.shape[2], hi - lo)
        return along.as_strided(shape, (0, along.shape[1], 1, 1)), visible

    def scores(self, lo: int, hi: int, sides: list[Side]) -> Tensor:
        """Return a chunk's scores `[b, h, r, n]` with their bias; −∞ where a row does not see the key."""
        score = self.call.product(sides[0].q, sides[0].k, place=0)
        if len(sides) == 2:
            assert sides[0].part is not None
            score = torch.where(sides[0].part, score, self.call.product(sides[1].q, sides[1].k, place=1))
        bias, visible = self.additive(lo, hi)
        if bias is not None:
            score += bias
        return score if visible is None else score.masked_fill_(~visible, -torch.inf)

    def distances(self, lo: int, hi: int) -> Tensor:
        """Return the distance i − j at row + column = 0, 1, …, r + n − 2."""
        return torch.arange(self.block.high - lo, self.block.low - hi, -1, device=self.q.device)

    def needs_from(self, unread: int, lse: Tensor) -> list[int]:
        """Return where each head must read from behind, when keys from `unread` on are in `lse` `[b, h, r]`."""
        if self.call.ball is None or not isinstance(self.bias, Linear):
            return [self.block.lo] * self.q.shape[1]
        far = self._distance(lse, self.bias.slopes)
        need = torch.maximum(self.block.first.to(far.dtype), self.block.position - far + 1)
        need = need.masked_fill(self.block.first >= unread, unread).clamp(max=unread)
        return [int(x) for x in need.amin(dim=(0, 2)).tolist()]

    def needs_until(self, unread: int, lse: Tensor) -> list[int]:
        """Return where each head must read to ahead (exclusive), when keys before `unread` are in `lse`."""
        if self.call.ball is None or not isinstance(self.bias, Linear):
            return [self.block.hi] * self.q.shape[1]
        far = self._distance(lse, self.bias.slopes if self.bias.ahead is None else self.bias.ahead)
        need = torch.minimum(self.block.last.to(far.dtype) + 1, self.block.position + far)
        need = need.masked_fill(self.block.last < unread, unread).clamp(min=unread)
        return [int(x) for x in need.amax(dim=(0, 2)).tolist()]

    def _distance(self, lse: Tensor, slopes: Tensor) -> Tensor:
        """Return the heads' reach; seen from both sides, each side may leave half the tolerance unread."""
        share = self.call.tolerance / (2 if self.call.two_sided else 1)
        return reach.distance(self.highest, lse, slopes, share)


def diagonal_sums(x: Tensor) -> Tensor:
    """Return the sums of x `[b, h, r, n]` over row + column = 0, 1, …, r + n − 2: `[h, r + n − 1]`, in a fixed order."""
    b, h, r, n = x.shape
    shifted = x.new_zeros(b, h, r, r + n)
    whole = r * (r + n)
    shifted.as_strided((b, h, r, n), (h * whole, whole, r + n + 1, 1)).copy_(x)  # row i starts in column i
    return shifted.sum(dim=(0, 2))[:, : r + n - 1]
