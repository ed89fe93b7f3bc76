"""The definition of the op, in plain torch: every other backend is tested against this file.

    score[i, j] = scale · Σ_f q[i, f]·k[j, f]·rates[f]^|i − j|  +  bias(i − j)      for first[i] ≤ j ≤ last[i]
    lse[i]      = log Σ_j exp(score[i, j])
    out[i]      = Σ_j exp(score[i, j] − lse[i])·v[j]

A key outside a query's interval has no influence on it, nor it on the key's gradient, whatever either holds. A query
that sees no key (or only scores of −∞) gives 0, and lse −∞. Scores are computed in float32 at least, and in float64 for
float64 inputs. It holds a length × length matrix, so it is for tests and for reading, not for long sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lengthen.attention.checks import can_read
from lengthen.attention.masks import positions
from lengthen.attention.problem import Problem


def unfit(problem: Problem) -> str | None:
    """Return None: it can do everything."""
    return None


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return out `[B, H, Lq, Dv]` in q's dtype, and lse `[B, H, Lq]` in the dtype computed in."""
    q, k, v = (x.to(problem.compute) for x in (problem.q, problem.k, problem.v))
    k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))

    i = positions(q.shape[2], problem.q_start, q.device)[..., None]
    j = torch.arange(k.shape[2], device=q.device)
    first, last = problem.interval()
    visible = (j >= first[..., None]) & (j <= last[..., None])  # [B or 1, Lq, Lk]
    distance = (i - j).where(visible, 0)  # a table need not cover what no query sees
    visible = visible[:, None]

    score = problem.scale * product(problem, q, k, distance, visible)
    if problem.bias is not None:
        score = score + problem.bias.at(distance, q.dtype).transpose(0, 1)
    score = score.masked_fill(~visible, -torch.inf)

    blind = (score == -torch.inf).all(-1)  # the gradient of a log-sum-exp of these would be NaN
    lse = score.masked_fill(blind[..., None], 0).logsumexp(dim=-1)
    weight = (score - lse[..., None]).exp()
    if all_finite(weight, v):
        out = weight @ v
    else:  # 0·NaN of a hidden key is no NaN here, nor in a gradient: each pair is multiplied by itself
        out = torch.stack([(weight * x[:, :, None].where(visible, 0)).sum(-1) for x in v.unbind(-1)], dim=-1)
    return out.to(problem.q.dtype), lse.masked_fill(blind, -torch.inf)


def product(problem: Problem, q: Tensor, k: Tensor, distance: Tensor, visible: Tensor) -> Tensor:
    """Return Σ_f q[i, f]·k[j, f]·rates[f]^|i − j|; pairs that are not visible are not multiplied, if that matters."""
    if problem.decay is None and all_finite(q, k):
        return q @ k.mT
    total = torch.zeros((), dtype=q.dtype, device=q.device)
    for f in range(q.shape[3]):
        pair = q[..., f, None].where(visible, 0) * k[..., None, :, f].where(visible, 0)
        if problem.decay is not None:
            pair = pair * problem.decay.at(distance, f, q.dtype).transpose(0, 1)
        total = total + pair
    return total


def all_finite(*tensors: Tensor) -> bool:
    """Return whether no number is NaN or infinite, as far as that can be told."""
    return all(not can_read(x) or bool(x.isfinite().all()) for x in tensors)
