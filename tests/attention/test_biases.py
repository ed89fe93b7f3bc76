import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from lengthen import Decay, Linear, Table, alibi_slopes

DISTANCES = torch.tensor([[0, 1, 5], [-1, -5, 2]])


def exponents(heads: int) -> list[Fraction]:
    """Return −log2 of each slope, written as the paper describes it: recursively, and without a floating point."""
    if math.log2(heads).is_integer():
        return [Fraction(8 * (h + 1), heads) for h in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return exponents(below) + exponents(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", range(1, 65))
def test_slopes_of_any_number_of_heads(heads: int) -> None:
    slopes = alibi_slopes(heads)
    assert slopes.dtype == torch.float32
    expected = torch.tensor([2.0 ** -float(e) for e in exponents(heads)], dtype=torch.float64)
    torch.testing.assert_close(slopes.double(), expected, rtol=6e-8, atol=0)  # half a unit in float32's last place
    assert slopes.unique().numel() == heads


def test_slopes_of_8_and_12_heads_as_in_the_paper() -> None:
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(8).tolist() == eight
    twelve = alibi_slopes(12)
    assert twelve[:8].tolist() == eight
    torch.testing.assert_close(twelve[8:], torch.tensor([0.7071, 0.3536, 0.1768, 0.0884]), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        (0, ValueError, "heads: expected at least 1, got 0"),
        (-8, ValueError, "heads: expected at least 1, got -8"),
        (8.0, TypeError, r"heads: expected a whole number, got 8\.0 \(float\)"),
        (True, TypeError, r"heads: expected a whole number, got True \(bool\)"),
        ("8", TypeError, r"heads: expected a whole number, got '8' \(str\)"),
    ],
)
def test_a_number_of_heads_is_checked(heads: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        alibi_slopes(heads)


def test_linear_is_minus_slope_times_distance() -> None:
    got = Linear(torch.tensor([0.5, 2.0])).at(DISTANCES)
    assert got.shape == (2, 2, 3)
    assert got[0].tolist() == [[0, -0.5, -2.5], [-0.5, -2.5, -1]]
    assert got[1].tolist() == [[0, -2, -10], [-2, -10, -4]]


def test_linear_ahead_is_for_keys_after_the_query() -> None:
    got = Linear(torch.tensor([0.5, 2.0]), torch.tensor([1.0, 3.0])).at(DISTANCES)
    assert got[0].tolist() == [[0, -0.5, -2.5], [-1, -5, -1]]
    assert got[1].tolist() == [[0, -2, -10], [-3, -15, -4]]


def test_table_looks_distances_up() -> None:
    values = torch.arange(12.0).view(2, 6)
    got = Table(values).at(DISTANCES)
    assert got[0].tolist() == [[0, 1, 5], [1, 5, 2]]
    assert got[1].tolist() == [[6, 7, 11], [7, 11, 8]]


def test_table_ahead_is_for_keys_after_the_query() -> None:
    ahead = torch.arange(12.0).view(2, 6) + 100
    got = Table(torch.arange(12.0).view(2, 6), ahead).at(DISTANCES)
    assert got[0].tolist() == [[0, 1, 5], [101, 105, 2]]
    assert got[1].tolist() == [[6, 7, 11], [107, 111, 8]]


@pytest.mark.parametrize("bias", [Linear(torch.tensor([0.5])), Table(torch.arange(6.0)[None])], ids=["linear", "table"])
def test_a_bias_is_given_in_the_dtype_asked_for(bias: Any) -> None:
    assert bias.at(DISTANCES).dtype == torch.float32
    assert bias.at(DISTANCES, torch.float64).dtype == torch.float64


def test_a_table_ends_unless_it_is_extended() -> None:
    values = torch.arange(8.0).view(2, 4)
    with pytest.raises(IndexError):
        Table(values).at(DISTANCES)
    got = Table(values, extended=True).at(DISTANCES)
    assert got[0].tolist() == [[0, 1, 3], [1, 3, 2]]
    assert got[1].tolist() == [[4, 5, 7], [5, 7, 6]]
    got = Table(values, 10 + values[:, :2], extended=True).at(DISTANCES)  # each side ends where it does
    assert got[0].tolist() == [[0, 1, 3], [11, 11, 2]]


def test_distances_far_out_stay_apart() -> None:
    far = torch.arange(1_000_000, 1_000_040)
    for bias in (Linear(torch.tensor([2.0**-8])).at(far), Table(torch.arange(1_000_040.0)[None]).at(far)):
        assert bias.unique().numel() == 40


def test_decay_is_a_power_of_the_distance_on_both_sides() -> None:
    rates = torch.tensor([0.5, 1.0, 0.1])
    assert Decay(rates).at(DISTANCES, 0, torch.float32).tolist() == [[[1, 0.5, 0.03125], [0.5, 0.03125, 0.25]]]
    assert Decay(rates).at(DISTANCES, 1, torch.float64).tolist() == [[[1, 1, 1], [1, 1, 1]]]
    of_heads = Decay(torch.stack([rates, rates.flip(0)])).at(DISTANCES, 0, torch.float64)
    assert of_heads.shape == (2, 2, 3)
    assert of_heads[0, 0, 2].item() == 0.5**5
    assert of_heads[1, 0, 2].item() == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_powers_of_a_decay_may_be_negative(shape: tuple[int, ...]) -> None:
    rates = 0.5 + 0.5 * torch.rand(shape)
    steps = torch.tensor([3, 0, -4])
    got = Decay(rates).power(steps, torch.float64)
    expected = rates.double().reshape(-1, 1, 3) ** steps.view(1, 3, 1)
    assert got.shape == (*(shape[:-1] or (1,)), 3, 3)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_the_lowest_rate_is_known_where_looking_is_free() -> None:
    assert Decay(torch.tensor([0.5, 0.25, 1.0])).lowest() == 0.25
    assert Decay(torch.tensor([0.5, 1.0]), floor=0.1).lowest() == 0.1
    assert Decay(torch.ones(2, device="meta")).lowest() is None
    assert Decay(torch.ones(2, device="meta"), floor=0.9).lowest() == 0.9


@pytest.mark.parametrize("ahead", [False, True])
def test_the_tail_is_the_log_of_what_all_farther_keys_can_weigh(ahead: bool) -> None:
    sides = torch.rand(2, 2, dtype=torch.float64) + 0.05
    far = torch.arange(3000)
    linear = Linear(*sides)
    for d in (0, 1, 7, 100):
        expected = (-sides[int(ahead)][:, None] * far[d:]).logsumexp(dim=1)  # past 3,000 nothing is left
        torch.testing.assert_close(linear.tail(torch.tensor(d), 50, ahead), expected, rtol=1e-9, atol=1e-9)
    values, forward = torch.randn(2, 2, 40, dtype=torch.float64)
    values[0, 5:9] = -torch.inf
    side = forward if ahead else values
    for extended in (False, True):
        table, farthest = Table(values, forward, extended), 60 if extended else 30
        there = side[:, torch.arange(farthest + 1).clamp(max=39)]
        for d in (0, 1, 30, farthest, farthest + 1, farthest + 9):
            expected = there[:, d:].logsumexp(dim=1)  # of nothing, −∞
            torch.testing.assert_close(table.tail(torch.tensor(d), farthest, ahead), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("step", [1, 3, 16, 100])
@pytest.mark.parametrize(("farthest", "extended"), [(20, False), (39, False), (20, True), (39, True), (77, True)])
def test_tails_of_every_so_many_distances(step: int, farthest: int, extended: bool) -> None:
    table = Table(torch.randn(2, 40), extended=extended)
    some = table.tails(farthest, step=step)
    distance = step * torch.arange(some.shape[1])
    assert distance[-1] > farthest
    torch.testing.assert_close(some, table.tail(distance, farthest), rtol=1e-12, atol=1e-12)
    assert bool((some[:, -1] == -torch.inf).all())


@pytest.mark.parametrize("kind", ["linear", "table", "extended"])
def test_from_its_reach_on_a_tail_is_below_the_limit(kind: str) -> None:
    slopes, values = torch.tensor([0.7, 0.02]), torch.randn(2, 60).cumsum(dim=1)
    farthest = 80 if kind == "extended" else 50
    bias: Any = Linear(slopes) if kind == "linear" else Table(values, extended=kind == "extended")
    limits = torch.linspace(-12, 4, 33).expand(3, 2, -1)  # [batch, heads, rows]
    far = bias.reach(limits, farthest)
    assert far.shape == (3, 2, 33)
    tails = bias.tail(torch.arange(2000), farthest)
    for h in range(2):
        for limit, reach in zip(limits[0, h].tolist(), far[0, h].tolist(), strict=True):
            first = next(d for d in range(2000) if tails[h, d] <= limit)
            assert max(reach, 0) == pytest.approx(first, abs=1 if kind == "linear" else 0)
            assert reach <= first + 1e-3


def test_a_slope_of_zero_has_no_reach() -> None:
    far = Linear(torch.zeros(1)).reach(torch.zeros(1, 1, 1), 50)
    assert not bool(far.isfinite().any())


def test_gradients_flow_to_both_sides() -> None:
    slopes, ahead = torch.ones(2, 3).unbind()
    slopes.requires_grad_()
    ahead.requires_grad_()
    Linear(slopes, ahead).at(DISTANCES).sum().backward()
    assert slopes.grad.tolist() == [-8.0] * 3  # 0 + 1 + 5 + 2
    assert ahead.grad.tolist() == [-6.0] * 3  # 1 + 5


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Table(ONES[None], extended=1), TypeError, r"Table\.extended: expected True or False, got 1 \(int\)"),
        (lambda: Linear([0.5]), TypeError, r"Linear\.slopes: expected a tensor, got \[0\.5\] \(list\)"),
        (lambda: Linear(None), TypeError, r"Linear\.slopes: expected a tensor, got None"),
        (lambda: Linear(ONES.bfloat16()), TypeError, r"Linear\.slopes: expected float32 or float64 .*got a torch.bfl"),
        (lambda: Linear(ONES.half()), TypeError, r"Linear\.slopes: expected float32 or float64 .*got a torch.float16"),
        (lambda: Linear(ONES.long()), TypeError, r"Linear\.slopes: expected float32 or float64 .*got a torch.int64"),
        (
            lambda: Linear(ONES[None]),
            ValueError,
            r"Linear\.slopes: expected 1 dimension.*got a torch.float32 .*\[1, 4\]",
        ),
        (
            lambda: Linear(-ONES),
            ValueError,
            r"Linear\.slopes: expected finite slopes of at least 0 \(the minus .*, got -1\.0",
        ),
        (lambda: Linear(ONES * torch.nan), ValueError, r"Linear\.slopes: expected finite slopes .*, got nan"),
        (lambda: Linear(torch.tensor([0.5, torch.inf])), ValueError, r"Linear\.slopes: expected finite .*, got inf"),
        (lambda: Linear(ONES, torch.tensor([1, 0, torch.nan, 2])), ValueError, r"Linear\.ahead: expected fin.*got nan"),
        (lambda: Linear(ONES, 0.5), TypeError, r"Linear\.ahead: expected a tensor, got 0\.5 \(float\)"),
        (
            lambda: Linear(ONES, ONES.bfloat16()),
            TypeError,
            r"Linear\.ahead: expected float32 or float64 .*bfloat16",
        ),
        (lambda: Linear(ONES, -ONES), ValueError, r"Linear\.ahead: expected finite slopes of .*, got -1\.0"),
        (
            lambda: Linear(ONES, ONES[:3]),
            ValueError,
            r"Linear\.ahead: expected one slope per head like slopes, \[4\], got .*\[3\]",
        ),
        (lambda: Table([[1.0]]), TypeError, r"Table\.values: expected a tensor, got \[\[1\.0\]\] \(list\)"),
        (lambda: Table(ONES), ValueError, r"Table\.values: expected 2 dimension.*got a torch.float32 .*\[4\]"),
        (lambda: Table(ONES[None].half()), TypeError, r"Table\.values: expected float32 or float64 .*float16"),
        (lambda: Table(ONES[None], 1), TypeError, r"Table\.ahead: expected a tensor, got 1 \(int\)"),
        (lambda: Table(ONES[None], ONES), ValueError, r"Table\.ahead: expected 2 dimension.*\[4\]"),
        (
            lambda: Table(ONES[None], ONES[None].bfloat16()),
            TypeError,
            r"Table\.ahead: expected float32 or float64 .*bfloat16",
        ),
        (
            lambda: Table(torch.ones(2, 4), torch.ones(3, 4)),
            ValueError,
            r"Table\.ahead: expected 2 heads like values, got .*\[3, 4\]",
        ),
        (
            lambda: Table(torch.ones(2, 0), extended=True),
            ValueError,
            r"Table\.values: expected at least one distance, got .*\[2, 0\]",
        ),
        (
            lambda: Table(torch.ones(2, 4), torch.ones(2, 0), extended=True),
            ValueError,
            r"Table\.ahead: expected at least one distance",
        ),
        (lambda: Decay(0.5), TypeError, r"Decay\.rates: expected a tensor, got 0\.5"),
        (lambda: Decay(ONES.half()), TypeError, r"Decay\.rates: expected float32 or float64 .*float16"),
        (lambda: Decay(torch.tensor(0.5)), ValueError, r"Decay\.rates: expected 1 or 2 dimension.*\[\]"),
        (lambda: Decay(ONES[None, None]), ValueError, r"Decay\.rates: expected 1 or 2 dimension.*\[1, 1, 4\]"),
        (
            lambda: Decay(torch.tensor([0.0, 0.5])),
            ValueError,
            r"Decay\.rates: expected every rate in \(0, 1\], got values from 0\.0 to 0\.5",
        ),
        (
            lambda: Decay(torch.tensor([1.5, 0.5])),
            ValueError,
            r"Decay\.rates: expected every rate in \(0, 1\], got values from 0\.5 to 1\.5",
        ),
        (lambda: Decay(torch.tensor([torch.nan])), ValueError, r"Decay\.rates: expected every rate in \(0, 1\]"),
    ],
)
def test_what_a_bias_is_made_of_is_checked(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


BOTH = pytest.mark.parametrize(
    "at", [Linear(ONES).at, Table(ONES[None]).at, lambda d: Decay(ONES).at(d, 0, torch.float32)]
)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool], ids=str)
def test_a_distance_is_an_integer(at: Any, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"distance: expected an integer tensor, got a {dtype} tensor"):
        at(torch.zeros(3).to(dtype))


@BOTH
def test_a_distance_is_a_tensor(at: Any) -> None:
    with pytest.raises(TypeError, match=r"distance: expected an integer tensor, got 3 \(int\)"):
        at(3)


def test_a_slope_of_zero_and_values_elsewhere_are_accepted() -> None:
    assert Linear(torch.zeros(2)).at(DISTANCES).abs().sum() == 0
    Linear(-torch.ones(2, device="meta"))  # not on the CPU: reading the values would not be free
    Decay(torch.ones(2, device="meta"))
