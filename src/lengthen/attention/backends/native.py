"""Torch's own attention, where it is exact: no bias, no decay, and a causal or full mask.

On a GPU that is `scaled_dot_product_attention` in 16 bits, which cuDNN and flash kernels do in O(length) memory. In
float32 and float64 torch may hold all scores at once there, so those are for other backends. A NaN in a key or value
may on a GPU reach queries that do not see it: looking for one would have the CPU wait.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen.attention.checks import can_look
from lengthen.attention.masks import EVERYTHING
from lengthen.attention.problem import Problem

WIDEST = 256  # features that torch's fused kernels take


def unfit(problem: Problem) -> str | None:
    """Return why this problem is not for torch's own attention; None: it is."""
    q, k, v = problem.q, problem.k, problem.v
    if problem.needs_lse:
        return "it does not return lse"
    if problem.bias is not None or problem.decay is not None:
        return "it knows no bias and no decay, but as a matrix of scores"
    square = isinstance(problem.q_start, int) and problem.q_start == 0 and q.shape[2] == k.shape[2]
    if problem.mask.formula() != (EVERYTHING, 1) or not (problem.mask.two_sided or square):
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
    if not all(can_look(x) for x in (q, k, v)):
        return "whether inputs are finite cannot be looked at, and a hidden NaN would leak"
    most = torch.finfo(problem.compute).max / k.shape[2]
    if not all(abs(float(end)) < most for x in (q, k, v) for end in x.detach().aminmax()):
        return "an input, or the sum of so many, is not finite: a hidden NaN would leak"
    return None


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return out, and nothing of interest in the place of lse."""
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    if q.device.type == "cpu":  # where 16-bit floats are slow, and rounded more than once
        q, k, v = (x.to(problem.compute) for x in (q, k, v))
    if scale <= 0:  # torch's kernels look for the highest score before they scale
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    if k.shape[1] == q.shape[1]:  # an `if`: torch.compile would hand on a comparison as a symbol
        out = F.scaled_dot_product_attention(q, k, v, is_causal=not problem.mask.two_sided, scale=scale)
    else:
        causal = not problem.mask.two_sided
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.to(problem.q.dtype), out
