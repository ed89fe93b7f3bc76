"""Which variants of the kernels a call takes: they differ by constants alone, and have grids that CUDA takes."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lengthen import Ball, Blockwise, Causal, Linear, Table, Window
from lengthen.attention.backends import triton
from lengthen.attention.backends.triton import shapes
from lengthen.attention.problem import pose

Call = dict[str, Any]
Draw = Callable[..., Call]
SHAPES = dict(shapes.SHAPES)  # as they are, not as tests have them
BACKWARD = {"enclose", "forward", "repair", "bwd_dq", "farthest", "bwd_dkv"}


class Launches:
    """What would be launched: the variants, and their grids by kernel."""

    def __init__(self) -> None:
        self.variants: set[Any] = set()
        self.grids: dict[str, tuple[int, int, int]] = {}

    def of(self, call: Call, gradients: bool = True) -> set[Any]:
        """Return the variants of a call and, with gradients, of its backward."""
        self.variants.clear()
        launch_module().widths_of.cache_clear()
        leaves = [call[name].detach().requires_grad_(gradients) for name in "qkv"]
        out, lse = triton.run(pose(**call | dict(zip("qkv", leaves, strict=True))))
        if gradients:
            torch.autograd.grad(out.sum() + lse.sum(), leaves)
        return set(self.variants)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Return a record of launches, which are not made, in blocks as GPUs have them."""
    found = Launches()

    def variant(kernel: Any, device: torch.device, dtype: torch.dtype, shape: Any, *constants: Any) -> Any:
        found.variants.add((kernel.name, device, dtype, constants))
        return lambda grid, *arguments: found.grids.update({kernel.name: grid})

    for key, shape in SHAPES.items():
        monkeypatch.setitem(shapes.SHAPES, key, shape)
    monkeypatch.setattr(shapes, "SHORT", 512)
    monkeypatch.setattr(launch_module().Kernel, "variant", variant)
    return found


def launch_module() -> Any:
    return importlib.import_module("lengthen.attention.backends.triton.launch")


def some(
    draw: Draw, queries: int, *, batch: int = 2, keys: int = 900, key_heads: int = 2, layout: str = "", **rest: Any
) -> Call:
    """Return a call in bfloat16 with ALiBi."""
    call = draw(batch, 4, queries, 64, keys=keys, key_heads=key_heads, dtype=torch.bfloat16)
    if layout == "beside":
        call |= {name: call[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    elif layout == "unaligned":
        call["k"] = torch.randn(batch, key_heads, keys, 65).bfloat16()[..., 1:]
    return call | {"bias": Linear(torch.rand(4).requires_grad_(queries > 1))} | rest


ALIKE: dict[str, tuple[Call, Call]] = {  # calls that must not differ in what is compiled for them
    "keys": ({}, {"keys": 1616}),
    "a multiple of 16": ({"keys": 800}, {"keys": 801}),
    "batch": ({}, {"batch": 1}),
    "heads beside each other": ({}, {"layout": "beside"}),
    "unaligned": ({}, {"layout": "unaligned"}),
    "group": ({}, {"key_heads": 1}),
    "size of a window": ({"mask": Window(100)}, {"mask": Window(101)}),
    "window or blocks": ({"mask": Window(100)}, {"mask": Blockwise(64)}),
    "window or padding": ({"mask": Window(100)}, {"mask": Causal().padded(torch.tensor([0, 9]))}),
    "a window past everything": ({}, {"mask": Window(2**40)}),
    "where queries stand": ({}, {"q_start": 3}),
    "places of their own": ({}, {"q_start": torch.tensor([3, 5])}),
    "scale and tolerance": ({}, {"scale": 0.7, "tolerance": 1e-4}),
}


@pytest.mark.parametrize("queries", [1, 300], ids=["decoded", "many"])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_no_constant_compiles_nothing(name: str, queries: int, draw: Draw, launches: Launches) -> None:
    one, other = (launches.of(some(draw, queries, **change), gradients=queries > 1) for change in ALIKE[name])
    assert {x[0] for x in one} == ({"split", "join"} if queries == 1 else BACKWARD)
    assert one == other


@pytest.mark.parametrize(
    "change",
    [
        {"bias": None},
        {"bias": Table(torch.zeros(4, 900))},
        {"bias": Table(torch.zeros(4, 9), extended=True)},
        {"mask": Window(100)},
        {name: torch.zeros(1, 4, 900, 64).half() for name in "qkv"},
        {"v": torch.zeros(1, 4, 900, 40).bfloat16()},
    ],
    ids=["no bias", "table", "extended", "window", "float16", "width"],
)
def test_constants_give_variants_of_their_own(change: Call, draw: Draw, launches: Launches) -> None:
    call = draw(1, 4, 900, 64, dtype=torch.bfloat16) | {"bias": Linear(torch.rand(4))}
    one, other = launches.of(call), launches.of(call | change)
    assert {x for x in one if x[0] in ("forward", "bwd_dq", "bwd_dkv")}.isdisjoint(other)


@pytest.mark.parametrize("queries", [1, 20], ids=["decoded", "many"])
def test_a_grid_holds_a_batch_of_any_size(queries: int, draw: Draw, launches: Launches) -> None:
    batch = 70_000
    call = draw(batch, 2, queries, 1, keys=20) | {"bias": Linear(torch.tensor([0.5, 0.1]))}
    call["ball"] = Ball.around(call["k"])
    launches.of(call, gradients=queries > 1)
    expected = {"split", "join"} if queries == 1 else BACKWARD - {"enclose"}
    assert set(launches.grids) == expected
    assert all(grid[0] >= batch for grid in launches.grids.values())
    assert all(max(grid[1:]) <= 65_535 for grid in launches.grids.values())


@pytest.mark.parametrize("key", [key for key in SHAPES if key[0] == "forward"], ids=str)
def test_blocks_fit_together(key: tuple[str, int, int]) -> None:
    forward, dq, dkv, grad = (SHAPES[(name, *key[1:])] for name in ("forward", "bwd_dq", "bwd_dkv", "table_grad"))
    assert forward.queries % dq.queries == 0
    assert dq.queries % dkv.queries == 0  # bwd_dq fills up what bwd_dkv reads to whole blocks of its own queries
    assert grad.queries == grad.keys


@pytest.mark.parametrize("names", [("enclose", "forward", "repair"), ("bwd_dq", "farthest", "bwd_dkv")])
def test_kernels_that_follow_each_other_share_a_launcher(names: tuple[str, ...]) -> None:
    # Triton compiles one for each sequence of types, which takes longer than the small kernels do.
    kernels = [launch_module().KERNELS[name].function.fn for name in names]
    given = [inspect.signature(kernel).parameters.values() for kernel in kernels]
    variable = [[x.name for x in each if x.annotation is inspect.Parameter.empty] for each in given]
    assert len(variable[0]) > 12
    assert variable[0] == variable[1] == variable[2]
    assert len({len(each) for each in given}) == 1
