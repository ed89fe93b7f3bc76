"""Every kernel compiles for a Hopper GPU, though none is there: the interpreter takes much that the compiler refuses.

Real calls go as far as the launch, which compiles the kernel for just such constants instead of running it: this file,
started as a script, without the interpreter. `python test_compiles.py every` takes every mask with every bias.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lengthen import Ball, Bidirectional, Causal, Decay, Linear, Table, Window
from lengthen.attention.backends import triton
from lengthen.attention.problem import pose

SHARED = 227 * 1024  # bytes of shared memory that a program can have
HEADS, KEYS = 4, 1024
FORWARD, BACKWARD = "enclose forward repair", "bwd_dq farthest bwd_dkv gather fold"
Case = tuple[str, dict[str, Any]]  # the kernels to compile of a call, and the call


def bias_of(name: str) -> Any:
    """Return a bias by name; "learned" ones have gradients."""
    table = [torch.rand(HEADS, 100 if "extended" in name else KEYS) for _ in range(2)]
    parts = [torch.rand(HEADS), torch.rand(HEADS)] if "linear" in name else table
    parts = [x.requires_grad_("learned" in name) for x in parts]
    if name == "none":
        return None
    return Linear(*parts) if "linear" in name else Table(*parts, extended="extended" in name)


def mask_of(name: str) -> Any:
    """Return a mask by name."""
    kind, *padded = name.split()
    mask: Any = {"causal": Causal(), "window": Window(100), "full": Bidirectional()}[kind]
    return mask.padded(torch.tensor([0, 9])) if padded else mask


# In bfloat16 with head_dim 64, unless it says otherwise.
PARTS: dict[str, list[Case]] = {
    "forward": [
        (FORWARD, {"mask": "causal", "bias": "linear"}),
        (FORWARD, {"mask": "window", "bias": "table"}),
        (FORWARD, {"mask": "full", "bias": "linear", "dtype": torch.float16}),
        (FORWARD, {"mask": "full padded", "bias": "extended"}),
        (FORWARD, {"mask": "causal", "bias": "extended", "dtype": torch.float32}),
        (FORWARD, {"mask": "full", "bias": "none"}),
        (f"scale_rows {FORWARD}", {"mask": "window", "bias": "none", "decay": True, "queries": KEYS - 1}),
    ],
    "backward": [
        (BACKWARD, {"mask": "causal", "bias": "learned linear", "dim": 40}),
        (BACKWARD, {"mask": "window", "bias": "learned table", "key_heads": 2}),
        (BACKWARD, {"mask": "full", "bias": "learned linear"}),
        (BACKWARD, {"mask": "full padded", "bias": "learned extended", "key_heads": 2}),
        (BACKWARD, {"mask": "causal", "bias": "learned extended", "dtype": torch.float32}),
        (BACKWARD, {"mask": "full", "bias": "none", "dtype": torch.float16}),
        (f"scale_rows {BACKWARD}", {"mask": "window", "bias": "linear", "decay": True}),
    ],
    "decode": [
        ("split join", {"queries": 1, "mask": "causal", "bias": "linear"}),
        ("split join", {"queries": 3, "mask": "window", "bias": "linear", "dtype": torch.float32, "dim": 40}),
        ("split", {"queries": 1, "mask": "window", "bias": "none", "dtype": torch.float16}),
        ("split", {"queries": 2, "mask": "full", "bias": "linear"}),
        ("split", {"queries": 16, "mask": "full padded", "bias": "table", "key_heads": 1}),
        ("split join", {"queries": 1, "mask": "causal", "bias": "extended"}),
    ],
    "wide": [
        (names, {"bias": "learned table", "queries": queries, "dim": dim, "dtype": dtype})
        for dim, dtype in ((128, torch.bfloat16), (256, torch.float32))
        for names, queries in (("forward bwd_dq bwd_dkv gather", KEYS), ("split", 1))
    ],
    "every": [
        (f"{FORWARD} {BACKWARD} split join scale_rows", {"mask": mask, "bias": bias, "dtype": dtype, "decay": decay})
        for mask, bias, dtype, decay in itertools.product(
            ("causal", "window", "full", "full padded"),
            ("none", "linear", "learned linear", "learned table", "learned extended", "table", "extended"),
            (torch.bfloat16, torch.float16, torch.float32),
            (False, True),
        )
        if not (decay and ("full" in mask or bias.startswith("learned t") or bias.startswith("learned e")))
    ],
}

# What those calls must come to: the values of each kernel's constants that decide which of its lines are compiled.
EITHER, BIASES, PRECISIONS = {False, True}, {0, 1, 2, 3}, {"tf32", "tf32x3"}
PLAIN: dict[str, set[Any]] = {"BIAS": BIASES, "TWO_SIDED": EITHER, "EDGED": EITHER, "PRECISION": PRECISIONS}
PULLED = PLAIN | {"ALIGN": {1, 16}, "GROUPED": EITHER, "OF_BIAS": EITHER, "DECAY": EITHER}
BRANCHES: dict[str, dict[str, dict[str, set[Any]]]] = {
    "forward": {
        "enclose": {"BIAS": {1, 2, 3}},
        "forward": PLAIN | {"STEADY": EITHER, "DECAY": EITHER},
        "repair": PLAIN | {"STEADY": EITHER, "DECAY": EITHER},
        "scale_rows": {"GROW": EITHER},
    },
    "backward": {
        "bwd_dq": PULLED,
        "bwd_dkv": PULLED,
        "farthest": {},
        "gather": {"TWO_SIDED": EITHER, "PRECISION": PRECISIONS},
        "fold": {},
        "scale_rows": {"GROW": EITHER},
    },
    "decode": {
        "split": PLAIN | {"ROWS": {16, 64}, "REACH": EITHER, "STEADY": EITHER, "SEVERAL": EITHER, "ALIGN": {1, 16}},
        "join": {"REACH": EITHER},
    },
    "wide": {"forward": {"D": {128, 256}}, "bwd_dq": {}, "bwd_dkv": {}, "gather": {}, "split": {}},
}


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """Leave the kernels' own block shapes, and run nothing here in the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")


@pytest.mark.slow
@pytest.mark.parametrize("part", BRANCHES)
def test_kernels_compile_for_a_gpu_and_fit_into_its_shared_memory(part: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}  # nothing that was compiled before
    command = [sys.executable, __file__, part]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if any(one["error"] is not None and "Cannot find ptxas" in one["error"] for one in found):
        pytest.skip("this triton comes without ptxas")
    assert [one for one in found if one["error"] is not None] == []
    assert [one for one in found if not 0 <= one["shared"] <= SHARED] == []
    assert {one["kernel"] for one in found} == set(BRANCHES[part])
    for kernel, expected in BRANCHES[part].items():
        for name, values in expected.items():
            assert {one["constants"][name] for one in found if one["kernel"] == kernel} == values, f"{kernel}: {name}"


def test_no_kernel_is_left_out() -> None:
    launch = importlib.import_module("lengthen.attention.backends.triton.launch")
    assert set(launch.KERNELS) == {kernel for part in BRANCHES.values() for kernel in part}


def run(
    mask: str = "causal",
    bias: str = "none",
    decay: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    queries: int = KEYS,
    dim: int = 64,
    key_heads: int = HEADS,
) -> None:
    """Make a call; with many queries ask for its gradients too, and with few give a ball."""
    sizes = ((HEADS, queries), (key_heads, KEYS), (key_heads, KEYS))
    q, k, v = (torch.zeros(2, heads, length, dim, dtype=dtype) for heads, length in sizes)
    few, given = queries <= 16, bias_of(bias)
    leaves = [] if few else [x.requires_grad_() for x in (q, k, v)]
    leaves += [x for x in (() if given is None or few else given.tensors) if x.requires_grad]
    rate = 0.98 if dtype == torch.float16 else 0.9  # so fast that there are several segments
    fast = Decay(torch.full((dim,), rate)) if decay else None
    ball = Ball.around(k) if few else None
    with torch.set_grad_enabled(not few):
        out, lse = triton.run(pose(q, k, v, given, fast, mask_of(mask), ball=ball))
    if leaves:
        torch.autograd.grad(out.sum() + lse.sum(), leaves, allow_unused=True)


def main(part: str) -> None:
    """Compile a part's cases, and print a line of JSON for each variant: kernel, constants, shared memory, error."""
    from triton.backends.compiler import GPUTarget

    launch = importlib.import_module("lengthen.attention.backends.triton.launch")
    asked: set[str] = set()
    done: set[Any] = set()

    def variant(
        kernel: Any, device: torch.device, dtype: torch.dtype, shape: Any, *constants: Any
    ) -> Callable[..., None]:
        key = kernel.name, dtype, constants
        if kernel.name in asked and key not in done:
            done.add(key)
            shared, error = -1, None
            try:
                target = GPUTarget("cuda", 90, 32)
                shared = kernel.compiled(dtype, shape, constants, target=target).metadata.shared
            except Exception as failure:  # of whatever kind: the compiler has many
                error = f"{type(failure).__name__}: {failure}"[-2000:]
            by_name = dict(zip(kernel.function.arg_names[-len(constants) :], constants, strict=True))
            print(
                json.dumps({"kernel": kernel.name, "constants": by_name, "shared": shared, "error": error}), flush=True
            )
        return lambda grid, *arguments: None

    launch.Kernel.variant = variant
    launch.lets_begin_early = lambda device: True
    for names, call in PARTS[part]:
        asked.clear()
        asked.update(names.split())
        launch.widths_of.cache_clear()
        run(**call)


if __name__ == "__main__":
    main(sys.argv[1])
