from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from lengthen.attention import Bidirectional, alibi_slopes, attention
from lengthen.positions import ALiBi

HEADS = pytest.mark.parametrize("heads", [8, 12, 16, 20])


def make(heads: int = 4, **options: Any) -> ALiBi:
    return ALiBi(heads=heads, head_dim=8, width=32, **options)


@HEADS
def test_against_transformers_mpt(heads: int) -> None:
    theirs = build_mpt_alibi_tensor(heads, 100).squeeze(1)  # the bias of the last query
    bias = make(heads).bias(99)
    torch.testing.assert_close(bias.slopes, -theirs[:, -2], rtol=1e-6, atol=0)
    torch.testing.assert_close(bias.at(99 - torch.arange(100)), theirs, rtol=1e-6, atol=0)


@HEADS
def test_against_x_transformers(heads: int, x_transformers: ModuleType) -> None:
    theirs = x_transformers.AlibiPositionalBias(heads)(50, 70)  # 50 queries at the end of 70 keys, both sides
    distance = torch.arange(20, 70).unsqueeze(1) - torch.arange(70)
    torch.testing.assert_close(make(heads).bias(69).at(distance), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 40, 71])
def test_any_number_of_heads(heads: int) -> None:
    slopes = make(heads).bias(10).slopes
    assert torch.equal(slopes, alibi_slopes(heads))
    assert slopes.unique().numel() == heads
    assert 0 < slopes.min() <= slopes.max() < 1


@pytest.mark.parametrize("sides", ["same", "separate"])
def test_what_a_caller_changes_is_a_copy(sides: str) -> None:
    method = make(sides=sides)
    bias = method.bias(3)
    assert bias.slopes.dtype == torch.float32
    for tensor in bias.tensors:
        if tensor is not None:
            tensor.zero_()
    again = method.bias(3)
    if sides == "same":
        assert torch.equal(again.slopes, alibi_slopes(4))
        assert again.ahead is None
    else:
        assert torch.equal(again.slopes, alibi_slopes(4) * torch.tensor([4, 1, 4, 1]))
        assert torch.equal(again.ahead, alibi_slopes(4) * torch.tensor([1, 4, 1, 4]))


def test_sides() -> None:
    distance = torch.tensor([-3, 0, 3])
    same = make().bias(3).at(distance)
    assert torch.equal(same[:, 0], same[:, 2])
    separate = make(sides="separate").bias(3).at(distance)
    assert torch.equal(separate[:, 2], same[:, 2] * torch.tensor([4, 1, 4, 1]))
    assert torch.equal(separate[:, 0], same[:, 0] * torch.tensor([1, 4, 1, 4]))
    assert not torch.equal(*(one.at(distance) for one in (make(1, sides="separate").bias(3), make(1).bias(3))))


def test_an_encoder_has_heads_that_look_near_on_both_sides() -> None:
    """Without one that attends to the neighbours, an encoder hardly learned to use context (docs/findings.md)."""
    weights = make(8, sides="separate").bias(128).at(torch.arange(-128, 129)).softmax(-1)
    near = weights[:, 128 - 4 : 128 + 5].sum(-1)
    assert near.max() > 0.9


@pytest.mark.parametrize("own", [[0.5, 0.1, 0.3], (0.5, 0.1, 0.3), torch.tensor([0.5, 0.1, 0.3])])
def test_slopes_of_ones_own(own: Any) -> None:
    expected = torch.tensor([0.5, 0.1, 0.3])
    assert torch.equal(make(3, slopes=own).bias(9).slopes, expected)
    bias = make(3, slopes=own, learned=True, sides="separate").bias(9)
    torch.testing.assert_close(bias.slopes, expected * torch.tensor([4, 1, 4]))
    torch.testing.assert_close(bias.ahead, expected * torch.tensor([1, 4, 1]))


def test_learned_slopes_start_at_the_standard_ones_and_stay_positive() -> None:
    method = make(learned=True)
    assert method.log_slopes is not None
    assert [name for name, _ in method.named_parameters()] == ["log_slopes"]
    torch.testing.assert_close(method.bias(5).slopes, alibi_slopes(4), rtol=1e-6, atol=0)
    with torch.no_grad():
        method.log_slopes.sub_(50)
    assert bool((method.bias(5).slopes > 0).all())


@pytest.mark.parametrize("sides", ["same", "separate"])
def test_learned_slopes_have_the_gradient_of_finite_differences(
    sides: str, finite_difference: Callable[[nn.Parameter, Callable[[], Tensor]], Tensor]
) -> None:
    method = make(learned=True, sides=sides).double()
    q, k, v = torch.randn(3, 1, 4, 9, 8, dtype=torch.float64).unbind()

    def loss() -> Tensor:
        out = attention(q, k, v, method.bias(8), mask=Bidirectional(), backend="reference")
        return out.square().sum()

    loss().backward()
    assert len(list(method.parameters())) == (1 if sides == "same" else 2)
    for parameter in method.parameters():
        expected = finite_difference(parameter, loss)
        assert expected.abs().min().item() > 1e-6
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-8)


def test_a_learned_bf16_model_trains_its_slopes() -> None:
    method = make(learned=True).to(torch.bfloat16)
    q, k, v = torch.randn(3, 1, 4, 9, 8).bfloat16().unbind()
    attention(q, k, v, method.bias(8)).float().square().sum().backward()
    assert method.log_slopes is not None
    assert method.log_slopes.grad is not None
    assert bool((method.log_slopes.grad != 0).all())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"learned": "yes"}, TypeError, r"alibi\.learned: expected True or False, got 'yes'"),
        ({"sides": "both"}, ValueError, r"alibi\.sides: expected 'same' or 'separate', got 'both'"),
        (
            {"slopes": [0.5, 0.25]},
            ValueError,
            r"alibi\.slopes: expected one slope for each of the 4 heads, got 2",
        ),
        ({"slopes": [0.5, 0.25, 0.0, 0.1]}, ValueError, r"alibi\.slopes\[2\]: expected more than 0, got 0"),
        ({"slopes": [0.5, 0.25, "a", 0.1]}, TypeError, r"alibi\.slopes\[2\]: expected a number, got 'a'"),
        ({"slopes": 0.5}, TypeError, r"alibi\.slopes: expected a list or tensor of 4 numbers, got 0\.5"),
        ({"slopes": torch.tensor(0.5)}, TypeError, r"alibi\.slopes: expected a list or tensor of 4 numbers"),
        ({"slopes": torch.ones(4, 1)}, TypeError, r"alibi\.slopes\[0\]: expected a number"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)
