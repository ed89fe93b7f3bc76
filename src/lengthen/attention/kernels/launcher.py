"""Launches a Triton kernel with little work on the CPU.

Triton looks at every argument of every launch to find the variant that was compiled for such arguments, which takes
longer than many of these kernels run. The same few facts decide here: constants, alignment of pointers, and whether a
stride is 1 or a multiple of 16. Sizes do not: kernels say so by `do_not_specialize`, so that a length never seen before
finds everything compiled. Pointers are passed as numbers: of a tensor, Triton would ask the driver whose it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.errors import OutOfResources

from lengthen.attention.kernels.plans import Launch, notes

LARGEST = 2**31 - 1  # a number above it is passed in 64 bits
runtime: Any = knobs.runtime
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what Triton asks, without its detour

Facts = tuple[Any, ...]


def watched() -> bool:
    """Return whether a profiler wants to see launches."""
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


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
        early: bool = False,
    ) -> None:
        """Launch on the current stream of the tensors' device.

        `known` are facts of other tensors and strides. `early` says that the programs may begin before the last kernel
        has ended: the constants must say the same.
        """
        key = (facts(tensors, strides) if known is None else known, constants, warps, stages, registers)
        compiled = self.kept.get(key)
        if compiled is not None:
            numbers = (*strides, *sizes, *floats, *constants)
            if watched():
                notes.launches = None
                compiled[grid](*tensors, *numbers)
                return
            stream = _current_stream(tensors[0].get_device())
            handles = (compiled.function, compiled.packed_metadata, None, None, None)
            compiled.run(*grid, stream, *handles, *[x.data_ptr() for x in tensors], *numbers)
            if notes.launches is not None:
                notes.launches.append(Launch(compiled.run, grid, handles, tensors, numbers))
            return
        notes.launches = None  # of those that are written down, none may be missing
        arguments = (*tensors, *strides, *sizes, *floats, *constants)
        options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": True}
        if early:
            options["launch_pdl"] = True
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
