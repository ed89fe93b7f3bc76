"""Reach: how far back an ALiBi head must look, proven before any far key is read.

For a query i of a head with slope m, let ℓ be the log-sum-exp of the scores read so far. All keys of the head lie in a
ball, ‖k_j − c‖ ≤ r, so by Cauchy–Schwarz no score without its bias is above

    s_i = scale·(q_i·c + ‖q_i‖·r).

Keys at distance D and more carry a bias of −m·D at most, one step less each: a geometric series. Together they weigh

    Σ_{d ≥ D} exp(s_i − m·d)  =  exp(s_i − m·D) / (1 − e^(−m)),

which is at most tolerance·e^ℓ as soon as

    D  ≥  (s_i − ℓ − log tolerance − log(1 − e^(−m))) / m.

That D is the query's reach. Leaving out a share ε ≤ tolerance of a row's mass moves its output by at most
2·ε·max‖v‖: ε·max‖v‖ for what is missing, and as much again for what the rest is scaled up by.

The centre c is the mean key. The softmax does not see a shift that is common to all keys, so the bound need not pay for
it: the keys of a trained head share a large mean. A decay breaks that (its factors differ from key to key), and then
c = 0; decayed shares are smaller than plain ones, so the bound still holds.

Whatever is not finite (NaN or ∞ among the inputs, a slope of 0, a tolerance of 0, no key read yet) makes D infinite:
everything is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthen.attention.biases import Linear
from lengthen.attention.masks import Causal, Mask

NEAR = 128  # the public `reach` takes ℓ from this many of a query's nearest keys
STEP = 4096  # positions looked at together


def default_tolerance(dtype: torch.dtype) -> float:
    """Return half a unit in the last place of `dtype`: what is left unread then vanishes in rounding."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True, eq=False)
class Ball:
    """A ball that holds all keys of a head: centre `[B, Hk, D]`, radius `[B, Hk]`, in the dtype computed in."""

    centre: Tensor
    radius: Tensor

    def highest_score(self, q: Tensor, scale: float) -> Tensor:
        """Return an upper bound of scale·q·k over every key, `[B, H, Lq]`."""
        group = q.shape[1] // self.centre.shape[1]
        centre = self.centre.repeat_interleave(group, dim=1).unsqueeze(-1)
        radius = self.radius.repeat_interleave(group, dim=1).unsqueeze(-1)
        along, length = [], []
        for part in torch.split(q, STEP, dim=2):
            wide = part.to(centre.dtype)
            along.append((wide @ centre).squeeze(-1))
            length.append(torch.linalg.vector_norm(wide, dim=-1))
        return scale * torch.cat(along, dim=2) + abs(scale) * torch.cat(length, dim=2) * radius


def enclosing_ball(k: Tensor, centred: bool = True) -> Ball:
    """Return a ball around the keys `[B, Hk, L, D]`; not centred, it is around the origin."""
    compute = torch.promote_types(k.dtype, torch.float32)
    centre = k.mean(dim=2, dtype=compute) if centred else k.new_zeros(*k.shape[:2], k.shape[3], dtype=compute)
    radius = centre.new_zeros(k.shape[:2])
    for part in torch.split(k, STEP, dim=2):
        radius = torch.maximum(radius, (part - centre.unsqueeze(2)).norm(dim=-1).amax(dim=-1))
    # Norms, q·c and ℓ itself are rounded: each by less than head_dim·eps of ‖q‖·(‖c‖ + r). Widen the ball by eight.
    slack = 8 * k.shape[3] * torch.finfo(compute).eps
    return Ball(centre, radius + slack * (radius + centre.norm(dim=-1)))


def bound(highest: Tensor, slopes: Tensor, tolerance: float) -> Tensor:
    """Return s_i − log tolerance − log(1 − e^(−m)), `[b, h, rows]`: what `distance` compares ℓ with."""
    if tolerance <= 0:
        return torch.full_like(highest, torch.inf)
    return highest - math.log(tolerance) - torch.log(-torch.expm1(-slopes.to(highest.dtype))).unsqueeze(-1)


def distance(bound: Tensor, lse: Tensor, slopes: Tensor) -> Tensor:
    """Return D `[b, h, rows]`: keys at that distance and more may be left unread. NaN or ∞: nothing may."""
    return (bound - lse) / slopes.to(lse.dtype).unsqueeze(-1)


def reach(
    q: Tensor,
    k: Tensor,
    bias: Linear,
    tolerance: float | None = None,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    q_start: int | None = None,
) -> Tensor:
    """Return how many positions back each query must look, int64 `[B, H, Lq]`.

    Keys at that distance and more weigh no more than `tolerance` of the row together (None: half a unit in the last
    place of q's dtype). Never more than the query can see; where the bound says nothing, all that it can see.
    The attention call reads no more than this, rounded up to whole blocks: what it has read already sharpens ℓ.

    >>> import torch, lengthen
    >>> q, k = torch.zeros(2, 1, 8, 1000, 64)
    >>> lengthen.reach(q, k, lengthen.Linear(lengthen.alibi_slopes(8)))[0, :, -1].tolist()
    [34, 67, 134, 267, 533, 1000, 1000, 1000]
    """
    from lengthen.attention.op import check_call  # the call's own checks; it imports this module

    if not isinstance(bias, Linear):
        raise TypeError(f"bias: expected Linear (no other bias has a bounded reach), got {type(bias).__name__}")
    mask = Causal() if mask is None else mask
    call = check_call(q, k, k, bias, None, mask, scale, q_start, tolerance)
    if not (q.numel() and k.numel()):
        return torch.zeros(q.shape[:3], dtype=torch.int64, device=q.device)
    compute = torch.promote_types(q.dtype, torch.float32)
    first, last = (x.unsqueeze(1) for x in mask.interval(q.shape[2], k.shape[2], call.q_start, q.device))
    position = torch.arange(q.shape[2], device=q.device) + call.q_start
    last = torch.minimum(last, position)  # reach looks back; what is ahead has its own side
    limit = bound(enclosing_ball(k).highest_score(q, call.scale), bias.slopes, call.tolerance)
    result = torch.empty(q.shape[:3], dtype=torch.int64, device=q.device)
    for i in range(0, q.shape[2], NEAR):
        rows = slice(i, i + NEAR)
        q_rows, here = q[:, :, rows].to(compute) * call.scale, position[rows]
        lo = max(0, int(last[..., rows].amin()) - NEAR + 1)
        hi = max(lo, int(last[..., rows].amax()) + 1)
        j = torch.arange(lo, hi, device=q.device)
        near = k[:, :, lo:hi].to(compute).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        score = q_rows @ near.mT + bias.at(here[:, None] - j, compute)
        seen = (j >= first[..., rows, None]) & (j <= last[..., rows, None])
        lse = score.masked_fill(~seen, -torch.inf).logsumexp(dim=-1)
        far = distance(limit[:, :, rows], lse, bias.slopes).ceil().nan_to_num(nan=torch.inf, posinf=torch.inf)
        most = (here - first[..., rows] + 1).clamp(min=0).to(compute)
        result[:, :, rows] = torch.minimum(far.clamp(min=0), most).long()
    return result
