"""Attention in plain torch, in O(length) memory forward and backward, on any device.

Each tile (tiles.py) reads its keys in chunks, nearest first, joined by a running softmax. Chunks outside the block's
interval are never touched. With a `Linear` bias, what has been read tells how much farther there is anything to read
(reach.py), and the loop ends there. The backward computes each tile again from lse, reads what the forward read, and
sums in a fixed order without atomics, so two runs are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lengthen.attention import fused, reference
from lengthen.attention.biases import Bias, Decay, Linear
from lengthen.attention.masks import Mask
from lengthen.attention.tiles import Call, Tile, diagonal_sums

AGAIN = 256  # with fewer keys left than this, asking reach again costs more than it saves


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
    if not (q.numel() and v.numel()):  # nothing to cut into tiles
        return reference.attention(q, k, v, bias, decay, mask, scale, q_start)
    first, last = mask.interval(q.shape[2], k.shape[2], q_start, q.device)
    behind, ahead = bias.tensors if bias is not None else (None, None)
    rates = decay.rates if decay is not None else None
    kind = type(bias) if bias is not None else None
    out, lse = _Chunked.apply(q, k, v, behind, ahead, rates, kind, first, last, scale, q_start, tolerance)  # type: ignore[no-untyped-call]
    return out, lse


class _Softmax:
    """A running softmax-weighted sum over chunks of keys, for the rows of a tile."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        self.sum = self.total = self.top = tile.q.new_empty(0)  # Σ weight·v, Σ weight, the score whose weight is 1

    def blank(self) -> None:
        """Become the state of having read nothing."""
        shape = (*self.tile.q.shape[:3], 1)
        self.sum = self.tile.q.new_zeros(*shape[:3], self.tile.call.v.shape[3])
        self.total, self.top = self.tile.q.new_zeros(shape), self.tile.q.new_full(shape, -torch.inf)

    def rows(self, parts: list[_Softmax]) -> _Softmax:
        """Take on the states of all rows, some rows each, in their order."""
        joined = zip(*((part.sum, part.total, part.top) for part in parts), strict=True)
        self.sum, self.total, self.top = (x[0] if len(x) == 1 else torch.cat(x, dim=2) for x in joined)
        return self

    def head(self, i: int) -> _Softmax:
        """Return the state of the i-th head alone: a view, so that what it reads lands here."""
        one = _Softmax(self.tile.of_head(i))
        one.sum, one.total, one.top = (x[:, i : i + 1] for x in (self.sum, self.total, self.top))
        return one

    def absorb(self, lo: int, hi: int) -> None:
        """Read the keys [lo, hi)."""
        chunk = fused.read(self.tile, lo, hi) if self.tile.call.fused else self._read(lo, hi)
        if not self.top.numel():
            self.sum, self.total, self.top = chunk
            return
        chunk_sum, chunk_total, chunk_top = chunk
        top = torch.maximum(self.top, chunk_top)
        base = top.masked_fill(top == -torch.inf, 0)
        fade, gain = self.top.sub_(base).exp_(), chunk_top.sub_(base).exp_()
        self.total.mul_(fade).addcmul_(chunk_total, gain)
        self.sum.mul_(fade).addcmul_(chunk_sum, gain)
        self.top.copy_(top)

    def _read(self, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return Σ weight·v, Σ weight and the highest score of a chunk, whose weight is 1."""
        tile = self.tile
        score, v = tile.scores(lo, hi, tile.sides(lo, hi)), tile.of_keys(tile.call.v, lo, hi)
        top = score.amax(dim=-1, keepdim=True)
        weight = score.sub_(top.masked_fill(top == -torch.inf, 0)).exp_()
        total = weight.sum(dim=-1, keepdim=True)
        return (weight @ v if tile.call.finite else reference.weigh(weight, v, tile.block.visible(lo, hi))), total, top

    def lse(self) -> Tensor:
        """Return the log-sum-exp of what has been read, `[b, h, r]`."""
        lse = self.top + self.total.log()
        return (lse if self.tile.call.finite else torch.where(self.top == torch.inf, self.top, lse)).squeeze(-1)

    def count(self) -> Tensor:
        """Return what to divide the sum by; 1 for rows that saw nothing, whose sum is 0."""
        return self.total.masked_fill(self.total == 0, 1)


def _read(tile: Tile) -> tuple[_Softmax, list[tuple[int, int]]]:
    """Read a tile's keys, nearest first, as far as each head reaches; say which [lo, hi) that was for each."""
    parts = []
    for _, part, lo, hi in tile.near():
        parts.append(_Softmax(part))
        for chunk in part.chunks(lo, hi):
            parts[-1].absorb(*chunk)
        if lo == hi:  # nothing that these queries see stands near them
            parts[-1].blank()
    state = _Softmax(tile).rows(parts)
    lse = state.lse()
    lows, highs = tile.needs_from(tile.start, lse), tile.needs_until(tile.end, lse)
    spans = []
    for i, (lo, hi) in enumerate(zip(lows, highs, strict=True)):
        start, end = tile.start, tile.end
        if lo < start or end < hi:
            one = state.head(i)
            while lo < start:
                start, unread = max(lo, start - one.tile.size), start
                one.absorb(start, unread)
                lo = max(lo, *one.tile.needs_from(start, one.lse())) if start - lo > AGAIN else lo
            while end < hi:
                end, unread = min(hi, end + one.tile.size), end
                one.absorb(unread, end)
                hi = min(hi, *one.tile.needs_until(end, one.lse())) if hi - end > AGAIN else hi
        spans.append((start, end))
    return state, spans


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
        out = q.new_zeros(*q.shape[:3], v.shape[3])  # what no tile visits sees nothing
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=call.compute)
        read = []
        for tile in call.tiles():
            state, spans = _read(tile)
            rows = (tile.block.batch, tile.heads, tile.block.rows)
            torch.div(state.sum.flip(2), state.count().flip(2), out=out[rows])
            lse[rows] = state.lse().flip(2)
            read.append((tile.block.batch, tile.block.rows, tile.heads, tile.beside, spans))
        ctx.save_for_backward(q, k, v, behind, ahead, rates, first, last, out, lse)
        ctx.kind, ctx.scale, ctx.q_start, ctx.read = kind, scale, q_start, read
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, behind, ahead, rates, first, last, out, lse = ctx.saved_tensors
        bias = ctx.kind(behind, ahead) if ctx.kind is not None else None
        decay = Decay(rates) if rates is not None else None
        with torch.autocast(q.device.type, enabled=False):
            call = Call(q, k, v, bias, decay, first, last, ctx.scale, ctx.q_start, tolerance=0, plain=True)
            grads = _Gradients(call, ctx.needs_input_grad)
            share = (d_out.to(call.compute) * out.to(call.compute)).sum(dim=-1) - d_lse  # Σ_j weight·d_weight
            for batch, rows, heads, near, spans in ctx.read:
                grads.add(Tile(call, call.block(batch, rows), heads, near), spans, d_out, share, lse)
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

    def add(self, tile: Tile, spans: list[tuple[int, int]], d_out: Tensor, share: Tensor, lse: Tensor) -> None:
        """Add what one tile contributes: what was read near for all heads together, the rest head by head."""
        rows = (tile.block.batch, tile.heads, tile.block.rows)
        d_o, minus_share, base = (x[rows].to(self.call.compute).flip(2) for x in (d_out, -share, lse))
        base = base.masked_fill(base == -torch.inf, 0)
        given = (d_o, minus_share.unsqueeze(-1), base.unsqueeze(-1))
        d_q = torch.zeros_like(tile.q)
        for some, part, lo, hi in tile.near():
            self._add_keys(part, lo, hi, d_q[:, :, some], *(x[:, :, some] for x in given))
        for i, (lo, hi) in enumerate(spans):
            if lo < tile.start or tile.end < hi:
                one, of_head = tile.of_head(i), [x[:, i : i + 1] for x in (d_q, *given)]
                self._add_keys(one, lo, tile.start, *of_head)
                self._add_keys(one, tile.end, hi, *of_head)
        self.q[rows] = d_q.flip(2) * self.call.scale

    def _add_keys(
        self, tile: Tile, lo: int, hi: int, d_q: Tensor, d_o: Tensor, minus_share: Tensor, base: Tensor
    ) -> None:
        """Add what a tile's keys [lo, hi) contribute; base is lse, minus_share −Σ_j weight·d_weight."""
        for start, end in tile.chunks(lo, hi):
            sides = tile.sides(start, end)
            weight = tile.scores(start, end, sides).sub_(base).exp_()
            self._add_to_keys(self.v, tile, start, end, weight.mT @ d_o)
            d_score = self.call.product(d_o, tile.of_keys(self.call.v, start, end), place=1)
            d_score.add_(minus_share).mul_(weight)
            for side in sides:
                d_q_side, d_k_side, d_log_rate = side.pull(d_score)
                d_q += d_q_side
                self._add_to_keys(self.k, tile, start, end, d_k_side)
                if self.log_rates is not None and d_log_rate is not None:
                    self.log_rates[tile.heads] += d_log_rate
            if self.behind is not None or self.ahead is not None:
                self._add_bias(tile, tile.distances(start, end), diagonal_sums(d_score).double())

    @staticmethod
    def _add_to_keys(grad: Tensor, tile: Tile, lo: int, hi: int, d: Tensor) -> None:
        """Add a gradient for each query head to the key head that they share."""
        target = grad[tile.block.batch, tile.key_heads, lo:hi]
        shared = d.shape[1] // target.shape[1]
        target += d if shared == 1 else d.view(d.shape[0], -1, shared, *d.shape[2:]).sum(dim=2)

    def _add_bias(self, tile: Tile, distance: Tensor, along: Tensor) -> None:
        """Add a chunk's share, given the sums of its scores' gradient `[h, …]` at each distance, falling."""
        assert self.call.bias is not None
        of_ahead = self.behind if self.call.bias.ahead is None else self.ahead
        for grad, side in ((self.behind, distance >= 0), (of_ahead, distance < 0)):
            if grad is None:
                continue
            steps, sums = distance[side].abs(), along[:, side]
            if isinstance(self.call.bias, Linear):
                grad[tile.heads] -= (sums * steps).sum(dim=1)
            else:
                inside = steps < grad.shape[1]  # beyond it, no query sees anything
                grad[tile.heads, steps[inside]] += sums[:, inside]  # each distance once: no accumulation

    def result(self) -> tuple[Tensor | None, ...]:
        """Return the gradients in the order of the inputs, each in its input's dtype."""
        call = self.call
        behind, ahead = call.bias.tensors if call.bias is not None else (None, None)
        rates = None
        if self.log_rates is not None and call.decay is not None:
            rates = self.log_rates / call.decay.rates.double()
            rates = rates.sum(dim=0) if call.decay.rates.dim() == 1 else rates
        grads = (self.q, self.k, self.v, self.behind, self.ahead, rates)
        inputs = (call.q, call.k, call.v, behind, ahead, call.decay.rates if call.decay is not None else None)
        return tuple(
            g.to(x.dtype) if g is not None and x is not None else None for g, x in zip(grads, inputs, strict=True)
        )
