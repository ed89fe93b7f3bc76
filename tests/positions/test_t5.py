from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

from lengthen.positions import T5
from lengthen.positions.t5 import bucket_starts

SETTINGS = pytest.mark.parametrize(
    ("buckets", "max_distance", "bidirectional"),
    [
        (32, 128, False),
        (32, 128, True),
        (64, 256, True),
        (16, 64, False),
        (40, 1000, False),
        (320, 800, True),
    ],
)


def make(random: bool = True, heads: int = 3, **options: Any) -> T5:
    method = T5(heads=heads, head_dim=8, width=24, **options)
    if random:
        nn.init.normal_(method.weight)
    return method


@SETTINGS
def test_against_transformers_buckets_at_70000_distances(buckets: int, max_distance: int, bidirectional: bool) -> None:
    method = make(buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    with torch.no_grad():  # weights that are the bucket's own number
        method.weight.copy_(torch.arange(buckets).unsqueeze(1).expand(-1, 3))
    reach = 70_000
    distance = torch.arange(-reach if bidirectional else 0, reach + 1)
    theirs = T5Attention._relative_position_bucket(-distance, bidirectional, buckets, max_distance)
    ours = method.bias(reach).at(distance)
    assert torch.equal(ours, theirs.float().expand(3, -1))


def test_buckets_are_exact_where_float32_logarithms_are_not() -> None:
    # Theirs puts distance 621 one bucket too far, with 24 up to 889: (621/12)^12 falls short of (889/12)^11.
    assert Fraction(621, 12) ** 12 < Fraction(889, 12) ** 11 <= Fraction(622, 12) ** 12
    assert bucket_starts(24, 889)[23] == 622
    assert T5Attention._relative_position_bucket(torch.tensor([-621]), False, 24, 889).item() == 23


@pytest.mark.parametrize(("buckets", "max_distance"), [(2, 2), (3, 9), (5, 3), (32, 17), (32, 20), (7, 1_000_000)])
def test_starts_never_fall_and_end_within_max_distance(buckets: int, max_distance: int) -> None:
    starts = bucket_starts(buckets, max_distance)
    assert len(starts) == buckets
    assert list(starts[: buckets // 2 + 1]) == list(range(buckets // 2 + 1))
    assert list(starts) == sorted(starts)
    assert starts[-1] <= max_distance
    assert make(buckets=buckets, max_distance=max_distance).bias(99).values.shape[1] == starts[-1] + 1


@pytest.mark.parametrize("bidirectional", [False, True])
def test_against_x_transformers(bidirectional: bool, x_transformers: ModuleType) -> None:
    ours = make(bidirectional=bidirectional)
    theirs = x_transformers.RelativePositionBias(scale=1.0, causal=not bidirectional, heads=3)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.copy_(ours.weight)
    distance = torch.arange(100, 400).unsqueeze(1) - torch.arange(400)
    expected = theirs(300, 400)
    got = ours.bias(399).at(distance)
    seen = torch.ones_like(distance, dtype=torch.bool) if bidirectional else distance >= 0
    torch.testing.assert_close(got[:, seen], expected[:, seen], rtol=0, atol=0)


@SETTINGS
def test_the_table_ends_where_the_last_bucket_begins(buckets: int, max_distance: int, bidirectional: bool) -> None:
    method = make(buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    for longest in (0, 1200, 1_000_000):  # it is as small at any length
        bias = method.bias(longest)
        assert bias.extended
        for values in bias.tensors:
            if values is not None:
                assert values.shape == (3, method.starts[-1] + 1)
                assert bool((values[:, -1] != values[:, -2]).all())


def test_starts_at_zero_and_draws_no_random_number() -> None:
    state = torch.get_rng_state()
    method = make(random=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert not method.weight.any()
    assert method.weight.shape == (32, 3)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradient_is_that_of_finite_differences(
    bidirectional: bool, finite_difference: Callable[[nn.Parameter, Callable[[], Tensor]], Tensor]
) -> None:
    method = make(heads=2, buckets=8, max_distance=20, bidirectional=bidirectional).double()
    weights = torch.randn(2, 2, 41, dtype=torch.float64)

    def loss() -> Tensor:
        bias, distance = method.bias(40), torch.arange(41)
        return (bias.at(distance).tanh() * weights[0]).sum() + (bias.at(-distance).sin() * weights[1]).sum()

    loss().backward()
    torch.testing.assert_close(method.weight.grad, finite_difference(method.weight, loss), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradient_repeats_to_the_bit_and_agrees_with_an_indexed_lookup(bidirectional: bool) -> None:
    method = make(heads=4, max_distance=50_000, bidirectional=bidirectional)
    length = method.starts[-1] + 1
    grads = torch.randn(2, 4, length)
    runs = []
    for _ in range(3):
        method.weight.grad = None
        tensors = [tensor for tensor in method.bias(length - 1).tensors if tensor is not None]
        torch.autograd.backward(tensors, list(grads[: len(tensors)]))
        assert method.weight.grad is not None
        runs.append(method.weight.grad.clone())
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])

    weight = method.weight.detach().double().requires_grad_()
    distance = torch.arange(length)
    index = torch.bucketize(distance, torch.tensor(method.starts), right=True) - 1
    expected = (weight[index].mT * grads[0].double()).sum()
    if bidirectional:
        expected = expected + (weight[index + 16].mT * grads[1].double()).sum()
    expected.backward()
    torch.testing.assert_close(runs[0].double(), weight.grad, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"buckets": 1}, ValueError, r"t5\.buckets: expected at least 2, got 1"),
        ({"buckets": 2, "bidirectional": True}, ValueError, r"t5\.buckets: expected at least 4, got 2"),
        (
            {"buckets": 33, "bidirectional": True},
            ValueError,
            r"t5\.buckets: expected an even number .*, got 33",
        ),
        ({"max_distance": 16}, ValueError, r"t5\.max_distance: expected more than 16 .*, got 16"),
        ({"max_distance": 128.0}, TypeError, r"t5\.max_distance: expected a whole number, got 128\.0"),
        ({"bidirectional": None}, TypeError, r"t5\.bidirectional: expected True or False, got None"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)
