"""Torch's fused CPU kernel for one chunk of a tile: softmax(q·k + bias)·v without the scores in memory.

It is the kernel behind `scaled_dot_product_attention` on the CPU, called below that function because a running softmax
needs the chunk's log-sum-exp as well. It takes the bias as a strided view, so a tile's one vector a head is all it is
given. Where it does not fit (decay, another device, a value width of its own, inputs that are not finite), the caller
does the same in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lengthen.attention.tiles import Tile


def read(tile: Tile, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ weight·v, Σ weight and the score whose weight is 1: here the mean value, 1 and lse."""
    k, v = tile.of_keys(tile.call.k, lo, hi), tile.of_keys(tile.call.v, lo, hi)
    bias, visible = tile.additive(lo, hi)
    if visible is not None:
        shape = (visible.shape[0], 1 if bias is None else bias.shape[1], *visible.shape[2:])
        bias = (tile.q.new_zeros(1) if bias is None else bias).expand(shape).masked_fill(~visible, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(tile.q, k, v, attn_mask=bias, scale=1.0)
    lse = lse.unsqueeze(-1)
    if visible is not None:  # the kernel gives 0 for a row that sees nothing here
        lse = lse.masked_fill(~visible.any(dim=-1, keepdim=True), -torch.inf)
    return out, torch.ones_like(lse), lse
