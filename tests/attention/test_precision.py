"""16 bits cost one rounding of what is returned, and nothing inside: distances, sums and gradients stay wide."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Bidirectional, Causal, Decay, Linear, Table, alibi_slopes, attention

Gradients = Callable[..., dict[str, Tensor]]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
BIASES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "linear": lambda: Linear(alibi_slopes(2)),
    "table": lambda: Table(torch.randn(2, 300)),
    "extended": lambda: Table(torch.randn(2, 20), extended=True),
}


def inputs(dtype: torch.dtype, length: int = 300, mean: float = 0.0) -> dict[str, Any]:
    return {
        "q": torch.randn(1, 2, length, 8).to(dtype),
        "k": torch.randn(1, 1, length, 8).to(dtype),
        "v": (torch.randn(1, 1, length, 8) + mean).to(dtype),
        "mask": Causal(),
        "tolerance": 0,
    }


@DTYPES
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("decay", [False, True], ids=["plain", "decay"])
@pytest.mark.parametrize("mean", [0.0, 10.0])
def test_results_and_gradients_cost_one_rounding(
    bias: str, dtype: torch.dtype, decay: bool, mean: float, gradients: Gradients
) -> None:
    # Values of a large mean: Σ p·dp is then large beside ds, and would be lost with the output's last bits.
    call = inputs(dtype, mean=mean) | {"bias": BIASES[bias]()}
    if decay:
        call["decay"] = Decay(0.99 + 0.01 * torch.rand(8))
    got, expected = gradients(call), gradients(call, "reference", dtype=torch.float64)
    rounding = torch.finfo(dtype).eps / 2
    assert got["out"].dtype == dtype
    assert got["lse"].dtype == torch.float32
    torch.testing.assert_close(got["out"].double(), expected["out"], rtol=1.01 * rounding, atol=2e-6 * (1 + mean))
    torch.testing.assert_close(got["lse"].double(), expected["lse"], rtol=0, atol=1e-5)
    for name in expected.keys() - {"out", "lse"}:
        narrow = name in ("dq", "dk", "dv")
        assert got[name].dtype == (dtype if narrow else torch.float32)
        # Products are in float32, of which sums show a few last bits; the output is kept in two parts of 16 bits.
        inside = (5e-6 + 3 * rounding**2) * (1 + mean)
        allowed = (inside + (2 * rounding if narrow else 0)) * expected[name].abs().max().item()
        torch.testing.assert_close(got[name].double(), expected[name], rtol=0, atol=allowed, msg=name)


@DTYPES
@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "both"])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_the_last_value_of_an_extended_table_gets_the_whole_sum(
    dtype: torch.dtype, mask: Any, backend: str, gradients: Gradients
) -> None:
    # The gradients of all distances past the end add up in one number, far past what 16 bits hold.
    call, end, length = inputs(dtype, 700, mean=3.0) | {"mask": mask}, 20, 700
    values, ahead = torch.randn(2, 2, end)
    short = Table(values, ahead, extended=True)
    written_out = Table(*(torch.cat((x, x[:, -1:].expand(-1, length - end)), dim=1) for x in (values, ahead)))
    got = gradients(call | {"bias": short}, backend)
    whole = gradients(call | {"bias": written_out}, "reference", dtype=torch.float64)
    torch.testing.assert_close(got["out"].double(), whole["out"], rtol=torch.finfo(dtype).eps, atol=1e-5)
    for name in ("dtable", "dtable ahead"):
        expected = torch.cat((whole[name][:, : end - 1], whole[name][:, end - 1 :].sum(dim=1, keepdim=True)), dim=1)
        torch.testing.assert_close(got[name].double(), expected, rtol=2e-5, atol=2e-5 * whole[name].abs().sum().item())


@HALVES
@pytest.mark.parametrize("backend", ["chunked", "reference", None])
def test_neighbours_4000_keys_away_stay_apart(backend: str | None, dtype: torch.dtype) -> None:
    # Held in bfloat16, distances around 4,000 are multiples of 16 (in float16, of 2): ties where e^(−m) lies between.
    q = torch.zeros(1, 8, 1, 16, dtype=dtype)
    k, v = torch.zeros(1, 8, 100, 16, dtype=dtype), torch.eye(100, 16, dtype=dtype).expand(1, 8, -1, -1).flip(2)
    out = attention(q, k, v, bias=Linear(alibi_slopes(8)), q_start=4_000, backend=backend)[0, :, 0].double()
    slopes = alibi_slopes(8).double().unsqueeze(1)
    weights = torch.softmax(-slopes * torch.arange(100), dim=1)[:, :16]  # nearest key first
    torch.testing.assert_close(out, weights, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("backend", ["chunked", None])
def test_alibi_in_bfloat16_at_length_4096(backend: str | None) -> None:
    q, k, v = (torch.randn(1, 8, n, 32).bfloat16() for n in (48, 4096, 4096))
    bias = Linear(alibi_slopes(8))
    out = attention(q, k, v, bias=bias, tolerance=0, backend=backend).double()
    expected = attention(q.double(), k.double(), v.double(), bias=bias, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1.01 * 2**-8, atol=1e-5)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(("distance", "off"), [(1_000, 4e-5), (10_000, 6e-4), (1_000_000, 0.04)])
def test_far_from_all_keys_slope_times_distance_is_rounded(backend: str, distance: int, off: float) -> None:
    """As docs/attention.md has it, with the way round it: take the same number off every distance."""
    q, k, v = torch.randn(3, 1, 8, 100, 64)
    call: dict[str, Any] = {"bias": Linear(alibi_slopes(8)), "return_lse": True}
    exact, lse = attention(*(x.double() for x in (q, k, v)), **call, q_start=distance, backend="reference")
    far, _ = attention(q, k, v, **call, q_start=distance, backend=backend)
    assert 1e-6 < (far - exact).abs().max() < off
    near, near_lse = attention(q, k, v, **call, q_start=99, backend=backend)
    torch.testing.assert_close(near, exact.float(), rtol=0, atol=5e-6)
    moved = near_lse.double() - alibi_slopes(8).double()[:, None] * (distance - 99)
    torch.testing.assert_close(moved, lse, rtol=0, atol=1e-5)
