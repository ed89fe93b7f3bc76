"""Checks of the tensors that a caller passes in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from lengthen.checks import describe

WIDE = (torch.float32, torch.float64)  # what distances, slopes and tables are held in


def can_read(value: Tensor) -> bool:
    """Return whether values are there to be read: not while they are traced, faked or mapped over."""
    if torch.compiler.is_compiling() or value.device.type == "meta" or type(value) not in (Tensor, Parameter):
        return False
    return torch._C._functorch.maybe_current_level() is None


def can_look(value: Tensor) -> bool:
    """Return whether reading values is free: on the CPU."""
    return value.device.type == "cpu" and can_read(value)


def on_device(name: str, value: Tensor, device: torch.device) -> Tensor:
    """Return `value` if it is on the device that q is on."""
    if value.device != device:
        raise ValueError(f"{name}: expected a tensor on {device} like q, got {describe(value)}")
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
