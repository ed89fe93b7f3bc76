"""Checks of what a caller passes in: each error names the argument, what was expected and what came."""

from __future__ import annotations

import math

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)  # what distances, slopes and tables are held in


def describe(value: object) -> str:
    """Say what came, shortly enough for an error message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def can_look(value: Tensor) -> bool:
    """Return whether values can be checked for free: on the CPU, and not while torch.compile traces."""
    return value.device.type == "cpu" and not torch.compiler.is_compiling()


def whole_number(name: str, value: object, at_least: int | None = None) -> int:
    """Return `value` as an int, or say why it is not one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a whole number, got {describe(value)}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}: expected at least {at_least}, got {value}")
    return value


def wide_tensor(name: str, value: object, dims: tuple[int, ...]) -> Tensor:
    """Return `value` if it is a float32 or float64 tensor with one of these numbers of dimensions."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(value)}")
    if value.dtype not in WIDE:
        raise TypeError(
            f"{name}: expected float32 or float64 (in 16 bits, distances run together), got {describe(value)}"
        )
    if value.dim() not in dims:
        wanted = " or ".join(str(d) for d in dims)
        raise ValueError(f"{name}: expected {wanted} dimension(s), got {describe(value)}")
    return value


def index_tensor(name: str, value: object, dims: int) -> Tensor:
    """Return `value` if it is an integer tensor of `dims` dimensions."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected an integer tensor, got {describe(value)}")
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        raise TypeError(f"{name}: expected an integer tensor, got {describe(value)}")
    if value.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimension(s), got {describe(value)}")
    return value


def finite(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> bool:
    """Return whether no input, bias or score is NaN or infinite: then what is hidden cannot leak."""
    compute = torch.promote_types(q.dtype, torch.float32)
    extremes = [torch.stack(x.aminmax()).to(torch.float64).abs().amax() for x in (q, k, v)]
    extremes.append(torch.zeros_like(extremes[0]) if bias is None else bias.abs().amax().to(torch.float64))
    highest_q, highest_k, highest_v, highest_bias = torch.stack(extremes).tolist()
    score = highest_q * highest_k * q.shape[3] * abs(scale) + highest_bias
    return math.isfinite(highest_v) and score < torch.finfo(compute).max
