"""Tiles: a block of queries of one head against chunks of keys, in plain torch.

Three choices make a tile fast without compiled code:

- Its rows stand in reverse order. Distance is then a function of row + column, so the bias of a chunk is one vector seen
  through strides (1, 1), which the matrix product adds as it goes: nothing of the chunk's size is built for it. In the
  backward, the same view turns the sum along diagonals (a bias's gradient) into a sum over rows.
- Masks are compared only in chunks that an interval's edge crosses.
- Matrix products and sums are in float32 at least, cast chunk by chunk, so 16-bit inputs cost no second copy.

Decay (xPos): keys of a chunk are scaled by rate^−(j − s) and queries by rate^(i − s), s the chunk's far end. Both
exponents stay small, since a chunk is short; the query's factor may underflow, as the score itself then does. Keys ahead
of the query are scaled from the other end. Only a chunk that holds keys on both sides computes both.

Shapes: b sequences, r rows (queries), n keys of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lengthen.attention import reach
from lengthen.attention.biases import Bias, Decay, Linear, Table

TILE = 1 << 20  # scores held at once: 4 MB in float32, which a CPU's last cache keeps
ROWS = 256  # queries of a tile: more waste work at the diagonal, fewer starve the matrix product
NEAR = 128  # keys read beside the diagonal before reach is asked for the first time
FEW = 32  # for so few queries, the pass over all keys that reach needs costs what it saves
SAFE_EXPONENT = 20.0  # over a chunk, decay stays above e^−20: far inside float32


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

    def __post_init__(self) -> None:
        self.compute = torch.promote_types(self.q.dtype, torch.float32)
        queries, keys = self.q.shape[2], self.k.shape[2]
        position = torch.arange(queries, device=self.q.device) + self.q_start
        self.two_sided = bool((self.last > position).any())
        self.finite = bool(self.v.sum(dtype=self.compute).isfinite())
        self.rows, self.longest = min(ROWS, queries), keys
        if self.decay is not None:
            self.log_rates = self.decay.rates.double().log().expand(self.q.shape[1], -1)
            steepest = -self.log_rates.min().item()
            self.longest = min(keys, max(1, int(SAFE_EXPONENT / max(steepest, 1e-9))))
            self.rows = min(self.rows, self.longest)
        self.batch = max(1, TILE // max(1, self.rows * min(keys, TILE // ROWS)))
        if isinstance(self.bias, Linear) and self.tolerance > 0 and self.finite and queries > FEW:
            self.ball = reach.enclosing_ball(self.k, centred=self.decay is None)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of queries that see anything."""
        for b in range(0, self.q.shape[0], self.batch):
            for i in range(0, self.q.shape[2], self.rows):
                block = Block(self, slice(b, min(b + self.batch, self.q.shape[0])), i)
                if block.lo < block.hi:
                    yield block


class Block:
    """A block of queries, last first, and the keys [lo, hi) that one or more of them see."""

    def __init__(self, call: Call, batch: slice, i: int) -> None:
        self.batch, self.rows = batch, slice(i, min(i + call.rows, call.q.shape[2]))
        self.low, self.high = call.q_start + self.rows.start, call.q_start + self.rows.stop - 1
        self.position = torch.arange(self.high, self.low - 1, -1, device=call.q.device)
        seen_by = batch if call.first.shape[0] > 1 else slice(None)
        self.first, self.last = call.first[seen_by, self.rows].flip(1), call.last[seen_by, self.rows].flip(1)
        blind = self.first > self.last
        first, last = self.first.masked_fill(blind, call.k.shape[2]), self.last.masked_fill(blind, -1)
        edges = torch.stack([first.amin(), last.amax() + 1, first.amax(), last.amin() + 1]).tolist()
        self.lo, self.hi, self.inner_lo, self.inner_hi = edges  # every row sees all of [inner_lo, inner_hi)

    def visible(self, lo: int, hi: int) -> Tensor | None:
        """Return which rows see which of the keys [lo, hi), `[b or 1, r, n]`; None: all see all."""
        if lo >= self.inner_lo and hi <= self.inner_hi:
            return None
        j = torch.arange(lo, hi, device=self.first.device)
        return (j >= self.first.unsqueeze(-1)) & (j <= self.last.unsqueeze(-1))


@dataclass(eq=False)
class Side:
    """Queries and keys as a chunk multiplies them: plain, or with the decay towards one side in them."""

    q: Tensor  # [b, r, D]
    k: Tensor  # [b, n, D]
    log_rate: Tensor | None = None  # [D], float64
    q_steps: Tensor | None = None  # [r]
    k_steps: Tensor | None = None  # [n]
    part: Tensor | None = None  # [r, n]: where this side's scores are the ones that count

    def __post_init__(self) -> None:
        if self.log_rate is not None and self.q_steps is not None and self.k_steps is not None:
            self.q_factor = torch.exp(self.log_rate * self.q_steps.unsqueeze(-1)).to(self.q.dtype)
            self.k_factor = torch.exp(-self.log_rate * self.k_steps.unsqueeze(-1)).to(self.k.dtype)
            self.q, self.k = self.q * self.q_factor, self.k * self.k_factor

    def pull(self, d_score: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, k (before the decay) and log_rate from the scores' gradient."""
        if self.part is not None:
            d_score = d_score.masked_fill(~self.part, 0)
        d_q, d_k = torch.bmm(d_score, self.k), torch.bmm(d_score.mT, self.q)
        if self.q_steps is None or self.k_steps is None:
            return d_q, d_k, None
        d_log_rate = torch.einsum("brd,brd,r->d", d_q.double(), self.q.double(), self.q_steps.double())
        d_log_rate -= torch.einsum("bnd,bnd,n->d", d_k.double(), self.k.double(), self.k_steps.double())
        return d_q * self.q_factor, d_k * self.k_factor, d_log_rate


class Tile:
    """A block of queries of one head: its scores against any chunk of keys, and how far it must read."""

    def __init__(self, call: Call, block: Block, head: int) -> None:
        self.call, self.block, self.head = call, block, head
        self.key_head = head * call.k.shape[1] // call.q.shape[1]
        self.q = call.q[block.batch, head, block.rows].to(call.compute).flip(1) * call.scale
        self.bias = _of_head(call.bias, head)
        self.size = max(1, min(call.longest, TILE // (self.q.shape[0] * self.q.shape[1])))
        if call.ball is not None:
            self.highest = call.ball.highest_score(self.q, block.batch, self.key_head)

    def values(self, lo: int, hi: int) -> Tensor:
        """Return the values of a chunk, `[b, n, Dv]`."""
        return self.call.v[self.block.batch, self.key_head, lo:hi].to(self.call.compute)

    def chunks(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """Cut [lo, hi) into chunks that fit."""
        for start in range(lo, hi, self.size):
            yield start, min(start + self.size, hi)

    def sides(self, lo: int, hi: int) -> list[Side]:
        """Return what a chunk multiplies: one side, or both where decay meets keys behind and ahead at once."""
        call, position = self.call, self.block.position
        k = call.k[self.block.batch, self.key_head, lo:hi].to(call.compute)
        if call.decay is None:
            return [Side(self.q, k)]
        j, log_rate = torch.arange(lo, hi, device=k.device), call.log_rates[self.head]
        behind = call.two_sided and lo <= self.block.high or not call.two_sided
        ahead = call.two_sided and hi - 1 > self.block.low
        part = (j <= position.unsqueeze(-1)) if behind and ahead else None
        sides = []
        if behind:
            sides.append(Side(self.q, k, log_rate, (position - lo).clamp(min=0), j - lo, part))
        if ahead:
            other = None if part is None else ~part
            sides.append(Side(self.q, k, log_rate, (hi - 1 - position).clamp(min=0), hi - 1 - j, other))
        return sides

    def scores(self, lo: int, hi: int, sides: list[Side], visible: Tensor | None) -> Tensor:
        """Return a chunk's scores `[b, r, n]` with their bias; −∞ where a row does not see the key."""
        bias = self._bias(lo, hi)
        side = sides[0]
        if len(sides) == 1 and bias is not None:
            score = torch.baddbmm(bias, side.q, side.k.mT)
        else:
            score = torch.bmm(side.q, side.k.mT)
            if len(sides) == 2:
                assert side.part is not None
                score = torch.where(side.part, score, torch.bmm(sides[1].q, sides[1].k.mT))
            if bias is not None:
                score += bias
        return score if visible is None else score.masked_fill_(~visible, -torch.inf)

    def distances(self, lo: int, hi: int) -> Tensor:
        """Return the distance i − j at row + column = 0, 1, …, r + n − 2."""
        return torch.arange(self.block.high - lo, self.block.low - hi, -1, device=self.q.device)

    def _bias(self, lo: int, hi: int) -> Tensor | None:
        if self.bias is None:
            return None
        distance = self.distances(lo, hi)
        if isinstance(self.bias, Table):  # past a table's ends lies only what no query sees
            ends = [t.shape[1] - 1 for t in self.bias.tensors if t is not None]
            distance = distance.clamp(-ends[-1], ends[0])
        along = self.bias.at(distance, self.call.compute)
        return along.as_strided((*self.q.shape[:2], hi - lo), (0, 1, 1))

    def needs_from(self, lo: int, unread: int, lse: Tensor) -> int:
        """Return where keys behind must be read from, when those from `unread` on are in `lse` `[b, r]`."""
        if self.call.ball is None or not isinstance(self.bias, Linear):
            return lo
        far = self._distance(lse, self.bias.slopes)
        position = self.block.position
        need = torch.maximum(self.block.first.to(far.dtype), position - far + 1)
        return max(lo, int(need.masked_fill(self.block.first >= unread, unread).amin().clamp(max=unread)))

    def needs_until(self, hi: int, unread: int, lse: Tensor) -> int:
        """Return where keys ahead must be read to (exclusive), when those before `unread` are in `lse`."""
        if self.call.ball is None or not isinstance(self.bias, Linear):
            return hi
        far = self._distance(lse, self.bias.slopes if self.bias.ahead is None else self.bias.ahead)
        need = torch.minimum(self.block.last.to(far.dtype) + 1, self.block.position + far)
        return min(hi, int(need.masked_fill(self.block.last < unread, unread).amax().clamp(min=unread)))

    def _distance(self, lse: Tensor, slope: Tensor) -> Tensor:
        """Return this head's reach; seen from both sides, each side may leave half the tolerance unread."""
        share = self.call.tolerance / (2 if self.call.two_sided else 1)
        return reach.distance(self.highest, lse, slope.item(), share)


def diagonal_sums(x: Tensor) -> Tensor:
    """Return the sums of x `[b, r, n]` over row + column = 0, 1, …, r + n − 2, in a fixed order."""
    b, r, n = x.shape
    shifted = x.new_zeros(b, r, r + n)
    shifted.as_strided((b, r, n), (r * (r + n), r + n + 1, 1)).copy_(x)  # row i starts in column i
    return shifted.sum(dim=(0, 1))[: r + n - 1]


def _of_head(bias: Bias | None, head: int) -> Bias | None:
    if bias is None:
        return None
    behind, ahead = bias.tensors
    return type(bias)(behind[head : head + 1], None if ahead is None else ahead[head : head + 1])
