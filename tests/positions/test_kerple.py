import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lengthen.positions import Kerple

KINDS = pytest.mark.parametrize("kind", ["log", "power"])


def make(kind: str, heads: int = 4, sides: str = "same") -> Kerple:
    return Kerple(heads=heads, head_dim=8, width=32, kind=kind, sides=sides)


@KINDS
def test_is_the_paper_s_formula(kind: str) -> None:
    method = make(kind)
    with torch.no_grad():
        method.raw_r1.add_(torch.tensor([0.3, -0.2, 0.1, 0.9]))
        method.raw_r2.sub_(torch.tensor([0.5, 0.2, -0.4, 0.1]))
    values = method.bias(3000).values
    assert values.dtype == torch.float32
    for head in range(4):
        r1, r2 = method.r1[head].item(), method.r2[head].item()
        for d in (0, 1, 2, 17, 999, 3000):
            expected = -r1 * math.log(1 + r2 * d) if kind == "log" else -r1 * d**r2
            assert values[head, d].item() == pytest.approx(expected, rel=1e-5)


def test_heads_start_spread_over_the_paper_s_ranges_steepest_first() -> None:
    for heads in (1, 4, 12):
        share = torch.arange(heads, 0, -1) / heads
        log, power = make("log", heads), make("power", heads)
        torch.testing.assert_close(log.r1, 2 * share)
        torch.testing.assert_close(log.r2, share)
        torch.testing.assert_close(power.r1, share)
        torch.testing.assert_close(power.r2, share)
        for method in (log, power):
            assert bool((method.bias(50).values[:, 50].diff() > 0).all())


def test_a_power_of_one_is_alibi() -> None:
    method = make("power")
    nn.init.zeros_(method.raw_r2)
    distance = torch.arange(101)
    torch.testing.assert_close(method.bias(100).values, -method.r1.unsqueeze(1) * distance)


@KINDS
@pytest.mark.parametrize("raw", [-40.0, 40.0])
def test_parameters_stay_in_range_whatever_is_learned(kind: str, raw: float) -> None:
    method = make(kind)
    nn.init.constant_(method.raw_r2, raw)
    assert bool((method.r2 > 0).all())
    if kind == "power":
        assert bool((method.r2 <= 2).all())
    nn.init.constant_(method.raw_r1, -raw)
    assert bool((method.r1 > 0).all())


@KINDS
def test_gradient_is_finite_at_distance_zero_and_that_of_finite_differences(
    kind: str, finite_difference: Callable[[nn.Parameter, Callable[[], Tensor]], Tensor]
) -> None:
    method = make(kind).double()
    weights = torch.randn(4, 31, dtype=torch.float64)

    def loss() -> Tensor:
        return (method.bias(30).values.tanh() * weights).sum() + method.bias(30).values[:, 0].sum()

    loss().backward()
    for parameter in method.parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, finite_difference(parameter, loss), rtol=1e-6, atol=1e-8)


@KINDS
def test_distance_zero_alone_has_no_bias_and_no_gradient(kind: str) -> None:
    method = make(kind)
    values = method.bias(0).values
    assert values.tolist() == [[0.0]] * 4
    values.sum().backward()
    for parameter in method.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@KINDS
def test_sides(kind: str) -> None:
    same, separate = make(kind).bias(9), make(kind, sides="separate")
    assert same.ahead is None
    bias = separate.bias(9)
    assert bias.ahead is not None
    steeper = torch.where(torch.arange(len(same.values)) % 2 == 0, 4, 1).unsqueeze(1)
    torch.testing.assert_close(bias.values, same.values * steeper)
    torch.testing.assert_close(bias.ahead, same.values * (4 / steeper))
    for parameter in separate.parameters():  # each moves its own side alone
        before, ahead = separate.bias(9).values, separate.bias(9).ahead
        with torch.no_grad():
            parameter += 0.1
        moved = [not torch.equal(x, y) for x, y in zip((before, ahead), separate.bias(9).tensors, strict=True)]
        assert moved == (
            [True, False] if parameter is separate.raw_r1 or parameter is separate.raw_r2 else [False, True]
        )


@KINDS
def test_gradients_of_both_sides_are_those_of_finite_differences(
    kind: str, finite_difference: Callable[[nn.Parameter, Callable[[], Tensor]], Tensor]
) -> None:
    method = make(kind, sides="separate").double()
    weights = torch.randn(4, 61, dtype=torch.float64)

    def loss() -> Tensor:
        return (method.bias(30).at(torch.arange(-30, 31)).tanh() * weights).sum()

    loss().backward()
    assert len(list(method.parameters())) == 4
    for parameter in method.parameters():
        expected = finite_difference(parameter, loss)
        assert bool((expected != 0).all())
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=1e-8)


def test_sides_are_checked() -> None:
    with pytest.raises(ValueError, match=r"kerple\.sides: expected 'same' or 'separate', got 'both'"):
        make("log", sides="both")


def test_kind_is_checked() -> None:
    with pytest.raises(ValueError, match=r"kerple\.kind: expected 'log' or 'power', got 'logarithm'"):
        make("logarithm")
