"""Launches a Triton kernel with little work on the CPU.

Triton looks at every argument of every launch to find the variant that was compiled for such arguments, which takes
longer than many of these kernels run. The same few facts decide here: constants, alignment of pointers, and whether a
stride is 1 or a multiple of 16. Sizes do not: kernels say so by `do_not_specialize`, so that a length never seen before
finds everything compiled.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.runtime.errors import OutOfResources

LARGEST = 2**31 - 1  # a number above it is passed in 64 bits


Facts = tuple[Any, ...]


def facts(tensors: tuple[Tensor, ...], strides: tuple[int, ...]) -> Facts:
    """Return what decides over a variant, but for constants."""
    return (
        tensors[0].device,
        *[t.dtype for t in tensors],
        *[t.data_ptr() % 16 == 0 for t in tensors],
        *[(n % 16 == 0) + 2 * (n == 1) + 4 * (n > LARGEST) for n in strides],
    )


class Launcher:
    """A kernel whose arguments are tensors, strides, sizes, floats and constants, in this order."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.kept: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        strides: tuple[int, ...],
        sizes: tuple[int, ...],
        floats: tuple[float, ...],
        constants: tuple[Any, ...],
        warps: int,
        stages: int,
        registers: int | None = None,
        known: Facts | None = None,
    ) -> None:
        """Launch on the current stream of the tensors' device; `known` are facts of other tensors and strides."""
        key = (facts(tensors, strides) if known is None else known, constants, warps, stages, registers)
        compiled = self.kept.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *strides, *sizes, *floats, *constants)
            return
        arguments = (*tensors, *strides, *sizes, *floats, *constants)
        options = {"num_warps": warps, "maxnreg": registers}
        for fewer in range(stages, 0, -1):  # a smaller GPU may not have the memory to load so far ahead
            try:
                compiled = self.kernel[grid](*arguments, num_stages=fewer, **options)
            except OutOfResources:
                if fewer == 1:
                    raise
            else:
                break
        if tensors[0].is_cuda:  # the interpreter compiles nothing
            self.kept[key] = compiled
