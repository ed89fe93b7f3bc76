"""Few queries against many keys: the reference's results, however keys are split, and no key read beyond the reach."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Ball, Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes
from lengthen.attention.backends import triton
from lengthen.attention.backends.ops import flat
from lengthen.attention.backends.triton import shapes
from lengthen.attention.problem import pose

Call = dict[str, Any]
Draw = Callable[..., Call]
Check = Callable[..., tuple[Tensor, Tensor]]
BLOCK = 16  # keys, in these tests


def with_ball(call: Call, wider: float = 1.0) -> Call:
    """Return a call with a ball around its keys, or with a wider one."""
    ball = Ball.around(call["k"])
    return call | {"ball": Ball(ball.centre, wider * ball.radius, ball.keys)}


def read(call: Call) -> Tensor:
    """Return the first key that decoding reads and the end of those it reads, `[2, batch, key_heads]`."""
    return triton.decode_few(pose(**call), False)[3]


# Examples take long here, and so would making a failing one smaller.
@settings(max_examples=16, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_any_call(data: st.DataObject, any_call: Draw, check_forward: Check) -> None:
    call = any_call(data, most_queries=5)
    with pytest.MonkeyPatch.context() as patch:
        launch = importlib.import_module("lengthen.attention.backends.triton.launch")
        patch.setattr(launch, "DECODERS", data.draw(st.sampled_from([1, 7, 24, 200]), label="DECODERS"))
        check_forward(with_ball(call) if data.draw(st.booleans(), label="ball") else call)


@pytest.mark.parametrize("bias", ["none", "linear", "table", "extended"])
@pytest.mark.parametrize("mask", ["causal", "window", "full", "causal padded"])
def test_every_mask_and_bias(mask: str, bias: str, draw: Draw, check_forward: Check) -> None:
    for queries in (1, 3):
        call = draw(1 + ("padded" in mask), 2, queries, keys=50, key_heads=1, mask=mask, bias=bias)
        check_forward(with_ball(call) if queries == 1 else call)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(1, 16), (40, 64), (17, 3), (16, 256), (256, 16)])
def test_any_width_up_to_256(head_dim: int, value_dim: int, draw: Draw, check_forward: Check) -> None:
    check_forward(draw(1, 2, 2, head_dim, keys=40, value_dim=value_dim, bias="linear"))


def test_sequences_may_stand_at_places_of_their_own(draw: Draw, check_forward: Check) -> None:
    for q_start in ([12, 38], [30, -1], [90, 5]):
        check_forward(with_ball(draw(2, 2, 2, keys=40, bias="linear", q_start=torch.tensor(q_start))))


def test_of_16_bits_out_is_rounded_once(draw: Draw, check_forward: Check) -> None:
    # Weights are rounded to 16 bits for their product with the values, and the result is again.
    check_forward(with_ball(draw(1, 2, 2, keys=70, key_heads=1, dtype=torch.float16, bias="linear")), within=1e-3)


def test_one_token_at_a_time_gives_the_rows_of_one_long_call(draw: Draw) -> None:
    call = draw(1, 2, 20, key_heads=1) | {"bias": Linear(64 * alibi_slopes(2)), "mask": Blockwise(9)}
    wide = call | {name: call[name].double() for name in "qkv"}
    expected = lengthen.attention(**wide, backend="reference", return_lse=True)
    keys, values = (torch.full_like(call[name], torch.nan) for name in "kv")  # a cache: the rest of it is not filled
    ball = Ball.around(call["k"][:, :, :0])
    for at in range(20):
        keys[:, :, at], values[:, :, at] = call["k"][:, :, at], call["v"][:, :, at]
        ball = ball.appended(call["k"][:, :, at : at + 1])
        here = {"q": call["q"][:, :, at : at + 1], "k": keys[:, :, : at + 1], "v": values[:, :, : at + 1], "ball": ball}
        got = lengthen.attention(**call | here, backend="triton", return_lse=True)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours[:, :, 0].double(), theirs[:, :, at], rtol=1e-6, atol=1e-5)


def test_how_keys_are_split_changes_nothing_but_rounding(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    call, results = draw(1, 1, 3, keys=100, bias="linear"), []
    for programs in (1, 4, 200, 200):
        monkeypatch.setattr(importlib.import_module("lengthen.attention.backends.triton.launch"), "DECODERS", programs)
        results.append(lengthen.attention(**call, backend="triton"))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=2e-6)
    assert torch.equal(results[2], results[3])  # two runs are equal to the bit


@pytest.mark.parametrize("layout", ["heads beside each other", "features apart", "part of a longer cache"])
def test_strides_of_a_cache_make_no_difference(layout: str, draw: Draw) -> None:
    def laid_out(x: Tensor) -> Tensor:
        if layout == "heads beside each other":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "features apart":
            return x.mT.contiguous().mT
        return torch.cat((x, torch.full_like(x, torch.nan)), dim=2)[:, :, : x.shape[2]]

    call = with_ball(draw(2, 2, 2, keys=30, bias="linear"))
    strided = call | {name: laid_out(call[name]) for name in "qkv"}
    assert not strided["k"].is_contiguous()
    got, expected = (lengthen.attention(**x, backend="triton") for x in (strided, call))
    assert torch.equal(got, expected)


# How far it reads.


@pytest.mark.parametrize("queries", [1, 4])
def test_steep_heads_read_less_than_flat_ones(queries: int, draw: Draw) -> None:
    call = draw(1, 4, queries, keys=300) | {"bias": Linear(torch.tensor([0.0, 0.1, 0.4, 2.0]))}
    first, end = read(with_ball(call))[:, 0]
    assert first[0] == 0
    assert bool((first.diff() > 0).all())
    assert first[3] >= 300 - 3 * BLOCK
    assert end.tolist() == [300] * 4


def test_heads_that_share_keys_read_as_far_as_the_flattest(draw: Draw) -> None:
    call, slopes = draw(1, 4, 2, keys=300, key_heads=2), torch.tensor([3.0, 0.2, 0.5, 2.0])
    together, alone = read(with_ball(call | {"bias": Linear(slopes)}))[0, 0], []
    for head in range(4):
        part = {"q": call["q"][:, [head]], "k": call["k"][:, [head // 2]], "v": call["v"][:, [head // 2]]}
        alone.append(int(read(with_ball(call | part | {"bias": Linear(slopes[[head]])}))[0]))
    assert together.tolist() == [min(alone[:2]), min(alone[2:])]
    assert alone[0] > alone[1]


def test_far_keys_and_values_are_not_touched(draw: Draw) -> None:
    call = draw(2, 4, 2, keys=200, key_heads=2) | {"bias": Linear(torch.tensor([2.0, 0.7, 1.0, 0.5]))}
    call = with_ball(call)
    expected, first = lengthen.attention(**call, backend="triton"), read(call)[0]
    assert first.min() >= 2 * BLOCK
    unread = torch.arange(200) < first[..., None]
    spoilt = {name: call[name].masked_fill(unread[..., None], torch.nan) for name in "kv"}
    assert torch.equal(lengthen.attention(**call | spoilt, backend="triton"), expected)


@pytest.mark.parametrize(("queries", "scale", "tolerance"), [(1, 0.25, 0.2), (5, -0.25, 1e-5)])
def test_no_more_than_tolerance_is_left_unread(queries: int, scale: float, tolerance: float) -> None:
    # Near keys score −2 and far ones 2, the most that the bound allows; where they turn differs between sequences, and
    # for one of them it is just where reading ends. A flat slope makes the sum of what is unread long.
    keys, turns = 180, torch.arange(28, 160, 12)[:, None]
    k = torch.where(torch.arange(keys) < turns, 0.25, -0.25)[:, None, :, None].expand(-1, 1, -1, 16).contiguous()
    q, bias = torch.full_like(k[:, :, :queries], 0.5 / scale), Linear(torch.tensor([0.1]))
    call = {"q": q, "k": k, "v": torch.zeros_like(k), "scale": scale, "tolerance": tolerance, "bias": bias}
    first = read(with_ball(call | {"mask": Causal()}))[0][..., None, None]
    j, distance = torch.arange(keys), torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    score = scale * q.double() @ k.double().mT + bias.at(distance, torch.float64)
    unread = score.masked_fill(distance < 0, -torch.inf).softmax(-1).masked_fill(j >= first, 0).sum(-1)
    assert 0.05 * tolerance < unread.max() <= tolerance


def test_a_ball_too_wide_reads_more_and_gives_the_same(draw: Draw, check_forward: Check) -> None:
    call = draw(1, 2, 2, keys=200) | {"bias": Linear(torch.tensor([0.7, 1.5]))}
    firsts = [read(with_ball(call, wider))[0, 0] for wider in (1, 8, 1000, torch.inf)]
    check_forward(with_ball(call, 8))
    assert bool((firsts[1] < firsts[0]).all())
    assert firsts[2].tolist() == firsts[3].tolist() == [0, 0]


def test_without_a_ball_a_tolerance_or_a_slope_everything_is_read(draw: Draw) -> None:
    call, steep = with_ball(draw(1, 2, 1, keys=200)), {"bias": Linear(torch.tensor([4.0, 4.0]))}
    assert read(call | steep)[0].min() > 100
    for change in (steep | {"ball": None}, steep | {"tolerance": 0}, {"bias": Linear(torch.zeros(2))}, {}):
        assert read(call | change).tolist() == [[[0, 0]], [[200, 200]]]


def test_a_query_that_looks_ahead_reads_everything(draw: Draw, check_forward: Check) -> None:
    # The last keys are far ahead and the slope behind is steep: neither says how far back of them to read.
    call = draw(1, 2, 2, keys=150, mask="full", q_start=20)
    check_forward(with_ball(call | {"bias": Linear(torch.tensor([3.0, 2.0]), torch.tensor([0.01, 0.1]))}))


def test_a_window_and_blocks_end_what_is_read(draw: Draw) -> None:
    call = draw(1, 1, 2, keys=200)
    assert read(call | {"mask": Window(40)}).flatten().tolist() == [159, 200]  # what the first of them sees
    assert read(call | {"mask": Blockwise(50)}).flatten().tolist() == [100, 200]
    assert read(call | {"q_start": 70}).flatten().tolist() == [0, 72]


@pytest.mark.parametrize("size", [20.0, 230.0, 1e3])
def test_far_keys_may_score_far_above_the_nearest(size: float, draw: Draw, check_forward: Check) -> None:
    # By 13, 146 and 635 in units of log 2: the second is more than a weight can hold, and not too much for a unit.
    call = draw(1, 2, 2, keys=100) | {"bias": Linear(torch.tensor([0.01, 0.02]))}
    call["q"], call["k"] = torch.full_like(call["q"], 1.0), torch.full_like(call["k"], -0.01)
    call["k"][:, :, 10:12] = size * torch.tensor([0.1, 0.11])[:, None]
    check_forward(with_ball(call))
    check_forward(with_ball(call | {"scale": 4.0}, 1.5))


# Which calls are decoded, and what torch knows of the op.


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the ops that are called from now on."""
    names: list[str] = []

    def spy(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (names.append(name), forward(*arguments))[1]

    for op in (triton.attend_op, triton.decode_op):
        monkeypatch.setattr(op, "forward", spy(op.name, op.forward))
    return names


def test_few_queries_are_decoded(draw: Draw, seen: list[str], check_forward: Check) -> None:
    few, rows = shapes.FEW, shapes.FEW_ROWS
    slow, fast = (Decay(torch.linspace(rate, 1, 16, dtype=torch.float64)) for rate in (0.8, 0.71))
    for call, op in (
        (draw(1, rows // few, few, keys=50, key_heads=1, bias="linear"), "decode"),
        (draw(1, rows, 1, keys=50, key_heads=1), "decode"),
        (draw(1, 1, few + 1, keys=40), "attend"),
        (draw(1, 5, few, keys=40, key_heads=1), "attend"),  # few, but too many rows
        (draw(1, 2, 3, keys=90, key_heads=1, bias="linear") | {"decay": slow}, "decode"),
        (draw(1, 1, 1, keys=140) | {"decay": fast}, "attend"),  # 128 keys are a segment
    ):
        seen.clear()
        check_forward(call)
        assert seen == [op]


@pytest.mark.parametrize("leaf", ["q", "v", "slopes", "ahead"])
def test_a_call_that_needs_a_gradient_is_not_decoded(leaf: str, draw: Draw, seen: list[str]) -> None:
    call = draw(1, 2, 2, keys=20, mask="full", bias="linear ahead")
    (call | dict(zip(("slopes", "ahead"), call["bias"].tensors, strict=True)))[leaf].requires_grad_()
    lengthen.attention(**call, backend="triton")
    with torch.no_grad():
        lengthen.attention(**call, backend="triton")
    assert seen == ["attend", "decode"]


@pytest.mark.parametrize(("queries", "bias"), [(1, "table"), (3, "linear")])
def test_gradients_of_few_queries_are_right(queries: int, bias: str, draw: Draw, check: Any, seen: list[str]) -> None:
    check(draw(1, 2, queries, keys=40, key_heads=1, bias=bias))
    assert seen == ["attend"]


def test_the_op_itself_refuses_a_gradient(draw: Draw) -> None:
    call = draw(1, 1, 1, keys=20)
    call["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="lengthen::decode: there is no gradient of this op"):
        triton.decode_op.op(*flat(pose(**call)))[0].sum().backward()


@pytest.mark.parametrize("case", ["ball", "padded, table", "both sides"])
def test_torch_finds_nothing_wrong_with_the_op(case: str, draw: Draw) -> None:
    call, slopes = draw(1, 2, 3, keys=24, key_heads=1, value_dim=24), torch.tensor([1.0, 0.2])
    changes: dict[str, Call] = {
        "ball": with_ball(call) | {"bias": Linear(slopes), "mask": Window(8)},
        "padded, table": {"bias": Table(torch.randn(2, 30)), "mask": Causal().padded(torch.tensor([3]))},
        "both sides": {"bias": Linear(slopes, slopes.flip(0)), "mask": Bidirectional()},
    }
    torch.library.opcheck(triton.decode_op.op, flat(pose(**call | changes[case])))
