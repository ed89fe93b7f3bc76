"""Torch's own attention, where it is exact: no decay, and a causal or full mask; on a CPU also short calls with a bias.

Torch takes a bias as a matrix of all pairs, so that is for calls that are over before others have begun. On a GPU it is
for 16 bits, which cuDNN and flash kernels do in O(length) memory; in float32 and float64 torch may hold all scores at
once there. A NaN in a key or value may on a GPU reach queries that do not see it: looking for one would have the CPU
wait.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen.attention.checks import can_look
from lengthen.attention.masks import EVERYTHING, positions
from lengthen.attention.problem import Problem

WIDEST = 256  # features that torch's fused kernels take
SHORT = 1 << 19  # entries of a bias


def unfit(problem: Problem) -> str | None:
    """Return why this problem is not for torch's own attention; None: it is."""
    q, k, v = problem.q, problem.k, problem.v
    if problem.needs_lse:
        return "it does not return lse"
    if problem.decay is not None:
        return "it knows no decay"
    biases = [x for x in problem.bias.tensors if x is not None] if problem.bias is not None else []
    if q.device.type == "cpu" and not all(can_look(x) for x in (q, k, v, *biases)):  # asked before any size is
        return "whether inputs are finite cannot be looked at, and a hidden NaN would leak"
    inside = isinstance(problem.q_start, int) and 0 <= problem.q_start <= k.shape[2] - q.shape[2]
    if problem.bias is not None:
        if q.device.type != "cpu" or q.shape[1] * q.shape[2] * k.shape[2] > SHORT:
            return "it knows a bias only as a matrix of all pairs"
        if problem.mask.formula() is None or not inside:
            return "a query may see nothing, for which it gives NaN"
    elif problem.mask.formula() != (EVERYTHING, 1) or not (problem.mask.two_sided or (inside and square(problem))):
        return "it knows full attention, and causal attention of as many queries as keys"
    if problem.empty:
        return "there is nothing to read"
    if v.shape[3] != q.shape[3]:
        return "the value width is not head_dim, for which it may hold all scores at once"
    if q.is_cuda:
        fused = q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] % 8 == 0 and q.shape[3] <= WIDEST
        return None if fused else "its fused kernels are for 16 bits and head_dim up to 256, a multiple of 8"
    if q.device.type != "cpu":
        return f"it is not known to be exact on {q.device.type}"
    most = torch.finfo(problem.compute).max / k.shape[2]
    largest = [max(abs(float(end)) for end in x.detach().aminmax()) for x in (q, k, v, *biases)]
    farthest = q.shape[2] + k.shape[2]
    highest = largest[0] * largest[1] * q.shape[3] * abs(problem.scale) + sum(largest[3:]) * farthest
    if not (highest < most and largest[2] < most):
        return "an input, a score or the sum of so many is not finite: a hidden NaN would leak"
    return None


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return out, and nothing of interest in the place of lse."""
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    if q.device.type == "cpu":  # where 16-bit floats are slow, and rounded more than once
        q, k, v = (x.to(problem.compute) for x in (q, k, v))
    if scale <= 0:  # torch's kernels look for the highest score before they scale
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    attend = functools.partial(F.scaled_dot_product_attention, q, k, v, scale=scale)
    if problem.bias is not None:
        attend = functools.partial(attend, attn_mask=matrix(problem))
    elif not problem.mask.two_sided:
        attend = functools.partial(attend, is_causal=True)
    # An `if`: torch.compile would hand on a comparison as a symbol.
    out = attend() if k.shape[1] == q.shape[1] else attend(enable_gqa=True)
    return out.to(problem.q.dtype), out


def square(problem: Problem) -> bool:
    """Return whether there are as many queries as keys."""
    return problem.q.shape[2] == problem.k.shape[2]


def matrix(problem: Problem) -> Tensor:
    """Return the bias of all pairs, −∞ where hidden, `[1, heads, queries, keys]`: four dimensions, or torch is slow."""
    assert problem.bias is not None
    j = torch.arange(problem.k.shape[2])
    first, last = (x[0, :, None] for x in problem.interval())
    visible = (j >= first) & (j <= last)
    distance = positions(problem.q.shape[2], problem.q_start, j.device)[0, :, None] - j
    return problem.bias.at(distance.where(visible, 0), problem.compute).masked_fill(~visible, -torch.inf)[None]
