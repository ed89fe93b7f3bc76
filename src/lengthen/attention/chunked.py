"""Attention in plain torch, in O(length) memory forward and backward, on any device.

Each tile (tiles.py) reads its keys in chunks, nearest first, joined by a running softmax. Chunks outside the block's
interval are never touched. With a `Linear` bias, what has been read tells how much farther there is
anything to read (reach.py), and the loop ends there. The backward computes each tile again from lse, reads what the forward
read, and sums in a fixed order without atomics, so two runs are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lengthen.attention.biases import Bias, Decay, Linear
from lengthen.attention.masks import Mask
from lengthen.attention.reference import weigh
from lengthen.attention.tiles import NEAR, Call, Tile, diagonal_sums


@torch.compiler.disable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    decay: Decay | None,
    mask: Mask,
    scale: float,
    q_start: int,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Return out in q's dtype and lse in the dtype computed in; the reference says what they are."""
    first, last = mask.interval(q.shape[2], k.shape[2], q_start, q.device)
    behind, ahead = bias.tensors if bias is not None else (None, None)
    rates = decay.rates if decay is not None else None
    kind = type(bias) if bias is not None else None
    out, lse = _Chunked.apply(q, k, v, behind, ahead, rates, kind, first, last, scale, q_start, tolerance)  # type: ignore[no-untyped-call]
    return out, lse


class _Softmax:
    """A running softmax-weighted sum over chunks of keys."""

    def __init__(self, tile: Tile) -> None:
        rows = (*tile.q.shape[:2], 1)
        self.top = tile.q.new_full(rows, -torch.inf)
        self.total = tile.q.new_zeros(rows)
        self.sum = tile.q.new_zeros(*tile.q.shape[:2], tile.call.v.shape[3])
        self.tile = tile

    def absorb(self, lo: int, hi: int) -> None:
        """Read the keys [lo, hi)."""
        visible = self.tile.block.visible(lo, hi)
        score = self.tile.scores(lo, hi, self.tile.sides(lo, hi), visible)
        top = torch.maximum(self.top, score.amax(dim=-1, keepdim=True))
        base = top.masked_fill(top == -torch.inf, 0)
        weight, fade = score.sub_(base).exp_(), (self.top - base).exp_()
        self.top, self.total = top, self.total * fade + weight.sum(dim=-1, keepdim=True)
        v = self.tile.values(lo, hi)
        if self.tile.call.finite or visible is None:
            self.sum = self.sum.mul_(fade).baddbmm_(weight, v)
        else:
            self.sum = self.sum * fade + weigh(weight.unsqueeze(1), v.unsqueeze(1), visible.unsqueeze(1)).squeeze(1)

    def lse(self) -> Tensor:
        """Return the log-sum-exp of what has been read, `[b, r]`."""
        return (self.top + self.total.log()).squeeze(-1)

    def out(self) -> Tensor:
        """Return the weighted mean of the values; 0 for rows that saw nothing."""
        return self.sum / self.total.masked_fill(self.total == 0, 1)


def _read(tile: Tile) -> tuple[_Softmax, tuple[int, int]]:
    """Read a tile's keys, nearest first, as far as it reaches; say which [lo, hi) that was."""
    state, block = _Softmax(tile), tile.block
    lo, hi = block.lo, block.hi
    start = max(lo, min(hi, block.low - NEAR))
    end = max(start, min(hi, block.high + 1 + (NEAR if tile.call.two_sided else 0)))
    for chunk in tile.chunks(start, end):
        state.absorb(*chunk)
    while start > (lo := tile.needs_from(lo, start, state.lse())):
        state.absorb(max(lo, start - tile.size), start)
        start = max(lo, start - tile.size)
    while end < (hi := tile.needs_until(hi, end, state.lse())):
        state.absorb(end, min(hi, end + tile.size))
        end = min(hi, end + tile.size)
    return state, (start, end)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        behind: Tensor | None,
        ahead: Tensor | None,
        rates: Tensor | None,
        kind: type[Bias] | None,
        first: Tensor,
        last: Tensor,
        scale: float,
        q_start: int,
        tolerance: float,
    ) -> tuple[Tensor, Tensor]:
        bias = kind(behind, ahead) if kind is not None and behind is not None else None
        decay = Decay(rates) if rates is not None else None
        call = Call(q, k, v, bias, decay, first, last, scale, q_start, tolerance)
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=call.compute)
        read = {}
        for block in call.blocks():
            for head in range(q.shape[1]):
                state, span = _read(Tile(call, block, head))
                read[block.batch.start, block.rows.start, head] = span
                out[block.batch, head, block.rows] = state.out().flip(1).to(out.dtype)
                lse[block.batch, head, block.rows] = state.lse().flip(1)
        ctx.save_for_backward(q, k, v, behind, ahead, rates, first, last, out, lse)
        ctx.kind, ctx.scale, ctx.q_start, ctx.read = kind, scale, q_start, read
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, behind, ahead, rates, first, last, out, lse = ctx.saved_tensors
        bias = ctx.kind(behind, ahead) if ctx.kind is not None else None
        decay = Decay(rates) if rates is not None else None
        with torch.autocast(q.device.type, enabled=False):
            call = Call(q, k, v, bias, decay, first, last, ctx.scale, ctx.q_start, tolerance=0)
            grads = _Gradients(call, ctx.needs_input_grad)
            share = (d_out.to(call.compute) * out.to(call.compute)).sum(dim=-1) - d_lse  # Σ_j weight·d_weight
            for block in call.blocks():
                for head in range(q.shape[1]):
                    span = ctx.read[block.batch.start, block.rows.start, head]
                    grads.add(Tile(call, block, head), span, d_out, share, lse)
        return (*grads.result(), *[None] * 6)


class _Gradients:
    """The gradients of q, k, v, the bias and the decay's rates, summed tile by tile."""

    def __init__(self, call: Call, wanted: tuple[bool, ...]) -> None:
        self.call = call
        self.q, self.k, self.v = (x.new_zeros(x.shape, dtype=call.compute) for x in (call.q, call.k, call.v))
        behind, ahead = call.bias.tensors if call.bias is not None else (None, None)
        self.behind = torch.zeros_like(behind, dtype=torch.float64) if wanted[3] and behind is not None else None
        self.ahead = torch.zeros_like(ahead, dtype=torch.float64) if wanted[4] and ahead is not None else None
        self.log_rates = torch.zeros_like(call.log_rates) if wanted[5] and call.decay is not None else None

    def add(self, tile: Tile, span: tuple[int, int], d_out: Tensor, share: Tensor, lse: Tensor) -> None:
        """Add what one tile contributes."""
        block, head, group = tile.block, tile.head, tile.key_head
        rows = (block.batch, head, block.rows)
        d_o = d_out[rows].flip(1).to(self.call.compute)
        minus_share, base = -share[rows].flip(1).unsqueeze(-1), lse[rows].flip(1).unsqueeze(-1)
        base = base.masked_fill(base == -torch.inf, 0)
        d_q = torch.zeros_like(tile.q)
        for lo, hi in tile.chunks(*span):
            sides = tile.sides(lo, hi)
            weight = tile.scores(lo, hi, sides, block.visible(lo, hi)).sub_(base).exp_()
            self.v[block.batch, group, lo:hi] += torch.bmm(weight.mT, d_o)
            d_score = torch.baddbmm(minus_share, d_o, tile.values(lo, hi).mT).mul_(weight)
            for side in sides:
                d_q_side, d_k_side, d_log_rate = side.pull(d_score)
                d_q += d_q_side
                self.k[block.batch, group, lo:hi] += d_k_side
                if self.log_rates is not None and d_log_rate is not None:
                    self.log_rates[head] += d_log_rate
            if self.behind is not None or self.ahead is not None:
                self._add_bias(tile, lo, hi, diagonal_sums(d_score).double())
        self.q[rows] = d_q.flip(1) * self.call.scale

    def _add_bias(self, tile: Tile, lo: int, hi: int, along: Tensor) -> None:
        """Add a chunk's share, given the sums of its scores' gradient at each distance from high to low."""
        distance = tile.distances(lo, hi)
        is_behind = distance >= 0
        one_sided = self.call.bias is not None and self.call.bias.tensors[1] is None
        for grad, side in ((self.behind, is_behind), (self.behind if one_sided else self.ahead, ~is_behind)):
            if grad is None:
                continue
            if isinstance(self.call.bias, Linear):
                grad[tile.head] -= (along[side] * distance[side].abs()).sum()
            else:
                d = distance[side].abs()
                inside = d < grad.shape[1]  # beyond it, no query sees anything
                grad[tile.head, d[inside]] += along[side][inside]  # each distance once: a plain assignment

    def result(self) -> tuple[Tensor | None, ...]:
        """Return the gradients in the order of the inputs, each in its input's dtype."""
        call = self.call
        behind, ahead = call.bias.tensors if call.bias is not None else (None, None)
        rates = None
        if self.log_rates is not None and call.decay is not None:
            rates = self.log_rates / call.decay.rates.double()
            rates = rates.sum(dim=0) if call.decay.rates.dim() == 1 else rates
        pairs = (
            (self.q, call.q), (self.k, call.k), (self.v, call.v),
            (self.behind, behind), (self.ahead, ahead), (rates, call.decay.rates if call.decay else None),
        )  # fmt: skip
        return tuple(g.to(x.dtype) if g is not None and x is not None else None for g, x in pairs)
