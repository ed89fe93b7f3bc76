"""Tiles: a block of queries against chunks of keys, in plain torch.

Three choices make a tile fast without compiled code:

- Its rows stand in reverse order. Distance is then a function of row + column, so the bias of a chunk is one vector a
  head, seen through strides (1, 1): nothing of the chunk's size is built for it. In the backward, the same view turns
  the sum along diagonals (a bias's gradient) into a sum over rows.
- Masks are compared only in chunks that an interval's edge crosses, once for all heads.
- The nearest keys are read by all heads together, since every head reads them; farther ones head by head, since each
  reaches its own distance.

Matrix products and sums are in float32 at least, cast chunk by chunk, so 16-bit inputs cost no second copy.

Decay (xPos): keys of a chunk are scaled by rate^−(j − s) and queries by rate^(i − s), s the chunk's far end. Both
exponents stay small, since a chunk is short; the query's factor may underflow, as the score itself then does. Keys ahead
of the query are scaled from the other end. Only a chunk that holds keys on both sides computes both.

Shapes: b sequences, h heads, r rows (queries), n keys of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
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
        sequences, heads, queries, _ = self.q.shape
        keys, self.group = self.k.shape[2], heads // self.k.shape[1]
        position = torch.arange(queries, device=self.q.device) + self.q_start
        self.two_sided = bool((self.last > position).any())
        self.finite = bool(self.v.sum(dtype=self.compute).isfinite())
        self.rows, self.longest = min(ROWS, queries), keys
        if self.decay is not None:
            self.log_rates = self.decay.rates.double().log().expand(heads, -1)
            steepest = -self.log_rates.min().item()
            self.longest = min(keys, max(1, int(SAFE_EXPONENT / max(steepest, 1e-9))))
            self.rows = min(self.rows, self.longest)
        # As many heads, then sequences, as fit the budget when each reads its nearest keys.
        fit = max(1, TILE // max(1, self.rows * min(keys, self.rows + NEAR)))
        self.heads = heads if fit >= heads else max(self.group * (fit // self.group), 1)
        self.batch = max(1, fit // self.heads)
        if isinstance(self.bias, Linear) and self.tolerance > 0 and self.finite and queries > FEW:
            self.ball = reach.enclosing_ball(self.k, centred=self.decay is None)

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles that see anything."""
        for b in range(0, self.q.shape[0], self.batch):
            batch = slice(b, min(b + self.batch, self.q.shape[0]))
            for i in range(0, self.q.shape[2], self.rows):
                block = Block(self, batch, i)
                if block.lo < block.hi:
                    for h in range(0, self.q.shape[1], self.heads):
                        yield Tile(self, block, slice(h, min(h + self.heads, self.q.shape[1])))


class Block:
    """A block of queries, last first, and the keys [lo, hi) that one or more of them see."""

    def __init__(self, call: Call, batch: slice, i: int) -> None:
        self.batch, self.rows = batch, slice(i, min(i + call.rows, call.q.shape[2]))
        self.low, self.high = call.q_start + self.rows.start, call.q_start + self.rows.stop - 1
        self.position = torch.arange(self.high, self.low - 1, -1, device=call.q.device)
        seen_by = batch if call.first.shape[0] > 1 else slice(None)
        self.first, self.last = (x[seen_by, None, self.rows].flip(2) for x in (call.first, call.last))  # [b or 1, 1, r]
        blind = self.first > self.last
        self.first, self.last = self.first.masked_fill(blind, call.k.shape[2]), self.last.masked_fill(blind, -1)
        edges = torch.stack([self.first.amin(), self.last.amax(), self.first.amax(), self.last.amin()]).tolist()
        self.lo, self.inner_lo = edges[0], edges[2]  # every row sees all of [inner_lo, inner_hi)
        self.hi, self.inner_hi = edges[1] + 1, edges[3] + 1
        # What all heads read together: the diagonal and its neighbourhood.
        self.start = max(self.lo, min(self.hi, self.low - NEAR))
        self.end = max(self.start, min(self.hi, self.high + 1 + (NEAR if call.two_sided else 0)))

    def visible(self, lo: int, hi: int) -> Tensor | None:
        """Return which rows see which of the keys [lo, hi), `[b or 1, 1, r, n]`; None: all see all."""
        if lo >= self.inner_lo and hi <= self.inner_hi:
            return None
        j = torch.arange(lo, hi, device=self.first.device)
        return (j >= self.first.unsqueeze(-1)) & (j <= self.last.unsqueeze(-1))


@dataclass(eq=False)
class Side:
    """Queries and keys as a chunk multiplies them: plain, or with the decay towards one side in them."""

    q: Tensor  # [b, h, r, D]
    k: Tensor  # [b, h, n, D]
    log_rate: Tensor | None = None  # [h, 1, D], float64
    q_steps: Tensor | None = None  # [r]
    k_steps: Tensor | None = None  # [n]
    part: Tensor | None = None  # [r, n]: where this side's scores are the ones that count

    def __post_init__(self) -> None:
        if self.log_rate is not None and self.q_steps is not None and self.k_steps is not None:
            self.q_factor = torch.exp(self.log_rate * self.q_steps.unsqueeze(-1)).to(self.q.dtype)
            self.k_factor = torch.exp(-self.log_rate * self.k_steps.unsqueeze(-1)).to(self.k.dtype)
            self.q, self.k = self.q * self.q_factor, self.k * self.k_factor

    def pull(self, d_score: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, k (before the decay) and log_rate `[h, D]` from the scores' gradient."""
        if self.part is not None:
            d_score = d_score.masked_fill(~self.part, 0)
        d_q, d_k = d_score @ self.k, d_score.mT @ self.q
        if self.q_steps is None or self.k_steps is None:
            return d_q, d_k, None
        d_log_rate = torch.einsum("bhrd,r->hd", (d_q * self.q).double(), self.q_steps.double())
        d_log_rate -= torch.einsum("bhnd,n->hd", (d_k * self.k).double(), self.k_steps.double())
        return d_q * self.q_factor, d_k * self.k_factor, d_log_rate


class Tile:
    """A block of queries of some heads: its scores against any chunk of keys, and how far it must read."""

    def __init__(self, call: Call, block: Block, heads: slice) -> None:
        self.call, self.block, self.heads = call, block, heads
        self.key_heads = slice(heads.start // call.group, (heads.stop - 1) // call.group + 1)
        self.bias = None if call.bias is None else call.bias.of(heads)
        self.q = call.q[block.batch, heads, block.rows].to(call.compute).flip(2) * call.scale
        if call.ball is not None:
            self.highest = call.ball.highest_score(self.q, block.batch, self.key_heads)

    def head(self, i: int) -> Tile:
        """Return the tile of the i-th of these heads alone."""
        one = copy(self)
        one.heads = slice(self.heads.start + i, self.heads.start + i + 1)
        one.key_heads = slice(one.heads.start // self.call.group, one.heads.start // self.call.group + 1)
        one.q, one.bias = self.q[:, i : i + 1], None if self.bias is None else self.bias.of(slice(i, i + 1))
        if self.call.ball is not None:
            one.highest = self.highest[:, i : i + 1]
        return one

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

    def scores(self, lo: int, hi: int, sides: list[Side], visible: Tensor | None) -> Tensor:
        """Return a chunk's scores `[b, h, r, n]` with their bias; −∞ where a row does not see the key."""
        score = sides[0].q @ sides[0].k.mT
        if len(sides) == 2:
            assert sides[0].part is not None
            score = torch.where(sides[0].part, score, sides[1].q @ sides[1].k.mT)
        if self.bias is not None:
            distance = self.distances(lo, hi)
            if isinstance(self.bias, Table):  # past a table's ends lies only what no query sees
                ends = [t.shape[1] - 1 for t in self.bias.tensors if t is not None]
                distance = distance.clamp(-ends[-1], ends[0])
            along = self.bias.at(distance, self.call.compute).contiguous()
            score += along.as_strided(score.shape[1:], (along.shape[1], 1, 1))
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
