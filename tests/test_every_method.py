"""Every position method × mask × way of use: the fast path equals the definition, forward and all gradients.

Shapes are drawn by hypothesis. Runs are made tiny, so that a few dozen positions already fall into many blocks, near
and far reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Window
from lengthen.attention import Mask
from lengthen.attention.backends.chunked import forward, runs, scores
from lengthen.positions import PositionMethod, build, names

METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in names()},
    "learned": {"max_length": 128},
    "rotary linear": {"scaling": "linear", "factor": 4.0},
    "rotary ntk": {"scaling": "ntk", "factor": 4.0},
    "rotary yarn": {"scaling": "yarn", "factor": 4.0, "original_length": 32},
    "xpos": {"scale_base": 8.0},
    "xpos learned": {"learned_gamma": True, "scale_base": 16.0},
    "alibi learned": {"learned": True},
    "alibi separate": {"learned": True, "sides": "separate"},
    "t5": {"buckets": 8, "max_distance": 20},
    "t5 bidirectional": {"buckets": 8, "max_distance": 20, "bidirectional": True},
    "kerple": {"kind": "log"},
    "kerple power": {"kind": "power"},
    "kerple separate": {"kind": "power", "sides": "separate"},
    "sandwich": {"dim": 16},
    "rotary+alibi": {},
    "xpos+t5": {"buckets": 8},
}
MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "window": Window(7),
    "blockwise": Blockwise(5),
    "bidirectional": Bidirectional(),
}
SIZES = {"heads": 4, "head_dim": 6, "width": 24}
few = settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
every = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


@pytest.fixture(params=METHODS, scope="module")
def method(request: pytest.FixtureRequest) -> PositionMethod:
    torch.manual_seed(0)
    made = build(request.param.split()[0], **SIZES, **METHODS[request.param]).double()
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return made


@contextmanager
def tiny_runs() -> Iterator[None]:
    """Make blocks of a few positions, so that short sequences take every path."""
    with (
        mock.patch.multiple(runs, ROWS=6, GRAIN=64, NUMBERS=512),
        mock.patch.multiple(forward, FEW=0, SHORT=8, USUAL=-12.0, UNIT=3, TOGETHER=16),
        mock.patch.object(scores, "TILE", 512),
    ):
        yield


def draw(seed: int, batch: int, length: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def normal(heads: int, width: int) -> Tensor:
        x = torch.randn(batch, heads, length, width, generator=random, dtype=torch.float64)
        return x.requires_grad_()

    return normal(4, 6), normal(key_heads, 6), normal(key_heads, 5)


def attend(
    method: PositionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    backend: str | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Attend as a model does; `start` is where each sequence begins, if not at its first key."""
    keys = torch.arange(k.shape[2]).expand(k.shape[0], -1)
    keys = keys if start is None else (keys - start).clamp(min=0)
    queries = keys[:, k.shape[2] - q.shape[2] :]
    bias, decay = method.bias(k.shape[2]), method.decay()
    q, k = method.rotate(q, queries), method.rotate(k, keys)
    return lengthen.attention(q, k, v, bias=bias, decay=decay, mask=mask, backend=backend)


def ways(method: PositionMethod) -> tuple[str | None, ...]:
    """Return the backends to compare: what the call picks, and `chunked` where that may be another."""
    return (None, "chunked") if method.decay() is None else (None,)


def gradients(out: Tensor, weight: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def assert_same(method: PositionMethod, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **more: Any) -> None:
    """Compare what the call picks, and the chunked backend, with the reference: output and every gradient."""
    leaves = [q, k, v, *method.parameters()]
    names = ["q", "k", "v", *(name for name, _ in method.named_parameters())]
    expected = attend(method, q, k, v, mask, "reference", **more)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_gradients = gradients(expected, weight, leaves)
    for backend in ways(method):
        with tiny_runs():
            got = attend(method, q, k, v, mask, backend, **more)
            got_gradients = gradients(got, weight, leaves)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
        for name, ours, theirs in zip(names, got_gradients, expected_gradients, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"gradient of {name}: {text}"
            )


@every
@given(
    seed=st.integers(0, 10**6), batch=st.integers(1, 2), length=st.integers(1, 40), key_heads=st.sampled_from([1, 2, 4])
)
@few
def test_equal_lengths(method: PositionMethod, mask: Mask, seed: int, batch: int, length: int, key_heads: int) -> None:
    assert_same(method, *draw(seed, batch, length, key_heads), mask)


@pytest.mark.parametrize("mask", ["causal", "window", "blockwise"])  # of a two-sided one, a cache lacks what is seen
@pytest.mark.parametrize("chunk", [1, 3, 17])
def test_cached_decoding(method: PositionMethod, mask: str, chunk: int) -> None:
    q, k, v = (x.detach() for x in draw(chunk, 2, 38, 2))
    whole = attend(method, q, k, v, MASKS[mask], "reference")
    for backend in ways(method):
        parts = []
        with tiny_runs():
            for start in range(0, 38, chunk):
                end = min(start + chunk, 38)
                parts.append(attend(method, q[:, :, start:end], k[:, :, :end], v[:, :, :end], MASKS[mask], backend))
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-9, atol=1e-11)


@every
@given(
    seed=st.integers(0, 10**6), length=st.integers(2, 36), padding=st.lists(st.integers(0, 35), min_size=2, max_size=2)
)
@few
def test_left_padding(method: PositionMethod, mask: Mask, seed: int, length: int, padding: list[int]) -> None:
    start = torch.tensor(padding).clamp(max=length - 1)
    q, k, v = draw(seed, 2, length, 2)
    padded = mask.padded(start)
    assert_same(method, q, k, v, padded, start=start[:, None])
    with tiny_runs():
        out = attend(method, q, k, v, padded, start=start[:, None])
    for n, first in enumerate(start.tolist()):
        alone = attend(method, *(x[n : n + 1, :, first:] for x in (q, k, v)), mask, "reference")
        torch.testing.assert_close(out[n : n + 1, :, first:], alone, rtol=1e-9, atol=1e-11)
        assert not out[n, :, :first].any(), "a query that is padding sees nothing"


@every
@given(seed=st.integers(0, 10**6), documents=st.lists(st.integers(1, 16), min_size=1, max_size=3))
@few
def test_packed_documents(method: PositionMethod, mask: Mask, seed: int, documents: list[int]) -> None:
    ends = torch.tensor(documents).cumsum(0)
    starts = (ends - torch.tensor(documents)).repeat_interleave(torch.tensor(documents)).expand(1, -1)
    q, k, v = draw(seed, 1, int(ends[-1]), 2)
    packed = mask.packed(starts)
    assert_same(method, q, k, v, packed, start=starts)
    with tiny_runs():
        out = attend(method, q, k, v, packed, start=starts)
    for size, end in zip(documents, ends.tolist(), strict=True):
        alone = attend(method, *(x[:, :, end - size : end] for x in (q, k, v)), mask, "reference")
        torch.testing.assert_close(out[:, :, end - size : end], alone, rtol=1e-9, atol=1e-11)


@every
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-5), (torch.bfloat16, 2.0**-8)])
def test_within_rounding(method: PositionMethod, mask: Mask, dtype: torch.dtype, rounding: float) -> None:
    q, k, v = (x.detach().to(dtype) for x in draw(5, 2, 300, 2))
    positions = torch.arange(300)
    q, k = method.rotate(q, positions), method.rotate(k, positions)
    call = {"bias": method.bias(300), "decay": method.decay(), "mask": mask}
    exact = lengthen.attention(q.double(), k.double(), v.double(), **call, backend="reference")
    for backend in ways(method):
        out = lengthen.attention(q, k, v, **call, backend=backend)
        assert out.dtype == dtype
        assert (out.double() - exact).abs().max() <= rounding * v.double().abs().max()


@every
def test_shifting_all_positions_changes_nothing(method: PositionMethod, mask: Mask) -> None:
    """Relative methods see i − j alone: the same sequence a million positions later attends alike."""
    if "embed" in method.places:
        pytest.skip("an absolute method")
    q, k, v = (x.detach() for x in draw(6, 1, 40, 4))
    here, later = torch.arange(40), torch.arange(40) + 10**6
    call = {"bias": method.bias(40), "decay": method.decay(), "mask": mask}
    for dtype, rounding in ((torch.float64, 1e-8), (torch.float32, 2e-5), (torch.bfloat16, 0.05)):
        a, b = (
            lengthen.attention(method.rotate(q.to(dtype), at), method.rotate(k.to(dtype), at), v.to(dtype), **call)
            for at in (here, later)
        )
        torch.testing.assert_close(a, b, rtol=0, atol=rounding)
