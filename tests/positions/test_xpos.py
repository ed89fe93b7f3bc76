import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lengthen.attention import Bidirectional, Causal, Mask, attention
from lengthen.positions import Rotary, XPos

SIZES = {"heads": 2, "head_dim": 16, "width": 32}


def attend(method: XPos, q: Tensor, k: Tensor, v: Tensor, shift: int, mask: Mask | None = None) -> Tensor:
    positions = torch.arange(q.shape[2]) + shift
    rotated = method.rotate(q, positions), method.rotate(k, positions)
    return attention(*rotated, v, decay=method.decay(), mask=mask or Causal(), backend="reference")


def papers_scores(q: Tensor, k: Tensor, gamma: float, scale_base: float) -> Tensor:
    """q'·k' as the paper writes them: (q cos + rot(q) sin)·ζ^(n/512) and (k cos + rot(k) sin)·ζ^(−m/512)."""
    d = q.shape[-1]
    theta = torch.tensor([10000 ** (-2 * (f // 2) / d) for f in range(d)], dtype=torch.float64)
    zeta = torch.tensor([((f // 2) / (d / 2) + gamma) / (1 + gamma) for f in range(d)], dtype=torch.float64)

    def scaled(x: Tensor, sign: int) -> Tensor:
        n = torch.arange(x.shape[-2], dtype=torch.float64).unsqueeze(1)
        rot = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        return (x * (n * theta).cos() + rot * (n * theta).sin()) * zeta ** (sign * n / scale_base)

    return scaled(q, 1) @ scaled(k, -1).mT


@pytest.mark.parametrize("options", [{}, {"gamma": 1.5, "scale_base": 37.5}])
def test_is_the_paper_s_formula(options: dict[str, Any]) -> None:
    method = XPos(**SIZES, **options, pairs="neighbours")  # the paper's layout
    q, k, v = torch.randn(3, 1, 2, 40, 16, dtype=torch.float64).unbind()
    scores = papers_scores(q, k, options.get("gamma", 0.4), options.get("scale_base", 512.0)) / 4
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v
    torch.testing.assert_close(attend(method, q, k, v, 0), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rates_belong_to_the_pairs_that_are_rotated(pairs: str) -> None:
    method = XPos(**SIZES, pairs=pairs)
    rates = method.decay().rates
    assert rates.dtype == torch.float64
    a, b = (rates[:8], rates[8:]) if pairs == "halves" else (rates[0::2], rates[1::2])
    assert torch.equal(a, b)
    expected = [((i / 8 + 0.4) / 1.4) ** (1 / 512) for i in range(8)]
    torch.testing.assert_close(a, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)


def test_both_layouts_give_the_same_attention_on_permuted_features() -> None:
    q, k, v = torch.randn(3, 1, 2, 12, 16, dtype=torch.float64).unbind()
    order = torch.arange(16).view(2, 8).mT.flatten()
    halves = attend(XPos(**SIZES, pairs="halves"), q, k, v, 0)
    neighbours = attend(XPos(**SIZES, pairs="neighbours"), q[..., order], k[..., order], v, 0)
    torch.testing.assert_close(halves, neighbours)


@pytest.mark.parametrize("mask", [Causal(), Bidirectional()])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 2e-5)])
def test_the_same_a_million_positions_on(mask: Mask, dtype: torch.dtype, tolerance: float) -> None:
    method = XPos(**SIZES)
    q, k, v = torch.randn(3, 1, 2, 30, 16, dtype=dtype).unbind()
    near, far = attend(method, q, k, v, 0, mask), attend(method, q, k, v, 10**6, mask)
    torch.testing.assert_close(near, far, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finite_far_out_in_half_precision(dtype: torch.dtype) -> None:
    method = XPos(**SIZES).to(dtype)
    q, k, v = torch.randn(3, 1, 2, 30, 16).to(dtype).unbind()
    out = attend(method, q, k, v, 10**6)
    assert bool(out.isfinite().all())
    exact = attend(method, q.double(), k.double(), v.double(), 10**6)
    assert (out.double() - exact).abs().max().item() < 0.05


def test_decays_alike_on_both_sides() -> None:
    # A query and keys rotated back to position 0 leave the decay alone: keys at equal distance weigh the same.
    method = XPos(**SIZES)
    q = torch.ones(1, 2, 5, 16, dtype=torch.float64)
    one = torch.eye(5, dtype=torch.float64).expand(1, 2, 5, 5)
    weights = attention(q, q, one, decay=method.decay(), mask=Bidirectional(), backend="reference")[0, 0]
    torch.testing.assert_close(weights, weights.flip(0, 1))
    assert weights[2, 1] < weights[2, 2]


def test_rotates_as_rotary_does() -> None:
    q, positions = torch.randn(1, 2, 9, 16), torch.arange(9)
    rotary = Rotary(**SIZES, base=777.0)
    assert torch.equal(XPos(**SIZES, base=777.0).rotate(q, positions), rotary.rotate(q, positions))


def test_learned_gamma_starts_where_it_is_told() -> None:
    for gamma in (0.05, 0.4, 3.0, 50.0):
        method = XPos(**SIZES, gamma=gamma, learned_gamma=True)
        assert method.gamma.item() == pytest.approx(gamma, rel=1e-6)
        fixed = XPos(**SIZES, gamma=gamma).decay().rates
        torch.testing.assert_close(method.decay().rates, fixed, rtol=1e-8, atol=0)


def test_learned_gamma_has_the_gradient_of_finite_differences(
    finite_difference: Callable[[nn.Parameter, Callable[[], Tensor]], Tensor],
) -> None:
    method = XPos(**SIZES, learned_gamma=True, scale_base=8.0).double()
    q, k, v = torch.randn(3, 1, 2, 12, 16, dtype=torch.float64).unbind()

    def loss() -> Tensor:
        return attend(method, q, k, v, 0).square().sum()

    loss().backward()
    assert method.raw_gamma is not None
    assert method.raw_gamma.grad is not None
    expected = finite_difference(method.raw_gamma, loss)
    assert abs(expected.item()) > 1e-6
    torch.testing.assert_close(method.raw_gamma.grad, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("gamma", "scale_base"),  # of these, Python rounds the lowest rate up, and torch down
    [(0.0064105492343824715, 5.040561503200906), (0.0025371950845553817, 15.623683198844198)],
)
def test_the_floor_is_not_above_the_lowest_rate(gamma: float, scale_base: float) -> None:
    decay = XPos(**{**SIZES, "head_dim": 64}, gamma=gamma, scale_base=scale_base).decay()
    assert decay.floor is not None
    assert 0 <= float(decay.rates.min()) - decay.floor < 1e-9


@pytest.mark.parametrize("raw", [-30.0, 0.0, 40.0])
def test_gamma_stays_in_range_whatever_is_learned(raw: float) -> None:
    method = XPos(**SIZES, learned_gamma=True)
    nn.init.constant_(method.raw_gamma, raw)
    assert 0 < method.gamma.item() < math.inf
    rates = method.decay().rates
    assert bool(((rates > 0) & (rates <= 1)).all())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gamma": 0}, ValueError, r"xpos\.gamma: expected more than 0, got 0"),
        ({"scale_base": -1.0}, ValueError, r"xpos\.scale_base: expected more than 0, got -1"),
        ({"gamma": "a"}, TypeError, r"xpos\.gamma: expected a number"),
        ({"learned_gamma": 1}, TypeError, r"xpos\.learned_gamma: expected True or False"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        XPos(**SIZES, **options)


def test_learned_gamma_stays_in_range_however_far_it_is_pushed() -> None:
    method = XPos(heads=2, head_dim=8, width=16, learned_gamma=True)
    for raw in (-1e4, 1e4):
        for parameter in method.parameters():
            parameter.data.fill_(raw)
        decay = method.decay()
        assert decay is not None
        assert bool(((decay.rates > 0) & (decay.rates <= 1)).all())
