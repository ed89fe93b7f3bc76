"""The kernels in Triton's interpreter: on the CPU, with blocks so small that a short sequence takes many."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Window
from lengthen.attention import kernels
from lengthen.attention.kernels import shapes
from lengthen.attention.kernels.shapes import Shape

Call = dict[str, Any]  # the arguments of `lengthen.attention`
SMALL = {
    "decode": Shape(16, 16, 4, 1),
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
    with pytest.MonkeyPatch.context() as patch:  # only now and in these tests: others would take it for an order
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("lengthen.attention.kernels.launch")
        kernel = importlib.import_module("lengthen.attention.kernels.forward").forward
    return "" if type(kernel).__name__ == "InterpretedFunction" else "Triton was imported without its interpreter"


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
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    forward = importlib.import_module("lengthen.attention.kernels.forward")
    monkeypatch.setattr(shapes, "SHORT", 0)
    for key in shapes.SHAPES:
        monkeypatch.setitem(shapes.SHAPES, key, SMALL[key[0]])
    ball = importlib.import_module("lengthen.attention.kernels.ball")
    constant = type(forward.AGAIN)  # Triton's constexpr
    monkeypatch.setattr(forward, "AGAIN", constant(48))
    monkeypatch.setattr(ball, "FLAT", constant(0.0))
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
            return table_for({"mask": Causal()} | call, ahead=name == "table ahead", dtype=torch.float32)
        slopes = 2.0 ** -torch.linspace(0.5, 5, heads, device=device)
        return Linear(slopes, 1.5 * slopes.flip(0) if name == "linear ahead" else None)

    return make


@pytest.fixture(scope="session")
def off() -> Callable[..., dict[str, float]]:
    """Return a function that says how far a call's results are from the reference's in float64, relative to its norms.

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
            behind, ahead = map(leaf, ("dbias", "dbias ahead"), call["bias"].tensors)
            name = "slopes" if isinstance(call["bias"], Linear) else "values"
            given["bias"] = replace(call["bias"], **{name: behind, "ahead": ahead})
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


@pytest.fixture(scope="session")
def any_call(
    qkv: Callable[..., Call],
    documents: Callable[..., st.SearchStrategy[Tensor]],
    table_for: Callable[..., Any],
) -> Callable[[st.DataObject], Call]:
    """Return a function that draws any call that the kernels take."""

    def draw_call(data: st.DataObject) -> Call:
        torch.manual_seed(data.draw(st.integers(0, 99), label="seed"))
        batch, key_heads, group = data.draw(st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 1, 1)]))
        head_dim = data.draw(st.sampled_from([16, 24, 40, 80, 1]), label="head_dim")
        value_dim = data.draw(st.sampled_from([None, 16, 24, 40, 3]), label="value_dim")
        queries = data.draw(st.one_of(st.just(1), st.integers(2, 55), st.sampled_from([16, 32, 48])), label="queries")
        keys = data.draw(st.one_of(st.just(queries), st.integers(1, 75), st.sampled_from([16, 32, 64])), label="keys")
        call = qkv(batch, key_heads * group, queries, head_dim, keys=keys, key_heads=key_heads, value_dim=value_dim)
        q_start = data.draw(
            st.one_of(st.none(), st.integers(-queries - 3, keys + 3), st.integers(keys + 20, keys + 60)),
            label="q_start",
        )
        mask: Any = data.draw(
            st.one_of(
                st.sampled_from([Causal(), Bidirectional()]),
                st.builds(Window, st.integers(1, 40)),
                st.builds(Blockwise, st.integers(1, 40)),
            ),
            label="mask",
        )
        stands = keys - queries if q_start is None else q_start
        kind = data.draw(st.sampled_from(["plain", "padded", "packed"]), label="kind")
        if kind == "packed" and stands >= 0 and stands + queries <= keys:
            mask = mask.packed(data.draw(documents(data.draw(st.sampled_from([1, batch])), keys)))
        elif kind == "padded":
            rows = data.draw(st.sampled_from([1, batch]))
            mask = mask.padded(torch.tensor([data.draw(st.integers(0, keys + 2)) for _ in range(rows)]))
        call |= {"mask": mask, "q_start": q_start}
        call["scale"] = data.draw(st.sampled_from([None, 0.3, -0.5, 0.0]), label="scale")
        call["tolerance"] = data.draw(st.sampled_from([None, 0, 1e-6]), label="tolerance")
        bias, ahead = data.draw(st.sampled_from(["none", "linear", "table"]), label="bias"), data.draw(st.booleans())
        wide = data.draw(st.sampled_from([torch.float32, torch.float64]), label="the bias's dtype")
        if bias == "linear":
            heads = key_heads * group
            slopes = 2.0 ** -torch.linspace(-1, 7, 2 * heads, dtype=wide)[torch.randperm(2 * heads)]
            call["bias"] = Linear(slopes[:heads], slopes[heads:] if ahead else None)
        elif bias == "table":
            call["bias"] = table_for(call, ahead, spare=data.draw(st.integers(0, 20)), dtype=wide)
        return call

    return draw_call
