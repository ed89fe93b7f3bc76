"""Every kernel compiles for a Hopper GPU, though none is there: the interpreter takes much that the compiler refuses.

Real calls go as far as the launch, which compiles the kernel for just such arguments instead of running it: this file,
started as a script, without the interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window
from lengthen.attention import kernels

SHARED = 227 * 1024  # bytes of shared memory that a program can have
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
HEADS, DIM, KEYS = 4, 64, 1024


def slopes() -> Linear:
    return Linear(torch.rand(HEADS), torch.rand(HEADS))


def table(level: int | None = None) -> Table:
    return Table(torch.rand(HEADS, KEYS), torch.rand(HEADS, KEYS), level)


def padded(mask: Any) -> Any:
    return mask.padded(torch.tensor([0, 100]))


# The kernels to compile of a call, and the call: in bfloat16 with as many queries as keys, unless it says otherwise.
Case = tuple[str, dict[str, Any]]
DECAY = Decay(torch.full((DIM,), 0.9))  # so fast that the keys are in three segments
CASES: dict[str, Callable[[], list[Case]]] = {
    "forward": lambda: [
        ("ball forward", {"mask": Causal(), "bias": slopes()}),
        ("forward", {"mask": Window(100), "bias": slopes(), "key_norm": True}),
        ("forward repair", {"mask": Bidirectional(), "bias": slopes()}),
        ("forward repair", {"mask": padded(Blockwise(64)), "bias": table()}),
        ("scale_rows forward repair", {"mask": Blockwise(64), "decay": DECAY}),
        ("forward", {"mask": Causal(), "bias": table(level=100)}),
        ("forward", {"mask": Causal(), "bias": slopes(), "dtype": torch.float16}),
        ("forward", {"mask": Causal(), "dtype": torch.float32}),
    ],
    "backward": lambda: [
        ("of_queries of_keys", {"mask": Causal(), "bias": slopes(), "wanted": "all"}),
        ("of_queries of_keys", {"mask": Bidirectional(), "bias": slopes(), "wanted": "all"}),
        ("of_queries of_keys", {"mask": Window(100), "queries": KEYS - 1, "wanted": "out"}),
        ("of_queries of_keys", {"mask": Causal(), "bias": table(level=100), "wanted": "out"}),
        ("scale_rows of_queries of_keys", {"mask": Blockwise(64), "decay": DECAY, "wanted": "out"}),
        ("of_queries of_keys gather fold", {"mask": padded(Causal()), "bias": table(), "wanted": "all"}),
        ("gather", {"mask": Bidirectional(), "bias": table(), "wanted": "out"}),
        ("of_queries of_keys", {"mask": Causal(), "dtype": torch.float32, "wanted": "out"}),
    ],
    "decoding": lambda: [
        ("split join", {"queries": 1, "mask": Causal(), "bias": slopes(), "key_norm": True}),
        ("split", {"queries": 3, "mask": Window(100), "bias": slopes(), "key_norm": True}),
        ("split", {"queries": 1, "mask": Blockwise(64), "dtype": torch.float16}),
        ("split", {"queries": 2, "mask": Bidirectional(), "bias": slopes()}),
        ("split", {"queries": 4, "mask": padded(Causal()), "bias": table()}),
        ("split join", {"queries": 2, "mask": Causal(), "bias": slopes(), "key_norm": True, "dtype": torch.float32}),
    ],
}

# What those calls must come to: the values of each kernel's constants that decide which of its lines are compiled.
EITHER, MASKS, BIASES, PRECISIONS = {False, True}, {0, 1, 2, 3, 4}, {0, 1, 2}, {"tf32", "tf32x3"}
PLAIN: dict[str, set[Any]] = {"MASK": MASKS, "BIAS": {*BIASES, 3}, "TWO_SIDED": EITHER, "PRECISION": PRECISIONS}
BRANCHES: dict[str, dict[str, dict[str, set[Any]]]] = {
    "forward": {
        "ball": {},
        "scale_rows": {"GROW": {True}},
        "forward": PLAIN | {"REACH": {0, 1, 2}, "STEADY": EITHER, "DECAY": EITHER},
        "repair": {"MASK": {2, 3, 4}, "BIAS": BIASES, "TWO_SIDED": EITHER, "DECAY": EITHER},
    },
    "backward": {
        "of_queries": PLAIN | {"SLOPES": EITHER, "ORDERED": EITHER, "LSE": EITHER, "DECAY": EITHER},
        "of_keys": PLAIN | {"ORDERED": EITHER, "DECAY": EITHER, "FILLED": EITHER},
        "gather": {"MASK": {3, 4}},
        "scale_rows": {"GROW": EITHER},
        "fold": {},
    },
    "decoding": {"split": PLAIN | {"BIAS": BIASES, "REACH": {0, 2}, "STEADY": EITHER, "SEVERAL": EITHER}, "join": {}},
}


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """Leave the kernels' own block shapes, and run nothing here in the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")


@pytest.mark.slow
@pytest.mark.parametrize("part", CASES)
def test_kernels_compile_for_a_gpu_and_fit_into_its_shared_memory(part: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}  # nothing that was compiled before
    command = [sys.executable, __file__, part]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if any(one["error"] is not None and "Cannot find ptxas" in one["error"] for one in found):
        pytest.skip("this triton comes without ptxas")
    assert [one for one in found if one["error"] is not None] == []
    assert [one for one in found if not 0 <= one["shared"] <= SHARED] == []
    for kernel, expected in BRANCHES[part].items():
        compiled = [one["constants"] for one in found if one["kernel"] == kernel]
        assert compiled, kernel
        for name, values in expected.items():
            assert {constants[name] for constants in compiled} == values, f"{kernel}: {name}"


def test_no_kernel_is_left_out() -> None:
    launch = importlib.import_module("lengthen.attention.kernels.launch")
    launcher = importlib.import_module("lengthen.attention.kernels.launcher")
    launched = {x.kernel.fn.__name__ for x in vars(launch).values() if isinstance(x, launcher.Launcher)}
    assert launched == {kernel for part in BRANCHES.values() for kernel in part}


def run(
    mask: Any,
    bias: Any = None,
    decay: Decay | None = None,
    dtype: torch.dtype = torch.bfloat16,
    queries: int = KEYS,
    key_norm: bool = False,
    wanted: str = "",
) -> None:
    """Make a call, and ask for the gradients of everything or those that out gives to queries, keys and values."""
    q, k, v = (torch.zeros(2, HEADS, length, DIM, dtype=dtype) for length in (queries, KEYS, KEYS))
    leaves = [q, k, v] if wanted else []
    if wanted == "all" or (isinstance(bias, Table) and wanted):
        leaves += [x for x in bias.tensors if x is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    norm = torch.ones(2, HEADS) if key_norm else None
    out, lse = kernels.attention(q, k, v, bias, decay, mask, 0.125, KEYS - queries, 1e-3, norm)
    if wanted:
        loss = out.sum() + lse.sum() if wanted == "all" else out.sum()
        torch.autograd.grad(loss, leaves, allow_unused=True)


def compiled(
    kernel: Any,
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, ...],
    sizes: tuple[int, ...],
    floats: tuple[float, ...],
    constants: tuple[Any, ...],
    options: dict[str, int],
) -> Any:
    """Return the kernel as a Hopper GPU would have it for these arguments, by what Triton looks at in each."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = [POINTERS[x.dtype] for x in tensors] + ["constexpr" if x == 1 else "i32" for x in strides]
    special = len(kinds)  # arguments whose values are looked at; Triton must look at the same
    looked_at = [not x.do_not_specialize for x in kernel.params[len(tensors) :]]
    assert looked_at[: len(strides) + len(sizes)] == [True] * len(strides) + [False] * len(sizes)
    kinds += ["i32"] * len(sizes) + ["fp32"] * len(floats) + ["constexpr"] * len(constants)
    values = [x.data_ptr() for x in tensors] + [*strides, *sizes, *floats, *constants]
    signature = dict(zip(kernel.arg_names, kinds, strict=True))
    fixed, aligned = {}, {}
    for i, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        if kind == "constexpr":
            fixed[(i,)] = value
        elif i < special and value % 16 == 0:
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main(part: str) -> None:
    """Compile a part's cases, and print a line of JSON for each: kernel, constants, shared memory, error."""
    from lengthen.attention.kernels.launcher import Launcher

    asked: set[str] = set()

    def launch(
        self: Launcher,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        strides: tuple[int, ...],
        sizes: tuple[int, ...],
        floats: tuple[float, ...],
        constants: tuple[Any, ...],
        warps: int,
        stages: int,
        registers: int | None = None,
        known: Any = None,
        early: bool = False,
    ) -> None:
        kernel = self.kernel
        if kernel.__name__ not in asked:
            return
        options = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
        shared, error = -1, None
        try:
            shared = compiled(kernel, tensors, strides, sizes, floats, constants, options).metadata.shared
        except Exception as failure:  # of whatever kind: the compiler has many
            error = f"{type(failure).__name__}: {failure}"[-2000:]
        by_name = dict(zip(kernel.arg_names[-len(constants) :], constants, strict=True))
        print(json.dumps({"kernel": kernel.__name__, "constants": by_name, "shared": shared, "error": error}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launcher, "__call__", launch)
        patch.setattr(
            importlib.import_module("lengthen.attention.kernels.launch"), "lets_begin_early", lambda device: True
        )
        for names, call in CASES[part]():
            asked.clear()
            asked.update(names.split())
            run(**call)


if __name__ == "__main__":
    main(sys.argv[1])
