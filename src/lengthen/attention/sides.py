"""What a chunk of scores is the product of: queries and keys, plain or with xPos's decay in them.

Keys behind the query are scaled by rate^−(j − s) and queries by rate^(i − s), s the chunk's far end. The keys' exponent
stays small, since a chunk is short; the query's factor may underflow, as the score itself then does. Keys ahead of the
query are scaled from the other end. Only a chunk that holds keys on both sides of a query needs both.

A whole call that is short, with no key ahead of its query, is one chunk: `folded` counts from its middle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lengthen.attention.biases import Decay


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


def folded(q: Tensor, k: Tensor, decay: Decay, q_start: int) -> tuple[Tensor, Tensor]:
    """Return q and k with the decay of every key behind its query in their product, each in its own dtype."""
    compute = torch.promote_types(q.dtype, torch.float32)
    q_factor, k_factor = decay.powers(q.shape[2], k.shape[2], q_start, compute)
    if k_factor.shape[0] not in (1, k.shape[1]):  # a decay of each head's own, and heads that share keys
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    # (x·factor would take the factor's order of dimensions in memory, not the one that attention gives gradients in.)
    return _times(q, q_factor), _times(k, k_factor)


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """Return x·factor in x's dtype and its order of dimensions in memory."""
    if x.stride(1) < x.stride(2):
        return (x.transpose(1, 2) * factor.transpose(0, 1)).to(x.dtype).transpose(1, 2)
    return (x * factor).to(x.dtype)
