"""What the tests of the op share: the comparison with the definition, small tiles, a record of what is read."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Decay, Linear, Table
from lengthen.attention import chunked, tiles
from lengthen.attention.tiles import Tile

Call = dict[str, Any]  # the arguments of `lengthen.attention`
Read = tuple[slice, slice, slice, int, int]  # sequences, heads, queries, and the keys [lo, hi) they loaded
HOMES: dict[str, ModuleType] = {
    **dict.fromkeys(("TILE", "ROWS", "TALL", "NEAR", "FEW", "FAR", "USUAL_REACH"), tiles),
    "AGAIN": chunked,
    "STEP": importlib.import_module("lengthen.attention.reach"),
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
def small_tiles() -> Callable[..., AbstractContextManager[None]]:
    """Return a context in which tiles are small, so that a short sequence takes many: `small_tiles(ROWS=4)`."""

    @contextmanager
    def use(**constants: float) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in constants.items():
                patch.setattr(HOMES[name], name, value)
            yield

    return use


@pytest.fixture(scope="session")
def constants() -> st.SearchStrategy[dict[str, float]]:
    """Return what to draw the constants of `small_tiles` from."""
    return st.fixed_dictionaries(
        {
            "TILE": st.sampled_from([64, 256, 1024, 4096]),
            "ROWS": st.integers(4, 16),
            "TALL": st.integers(8, 32),
            "NEAR": st.integers(2, 8),
            "FEW": st.integers(0, 8),
            "FAR": st.integers(4, 64),
            "USUAL_REACH": st.sampled_from([0.5, 2.0, 8.0]),
            "AGAIN": st.integers(0, 8),
            "STEP": st.integers(3, 40),
        }
    )


@pytest.fixture(scope="session")
def recorded() -> Callable[[], AbstractContextManager[list[Read]]]:
    """Return a context that lists every load of keys by a tile, forward and backward."""

    @contextmanager
    def record() -> Iterator[list[Read]]:
        reads: list[Read] = []
        of_keys = Tile.of_keys

        def spy(tile: Tile, x: Tensor, lo: int, hi: int) -> Tensor:
            if x is tile.call.k:
                reads.append((tile.block.batch, tile.heads, tile.block.rows, lo, hi))
            return of_keys(tile, x, lo, hi)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tile, "of_keys", spy)
            yield reads

    return record


@pytest.fixture(scope="session")
def scores_read() -> Callable[[list[Read]], int]:
    """Return a function that counts the scores of recorded reads."""

    def count(reads: list[Read]) -> int:
        return sum(math.prod(s.stop - s.start for s in read[:3]) * (read[4] - read[3]) for read in reads)

    return count


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

    bias, decay, given = call.get("bias"), call.get("decay"), dict(call)
    given.update({name: leaf(f"d{name}", call[name]) for name in "qkv"})
    if bias is not None:
        kind = "slopes" if isinstance(bias, Linear) else "table"
        behind, ahead = bias.tensors
        given["bias"] = type(bias)(leaf(f"d{kind}", behind), leaf(f"d{kind} ahead", ahead))
    if decay is not None:
        given["decay"] = Decay(leaf("drates", decay.rates))
    got = lengthen.attention(**given, backend=backend, return_lse=lse)
    found = {"out": got[0], "lse": got[1]} if lse else {"out": got}
    generator, loss = torch.Generator().manual_seed(7), 0
    for x in found.values():
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
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
        got, expected = results(call, backend, lse, None), results(call, "reference", lse, torch.float64)
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
        position = torch.arange(q_start, q_start + q.shape[2], device=q.device)
        ends = [int((x * (first <= last)).amax().clamp(min=0)) + 1 for x in (position - first, last - position)]
        ends = ends if ahead else [max(ends)]
        return Table(*(torch.randn(q.shape[1], end + spare, dtype=dtype).to(q.device) for end in ends))

    return make
