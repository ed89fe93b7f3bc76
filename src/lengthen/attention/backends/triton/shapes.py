"""Block shapes, warps and pipeline stages for each kernel, as measured on an NVIDIA H200; and when reach pays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

FEW, FEW_ROWS = 16, 64  # queries, and rows of all heads that share keys, that decoding takes
SHORT = 512  # up to this many keys, the pass over them that reach needs costs more than it saves


@dataclass(frozen=True)
class Shape:
    """How a kernel cuts its work."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # for a thread, at most: with fewer, more programs share a multiprocessor

    @staticmethod
    def of(kernel: str, head_dim: int, value_dim: int, dtype: torch.dtype) -> Shape:
        """Return the shape for this kernel and these widths."""
        width = max(head_dim, value_dim)
        size = 64 if width <= 64 else 128 if width <= 128 else 256
        return SHAPES[(kernel, size, dtype.itemsize)]


SHAPES = {
    ("decode", 64, 2): Shape(16, 64, 4, 3),
    ("decode", 128, 2): Shape(16, 32, 4, 3),
    ("decode", 256, 2): Shape(16, 32, 4, 2),
    ("decode", 64, 4): Shape(16, 32, 4, 2),
    ("decode", 128, 4): Shape(16, 32, 4, 2),
    ("decode", 256, 4): Shape(16, 16, 4, 1),
    ("forward", 64, 2): Shape(64, 64, 4, 3, 128),
    ("forward", 128, 2): Shape(64, 32, 4, 3, 168),
    ("forward", 256, 2): Shape(64, 32, 8, 2),
    ("bwd_dq", 64, 2): Shape(64, 64, 4, 3, 168),
    ("bwd_dq", 128, 2): Shape(64, 64, 4, 2),
    ("bwd_dq", 256, 2): Shape(32, 32, 4, 2),
    ("bwd_dkv", 64, 2): Shape(32, 64, 4, 2, 128),
    ("bwd_dkv", 128, 2): Shape(32, 64, 4, 3),
    ("bwd_dkv", 256, 2): Shape(32, 32, 4, 2),
    ("table_grad", 64, 2): Shape(64, 64, 4, 2, 168),
    ("table_grad", 128, 2): Shape(64, 64, 8, 2),
    ("table_grad", 256, 2): Shape(32, 32, 4, 1),
    ("forward", 64, 4): Shape(64, 32, 4, 2),
    ("forward", 128, 4): Shape(32, 32, 4, 2),
    ("forward", 256, 4): Shape(32, 16, 4, 1),
    ("bwd_dq", 64, 4): Shape(32, 32, 4, 1),
    ("bwd_dq", 128, 4): Shape(32, 16, 4, 1),
    ("bwd_dq", 256, 4): Shape(16, 16, 4, 1),
    ("bwd_dkv", 64, 4): Shape(32, 32, 4, 1),
    ("bwd_dkv", 128, 4): Shape(16, 32, 4, 1),
    ("bwd_dkv", 256, 4): Shape(16, 16, 4, 1),
    ("table_grad", 64, 4): Shape(32, 32, 4, 1),
    ("table_grad", 128, 4): Shape(32, 32, 4, 1),
    ("table_grad", 256, 4): Shape(16, 16, 4, 1),
}


def roomy(shape: Shape) -> Shape:
    """Return the same with all the registers that the compiler wants."""
    return replace(shape, registers=None)


def few(queries: int, group: int) -> bool:
    """Return whether so many queries, of heads that share keys, are few enough for the kernels that decode."""
    return queries <= FEW and queries * group <= FEW_ROWS


def span(head_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """Return how many queries of the forward share an interval of keys; the backward's blocks divide it."""
    return Shape.of("forward", head_dim, value_dim, dtype).queries
