"""A ball around the keys: it holds them all as a cache grows, a call refuses another's, and it saves reading."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lengthen import Ball, Bidirectional, Causal, Decay, Linear, Table, Window, attention


def assert_holds(ball: Ball, k: Tensor) -> None:
    """Check in float64 that every key lies in the ball."""
    away = (k.double() - ball.centre.double().unsqueeze(2)).norm(dim=-1)
    assert bool((away <= ball.radius.double().unsqueeze(2)).all())


@given(
    seed=st.integers(0, 99),
    keys=st.integers(0, 40),
    shift=st.sampled_from([0.0, 3.0, 1e4]),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    centred=st.booleans(),
    step=st.integers(1, 50),
)
def test_it_holds_every_key_it_was_given(
    seed: int, keys: int, shift: float, size: float, dtype: torch.dtype, centred: bool, step: int, small_runs: Any
) -> None:
    torch.manual_seed(seed)
    k = (size * torch.randn(2, 3, keys + 9, 5) + shift).to(dtype)
    with small_runs(STEP=step):
        ball = Ball.around(k[:, :, :keys], centred)
        assert_holds(ball, k[:, :, :keys])
        assert ball.keys == keys
        assert ball.centre.dtype == dtype
        assert ball.radius.dtype == torch.promote_types(dtype, torch.float32)
        assert centred or not ball.centre.any()
        grown = ball.appended(k[:, :, keys : keys + 1]).appended(k[:, :, keys + 1 :])
        assert_holds(grown, k)
        assert grown.keys == keys + 9
        other = grown.replaced(7 * k[:, :, :2])
        assert_holds(other, torch.cat((k, 7 * k[:, :, :2]), dim=2))
        assert other.keys == grown.keys
        assert bool((other.radius >= grown.radius).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [0.3, -2.0, 0.0])
def test_no_score_is_above_the_highest(dtype: torch.dtype, scale: float) -> None:
    q, k = torch.randn(2, 4, 50, 8).to(dtype), (torch.randn(2, 2, 60, 8) + 2).to(dtype)
    bound = Ball.around(k).highest_score(q, scale)
    assert bound.shape == (2, 4, 50)
    score = scale * q.double() @ k.double().repeat_interleave(2, dim=1).mT
    assert bool((score.amax(dim=-1) <= bound.double() + 1e-12).all())


MASKS: dict[str, Any] = {
    "causal": Causal(),
    "both": Bidirectional(),
    "window": Window(40),
    "padded": Causal().padded(torch.tensor([0, 50])),
}
BIASES: dict[str, Any] = {
    "linear": lambda: Linear(torch.tensor([0.9, 0.5, 0.3, 0.05])),
    "table": lambda: Table(-torch.rand(4, 301).cumsum(dim=1)),
    "extended": lambda: Table(-torch.rand(4, 50).cumsum(dim=1), extended=True),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("queries", [1, 20, 300])
def test_with_a_ball_the_result_is_the_same(mask: str, bias: str, queries: int, assert_as_defined: Any) -> None:
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 300, 8) + 1, torch.randn(2, 2, 300, 8)
    call = {"q": q, "k": k, "v": v, "bias": BIASES[bias](), "mask": MASKS[mask], "ball": Ball.around(k)}
    assert_as_defined(call, rest=2e-6)


def test_a_decay_asks_for_a_ball_around_the_origin(assert_as_defined: Any) -> None:
    # Far keys keep less of what they share with all keys, so a ball around their mean says nothing of them.
    q, k, v = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 300, 8) + 5, torch.randn(1, 2, 300, 8)
    call = {"q": -q.abs(), "k": k, "v": v, "bias": BIASES["linear"](), "ball": Ball.around(k), "mask": Causal()}
    assert_as_defined(call | {"decay": Decay(torch.full((8,), 0.9))}, rest=2e-6, drates=1e-4)


def test_a_cache_that_grows_keeps_its_ball() -> None:
    q, k, v = torch.randn(1, 4, 60, 8), *torch.randn(2, 1, 2, 60, 8)
    bias, ball = Linear(torch.tensor([0.9, 0.5, 0.3, 0.05])), Ball.around(k[:, :, :20])
    whole = attention(q, k, v, bias=bias, backend="reference")
    for end in range(21, 61):
        ball = ball.appended(k[:, :, end - 1 : end])
        got = attention(q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end], bias=bias, ball=ball)
        torch.testing.assert_close(got, whole[:, :, end - 1 : end], rtol=0, atol=2e-6)


@pytest.mark.parametrize("queries", [1, 16])
def test_few_queries_with_a_ball_read_only_what_is_in_reach(queries: int, spans: Callable[..., Tensor]) -> None:
    q, k, v = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 3000, 8), torch.randn(1, 2, 3000, 8)
    call = {"q": q, "k": k, "v": v, "bias": Linear(torch.tensor([0.5, 0.0]))}
    lo, hi = spans(call)
    assert int(lo.max()) == 0  # without one, looking at all keys would cost what it saves
    lo, hi = spans(call | {"ball": Ball.around(k)})
    assert bool((hi == 3000).all())
    assert int(lo[0, 0, 0]) > 2700
    assert int(lo[0, 1, 0]) == 0  # a slope of 0 bounds nothing
    table = Table(torch.stack((-0.5 * torch.arange(3000.0), torch.zeros(3000))))
    assert torch.equal(spans(call | {"bias": table, "ball": Ball.around(k)})[0][0, 1], torch.tensor([0]).int())
    assert int(spans(call | {"bias": table, "ball": Ball.around(k)})[0][0, 0, 0]) > 2700
    k[0, :, 5] = torch.nan  # a ball that holds NaN bounds nothing, and what is not finite is read with care
    assert int(spans(call | {"ball": Ball.around(k)}).max()) == -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ball, k: ball, r"ball: expected one of 31 keys like k, got one of 30: it is not k's"),
        (lambda ball, k: ball.replaced(k[:, :, 30:]), r"ball: expected one of 31 keys like k, got one of 30"),
        (lambda ball, k: Ball.around(k).appended(k[:, :, :1]), r"ball: expected one of 31 keys like k, got one of 32"),
        (lambda ball, k: Ball.around(k[:1]), r"ball: expected a centre of shape \[2, 2, 8\] and a radius of \[2, 2\]"),
        (lambda ball, k: Ball.around(k[..., :4]), r"ball: expected a centre of shape \[2, 2, 8\]"),
        (
            lambda ball, k: Ball(torch.zeros(2, 2, 8), torch.zeros(2, 1), 31),
            r"ball: expected .* a radius of \[2, 2\], got .*\[2, 1\]",
        ),
        (lambda ball, k: Ball.around(k.to("meta")), r"ball: expected a tensor on cpu like q, got .*meta"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "chunked", None])
def test_a_ball_of_other_keys_is_refused(change: Any, message: str, backend: str | None) -> None:
    k = torch.randn(2, 2, 31, 8)
    ball = change(Ball.around(k[:, :, :30]), k)
    with pytest.raises(ValueError, match=message):
        attention(torch.randn(2, 4, 1, 8), k, k, bias=Linear(torch.ones(4)), ball=ball, backend=backend)


def test_16_bits_are_too_few_for_a_radius() -> None:
    for centre, radius in ((torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)):
        with pytest.raises(TypeError, match=rf"Ball\.radius: expected float32, or float64 .*, got a {radius}"):
            Ball(torch.zeros(1, 1, 4, dtype=centre), torch.zeros(1, 1, dtype=radius), 3)


@pytest.mark.parametrize("queries", [1, 60])
def test_an_infinite_radius_bounds_nothing(queries: int, spans: Callable[..., Tensor], assert_as_defined: Any) -> None:
    q, k, v = torch.randn(1, 4, queries, 8), torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8)
    bias, ball = Linear(torch.tensor([0.9, 0.5, 0.3, 0.05])), Ball.around(k)
    call = {"q": q, "k": k, "v": v, "bias": bias, "mask": Causal()}
    wide = call | {"ball": Ball(ball.centre, ball.radius * torch.inf, 300)}
    assert int(spans(call | {"ball": ball})[0].max()) > 0
    assert int(spans(wide)[0].max()) == 0
    assert_as_defined(wide, rest=2e-6)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("centred", [True, False])
def test_around_keys_that_are_not_finite_the_radius_is_infinite(odd: float, centred: bool) -> None:
    k = torch.randn(1, 2, 9, 4)
    k[0, 1, 3, 2] = odd
    for ball in (
        Ball.around(k, centred),
        Ball.around(k[:, :, :3], centred).appended(k[:, :, 3:]).appended(k[:, :, :1]),
    ):
        assert ball.radius.isfinite().tolist() == [[True, False]]
        assert float(ball.radius[0, 1]) == torch.inf
        assert bool(ball.centre.isfinite().all())


def test_what_is_no_ball_is_refused() -> None:
    k = torch.randn(1, 1, 5, 8)
    with pytest.raises(ValueError, match=r"Ball\.radius: expected numbers of at least 0 .*, got -2\.0"):
        Ball(torch.zeros(1, 1, 8), torch.full((1, 1), -2.0), 5)
    for name, centre, radius in (("centre", torch.nan, 1.0), ("radius", 0.0, torch.nan)):
        with pytest.raises(ValueError, match=rf"Ball\.{name}: expected numbers .*, got nan"):
            Ball(torch.full((1, 1, 8), centre), torch.full((1, 1), radius), 5)
    with pytest.raises(TypeError, match=r"Ball\.centre: expected a tensor \(Ball\.around\(k\) .*, got None"):
        Ball(None, torch.zeros(1, 1), 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Ball\.radius: expected a tensor .*, got 3\.0"):
        Ball(k[:, :, 0], 3.0, 5)  # type: ignore[arg-type]


def test_a_ball_of_keys_in_another_dtype_is_refused() -> None:
    k = torch.randn(1, 1, 5, 8)
    with pytest.raises(
        TypeError, match=r"ball: expected one of keys in torch\.float32 like k, its centre is .*torch\.bfloat16"
    ):
        attention(k, k, k, bias=Linear(torch.ones(1)), ball=Ball.around(k.bfloat16()))
