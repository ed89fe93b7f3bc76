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

from lengthen.attention.biases import Bias, Decay, Linear, Table
from lengthen.attention.checks import finite
from lengthen.attention.reach import bound, distance, enclosing_ball
from lengthen.attention.sides import Side

TILE = 1 << 20  # scores held at once: 4 MB in float32, which a CPU's last cache keeps
FUSED = 4  # times as many in the fused kernel, which holds none; more would ask reach too seldom
ROWS = 256  # rows of a block at the diagonal: more waste work on what they do not see
TALL = 1024  # rows of a block of a head that looks far: fewer load far keys again and again
NEAR = 128  # keys read beside the diagonal before reach is asked for the first time
FEW = 32  # for so few queries, the pass over all keys that reach needs costs what it saves
SAFE_EXPONENT = 20.0  # over a chunk, decay stays above e^−20: far inside float32
USUAL_REACH = 28.0  # a head of slope m reaches about this over m; shapes of tiles go by it, results do not
FAR = 1024  # a head that usually reaches farther has tall blocks


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
    plain: bool = False  # keep to plain torch, as the backward does
    compute: torch.dtype = field(init=False)
    finite: bool = field(init=False)  # every input, bias and score
    two_sided: bool = field(init=False)
    along: Tensor | None = field(init=False)
    bounds: list[Tensor] = field(init=False, default_factory=list)  # reach's, behind and ahead; empty: no reach
    buffers: dict[int, Tensor] = field(init=False, default_factory=dict)
    blocks: dict[tuple[int, int, int, int], Block] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.compute = torch.promote_types(self.q.dtype, torch.float32)
        heads, queries = self.q.shape[1:3]
        keys, self.group = self.k.shape[2], heads // self.k.shape[1]
        position = torch.arange(queries, device=self.q.device) + self.q_start
        self.two_sided = bool(((self.last > position) & (self.first <= self.last)).any())
        # The bias at every distance of the call, falling. Where no query looks ahead, keys ahead get −∞ in it: then the
        # diagonal needs no other mask.
        self.farthest = self.q_start + queries - 1
        distance = torch.arange(self.farthest, self.q_start - keys, -1, device=self.q.device)
        self.along = self._along(distance)
        self.finite = finite(self.q, self.k, self.v, self.scale, self.along)
        if not self.two_sided:
            along = self.q.new_zeros(1, len(distance), dtype=self.compute) if self.along is None else self.along
            self.along = along.masked_fill(distance < 0, -torch.inf)
        self.longest = keys
        if self.decay is not None:
            self.log_rates = self.decay.rates.double().log().expand(heads, -1)
            steepest = -self.log_rates.min().item()
            self.longest = min(keys, max(1, int(SAFE_EXPONENT / max(steepest, 1e-9))))
        if isinstance(self.bias, Linear) and self.tolerance > 0 and self.finite and queries > FEW:
            highest = enclosing_ball(self.k, centred=self.decay is None).highest_score(self.q, self.scale)
            share = self.tolerance / (2 if self.two_sided else 1)  # from both sides, each may leave half unread
            sides = self.slopes if self.two_sided else self.slopes[:1]
            self.bounds = [bound(highest, slopes, share) for slopes in sides]

    @property
    def fused(self) -> bool:
        """Return whether torch's fused CPU kernel reads this call's chunks."""
        on_cpu, same_width = self.q.device.type == "cpu", self.q.shape[3] == self.v.shape[3]
        return on_cpu and same_width and self.decay is None and self.finite and not self.plain

    @property
    def slopes(self) -> list[Tensor]:
        """Return a `Linear` bias's slopes, behind and ahead."""
        assert isinstance(self.bias, Linear)
        return [self.bias.slopes, self.bias.slopes if self.bias.ahead is None else self.bias.ahead]

    def _along(self, distance: Tensor) -> Tensor | None:
        """Return the bias at these distances, `[h, …]`."""
        if self.bias is None:
            return None
        if isinstance(self.bias, Table):  # past a table's ends lies only what no query sees
            ends = [t.shape[1] - 1 for t in self.bias.tensors if t is not None]
            distance = distance.clamp(-ends[-1], ends[0])
        return self.bias.at(distance, self.compute).contiguous()

    def product(self, a: Tensor, b: Tensor, place: int) -> Tensor:
        """Return a @ b.mT, `[b, h, r, n]`, in one of two buffers that all tiles use in turn."""
        shape = (*a.shape[:3], b.shape[2])
        if place not in self.buffers or self.buffers[place].numel() < math.prod(shape):
            self.buffers[place] = a.new_empty(max(TILE, math.prod(shape)))
        out = self.buffers[place][: math.prod(shape)].view(a.shape[0] * a.shape[1], *shape[2:])
        return torch.bmm(a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:]).mT, out=out).view(shape)

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles that see anything."""
        sequences, heads, queries, _ = self.q.shape
        shapes = [self._shape(h) for h in range(heads)]
        h = 0
        while h < heads:
            # Neighbouring heads that read alike, of one key head or of as many: as many as fit the budget.
            rows, near = shapes[h]
            size = max(1, min(ROWS, rows) * min(self.k.shape[2], rows + near))
            limit = min(heads if self.group == 1 else h - h % self.group + self.group, h + max(1, TILE // size))
            end = next((i for i in range(h + 1, limit) if shapes[i] != shapes[h]), max(limit, h + 1))
            batch = max(1, TILE // (size * (end - h)))
            for b in range(0, sequences, batch):
                for i in range(0, queries, rows):
                    block = self.block(slice(b, min(b + batch, sequences)), slice(i, min(i + rows, queries)))
                    if block.lo < block.hi:
                        yield Tile(self, block, slice(h, end), near)
            h = end

    def block(self, batch: slice, rows: slice) -> Block:
        """Return a block of queries; heads share it."""
        key = batch.start, batch.stop, rows.start, rows.stop
        if key not in self.blocks:
            self.blocks[key] = Block(self, batch, rows)
        return self.blocks[key]

    def _shape(self, head: int) -> tuple[int, int]:
        """Return how many rows a head's blocks have, and how many keys beside the diagonal it reads at once."""
        most = max(1, min(self.q.shape[2], self.longest))
        if not self.bounds:
            return min(TALL, most), NEAR
        usual = USUAL_REACH / max(self.slopes[0][head].item(), 1e-9)
        if usual > FAR:
            return min(TALL, most), NEAR
        return min(ROWS, most), max(2 * NEAR, 1 << math.ceil(math.log2(max(usual, 1))))


class Block:
    """A block of queries, last first, and the keys [lo, hi) that one or more of them see."""

    def __init__(self, call: Call, batch: slice, rows: slice) -> None:
        self.batch, self.rows = batch, rows
        self.low, self.high = call.q_start + self.rows.start, call.q_start + self.rows.stop - 1
        self.position = torch.arange(self.high, self.low - 1, -1, device=call.q.device)
        seen_by = batch if call.first.shape[0] > 1 else slice(None)
        self.first, self.last = (x[seen_by, None, self.rows].flip(2) for x in (call.first, call.last))  # [b or 1, 1, r]
        blind = self.first > self.last
        self.first, self.last = (
            self.first.masked_fill(blind, call.k.shape[2]),
            self.last.masked_fill(blind, -1),
        )
        up_to_itself = (self.last == self.position).all().long()
        edges = [self.first.amin(), self.last.amax(), self.first.amax(), self.last.amin(), up_to_itself]
        lo, last, inner_first, inner_last, causal = (int(x) for x in torch.stack(edges).tolist())
        self.lo, self.hi = lo, last + 1
        self.inner_lo, self.inner_hi = inner_first, inner_last + 1  # every row sees these
        self.causal = bool(causal)  # every row sees up to itself

    def all_see(self, lo: int, hi: int) -> bool:
        """Return whether every row sees all keys [lo, hi)."""
        return lo >= self.inner_lo and hi <= self.inner_hi

    def visible(self, lo: int, hi: int) -> Tensor:
        """Return which rows see which of the keys [lo, hi), `[b or 1, 1, r, n]`."""
        j = torch.arange(lo, hi, device=self.first.device)
        return (j >= self.first.unsqueeze(-1)) & (j <= self.last.unsqueeze(-1))


class Tile:
    """A block of queries of some heads: its scores against any chunk of keys, and how far it must read."""

    def __init__(self, call: Call, block: Block, heads: slice, near: int) -> None:
        self.call, self.block, self.heads, self.beside = call, block, heads, near
        self.q = call.q[block.batch, heads, block.rows].to(call.compute).flip(2) * call.scale
        self.bounds = [x[block.batch, heads, block.rows].flip(2) for x in call.bounds]
        # What every head reads first, [start, end): the diagonal and the keys beside it.
        self.start = max(block.lo, min(block.hi, block.low - near))
        self.end = max(self.start, min(block.hi, block.high + 1 + (near if call.two_sided else 0)))

    @property
    def key_heads(self) -> slice:
        """Return the key heads that these heads read."""
        return slice(self.heads.start // self.call.group, (self.heads.stop - 1) // self.call.group + 1)

    def of_head(self, i: int) -> Tile:
        """Return the tile of the i-th of these heads alone."""
        one, head = copy(self), slice(i, i + 1)
        one.heads = slice(self.heads.start + i, self.heads.start + i + 1)
        one.q, one.bounds = self.q[:, head], [x[:, head] for x in self.bounds]
        return one

    def near(self) -> Iterator[tuple[slice, Tile, int, int]]:
        """Yield what every head reads first: some rows, their tile, and the keys [lo, hi)."""
        if self.q.shape[2] <= ROWS:
            yield slice(None), self, self.start, self.end
            return
        for r in range(0, self.q.shape[2], ROWS):
            rows, last = (
                slice(r, min(r + ROWS, self.q.shape[2])),
                self.block.rows.stop,
            )  # rows stand last first
            part = copy(self)
            part.block = self.call.block(self.block.batch, slice(last - rows.stop, last - rows.start))
            part.q = self.q[:, :, rows]
            end = self.end if self.call.two_sided else max(self.start, min(self.end, part.block.high + 1))
            yield rows, part, self.start, end

    @property
    def size(self) -> int:
        """How many keys a chunk may have; the fused kernel holds no scores, so it may have more."""
        budget = FUSED * TILE if self.call.fused else TILE
        return max(1, min(self.call.longest, budget // self.q[..., 0].numel()))

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
        """Return what a chunk's scores get added `[1, h or 1, r, n]`, and which of them count (None: all)."""
        call, block, visible = self.call, self.block, None
        by_distance = block.causal and block.inner_lo <= lo <= block.low and call.finite and not call.two_sided
        if not block.all_see(lo, hi) and not by_distance:
            visible = block.visible(lo, hi)
        if call.along is None:
            return None, visible
        heads = self.heads if call.bias is not None else slice(0, 1)
        # Distances fall along a row of `along`; this tile's first row and key stand at block.high − lo.
        skip = call.farthest - (block.high - lo)
        along = call.along[heads]
        shape, strides = (1, along.shape[0], self.q.shape[2], hi - lo), (0, along.stride(0), 1, 1)
        return along.as_strided(shape, strides, along.storage_offset() + skip), visible

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
        block = self.block
        if not self.bounds or unread <= block.lo:
            return [block.lo] * self.q.shape[1]
        far = distance(self.bounds[0], lse, self.call.slopes[0][self.heads])
        needless = torch.maximum(block.position - far, block.first - 1.0)  # and what is behind that
        lows = needless.masked_fill_(block.first >= unread, torch.inf).amin(dim=(0, 2)).tolist()
        # NaN is not above anything: then everything is read. One key more than needed makes up for rounding.
        return [math.floor(min(low, unread)) if low >= block.lo else block.lo for low in lows]

    def needs_until(self, unread: int, lse: Tensor) -> list[int]:
        """Return where each head must read to ahead (exclusive), when keys before `unread` are in `lse`."""
        block = self.block
        if not self.bounds or unread >= block.hi:
            return [block.hi] * self.q.shape[1]
        far = distance(self.bounds[1], lse, self.call.slopes[1][self.heads])
        needless = torch.minimum(block.position + far, block.last + 1.0)
        highs = needless.masked_fill_(block.last < unread, -torch.inf).amax(dim=(0, 2)).tolist()
        return [math.ceil(max(high + 1, unread)) if high <= block.hi - 1 else block.hi for high in highs]


def diagonal_sums(x: Tensor) -> Tensor:
    """Return the sums of x `[b, h, r, n]` over row + column = 0, 1, …, in a fixed order: `[h, r + n − 1]`."""
    b, h, r, n = x.shape
    shifted = x.new_zeros(b, h, r, r + n)
    whole = r * (r + n)
    shifted.as_strided((b, h, r, n), (h * whole, whole, r + n + 1, 1)).copy_(x)  # row i starts in column i
    return shifted.sum(dim=(0, 2))[:, : r + n - 1]
