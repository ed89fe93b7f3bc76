"""NaN and ±∞: what no query sees reaches nothing, forward or backward; what one sees shows."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes, attention

ODD = pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
BACKENDS = pytest.mark.parametrize("backend", [None, "chunked", "reference"])
LENGTH = 14
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "alibi": {"bias": Linear(alibi_slopes(4).double())},
    "table": {"bias": Table(torch.arange(4.0 * LENGTH).sin().view(4, LENGTH).double())},
    "decay": {"decay": Decay(torch.tensor([0.5, 0.9, 1.0]).double())},
}


def inputs() -> list[Tensor]:
    return [torch.randn(2, heads, LENGTH, 3, dtype=torch.float64) for heads in (4, 2, 2)]


def results(given: list[Tensor], weight: Tensor, **call: Any) -> list[Tensor]:
    """Return out and the gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = attention(*leaves, **call)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


@ODD
@BACKENDS
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", [Causal(), Bidirectional(), Window(4)], ids=["causal", "both", "window"])
def test_padding_may_hold_anything(mask: Any, options: str, backend: str | None, odd: float) -> None:
    start, end = torch.tensor([0, 6]), torch.tensor([LENGTH, LENGTH - 2])
    given, weight = inputs(), torch.randn(2, 4, LENGTH, 3, dtype=torch.float64)
    call = {"mask": mask.padded(start, end), **OPTIONS[options]}
    expected = results(given, weight, **call, backend="reference")
    spoilt = [x.clone() for x in given]
    for x in spoilt:
        x[1, :, :6], x[1, :, LENGTH - 2 :] = odd, odd
    weight[1, :, :6] = odd  # a loss of padding, too
    for ours, theirs in zip(results(spoilt, weight, **call, backend=backend), expected, strict=True):
        real = torch.ones(LENGTH, dtype=torch.bool)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-10, atol=1e-10)
        real[:6], real[LENGTH - 2 :] = False, False
        torch.testing.assert_close(ours[1][:, real], theirs[1][:, real], rtol=1e-10, atol=1e-10)


@ODD
@BACKENDS
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "both"])
def test_another_document_may_hold_anything(mask: Any, options: str, backend: str | None, odd: float) -> None:
    starts = torch.tensor([[0] * 5 + [5] * 4 + [9] * (LENGTH - 9)])
    given, weight = inputs(), torch.randn(2, 4, LENGTH, 3, dtype=torch.float64)
    call = {"mask": mask.packed(starts), **OPTIONS[options]}
    expected = results(given, weight, **call, backend="reference")
    spoilt = [x.clone() for x in given]
    for x in spoilt:
        x[:, :, 5:9] = odd
    real = torch.tensor([not 5 <= n < 9 for n in range(LENGTH)])
    for ours, theirs in zip(results(spoilt, weight, **call, backend=backend), expected, strict=True):
        torch.testing.assert_close(ours[:, :, real], theirs[:, :, real], rtol=1e-10, atol=1e-10)
        assert not bool(ours[:, :, ~real].isfinite().all())


@ODD
@BACKENDS
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_stands_ahead_is_not_felt_by_causal_queries(where: str, backend: str | None, odd: float) -> None:
    q, k, v = inputs()
    expected = attention(q, k, v, backend="reference")
    (k if where == "k" else v)[:, :, -1] = odd
    got = attention(q, k, v, backend=backend)
    torch.testing.assert_close(got[:, :, :-1], expected[:, :, :-1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", [None, "chunked", "reference"])
@pytest.mark.parametrize("keys", [3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "both"])
def test_a_query_that_is_nan_gives_nan(backend: str | None, keys: int, dtype: torch.dtype, mask: Any) -> None:
    q, k, v = torch.randn(3, 1, 2, keys, 4, dtype=dtype)
    q[0, 0, keys - 1, 0] = math.nan
    out, lse = attention(q, k, v, mask=mask, backend=backend, return_lse=True)
    for got in (out, attention(q, k, v, mask=mask, backend=backend)):
        assert bool(got[0, 0, -1].isnan().all())
        assert bool(got[0, 0, :-1].isfinite().all())
        assert bool(got[0, 1].isfinite().all())
    assert lse[0, 0].isnan().tolist() == [False] * (keys - 1) + [True]


@BACKENDS
def test_everything_visible_may_hold_anything(backend: str | None) -> None:
    q, k, v = inputs()
    v[0, 0, 3, 2] = math.nan
    got = attention(q, k, v, mask=Bidirectional(), backend=backend)
    expected = attention(q, k, v, mask=Bidirectional(), backend="reference")
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert bool(got[0, :2, :, 2].isnan().all())
    assert bool(got[0, :, :, :2].isfinite().all())  # features stay apart


@BACKENDS
@pytest.mark.parametrize(
    "bias", [None, Linear(alibi_slopes(4)), Table(torch.ones(4, 12))], ids=["none", "alibi", "table"]
)
def test_no_score_that_overflows_leaks_from_a_hidden_key(bias: Any, backend: str | None) -> None:
    # Every input is finite, but q·k is not: the key is the last, and only the last query sees it.
    q, k, v = torch.randn(3, 2, 4, 12, 8)
    q *= 1e20
    k[:, :, :-1] *= 1e-20
    k[:, :, -1] *= 1e20
    for mask in (Causal(), Window(12), Blockwise(12)):
        expected = attention(q, k, v, bias=bias, mask=mask, backend="reference")
        assert bool(expected[:, :, :-1].isfinite().all())
        got = attention(q, k, v, bias=bias, mask=mask, backend=backend)
        torch.testing.assert_close(got[:, :, :-1], expected[:, :, :-1], rtol=1e-5, atol=1e-6)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_values_do_not_overflow(backend: str | None, dtype: torch.dtype) -> None:
    # The mean of 1,000 values of 1e36 is one of them; their sum is past what float32 holds.
    q, k = torch.randn(2, 1, 2, 1000, 4).to(dtype)
    large = 1e36 if dtype == torch.float32 else 6e4
    v = torch.full((1, 2, 1000, 4), large).to(dtype)
    for bias in (None, Linear(torch.tensor([1e-3, 1e-4]))):
        out = attention(q, k, v, bias=bias, backend=backend)
        torch.testing.assert_close(out, v, rtol=1e-3, atol=0)
