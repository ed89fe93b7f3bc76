"""Reach inside the kernels: what is left unread never weighs more than the tolerance, and steep heads read little."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Ball, Bidirectional, Causal, Linear, Table
from lengthen.attention.backends.triton import shapes
from lengthen.attention.masks import positions

Call = dict[str, Any]
Draw = Callable[..., Call]
Spans = Callable[[Call], Tensor]
Gradients = Callable[..., dict[str, Tensor]]


def falling(bias: str, length: int, steep: tuple[float, float] = (2.0, 0.5)) -> Any:
    """Return a bias of two heads that falls with distance, on both sides by slopes of its own."""
    slopes = torch.tensor(steep)
    if bias == "linear":
        return Linear(slopes, slopes.flip(0))
    tables = [-slope[:, None] * torch.arange(length) ** 0.9 for slope in (slopes, slopes.flip(0))]
    return Table(*(x[:, :40] if bias == "extended" else x for x in tables), extended=bias == "extended")


def unread(call: Call, spans: Spans) -> Tensor:
    """Return the share of each row's weight that the kernels left unread, `[batch, heads, queries]`, in float64."""
    q, k = call["q"].double(), call["k"].double().repeat_interleave(call["q"].shape[1] // call["k"].shape[1], dim=1)
    mask, q_start = call["mask"], k.shape[2] - q.shape[2]
    first, end = spans(call)[..., torch.arange(q.shape[2]) // 32].unsqueeze(-1)  # as many queries are in a block here
    j, (lo, hi) = torch.arange(k.shape[2]), mask.interval(q.shape[2], k.shape[2], q_start, q.device)
    seen = (j >= lo[:, None, :, None]) & (j <= hi[:, None, :, None])
    distance = positions(q.shape[2], q_start, q.device)[0][:, None] - j
    score = call.get("scale", 1 / math.sqrt(q.shape[3])) * q @ k.mT + call["bias"].at(distance, torch.float64)
    return (
        score.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill((j >= first) & (j < end), 0).sum(-1).nan_to_num()
    )


@pytest.mark.parametrize("kind", ["scattered", "mean", "outlier", "turned"])
@pytest.mark.parametrize("bias", ["linear", "table"])
def test_no_more_than_tolerance_is_left_unread(bias: str, kind: str, draw: Draw, spans: Spans) -> None:
    for tolerance in (1e-1, 1e-5):
        call = draw(1, 2, 130, key_heads=1) | {"bias": falling(bias, 130), "tolerance": tolerance}
        if kind == "mean":
            call["k"] = 0.3 * call["k"] + 20
        elif kind == "outlier":
            call["k"][:, :, 3] *= 8
        elif kind == "turned":  # near keys point away from their queries, far ones at them
            call["q"], call["k"] = 1 + 0.01 * call["q"], 1 + 0.01 * call["k"]
            call["k"][:, :, 65:] *= -1
        assert 0 < unread(call, spans).max() <= tolerance


@pytest.mark.parametrize(
    ("bias", "side"), [("linear", "causal"), ("linear", "ahead"), ("table", "causal"), ("table", "behind")]
)
def test_no_more_than_tolerance_is_left_unread_where_the_bound_is_tight(bias: str, side: str, spans: Spans) -> None:
    # Near keys score −2 and far ones 2, the most that the bound allows; where they turn differs between sequences, and
    # for one of them it is just where reading ends. A flat slope makes the sum of what is unread long.
    length, tolerance, turns = 140, 0.2, torch.arange(60, 84, 8)[:, None]
    k = torch.where(torch.arange(length) < turns, 0.25, -0.25)[:, None, :, None].expand(-1, 1, -1, 16)
    k = k.flip(2) if side == "ahead" else k
    call: Call = {"q": torch.full_like(k, 2.0), "k": k.contiguous(), "v": torch.zeros_like(k), "tolerance": tolerance}
    call["bias"] = Linear(torch.tensor([0.1])) if bias == "linear" else Table(-0.1 * torch.arange(length)[None])
    share = unread(call | {"mask": Causal() if side == "causal" else Bidirectional()}, spans)
    assert 0.1 * tolerance < share.max() <= tolerance


@pytest.mark.parametrize(("mask", "bias"), [("full packed", "linear"), ("causal padded", "table")])
def test_results_are_off_by_no_more_than_the_tolerance_allows(
    mask: str, bias: str, draw: Draw, spans: Spans, gradients: Gradients
) -> None:
    tolerance, length = 1e-3, 80
    call = draw(2 if " " in mask else 1, 2, length, key_heads=1, mask=mask)
    call |= {"bias": falling(bias, length, (3.0, 1.0)), "tolerance": tolerance}
    read, everything = spans(call), spans(call | {"tolerance": 0})
    assert bool((read[0] >= everything[0]).all() & (read[1] <= everything[1]).all())
    assert (read[1] - read[0]).sum() < (everything[1] - everything[0]).sum()
    got, exact = gradients(call, "triton"), gradients(call, "reference", dtype=torch.float64)
    assert (got["out"] - exact["out"]).norm(dim=-1).max() <= 2 * tolerance * call["v"].norm(dim=-1).max() + 1e-5
    seen = exact["lse"].isfinite()
    assert torch.equal(seen, got["lse"].isfinite())
    lost = (exact["lse"] - got["lse"])[seen]  # what is missing of a sum of 1 is at most the tolerance
    assert lost.min() >= -1e-5
    assert lost.max() <= -math.log1p(-tolerance) + 1e-5
    for name in exact.keys() - {"out", "lse"}:  # the gradients of slopes: times distances
        allowed = 100 * tolerance if "slopes" in name else 4 * tolerance
        assert (got[name] - exact[name]).norm() <= allowed * exact[name].norm() + 1e-3, name


@pytest.mark.parametrize("bias", ["linear", "table"])
def test_steep_heads_read_less_than_flat_ones(bias: str, draw: Draw, spans: Spans) -> None:
    slopes = torch.tensor([0.0, 0.3, 2.0])
    call = draw(1, 3, 300) | {"tolerance": 1e-4}
    call["bias"] = Linear(slopes) if bias == "linear" else Table(-slopes[:, None] * torch.arange(300))
    first, end = spans(call)[:, 0]
    read = (end - first).sum(-1)
    assert bool((read.diff() < 0).all())
    assert first[0].max() == 0
    assert read[2] < 0.35 * read[0]


@pytest.mark.parametrize("bias", ["linear", "table"])
def test_two_sides_reach_as_far_as_their_own_bias_lets_them(bias: str, draw: Draw, spans: Spans) -> None:
    call = draw(1, 2, 150) | {"bias": falling(bias, 150, (3.0, 0.2)), "mask": Bidirectional(), "tolerance": 1e-3}
    first, end = spans(call)[:, 0]
    here = torch.arange(5) * 32
    behind, onward = (here - first)[:, 1:-1], (end - here - 32)[:, 1:-1]
    assert bool((behind[0] <= 32).all() & (onward[1] <= 32).all())
    assert bool((behind[0] < behind[1]).any() & (onward[1] < onward[0]).any())


@pytest.mark.parametrize(("mask", "bias"), [("causal", "extended"), ("full", "linear")])
def test_everything_is_read_where_nothing_is_bounded(mask: str, bias: str, draw: Draw, spans: Spans) -> None:
    call = draw(1, 2, 90, mask=mask) | {"bias": falling(bias, 90), "tolerance": 0.1}
    whole, usual = spans(call | {"tolerance": 0}), spans(call)
    assert torch.equal(whole, spans(call | {"bias": None}))
    assert bool((usual != whole)[:, 0].flatten(-2).any())
    flat = Linear(torch.zeros(2)) if bias == "linear" else Table(torch.zeros(2, 1), extended=True)
    assert torch.equal(spans(call | {"bias": flat}), whole)
    for odd in (torch.nan, 1e30):
        spoilt = call["k"].clone()
        spoilt[0, 0, 1, 5] = odd  # of the first head alone
        read = spans(call | {"k": spoilt})
        assert torch.equal(read[:, :, 0], whole[:, :, 0])
        assert torch.equal(read[:, :, 1], usual[:, :, 1])


def test_a_mean_that_all_keys_share_costs_nothing(draw: Draw, spans: Spans) -> None:
    call = draw(1, 2, 200) | {"bias": Linear(torch.tensor([1.0, 0.3])), "tolerance": 1e-4}
    first = spans(call)[0]
    shifted = spans(call | {"k": call["k"] + 30 * torch.randn(16)})[0]
    assert first.max() > 100
    assert (first - shifted).max() <= 16


def test_a_bound_far_above_all_scores_loses_nothing(draw: Draw, check: Callable[..., None]) -> None:
    call = draw(1, 1, 90) | {"bias": Linear(torch.tensor([0.5])), "tolerance": 1e-6}
    call["q"][..., 0] = 0
    call["k"][0, 0, 5, 0] = 1000.0  # no query looks that way, and the bound cannot know
    check(call, dslopes=1e-3)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_keys_of_flat_heads_alone_are_not_measured(
    key_heads: int, draw: Draw, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    ball = importlib.import_module("lengthen.attention.backends.triton.ball")
    slopes = torch.tensor([2.0, 0.28, 0.1, 0.28])  # over 100 keys a bias of 200, 28, 10, 28
    for bias in (Linear(slopes), Table(-slopes[:, None] * torch.arange(100))):
        call = draw(1, 4, 100, key_heads=key_heads) | {"bias": bias, "tolerance": 0.2}
        call["k"] *= 0.01  # so that all would leave keys unread
        monkeypatch.setattr(ball, "FLAT", type(ball.FLAT)(30.0))
        # The second head's keys are measured for the steep head beside it, or not at all.
        assert (spans(call)[0, 0].amax(-1) > 0).tolist() == [True, key_heads == 2, False, False]
        monkeypatch.setattr(ball, "FLAT", type(ball.FLAT)(0.0))
        assert bool((spans(call)[0, 0].amax(-1) > 0).all())


def test_short_calls_do_not_measure_their_keys(draw: Draw, spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    call = draw(1, 1, 100) | {"bias": Linear(torch.tensor([3.0])), "tolerance": 0.1}
    assert spans(call)[0].max() > 0
    monkeypatch.setattr(shapes, "SHORT", 100)
    assert spans(call)[0].max() == 0


def test_a_given_ball_changes_only_how_much_is_read(draw: Draw, spans: Spans, gradients: Gradients) -> None:
    call = draw(1, 2, 100, key_heads=1) | {"bias": Linear(torch.tensor([2.0, 0.5])), "tolerance": 1e-6}
    ball = Ball.around(call["k"])
    got, expected = gradients(call | {"ball": ball}, "triton"), gradients(call, "reference", dtype=torch.float64)
    for name in expected:
        assert (got[name] - expected[name]).norm() <= 1e-4 * expected[name].norm(), name
    read, more, all_read = (
        spans(call | {"ball": Ball(ball.centre, wider * ball.radius, 100)}) for wider in (1, 4, torch.inf)
    )
    assert bool((more[0] <= read[0]).all() & (more[1] >= read[1]).all())
    assert not torch.equal(more, read)
    assert torch.equal(all_read, spans(call | {"tolerance": 0}))


def test_with_a_given_ball_neither_forward_nor_backward_looks_at_far_keys(
    draw: Draw, spans: Spans, gradients: Gradients
) -> None:
    call = draw(1, 2, 40, keys=200) | {"bias": Linear(torch.tensor([2.0, 1.0])), "tolerance": 1e-3}
    call["ball"] = Ball.around(call["k"])
    nearest = int(spans(call)[0].min()) // 32 * 32  # the gradient of keys goes by blocks of 32
    assert nearest >= 64
    expected = gradients(call, "triton")
    for name in "kv":
        call[name][:, :, :nearest] = torch.nan
    got = gradients(call, "triton")
    for name in expected:
        assert torch.equal(got[name], expected[name]), name
    for name in ("dk", "dv"):
        assert not got[name][:, :, :nearest].any(), name
        assert bool((got[name][:, :, nearest + 32 :] != 0).all()), name


def test_a_ball_in_16_bits_holds_what_rounding_moves(draw: Draw, spans: Spans) -> None:
    # The centre is rounded to 16 bits for its product with the queries: the bound must not fall by that.
    call = draw(1, 2, 150, dtype=torch.float16) | {"bias": Linear(torch.tensor([2.0, 0.5])), "tolerance": 1e-2}
    call["k"] = (20.003 + 0.01 * call["k"].float()).half()
    call["ball"] = Ball.around(call["k"])
    assert 0 < unread(call, spans).max() <= 1e-2
