"""Reach: how far a head must look, proven before any far key is read (docs/reach.md has the proof).

For a query i of a head let ℓ be the log-sum-exp of the scores read so far. All keys of the head lie in a ball,
‖k_j − c‖ ≤ r, so by Cauchy–Schwarz no score without its bias is above

    s_i = scale·q_i·c + |scale|·‖q_i‖·r.

Keys at distance D and more weigh at most e^(s_i + T(D)) together, T the tail of the bias (biases.py). That is at most
tolerance·e^ℓ as soon as

    T(D)  ≤  ℓ + log tolerance − s_i.

The smallest such D is the query's reach. Leaving out a fraction ε ≤ tolerance of a row's mass moves its output by at
most 2·ε·max‖v‖: ε·max‖v‖ for what is missing, and as much again for what the rest is scaled up by.

The centre c is the mean key. The softmax does not see a shift that is common to all keys, so the bound need not pay for
it: the keys of a trained head share a large mean. A decay breaks that (its factors differ from key to key), and then
c = 0; decayed parts are smaller than plain ones, so the bound still holds.

Whatever is not finite (NaN or ∞ among the inputs, a slope of 0, a tolerance of 0, no key read yet) makes D infinite:
everything is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lengthen.attention.biases import Bias
from lengthen.attention.checks import can_look, on_device
from lengthen.attention.masks import Causal, Mask, positions
from lengthen.checks import describe

NEAR = 128  # the public `reach` takes ℓ from this many of a query's nearest keys
STEP = 4096  # positions looked at together


def default_tolerance(dtype: torch.dtype) -> float:
    """Return half a unit in the last place of `dtype`: what is left unread then vanishes in rounding."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True, eq=False)
class Ball:
    """A ball that holds all keys of a head: with it, a cache bounds the scores of far keys without reading them.

    centre `[batch, key_heads, head_dim]` is of the keys' dtype, so that products take it as it is; radius
    `[batch, key_heads]` is float32 at least, and widened by more than rounding can hide in it. `keys` is how many keys
    it is of: a call refuses a ball of fewer or of more. Make one with `around`, and keep it up with `appended` as keys
    are added to the end, or with `replaced` as keys are written over others. It only ever grows. Around
    keys that are NaN or ∞ the radius is ∞, which bounds nothing: everything is read.

    >>> import torch, lengthen
    >>> k, new = torch.randn(1, 8, 1000, 64), torch.randn(1, 8, 1, 64)
    >>> ball = lengthen.Ball.around(k).appended(new)
    >>> ball.keys
    1001
    """

    centre: Tensor
    radius: Tensor
    keys: int

    def __post_init__(self) -> None:
        for name, value in (("centre", self.centre), ("radius", self.radius)):
            if not isinstance(value, Tensor):
                raise TypeError(f"Ball.{name}: expected a tensor (Ball.around(k) makes a ball), got {describe(value)}")
        if self.radius.dtype != torch.promote_types(self.centre.dtype, torch.float32):
            raise TypeError(
                f"Ball.radius: expected float32, or float64 for float64 keys, got {describe(self.radius)} and a centre "
                f"that is {describe(self.centre)}"
            )
        # Of a radius that is NaN, kernels would take the largest of it and 0 for 0.
        for name, value, least in (("centre", self.centre, -math.inf), ("radius", self.radius, 0.0)):
            low = float(value.min()) if can_look(value) and value.numel() else least
            if not low >= least:  # of numbers among which is NaN, the least is NaN
                raise ValueError(f"Ball.{name}: expected numbers of at least {least:g} (∞ bounds nothing), got {low}")

    @classmethod
    def around(cls, k: Tensor, centred: bool = True) -> Ball:
        """Return a ball around the keys `[batch, key_heads, keys, head_dim]`; not centred, it is around the origin."""
        _check_keys(k)
        compute = torch.promote_types(k.dtype, torch.float32)
        k = k.detach()
        if centred and k.shape[2]:
            centre = k.mean(dim=2, dtype=compute).to(k.dtype)
            centre = centre.where(centre.isfinite(), 0)
        else:
            centre = k.new_zeros(*k.shape[:2], k.shape[3])
        return cls(centre, centre.new_zeros(k.shape[:2], dtype=compute), k.shape[2]).replaced(k)

    def replaced(self, k: Tensor) -> Ball:
        """Return the ball that holds these keys too, of as many keys as before."""
        return replace(self, radius=self._holding(k))

    def appended(self, k: Tensor) -> Ball:
        """Return the ball of the keys that it was of and of these after them."""
        return replace(self, radius=self._holding(k), keys=self.keys + k.shape[2])

    def _holding(self, k: Tensor) -> Tensor:
        """Return the radius that these keys are within too."""
        _check_keys(k)
        radius = self.radius
        if (*k.shape[:2], k.shape[3]) != self.centre.shape:
            batch, heads, width = self.centre.shape
            raise ValueError(f"k: expected [{batch}, {heads}, keys, {width}] like the ball's, got {describe(k)}")
        centre = self.centre.to(radius.dtype)
        # Norms, q·c and ℓ are rounded: each by less than head_dim·eps of ‖q‖·(‖c‖ + r). Eight times that.
        slack = 8 * k.shape[3] * torch.finfo(radius.dtype).eps
        for part in torch.split(k.detach(), STEP, dim=2):
            if part.shape[2]:
                away = torch.linalg.vector_norm(part.to(radius.dtype) - centre.unsqueeze(2), dim=-1).amax(-1)
                radius = torch.maximum(radius, away + slack * (away + centre.norm(dim=-1)))
        return radius.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def check_covers(self, k: Tensor) -> None:
        """Refuse keys that it is not a ball of, as far as can be told without looking at them."""
        on_device("ball", self.centre, k.device)
        if self.centre.dtype != k.dtype:
            raise TypeError(f"ball: expected one of keys in {k.dtype} like k, its centre is {describe(self.centre)}")
        if self.centre.shape != (*k.shape[:2], k.shape[3]) or self.radius.shape != k.shape[:2]:
            raise ValueError(
                f"ball: expected a centre of shape {[*k.shape[:2], k.shape[3]]} and a radius of {list(k.shape[:2])}, "
                f"got {describe(self.centre)} and {describe(self.radius)}"
            )
        if self.keys != k.shape[2]:
            raise ValueError(f"ball: expected one of {k.shape[2]} keys like k, got one of {self.keys}: it is not k's")

    def highest_score(self, q: Tensor, scale: float) -> Tensor:
        """Return an upper bound of scale·q·k over every key, `[batch, heads, queries]`."""
        group = q.shape[1] // self.centre.shape[1]
        centre = self.centre.repeat_interleave(group, dim=1).unsqueeze(-1)
        radius = self.radius.repeat_interleave(group, dim=1).unsqueeze(-1)
        bounds = []
        for part in torch.split(q.detach(), STEP, dim=2):
            wide = part.to(radius.dtype)
            length = torch.linalg.vector_norm(wide, dim=-1)
            bounds.append(scale * (wide @ centre.to(wide.dtype)).squeeze(-1) + abs(scale) * length * radius)
        return torch.cat(bounds, dim=2)


def _check_keys(k: Tensor) -> None:
    if not isinstance(k, Tensor) or k.dim() != 4 or not k.is_floating_point():
        raise TypeError(f"k: expected keys [batch, key_heads, keys, head_dim] in floating point, got {describe(k)}")


def reach(
    q: Tensor,
    k: Tensor,
    bias: Bias,
    tolerance: float | None = None,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    q_start: int | Tensor | None = None,
) -> Tensor:
    """Return how many positions back each query must look, int64 `[batch, heads, queries]`.

    Keys at that distance and more weigh no more than `tolerance` of the row together (None: half a unit in the last
    place of q's dtype). Never more than the query can see; where the bound says nothing, all that it can see.
    The attention call reads no more than this, rounded up to whole blocks: what it has read already sharpens ℓ.

    >>> import torch, lengthen
    >>> q, k = torch.zeros(2, 1, 8, 1000, 64)
    >>> lengthen.reach(q, k, lengthen.Linear(lengthen.alibi_slopes(8)))[0, :, -1].tolist()
    [34, 67, 134, 267, 533, 1000, 1000, 1000]
    """
    from lengthen.attention.problem import pose  # the call's own checks; it imports this module

    if bias is None:
        raise TypeError("bias: expected Linear or Table, whose tail bounds how far a head looks, got None")
    problem = pose(q, k, k, bias, None, mask or Causal(), scale=scale, q_start=q_start, tolerance=tolerance)
    if not (q.numel() and k.numel()):
        return torch.zeros(q.shape[:3], dtype=torch.int64, device=q.device)
    compute = problem.compute
    first, last = (x.unsqueeze(1) for x in problem.interval())
    position = positions(q.shape[2], problem.q_start, q.device).unsqueeze(1)  # [batch or 1, 1, queries]
    last = torch.minimum(last, position)  # reach looks back; what is ahead has its own side
    farthest = max(0, int(position.max()))
    near_lse = []
    with torch.autocast(q.device.type, enabled=False):  # in 16 bits it would be no bound
        for i in range(0, q.shape[2], NEAR):
            rows = slice(i, i + NEAR)
            lo = max(0, int(last[..., rows].amin()) - NEAR + 1)
            hi = max(lo, int(last[..., rows].amax()) + 1)
            j = torch.arange(lo, hi, device=q.device)
            seen = (j >= first[..., rows, None]) & (j <= last[..., rows, None])
            distance = (position[..., rows, None] - j).where(seen, 0).squeeze(1)
            near = k[:, :, lo:hi].to(compute).repeat_interleave(problem.group, dim=1)
            score = problem.scale * q[:, :, rows].to(compute) @ near.mT + bias.at(distance, compute).transpose(0, 1)
            near_lse.append(score.masked_fill(~seen, -torch.inf).logsumexp(dim=-1))
        limit = math.log(problem.tolerance) if problem.tolerance > 0 else -math.inf
        limits = torch.cat(near_lse, dim=2) + limit - Ball.around(k).highest_score(q, problem.scale)
    far = bias.reach(limits, farthest).ceil().nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(min=0)
    return torch.minimum(far, (position - first + 1).clamp(min=0).to(compute)).long()
