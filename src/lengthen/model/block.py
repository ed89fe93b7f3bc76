"""One block of the transformer: attention with any position method, and a feed-forward layer.

    x = x + attention(norm(x));  x = x + feed_forward(norm(x))

`Block` has the other forms. Position enters as a `Placed`, the method at the positions of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthen.attention import Mask, attention
from lengthen.attention.biases import Bias, Decay
from lengthen.attention.static import AnyLayer
from lengthen.config import GATED, ModelConfig
from lengthen.positions.method import Placed


class AttentionOp(nn.Module):
    """The attention op as a module, so that a forward hook sees what each layer gives to it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, decay: Decay | None, mask: Mask) -> Tensor:
        """Return what `attention` does."""
        return attention(q, k, v, bias=bias, decay=decay, mask=mask)


class Attention(nn.Module):
    """Self-attention with any position method, heads of queries sharing keys and values if there are fewer of those."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = config.heads, config.key_value_heads, config.head_width
        together = (self.heads + 2 * self.key_heads) * self.head_dim
        self.qkv = nn.Linear(config.width, together, bias=config.has_bias("qkv"))
        self.clip = config.clip_qkv
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=config.norm_epsilon) if config.qk_norm else None for _ in range(2)
        )
        # The op and the caches scale by 1/√head_dim; another scale is that times a factor of the queries.
        usual = 1 / math.sqrt(self.head_dim)
        self.q_factor = 1.0 if config.score_scale is None else config.score_scale / usual
        self.op = AttentionOp()
        self.out = nn.Linear(self.heads * self.head_dim, config.width, bias=config.has_bias("out"))

    def forward(self, x: Tensor, placed: Placed, mask: Mask, layer: AnyLayer | None = None, forget: int = 0) -> Tensor:
        """Return what each token of x `[batch, length, width]` reads from those it sees, a cache's among them."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = torch.split(qkv, [self.heads, self.key_heads, self.key_heads], dim=2)
            qkv = torch.cat((self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v), dim=2)
        q, k, v = placed.split(qkv, self.heads, self.key_heads)
        if self.q_factor != 1:
            q = q * self.q_factor
        if layer is None:
            read = self.op(q, k, v, bias=placed.bias, decay=placed.decay, mask=mask)
        else:
            read = layer.attend(q, k, v, placed.bias, placed.decay, mask, forget)
        return cast(Tensor, self.out(read.transpose(1, 2).flatten(-2)))

    @torch.no_grad()
    def highest_score(self, magnitude: float) -> float | None:
        """Return a number that no |score| before its bias is above, where queries and keys are normalised."""
        if self.q_norm is None or self.k_norm is None:
            return None
        # ‖x‖ ≤ √d after the norm, times its largest weight; 1/√d is the scale. A rotation changes none of it.
        largest = float(self.q_norm.weight.abs().amax()) * float(self.k_norm.weight.abs().amax())
        return 1.01 * magnitude**2 * largest * math.sqrt(self.head_dim) * self.q_factor  # 1 % for 16-bit rounding


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
}


class FeedForward(nn.Module):
    """Two matrices with an activation between them, or with a gate: (activation(x·gate) · (x·up)) · down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation, self.gated = ACTIVATIONS[config.activation], config.activation in GATED
        bias = config.has_bias("feed_forward")
        self.up = nn.Linear(config.width, config.hidden_width * (2 if self.gated else 1), bias=bias)
        self.down = nn.Linear(config.hidden_width, config.width, bias=bias)
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for x `[…, width]`."""
        hidden = self.up(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        return cast(Tensor, self.down(self.dropout(hidden)))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what it read; `config.block` says where is normalised.

    pre        x = x + attention(norm(x));  x = x + feed_forward(norm(x))
    post       x = norm(x + attention(x));  x = norm(x + feed_forward(x))
    parallel   x = x + attention(norm(x)) + feed_forward(norm'(x))
    shared     the same with one norm
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.form = config.block
        self.attention_norm = norm(config)
        self.feed_forward_norm = None if config.block == "shared" else norm(config)
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, placed: Placed, mask: Mask, layer: AnyLayer | None = None, forget: int = 0) -> Tensor:
        """Return x `[batch, length, width]` with this block's part added."""
        first, second = self.attention_norm, self.feed_forward_norm or self.attention_norm
        if self.form == "post":
            x = first(x + self.dropout(self.attention(x, placed, mask, layer, forget))).to(x.dtype)
            return cast(Tensor, second(x + self.dropout(self.feed_forward(x))).to(x.dtype))
        normed = first(x)
        after = x + self.dropout(self.attention(normed, placed, mask, layer, forget))
        read = normed if self.form == "shared" else second(after if self.form == "pre" else x)
        return cast(Tensor, after + self.dropout(self.feed_forward(read)))


def norm(config: ModelConfig) -> nn.Module:
    """Return a normalisation layer of the kind that the model has."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_epsilon)
    return nn.LayerNorm(config.width, eps=config.norm_epsilon, bias=config.has_bias("norm"))
