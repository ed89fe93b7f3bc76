"""What the tests of the op share: the comparison with the definition, small runs, a record of what is read."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Linear, Table
from lengthen.attention.backends.chunked import backward, forward, runs, scores
from lengthen.attention.backends.chunked.runs import Run
from lengthen.attention.masks import positions

Call = dict[str, Any]  # the arguments of `lengthen.attention`
HOMES: dict[str, ModuleType] = {
    **dict.fromkeys(("ROWS", "LEAST", "WASTE", "GRAIN", "NUMBERS"), runs),
    **dict.fromkeys(("FEW", "SHORT", "USUAL", "UNIT", "TOGETHER", "CAREFUL"), forward),
    **dict.fromkeys(("TILE", "SAFE_EXPONENT"), scores),
    "WINDOWS": backward,
    "STEP": importlib.import_module("lengthen.attention.reach"),
}
SMALL: dict[str, float] = {
    **{"ROWS": 8, "LEAST": 4, "WASTE": 1.3, "GRAIN": 256, "NUMBERS": 512},
    **{"FEW": 0, "SHORT": 0, "USUAL": -31.0, "UNIT": 4, "TOGETHER": 16, "CAREFUL": 256},
    **{"TILE": 512, "SAFE_EXPONENT": 5.0, "WINDOWS": 300, "STEP": 5},
}


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same random numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def x_transformers() -> ModuleType:
    """Return the package of that name; importing it calls `torch.jit.script`, which torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("x_transformers.x_transformers")


@pytest.fixture(scope="session")
def small_runs() -> Callable[..., AbstractContextManager[None]]:
    """Return a context in which runs are small, so that a short sequence takes many: `small_runs(ROWS=4)`.

    `threads` is how many torch says that it has.
    """

    @contextmanager
    def use(threads: int | None = None, **constants: float) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (SMALL | constants).items():
                patch.setattr(HOMES[name], name, value)
            if threads is not None:
                patch.setattr(torch, "get_num_threads", lambda: threads)
            yield

    return use


@pytest.fixture(scope="session")
def constants() -> st.SearchStrategy[dict[str, float]]:
    """Return what to draw the constants of `small_runs` from."""
    return st.fixed_dictionaries(
        {
            "ROWS": st.integers(4, 16),
            "LEAST": st.integers(2, 8),
            "GRAIN": st.sampled_from([1, 64, 512, 4096]),
            "WASTE": st.sampled_from([1.0, 1.2, 2.0]),
            "NUMBERS": st.sampled_from([64, 512, 4096]),
            "FEW": st.integers(0, 8),
            "SHORT": st.integers(0, 30),
            "USUAL": st.sampled_from([-36.0, -31.0, -12.0, 11.0]),
            "UNIT": st.integers(1, 8),
            "TOGETHER": st.integers(0, 80),
            "CAREFUL": st.sampled_from([16, 256, 4096]),
            "TILE": st.sampled_from([32, 256, 1024, 4096]),
            "SAFE_EXPONENT": st.sampled_from([2.0, 20.0]),
            "WINDOWS": st.sampled_from([64, 512, 1 << 23]),
            "STEP": st.integers(3, 40),
            "threads": st.sampled_from([1, 3]),
        }
    )


@pytest.fixture(scope="session")
def recorded() -> Callable[[], AbstractContextManager[list[Run]]]:
    """Return a context that lists every run that is read, forward and backward."""

    @contextmanager
    def record() -> Iterator[list[Run]]:
        read: list[Run] = []
        attend, add = forward._Reading._attend, backward._Backward._add

        def spy_forward(reading: Any, run: Run, *rest: Any) -> Any:
            read.append(run)
            return attend(reading, run, *rest)

        def spy_backward(pulling: Any, run: Run) -> None:
            read.append(run)
            add(pulling, run)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward._Reading, "_attend", spy_forward)
            patch.setattr(backward._Backward, "_add", spy_backward)
            yield read

    return record


@pytest.fixture(scope="session")
def scores_read() -> Callable[[list[Run]], int]:
    """Return a function that counts the scores of recorded runs."""
    return lambda read: sum(run.scores for run in read)


@pytest.fixture(scope="session")
def spans() -> Callable[[Call], Tensor]:
    """Return a function that gives the keys [lo, hi) which each block of queries reads, `[2, batch, heads, blocks]`."""

    def read(call: Call) -> Tensor:
        from lengthen.attention.problem import pose

        with torch.no_grad():
            return forward.forward(pose(**{"mask": lengthen.Causal()} | call), False)[3]

    return read


@pytest.fixture(scope="session")
def documents() -> Callable[[int, int], st.SearchStrategy[Tensor]]:
    """Return a function that gives what to draw the starts of packed documents from, `[batch, length]`."""

    @st.composite
    def draw_starts(draw: st.DrawFn, batch: int, length: int) -> Tensor:
        rows = []
        for _ in range(batch):
            cuts = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4))
            begins = torch.zeros(length, dtype=torch.int64)
            begins[[cut for cut in cuts if cut < length]] = 1
            rows.append((begins * torch.arange(length)).cummax(dim=0).values)
        return torch.stack(rows)

    return draw_starts


def results(call: Call, backend: str | None, lse: bool, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return out, lse and all gradients of one call, by name; in another dtype where one is given."""
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        leaves[name] = (x if dtype is None else x.to(dtype)).detach().clone().requires_grad_()
        return leaves[name]

    bias, decay = call.get("bias"), call.get("decay")
    given = call | {name: leaf(f"d{name}", call[name]) for name in "qkv"}
    if bias is not None:
        name, kind = ("slopes", "slopes") if isinstance(bias, Linear) else ("values", "table")
        behind, ahead = leaf(f"d{kind}", bias.tensors[0]), leaf(f"d{kind} ahead", bias.tensors[1])
        given["bias"] = replace(bias, **{name: behind, "ahead": ahead})
    if decay is not None:
        given["decay"] = replace(decay, rates=leaf("drates", decay.rates))
    got = lengthen.attention(**given, backend=backend, return_lse=lse)
    found = {"out": got[0], "lse": got[1]} if lse else {"out": got}
    generator, loss, narrow = torch.Generator().manual_seed(7), 0, call["q"].dtype
    for name, x in found.items():  # upstream gradients are rounded as the call's own dtype has them, in every dtype
        rounded = narrow if name == "out" else torch.promote_types(narrow, torch.float32)
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, rounded).to(x.dtype)
        loss = loss + (x.where(x.isfinite(), 0) * weight).sum()
    loss.backward()
    found = {name: x.detach() for name, x in found.items()}
    return found | {name: x.grad if x.grad is not None else torch.zeros_like(x) for name, x in leaves.items()}


@pytest.fixture(scope="session")
def gradients() -> Callable[..., dict[str, Tensor]]:
    """Return a function that runs a call forward and backward, through lse too, and gives all results by name."""

    def run(
        call: Call, backend: str | None = "chunked", lse: bool = True, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        return results(call, backend, lse, dtype)

    return run


@pytest.fixture(scope="session")
def assert_as_defined() -> Callable[..., None]:
    """Return a function that checks out, lse and every gradient of a call against the reference in float64.

    Differences are measured against the largest entry of each result: `within` of it may be off.
    """

    def check(call: Call, backend: str | None = "chunked", lse: bool = True, **within: float) -> None:
        plain = {name: x for name, x in call.items() if name != "ball"}  # of keys in another dtype, and unread by it
        got, expected = results(call, backend, lse, None), results(plain, "reference", lse, torch.float64)
        assert got.keys() == expected.keys()
        for name, theirs in expected.items():
            finite = theirs[theirs.isfinite()]
            largest = max(1.0, finite.abs().max().item() if finite.numel() else 0.0)
            allowed = within.get(name, within.get("rest", 1e-10))
            torch.testing.assert_close(
                got[name].double(),
                theirs,
                rtol=0,
                atol=allowed * largest,
                msg=lambda text, name=name: f"{name}: {text}",
            )

    return check


@pytest.fixture(scope="session")
def table_for() -> Callable[..., Table]:
    """Return a function that makes a random table that ends at the farthest distance a query sees, or `spare` past."""

    def make(call: Call, ahead: bool, spare: int = 0, dtype: torch.dtype = torch.float64) -> Table:
        q, keys = call["q"], call["k"].shape[2]
        q_start = call.get("q_start")
        q_start = keys - q.shape[2] if q_start is None else q_start
        first, last = call["mask"].interval(q.shape[2], keys, q_start, q.device)
        position = positions(q.shape[2], q_start, q.device)
        ends = [int((x * (first <= last)).amax().clamp(min=0)) + 1 for x in (position - first, last - position)]
        ends = ends if ahead else [max(ends)]
        return Table(*(torch.randn(q.shape[1], end + spare, dtype=dtype).to(q.device) for end in ends))

    return make
