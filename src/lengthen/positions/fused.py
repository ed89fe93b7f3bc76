"""Split a projection into q, k and v and rotate q and k: one fused kernel each for forward and backward on a GPU.

Left to torch.compile, rotary embedding costs two passes over the gradients: one turns those of queries and keys back, a
second joins the three into the projection's. Here each direction is one kernel (`fused_kernel.py`), which splits and
turns, or turns back and joins, in the same pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def split(qkv: Tensor, heads: int, key_heads: int, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys (rotated, in halves) and values, `[batch, heads, length, head_dim]`.

    Args:
        qkv: the projection, `[batch, length, heads + 2·key_heads, head_dim]`.
        heads: heads of queries.
        key_heads: heads of keys, and of values.
        angles: cos and sin of the queries and of the keys, `[4, length, head_dim / 2]`, float32.
    """
    q, k, v = split_rotated(qkv, heads, key_heads, angles)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


# The two ops. Off a GPU they are the definition that the kernels are tested against.


@torch.library.custom_op("lengthen::split_rotated", mutates_args=())
def split_rotated(qkv: Tensor, heads: int, key_heads: int, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, rotated, and values, `[batch, length, heads, head_dim]`, each in memory of its own."""
    q, k, v = torch.split(qkv, [heads, key_heads, key_heads], dim=2)
    return _rotate(q, angles[0], angles[1]), _rotate(k, angles[2], angles[3]), v.contiguous()


@torch.library.custom_op("lengthen::join_rotated", mutates_args=())
def join_rotated(d_q: Tensor, d_k: Tensor, d_v: Tensor, angles: Tensor) -> Tensor:
    """Return the projection's gradient: those of queries and keys rotated back, and that of values, side by side."""
    return torch.cat((_rotate(d_q, angles[0], -angles[1]), _rotate(d_k, angles[2], -angles[3]), d_v), dim=2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x `[batch, length, heads, head_dim]` rotated by `[length, head_dim / 2]`, in x's dtype."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@split_rotated.register_fake
def _(qkv: Tensor, heads: int, key_heads: int, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, _, width = qkv.shape
    k, v = (qkv.new_empty(batch, length, key_heads, width) for _ in range(2))
    return qkv.new_empty(batch, length, heads, width), k, v


@join_rotated.register_fake
def _(d_q: Tensor, d_k: Tensor, d_v: Tensor, angles: Tensor) -> Tensor:
    batch, length, heads, width = d_q.shape
    return d_q.new_empty(batch, length, heads + 2 * d_k.shape[2], width)


@split_rotated.register_kernel("cuda")
def _(qkv: Tensor, heads: int, key_heads: int, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from lengthen.positions import fused_kernel

    return fused_kernel.split(qkv, heads, key_heads, angles)


@join_rotated.register_kernel("cuda")
def _(d_q: Tensor, d_k: Tensor, d_v: Tensor, angles: Tensor) -> Tensor:
    from lengthen.positions import fused_kernel

    return fused_kernel.join(d_q, d_k, d_v, angles)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[3])


def _pull(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor, None, None, None]:
    return join_rotated(d_q, d_k, d_v, *ctx.saved_tensors), None, None, None


split_rotated.register_autograd(_pull, setup_context=_keep)
