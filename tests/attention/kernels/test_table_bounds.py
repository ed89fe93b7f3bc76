"""The kernels read no further than a table and the room before it: both ends lie against memory that may not be read.

Tiles look up hidden distances too, so what they read is more than what they use. A read outside would be a segmentation
fault, hence this file, started as a script.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Table, Window
from lengthen.attention.kernels import shapes

PAGE, READ_WRITE, PRIVATE_ANONYMOUS = 4096, 3, 0x22
SHAPES = dict(shapes.SHAPES)  # as they are, not as tests have them

# A mask, queries, keys, how far the table goes, its level, and whether it has a side of its own for keys ahead.
CASES: dict[str, tuple[Any, int, int, int, int | None, bool]] = {
    "causal": (Causal(), 44, 44, 44, None, False),
    "one query": (Causal(), 1, 37, 37, None, False),
    "few queries": (Causal(), 5, 37, 37, None, False),
    "more keys than queries": (Causal(), 17, 44, 44, None, False),
    "level": (Causal(), 70, 70, 70, 9, False),
    "a table that ends with the window": (Window(13), 44, 44, 13, None, False),
    "blocks": (Blockwise(8), 44, 44, 16, None, False),
    "keys ahead": (Bidirectional(), 36, 36, 36, None, False),
    "two tables": (Bidirectional(), 36, 36, 36, None, True),
    "packed": (Causal().packed((torch.arange(40) // 17 * 17)[None]), 40, 40, 17, None, False),
}


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """Run nothing here in the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    if torch.cuda.is_available():
        pytest.skip("with a CUDA device the kernels are compiled")
    if sys.platform != "linux":
        pytest.skip("guards pages as Linux does")


@pytest.mark.parametrize("end", ["first", "last"])
def test_nothing_outside_a_table_is_read(end: str) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, __file__, end], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.split("\n")[:-1] == list(CASES), done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_room_before_a_table_holds_any_block() -> None:
    launch = importlib.import_module("lengthen.attention.kernels.launch")
    assert max(shape.queries + shape.keys for shape in SHAPES.values()) <= launch.AHEAD


def guarded(x: torch.Tensor, end: str) -> torch.Tensor:
    """Return a copy of numbers whose first or last lies against a page that may not be read."""
    libc: Any = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = x.numel() * x.element_size()
    inner = -(-size // PAGE) * PAGE
    base = libc.mmap(None, inner + 2 * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
    for page in (base, base + PAGE + inner):
        assert libc.mprotect(page, PAGE, 0) == 0
    at = base + PAGE + (inner - size if end == "last" else 0)
    copy = torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=x.dtype)
    return copy.copy_(x)


def main(end: str) -> None:
    """Run every case forward and backward, and print its name when it is done."""
    launch = importlib.import_module("lengthen.attention.kernels.launch")
    joined = launch._joined

    def joined_and_guarded(*arguments: Any) -> tuple[torch.Tensor, int]:
        table, stride = joined(*arguments)
        whole = torch.empty(0).set_(table.untyped_storage())
        return guarded(whole, end)[table.storage_offset() :], stride

    launch._joined = joined_and_guarded
    launch.DECODERS = 6
    for key, shape in SHAPES.items():
        small = 16 if key[0] in ("decode", "of_queries", "of_table") else 32
        shapes.SHAPES[key] = shapes.Shape(small, 32 if key[0] == "of_keys" else 16, shape.warps, 1)
    for name, (mask, queries, keys, far, level, two) in CASES.items():
        q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for length in (queries, keys, keys))
        values = torch.randn(1, far)
        if level is not None:
            values[:, level:] = values[:, level : level + 1]
        bias = Table(values.requires_grad_(), torch.randn(1, far) if two else None, level)
        with torch.no_grad():
            lengthen.attention(q, k, v, bias, mask=mask, backend="triton")
        out = lengthen.attention(q, k, v, bias, mask=mask, backend="triton")
        torch.autograd.grad(out.sum(), (q, k, v, values))
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
