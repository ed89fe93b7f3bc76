"""The kernels in Triton's interpreter: on the CPU, with blocks so small that a short sequence takes many."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Table, Window
from lengthen.attention import Mask
from lengthen.attention.backends import triton
from lengthen.attention.backends.triton import shapes
from lengthen.attention.backends.triton.shapes import Shape
from lengthen.attention.problem import pose

Call = dict[str, Any]  # the arguments of `lengthen.attention`
SMALL = {
    "decode": Shape(16, 16, 4, 1),
    "forward": Shape(32, 16, 4, 1),
    "bwd_dq": Shape(16, 16, 4, 1),
    "bwd_dkv": Shape(16, 32, 4, 1),
    "table_grad": Shape(16, 16, 4, 1),
}
# Sums over distances lose a digit or two.
SUMS = {"dslopes": 1e-4, "dslopes ahead": 1e-4}


def load_interpreted() -> str:
    """Load the kernels as Triton's interpreter runs them; return why that cannot be, empty: they are loaded."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton"
    if torch.cuda.is_available():
        return "with a CUDA device the kernels are compiled; test_gpu.py has their tests"
    with pytest.MonkeyPatch.context() as patch:  # only now and in these tests: others would take it for an order
        patch.setenv("TRITON_INTERPRET", "1")
        kernel = importlib.import_module("lengthen.attention.backends.triton.launch").forward.forward
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
    launch = importlib.import_module("lengthen.attention.backends.triton.launch")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "INTERPRETED", True)
    monkeypatch.setattr(shapes, "SHORT", 0)
    for key in shapes.SHAPES:
        monkeypatch.setitem(shapes.SHAPES, key, SMALL[key[0]])
    monkeypatch.setattr(launch, "DECODERS", 6)  # so few programs that a head has several
    constant = type(launch.forward.AGAIN)  # Triton's constexpr
    monkeypatch.setattr(launch.forward, "AGAIN", constant(48))
    monkeypatch.setattr(launch.forward, "TAIL_STEP", constant(8))
    monkeypatch.setattr(launch.balls, "FLAT", constant(0.0))
    launch.widths_of.cache_clear()
    make_fast(monkeypatch)
    torch.use_deterministic_algorithms(True)  # then `torch.empty` holds NaN, and what reads it shows
    with np.errstate(all="ignore"), warnings.catch_warnings():  # of NumPy, in which the interpreter computes
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        yield
    torch.use_deterministic_algorithms(False)
    launch.widths_of.cache_clear()


def make_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter leave out what takes most of its time: the same tests take a third of it."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    # Whether a sum overflows is computed for every sum, and then not looked at.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    # Triton's language is patched at every call of a function, where once for each module will do.
    patch_and_call, patched = interpreter.InterpretedFunction.__call__, set()

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        module = function.fn.__module__
        if module.startswith("lengthen.") or module in patched:  # the launch does it for those that it calls
            return function.rewrite()(*arguments, **named)
        patched.add(module)
        return patch_and_call(function, *arguments, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


class Around(Mask):
    """A mask as somebody may write one: three keys on either side."""

    def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the interval."""
        return position - 3, position + 3


class EverySecond(Causal):
    """A mask made of another: odd queries see from the key before them on, even ones from eleven before."""

    def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the interval."""
        return torch.where(position % 2 == 1, position - 1, position - 11), position


def mask_of(name: str, length: int, device: str) -> Any:
    """Return a mask by name, such as "window padded", for 2 sequences of a length."""
    kind, *more = name.split()
    mask: Any = {
        "causal": Causal(),
        "window": Window(length // 4 + 1),
        "blockwise": Blockwise(length // 5 + 1),
        "full": Bidirectional(),
        "around": Around(),
        "second": EverySecond(),
    }[kind]
    if "padded" in more:
        mask = mask.padded(*torch.tensor([[0, length // 2 + 3], [length - length // 4, length]], device=device))
    if "packed" in more:
        starts = [torch.arange(length) // size * size for size in (length // 2 + 5, length // 3 + 1)]
        mask = mask.packed(torch.stack(starts).to(device))
    return mask


@pytest.fixture(scope="session")
def draw(table_for: Callable[..., Table]) -> Callable[..., Call]:
    """Return a function that draws queries, keys and values, with a mask and a bias by name, such as "table ahead"."""

    def make(
        batch: int,
        heads: int,
        queries: int,
        head_dim: int = 16,
        keys: int | None = None,
        key_heads: int | None = None,
        value_dim: int | None = None,
        mask: str = "causal",
        bias: str = "none",
        q_start: Any = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Call:
        keys, key_heads = keys or queries, key_heads or heads
        sizes = ((heads, queries, head_dim), (key_heads, keys, head_dim), (key_heads, keys, value_dim or head_dim))
        q, k, v = (torch.randn(batch, *size).to(device, dtype) for size in sizes)
        call: Call = {"q": q, "k": k, "v": v, "mask": mask_of(mask, keys, device), "bias": None, "q_start": q_start}
        kind, ahead = bias.split()[0], "ahead" in bias
        if kind == "linear":
            slopes = 2.0 ** -torch.linspace(0.5, 5, heads, device=device)
            call["bias"] = Linear(slopes, 1.5 * slopes.flip(0) if ahead else None)
        elif kind == "table":
            call["bias"] = table_for(call, ahead=ahead, dtype=torch.float32)
        elif kind == "extended":
            parts = [torch.randn(heads, n, device=device) for n in (13, 9)[: 1 + ahead]]
            call["bias"] = Table(*parts, extended=True)
        return call

    return make


@pytest.fixture(scope="session")
def check(assert_as_defined: Callable[..., None]) -> Callable[..., None]:
    """Return a function that checks the kernels' out, lse and gradients of a call against the reference in float64."""

    def compare(call: Call, **within: float) -> None:
        assert_as_defined(call, "triton", **{"rest": 1e-5} | SUMS | within)

    return compare


@pytest.fixture(scope="session")
def check_forward() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that checks out and lse of a call without gradients, and returns them.

    The reference computes in float64, or in a dtype that is given: weights vanish at the same distance in the same one.
    """

    def compare(
        call: Call, dtype: torch.dtype = torch.float64, within: float = 1e-5, backend: str | None = "triton"
    ) -> tuple[Tensor, Tensor]:
        wide = call | {name: call[name].to(dtype) for name in "qkv"}
        with torch.no_grad():
            got = lengthen.attention(**call, backend=backend, return_lse=True)
            expected = lengthen.attention(
                **{name: x for name, x in wide.items() if name != "ball"}, backend="reference", return_lse=True
            )
        assert got[0].dtype == call["q"].dtype
        assert got[1].dtype == torch.float32
        for name, ours, theirs in zip(("out", "lse"), got, expected, strict=True):
            torch.testing.assert_close(
                ours.to(dtype),
                theirs,
                rtol=within,
                atol=within,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        return got

    return compare


@pytest.fixture(scope="session")
def spans() -> Callable[[Call], Tensor]:
    """Return a function that gives the keys [lo, hi) which the kernels read, `[2, batch, heads, query blocks]`."""
    return lambda call: triton.spans(pose(**call))


@pytest.fixture
def flags() -> Callable[[Call], Tensor]:
    """Return a function that gives what the forward flags for repair, `[2, batch, heads, blocks]`: lost, not finite."""
    return lambda call: triton.attend(pose(**call), False)[3][4:]


@pytest.fixture(scope="session")
def any_call(
    draw: Callable[..., Call], documents: Callable[..., Any], table_for: Callable[..., Table]
) -> Callable[..., Call]:
    """Return a function that draws any call that the kernels take, decays apart."""

    def draw_call(data: st.DataObject, most_queries: int = 55) -> Call:
        torch.manual_seed(data.draw(st.integers(0, 99), label="seed"))
        batch, key_heads, group = data.draw(st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 1, 1)]))
        head_dim = data.draw(st.sampled_from([16, 24, 40, 1]), label="head_dim")
        value_dim = data.draw(st.sampled_from([None, 16, 24, 3]), label="value_dim")
        queries = data.draw(st.integers(1, most_queries), label="queries")
        keys = data.draw(st.one_of(st.just(queries), st.integers(1, 75), st.sampled_from([16, 32, 64])), label="keys")
        heads = key_heads * group
        call = draw(batch, heads, queries, head_dim, keys=keys, key_heads=key_heads, value_dim=value_dim)
        place = st.one_of(st.integers(-queries - 3, keys + 3), st.integers(keys + 20, keys + 60))
        q_start = data.draw(st.one_of(st.none(), place) if queries <= keys else place, label="q_start")
        stands = keys - queries if q_start is None else q_start
        if batch > 1 and data.draw(st.booleans(), label="places of their own"):
            q_start = torch.tensor([stands, data.draw(place)])
        mask: Any = data.draw(
            st.one_of(
                st.sampled_from([Causal(), Bidirectional()]),
                st.builds(Window, st.integers(1, 40)),
                st.builds(Blockwise, st.integers(1, 40)),
            ),
            label="mask",
        )
        kind = data.draw(st.sampled_from(["plain", "padded", "packed"]), label="kind")
        if kind == "packed" and stands >= 0 and stands + queries <= keys and not isinstance(q_start, Tensor):
            mask = mask.packed(data.draw(documents(data.draw(st.sampled_from([1, batch])), keys)))
        elif kind == "padded":
            ends = [torch.tensor([data.draw(st.integers(0, keys + 2)) for _ in range(batch)]) for _ in range(2)]
            mask = mask.padded(ends[0], data.draw(st.sampled_from([None, ends[1]])))
        call |= {"mask": mask, "q_start": q_start}
        call["scale"] = data.draw(st.sampled_from([None, 0.3, -0.5, 0.0]), label="scale")
        call["tolerance"] = data.draw(st.sampled_from([None, 0, 1e-6]), label="tolerance")
        bias = data.draw(st.sampled_from(["none", "linear", "table", "extended"]), label="bias")
        ahead, wide = data.draw(st.booleans()), data.draw(st.sampled_from([torch.float32, torch.float64]))
        if bias == "linear":
            slopes = 2.0 ** -torch.linspace(-1, 7, 2 * heads, dtype=wide)[torch.randperm(2 * heads)]
            call["bias"] = Linear(slopes[:heads], slopes[heads:] if ahead else None)
        elif bias == "table":
            call["bias"] = table_for(call, ahead, spare=data.draw(st.integers(0, 20)), dtype=wide)
        elif bias == "extended":
            ends = [data.draw(st.integers(1, 40)) for _ in range(1 + ahead)]
            call["bias"] = Table(*(torch.randn(heads, end, dtype=wide) for end in ends), extended=True)
        return call

    return draw_call
