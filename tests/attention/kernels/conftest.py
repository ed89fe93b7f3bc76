"""The kernels in Triton's interpreter: on the CPU, with blocks so small that a short sequence takes many."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Window
from lengthen.attention import kernels
from lengthen.attention.kernels import shapes
from lengthen.attention.kernels.shapes import Shape

Call = dict[str, Any]  # the arguments of `lengthen.attention`
SMALL = {
    "forward": Shape(32, 16, 4, 1),
    "of_queries": Shape(16, 16, 4, 1),
    "of_keys": Shape(16, 32, 4, 1),
    "of_table": Shape(16, 16, 4, 1),
}


def load_interpreted() -> str:
    """Load the kernels as Triton's interpreter runs them; return why that cannot be, empty: they are loaded."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton"
    if torch.cuda.is_available():
        return "with a CUDA device the kernels are compiled; test_gpu.py has their tests"
    with pytest.MonkeyPatch.context() as patch:  # only now: left in place, it would be an order to all other tests
        patch.setenv("TRITON_INTERPRET", "1")
        forward = importlib.import_module("lengthen.attention.kernels.forward").forward
        importlib.import_module("lengthen.attention.kernels.launch")
    return "" if type(forward).__name__ == "InterpretedFunction" else "Triton was imported without its interpreter"


UNINTERPRETED = load_interpreted()


@pytest.fixture(autouse=True)
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels in the interpreter, in small blocks, and with reach at any length."""
    if request.node.get_closest_marker("gpu") is not None:
        yield
        return
    if UNINTERPRETED:
        pytest.skip(UNINTERPRETED)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(shapes, "SHORT", 0)
    for key in shapes.SHAPES:
        monkeypatch.setitem(shapes.SHAPES, key, SMALL[key[0]])
    with np.errstate(all="ignore"):  # the interpreter computes in NumPy, which warns of ∞ and NaN; a GPU does not
        yield


@pytest.fixture(scope="session")
def qkv() -> Callable[..., Call]:
    """Return a function that draws queries, keys and values."""

    def draw(
        batch: int,
        heads: int,
        queries: int,
        head_dim: int,
        *,
        keys: int | None = None,
        key_heads: int | None = None,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Call:
        keys, key_heads = queries if keys is None else keys, heads if key_heads is None else key_heads
        widths = {"q": (heads, queries, head_dim), "k": (key_heads, keys, head_dim)}
        widths["v"] = (key_heads, keys, head_dim if value_dim is None else value_dim)
        return {name: torch.randn(batch, *shape).to(device, dtype) for name, shape in widths.items()}

    return draw


@pytest.fixture(scope="session")
def mask_of() -> Callable[..., Any]:
    """Return a function that makes a mask by name, such as "window padded", for 2 sequences of a length."""

    def make(name: str, length: int, device: str = "cpu") -> Any:
        kind, *more = name.split()
        mask: Any = {
            "causal": Causal(),
            "window": Window(length // 4 + 1),
            "blockwise": Blockwise(length // 5 + 1),
            "full": Bidirectional(),
        }[kind]
        position = torch.arange(length)
        if "padded" in more:
            mask = mask.padded(torch.tensor([0, length // 2 + 3], device=device))
        if "packed" in more:
            starts = [position // size * size for size in (length // 2 + 5, length // 3 + 1)]
            mask = mask.packed(torch.stack(starts).to(device))
        return mask

    return make


@pytest.fixture(scope="session")
def bias_of(table_for: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a bias by name, such as "linear ahead", for a call."""

    def make(name: str, call: Call) -> Any:
        heads, device = call["q"].shape[1], call["q"].device
        if name == "none":
            return None
        if name.startswith("table"):
            return table_for(call, ahead=name == "table ahead", dtype=torch.float32)
        slopes = 2.0 ** -torch.linspace(0.5, 5, heads, device=device)
        return Linear(slopes, 1.5 * slopes.flip(0) if name == "linear ahead" else None)

    return make


@pytest.fixture(scope="session")
def off() -> Callable[..., dict[str, float]]:
    """Return a function that says how far a call's results are from the reference's in float64, relative to their norms.

    Of out, lse and each gradient, by name. What is not finite must be the same.
    """

    def results(call: Call, backend: str | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
        leaves: dict[str, Tensor] = {}

        def leaf(name: str, x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            leaves[name] = (x if dtype is None else x.to(dtype)).detach().clone().requires_grad_()
            return leaves[name]

        given = call | {name: leaf(f"d{name}", call[name]) for name in "qkv"}
        if call.get("bias") is not None:
            given["bias"] = type(call["bias"])(*map(leaf, ("dbias", "dbias ahead"), call["bias"].tensors))
        out, lse = lengthen.attention(**given, backend=backend, return_lse=True)
        generator = torch.Generator().manual_seed(7)
        d_out = torch.randn(out.shape, generator=generator).to(call["q"])  # rounded as out's own dtype would have it
        d_lse = torch.randn(lse.shape, generator=generator).to(lse.device)
        loss = (out * d_out.to(out)).sum() + (lse.where(lse.isfinite(), 0) * d_lse).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return {"out": out.detach(), "lse": lse.detach()} | dict(zip(leaves, grads, strict=True))

    def compare(call: Call, backend: str | None = "triton") -> dict[str, float]:
        ours, theirs = results(call, backend, None), results(call, "reference", torch.float64)
        found = {}
        for name, expected in theirs.items():
            got, usual = ours[name].double(), expected.isfinite()
            torch.testing.assert_close(got[~usual], expected[~usual], rtol=0, atol=0, equal_nan=True, msg=name)
            size = expected[usual].norm().clamp(min=1e-3)
            found[name] = ((got[usual] - expected[usual]).norm() / size).item()
        return found

    return compare


@pytest.fixture(scope="session")
def share_read() -> Callable[..., float]:
    """Return a function that gives the share of what a mask shows that the kernels read, of each head `[heads]`."""

    def share(call: Call) -> Tensor:
        everything = kernels.spans(**call | {"tolerance": 0})
        read = kernels.spans(**call)
        assert bool((read[0] >= everything[0]).all())
        assert bool((read[1] <= everything[1]).all())
        return (read[1] - read[0]).sum((0, 2)) / (everything[1] - everything[0]).sum((0, 2))

    return share
