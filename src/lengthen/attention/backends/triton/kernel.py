"""A kernel and its compiled variants: one for each set of its constants, and for nothing else.

Triton's own launch looks at every argument, compiles a kernel again for numbers that are 1 or multiples of 16, and
takes longer on the CPU than small kernels run on the GPU. Here a variant is compiled for what its constants say
(widths, bias, dtype …): all other numbers are 32 bits wide and may be any, and strides come in units of ALIGN features.
So a call that differs in lengths, batch, strides, window or padding compiles nothing, and a launch only hands its
arguments over. Pointers are passed as numbers: of a tensor, Triton would ask the driver whose it is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources

from lengthen.attention.backends.triton.shapes import Shape
from lengthen.attention.backends.triton.tile import Ball, Bias, Mask, Matrix, Sizes

MATRIX = Matrix("*T", "i32", "i32", "i32")
# What the arguments of kernels are, by name; others are numbers. *T points to the dtype of the queries.
TYPES: dict[str, Any] = {
    **dict.fromkeys(("q", "k", "v", "out", "residual", "do", "dq", "dk", "dv", "x", "y"), MATRIX),
    **dict.fromkeys(("lse", "d_lse", "log_sums", "deltas", "d_biases", "rates"), "*fp32"),
    **dict.fromkeys(("tiles", "d_table", "parts", "units", "totals"), "*fp32"),
    **dict.fromkeys(("spans", "far", "read"), "*i32"),
    **dict.fromkeys(("scale", "neg_log2_tolerance"), "fp32"),
    "mask": Mask("*i32", "*i32", "i32", "i32", "i32", "i32", "*i32", "i32", "i32"),
    "bias": Bias("*fp32", "*fp32", "*fp32", "i32", "i32", "i32", "*fp32", "i32"),
    "ball": Ball("*T", "*fp32", "i32"),
    "sizes": Sizes("i32", "i32", "i32", "i32", "i32", "i32"),
}
OWN = ("parts", "tiles", "log_sums", "deltas")  # buffers of the backend's own, which begin at multiples of 16 bytes
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what Triton asks, without its detour
_runtime: Any = knobs.runtime

Grid = tuple[int, int, int]


def _pointing(kind: Any, pointer: str) -> Any:
    """Return a type, or a named tuple of them, with a pointer's type for *T."""
    if isinstance(kind, tuple):
        return type(kind)(*(_pointing(x, pointer) for x in kind))
    return pointer if kind == "*T" else kind


class Variant:
    """A kernel that is compiled for some constants, on one device."""

    def __init__(self, compiled: Any, constants: tuple[Any, ...], device: int) -> None:
        self.compiled, self.constants, self.device = compiled, constants, device
        self.run, self.handles = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Launch on the device's current stream."""
        if _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls:  # a profiler wants to see it
            self.compiled[grid](*arguments, *self.constants)
        else:
            self.run(*grid, _current_stream(self.device), *self.handles, *arguments, *self.constants)


class Interpreted:
    """A kernel as Triton's interpreter runs it, with tensors in the place of pointers."""

    def __init__(self, function: Any, constants: tuple[Any, ...]) -> None:
        self.function, self.constants = function, constants

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Run all programs, one after the other."""
        self.function[grid](*arguments, *self.constants)


class Kernel:
    """A Triton kernel, whose constants are its last arguments."""

    def __init__(self, function: Any, early: bool = False) -> None:
        """Take a kernel; `early`: its programs may begin before the last kernel has ended, and wait by themselves."""
        self.function, self.early = function, early
        self.name: str = function.__name__
        self.variants: dict[Any, Variant] = {}

    def variant(self, device: torch.device, dtype: torch.dtype, shape: Shape, *constants: Any) -> Variant | Interpreted:
        """Return the variant for these constants, compiled if this is the first time."""
        if device.type != "cuda":
            return Interpreted(self.function, constants)
        key = device, dtype, constants
        if key not in self.variants:
            self.variants[key] = Variant(self.compiled(dtype, shape, constants), constants, device.index)
        return self.variants[key]

    def compiled(self, dtype: torch.dtype, shape: Shape, constants: tuple[Any, ...], target: Any = None) -> Any:
        """Return the kernel compiled for the current device, or for another target."""
        names = self.function.arg_names
        given = dict(zip(names[-len(constants) :], constants, strict=True))
        signature: dict[str, Any] = {}
        aligned: dict[tuple[int, ...], Any] = {}
        for i, name in enumerate(names):
            kind = "constexpr" if name in given else TYPES.get(name, "i32")
            if name in OWN or (kind is MATRIX and given["ALIGN"] > 1):
                aligned[(i,) if name in OWN else (i, 0)] = [["tt.divisibility", 16]]
            signature[name] = _pointing(kind, POINTERS[dtype])
        fixed = {(names.index(name),): value for name, value in given.items()}
        source = ASTSource(fn=self.function, signature=signature, constexprs=fixed, attrs=aligned)
        options = {"num_warps": shape.warps, "maxnreg": shape.registers, "enable_fp_fusion": True}
        options |= {"launch_pdl": True} if self.early and given["EARLY"] else {}
        for stages in range(shape.stages, 0, -1):  # a smaller GPU may not have the memory to load so far ahead
            try:
                compiled: Any = triton.compile(source, target=target, options=options | {"num_stages": stages})
                if target is None:
                    compiled._init_handles()
                return compiled
            except OutOfResources:
                if stages == 1:
                    raise
        raise AssertionError("a shape has at least one stage")
