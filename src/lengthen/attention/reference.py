"""The definition of the op, in plain torch: every other backend is tested against this file.

    score[i, j] = scale · Σ_f q[i, f]·k[j, f]·rates[f]^|i − j|  +  bias(i − j)      for first[i] ≤ j ≤ last[i]
    lse[i]      = log Σ_j exp(score[i, j])
    out[i]      = Σ_j exp(score[i, j] − lse[i])·v[j]

A key outside a query's interval has no influence on it, whatever it holds. A query that sees no key (or only scores of
−∞) gives 0, and lse −∞. Scores are computed in float32 at least, and in float64 for float64 inputs.
It holds a length × length matrix, so it is for tests and for reading, not for long sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lengthen.attention.biases import Bias, Decay
from lengthen.attention.masks import Mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    decay: Decay | None,
    mask: Mask,
    scale: float,
    q_start: int,
) -> tuple[Tensor, Tensor]:
    """Return out `[B, H, Lq, Dv]` in q's dtype, and lse `[B, H, Lq]` in the dtype computed in."""
    dtype, compute = q.dtype, torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(compute), k.to(compute), v.to(compute)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    i = torch.arange(q.shape[2], device=q.device)[:, None] + q_start
    j = torch.arange(k.shape[2], device=q.device)
    first, last = mask.interval(q.shape[2], k.shape[2], q_start, q.device)
    visible = ((j >= first[..., None]) & (j <= last[..., None]))[:, None]  # [B or 1, 1, Lq, Lk]
    distance = (i - j).where(visible.any(0)[0], 0)  # a table need not cover what no query sees

    if decay is None:
        score = q @ k.mT
    else:
        score = sum(q[..., f, None] * k[..., None, :, f] * decay.at(distance, f, compute) for f in range(q.shape[3]))  # type: ignore[assignment]
    score = scale * score
    if bias is not None:
        score = score + bias.at(distance, compute)
    score = score.masked_fill(~visible, -torch.inf)

    lse = score.logsumexp(dim=-1)
    weight = (score - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return weigh(weight, v, visible).to(dtype), lse


def weigh(weight: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return weight @ v over visible keys: 0·NaN and 0·∞ of an invisible key count for nothing."""
    finite = v.isfinite()
    out = weight @ v.where(finite, 0)
    for j in (~finite).flatten(0, 1).any(-1).any(0).nonzero().flatten().tolist():
        odd = v[:, :, j : j + 1].where(~finite[:, :, j : j + 1], 0)
        out = out + (weight[..., j : j + 1] * odd).where(visible[..., j : j + 1] & ~finite[:, :, j : j + 1], 0)
    return out
