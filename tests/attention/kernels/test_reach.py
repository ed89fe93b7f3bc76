"""Reach inside the kernels: what is left unread never weighs more than the tolerance, and steep heads read little."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Window
from lengthen.attention import kernels
from lengthen.attention.kernels import shapes

Call = dict[str, Any]
Share = Callable[[Call], Tensor]
MASKS: dict[str, Any] = {
    "causal": Causal(),
    "full": Bidirectional(),
    "window": Window(60),
    "blockwise": Blockwise(40),
    "padded": Causal().padded(torch.tensor([21])),
    "packed": Bidirectional().packed((torch.arange(100) // 70 * 70)[None]),
}


def unread(call: Call) -> Tensor:
    """Return the share of each row's weight that the kernels left unread, `[batch, heads, queries]`, in float64."""
    q, k = (call[name].double() for name in "qk")
    queries, keys = q.shape[2], k.shape[2]
    q_start = call.get("q_start", keys - queries)
    mask = call.get("mask", Causal())
    rows = torch.arange(queries) // 32  # the blocks of queries that tests have
    first, end = kernels.spans(**call)[..., rows].unsqueeze(-1)
    j = torch.arange(keys)
    distance = torch.arange(queries)[:, None] + q_start - j
    score = call.get("scale", 1 / math.sqrt(q.shape[3])) * q @ k.mT + call["bias"].at(distance, torch.float64)
    lo, hi = (x[:, None, :, None] for x in mask.interval(queries, keys, q_start, q.device))
    score = score.masked_fill((j < lo) | (j > hi), -torch.inf)
    return score.softmax(-1).masked_fill((j >= first) & (j < end), 0).sum(-1)


def spread(kind: str, k: Tensor, q: Tensor) -> None:
    """Place keys and queries where a bound is easily wrong."""
    if kind == "mean":
        k.mul_(0.3).add_(20)
    elif kind == "outlier":
        k[:, :, 3] *= 8
    elif kind == "turned":  # near keys point away from their queries, far ones at them
        q.copy_(1 + 0.01 * q)
        k.copy_(1 + 0.01 * k)
        k[:, :, k.shape[2] // 2 :] *= -1
    elif kind == "still":
        q.zero_()


@pytest.mark.parametrize("kind", ["scattered", "mean", "outlier", "turned", "still"])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-5])
def test_no_more_than_tolerance_is_left_unread(kind: str, tolerance: float, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 150, 16, key_heads=1) | {"bias": Linear(torch.tensor([2.0, 0.5])), "tolerance": tolerance}
    spread(kind, call["k"], call["q"])
    share = unread(call)
    assert share.max() <= tolerance
    assert share.max() > 0


@pytest.mark.parametrize("side", ["causal", "behind", "ahead"])
@pytest.mark.parametrize("tolerance", [0.2, 0.02])
def test_no_more_than_tolerance_is_left_unread_where_the_bound_is_tight(side: str, tolerance: float) -> None:
    # Near keys score −2 and far ones 2, the most that the bound allows; where they turn differs between sequences, and
    # for one of them it is just where reading ends. A flat slope makes the sum of what is unread long.
    length, turns = 140, torch.arange(60, 84, 4)[:, None]
    k = torch.where(torch.arange(length) < turns, 0.25, -0.25)[:, None, :, None].expand(-1, 1, -1, 16)
    k = k.flip(2) if side == "ahead" else k
    call: Call = {"q": torch.full_like(k, 2.0), "k": k.contiguous(), "v": torch.zeros_like(k), "tolerance": tolerance}
    call |= {"bias": Linear(torch.tensor([0.1])), "mask": Causal() if side == "causal" else Bidirectional()}
    share = unread(call)
    assert share.max() <= tolerance
    assert share.max() > 0.1 * tolerance


@pytest.mark.parametrize("mask", MASKS)
def test_out_is_off_by_no_more_than_the_tolerance_allows(
    mask: str, qkv: Callable[..., Call], share_read: Share, gradients: Callable[..., dict[str, Tensor]]
) -> None:
    tolerance = 1e-3
    call = qkv(1, 2, 100, 16) | {"mask": MASKS[mask], "tolerance": tolerance}
    call["bias"] = Linear(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 4.0]))
    assert share_read(call).max() < 1
    assert unread(call).nan_to_num().max() <= tolerance
    got, exact = gradients(call, "triton"), gradients(call, "reference", dtype=torch.float64)
    longest = call["v"].norm(dim=-1).max()
    off = (got["out"] - exact["out"]).norm(dim=-1)
    assert off.max() <= 2 * tolerance * longest + 1e-5
    seen = exact["lse"].isfinite()
    assert torch.equal(seen, got["lse"].isfinite())
    # What is missing of a sum of 1 is at most the tolerance.
    lost = (exact["lse"] - got["lse"])[seen]
    assert lost.max() <= -math.log1p(-tolerance) + 1e-5
    assert lost.min() >= -1e-5
    for name in ("dq", "dk", "dv"):
        assert (got[name] - exact[name]).norm() <= 4 * tolerance * exact[name].norm(), name
    for name in ("dslopes", "dslopes ahead"):  # times distances
        assert (got[name] - exact[name]).abs().max() <= 100 * tolerance * exact[name].abs().max() + 1e-3, name


def test_steep_heads_read_less_than_flat_ones(qkv: Callable[..., Call], share_read: Share) -> None:
    call = qkv(1, 3, 300, 16) | {"bias": Linear(torch.tensor([0.0, 0.3, 2.0])), "tolerance": 1e-4}
    share = share_read(call)
    assert bool((share.diff() < 0).all())
    assert share[0] == 1
    assert share[2] < 0.35


def test_it_reads_about_as_far_as_the_public_reach_says(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 250, 16) | {"bias": Linear(torch.tensor([1.0, 0.3])), "tolerance": 1e-3}
    first = kernels.spans(**call)[0][..., torch.arange(250) // 32]
    needed = lengthen.reach(call["q"], call["k"], call["bias"], 1e-3)
    farthest = (torch.arange(250) - first - needed).view(-1)
    # Whole blocks, for the farthest of 32 queries; and the ball is around other points than the mean key.
    assert farthest.max() <= 31 + 15 + 48 + 20


@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "full"])
def test_a_tolerance_of_0_and_a_slope_of_0_read_everything(mask: Any, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 120, 16) | {"mask": mask}
    whole = kernels.spans(**call)
    for bias, tolerance in ((Linear(torch.tensor([3.0])), 0), (Linear(torch.zeros(1)), 0.5)):
        assert torch.equal(kernels.spans(**call, bias=bias, tolerance=tolerance), whole)
    assert not torch.equal(kernels.spans(**call, bias=Linear(torch.tensor([3.0])), tolerance=0.5), whole)


@pytest.mark.parametrize("odd", [torch.nan, -torch.inf], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "full"])
def test_keys_that_are_not_finite_are_all_read(odd: float, mask: Any, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 90, 16) | {"bias": Linear(torch.tensor([3.0, 3.0])), "mask": mask, "tolerance": 0.1}
    whole, usual = kernels.spans(**call | {"tolerance": 0}), kernels.spans(**call)
    call["k"][0, 0, 1, 5] = odd  # of the first head alone
    read = kernels.spans(**call)
    assert torch.equal(read[:, :, 0], whole[:, :, 0])
    assert torch.equal(read[:, :, 1], usual[:, :, 1])


@pytest.mark.parametrize("size", [1e3, 1e12, 1e30])
def test_huge_keys_are_all_read(size: float, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 120, 16) | {"bias": Linear(torch.tensor([3.0])), "tolerance": 0.1}
    call["k"] *= size
    call["q"] *= min(size, 1e6) / size  # scores that float32 can hold
    assert torch.equal(kernels.spans(**call), kernels.spans(**call | {"tolerance": 0}))


def test_a_mean_that_all_keys_share_costs_nothing(qkv: Callable[..., Call], share_read: Share) -> None:
    call = qkv(1, 2, 200, 16) | {"bias": Linear(torch.tensor([1.0, 0.3])), "tolerance": 1e-4}
    centred = share_read(call)
    call["k"] += 30 * torch.randn(16)
    assert bool((share_read(call) <= centred + 0.05).all())
    assert centred.max() < 0.8


def test_two_sides_reach_as_far_as_their_own_slopes_let_them(qkv: Callable[..., Call]) -> None:
    slopes = Linear(torch.tensor([3.0, 0.2]), torch.tensor([0.2, 3.0]))
    call = qkv(1, 2, 150, 16) | {"bias": slopes, "mask": Bidirectional(), "tolerance": 1e-3}
    first, end = kernels.spans(**call)[:, 0]
    here = torch.arange(5) * 32
    behind, onward = (here - first)[:, 1:-1], (end - here - 32)[:, 1:-1]
    assert bool((behind[0] < behind[1]).any())
    assert bool((behind[0] <= 32).all())
    assert bool((onward[1] < onward[0]).any())
    assert bool((onward[1] <= 32).all())


@pytest.mark.parametrize("highest", ["near", "far", "both"])
@pytest.mark.parametrize(("slope", "tolerance"), [(2.0, 1e-6), (0.1, 1e-6), (0.1, 0)])
def test_scores_may_be_far_apart(highest: str, slope: float, tolerance: float, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 120, 16) | {"bias": Linear(torch.tensor([slope])), "tolerance": tolerance}
    call["q"] = 30 * (1 + 0.01 * call["q"])
    call["k"] = torch.ones_like(call["k"]) * (torch.randn(120, 1) if highest == "both" else 1)
    call["k"][:, :, slice(60, None) if highest == "far" else slice(0, 60)] *= -1
    got = lengthen.attention(**call, backend="triton", return_lse=True)
    wide = call | {name: call[name].double() for name in "qkv"}
    expected = lengthen.attention(**wide, backend="reference", return_lse=True)
    assert expected[1].abs().max() > 100
    for ours, theirs in zip(got, expected, strict=True):  # scores themselves are rounded
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_keys_of_flat_heads_alone_are_not_measured(
    key_heads: int, qkv: Callable[..., Call], share_read: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ball = importlib.import_module("lengthen.attention.kernels.ball")
    monkeypatch.setattr(ball, "FLAT", type(ball.FLAT)(30.0))
    slopes = torch.tensor([2.0, 0.28, 0.1, 0.28])  # over 100 keys a bias of 200, 28, 10, 28
    call = qkv(1, 4, 100, 16, key_heads=key_heads) | {"bias": Linear(slopes), "tolerance": 0.2}
    call["k"] *= 0.01  # so that all but the flattest would leave keys unread
    read = share_read(call)
    assert read[0] < 1
    assert bool((read[2:] == 1).all())
    assert bool(read[1] < 1) == (key_heads == 2)  # its keys are measured for the steep head beside it
    monkeypatch.setattr(ball, "FLAT", type(ball.FLAT)(0.0))
    assert bool((share_read(call)[[0, 1, 3]] < 1).all())


def test_a_bound_far_above_all_scores_loses_nothing(
    qkv: Callable[..., Call], assert_as_defined: Callable[..., None]
) -> None:
    call = qkv(1, 1, 120, 16) | {"bias": Linear(torch.tensor([0.5])), "tolerance": 1e-6}
    call["q"][..., 0] = 0
    call["k"][0, 0, 5, 0] = 1000.0  # no query looks that way, and the bound cannot know
    assert_as_defined(call, "triton", rest=1e-5, dslopes=1e-3)


def spans_given(call: Call, key_norm: Tensor) -> Tensor:
    """Return the keys that are read where the caller says how long keys are."""
    q, k = call["q"], call["k"]
    place = (1 / math.sqrt(q.shape[3]), k.shape[2] - q.shape[2], call["tolerance"])
    mask = call.get("mask", Causal())
    return kernels.attend(*kernels._arguments(q, k, call["v"], call["bias"], None, mask, *place, key_norm))[2]


@pytest.mark.parametrize("mask", [Causal(), Bidirectional(), Window(60)], ids=["causal", "full", "window"])
def test_a_given_key_norm_changes_only_how_much_is_read(
    mask: Any, qkv: Callable[..., Call], assert_as_defined: Callable[..., None]
) -> None:
    call = qkv(1, 2, 100, 16, key_heads=1)
    call |= {"bias": Linear(torch.tensor([2.0, 0.5])), "mask": mask, "tolerance": 1e-6}
    norm = call["k"].norm(dim=-1).amax(dim=-1)
    assert_as_defined(call | {"key_norm": norm}, "triton", rest=1e-5, dslopes=1e-3)
    read, more = spans_given(call, norm), spans_given(call, 4 * norm)
    assert bool((more[0] <= read[0]).all())
    assert bool((more[1] >= read[1]).all())
    assert not torch.equal(more, read)
    everything = kernels.spans(**call | {"tolerance": 0})
    assert torch.equal(spans_given(call, torch.full_like(norm, torch.inf)), everything)
    assert torch.equal(spans_given(call | {"tolerance": 0}, norm), everything)
    assert not torch.equal(read, everything)


def test_norms_may_lie_apart_in_memory(qkv: Callable[..., Call]) -> None:
    call = qkv(2, 4, 60, 16, key_heads=2) | {"bias": Linear(torch.tensor([2.0, 0.5, 1.0, 3.0])), "tolerance": 1e-6}
    norms = call["k"].norm(dim=-1).amax(dim=-1) * torch.tensor([1.0, 100.0])
    assert torch.equal(spans_given(call, norms.t().contiguous().t()), spans_given(call, norms))


def test_with_a_given_key_norm_neither_forward_nor_backward_looks_at_far_keys(
    qkv: Callable[..., Call], gradients: Callable[..., dict[str, Tensor]]
) -> None:
    call = qkv(1, 2, 40, 16, keys=200) | {"bias": Linear(torch.tensor([2.0, 1.0])), "tolerance": 1e-3}
    call["key_norm"] = call["k"].norm(dim=-1).amax(dim=-1)
    nearest = int(spans_given(call, call["key_norm"])[0].min()) // 32 * 32  # the gradient of keys goes by blocks of 32
    assert nearest >= 64
    expected = gradients(call, "triton")
    for name in "kv":
        call[name][:, :, :nearest] = torch.nan
    got = gradients(call, "triton")
    for name in expected:
        assert torch.equal(got[name], expected[name]), name
    for name in ("dk", "dv"):
        assert bool((got[name][:, :, :nearest] == 0).all()), name
        assert bool((got[name][:, :, nearest + 32 :] != 0).all()), name


def test_short_calls_do_not_measure_their_keys(qkv: Callable[..., Call], monkeypatch: pytest.MonkeyPatch) -> None:
    call = qkv(1, 1, 100, 16) | {"bias": Linear(torch.tensor([3.0])), "tolerance": 0.1}
    assert kernels.spans(**call)[0].max() > 0
    monkeypatch.setattr(shapes, "SHORT", 100)
    assert kernels.spans(**call)[0].max() == 0
