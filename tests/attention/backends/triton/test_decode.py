"""Few queries against many keys: the reference's results, however keys are split, and no key read beyond the reach."""

import importlib
import math
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
Check = Callable[..., tuple[Tensor, Tensor]]
BLOCK = 16  # keys, in these tests


def with_ball(call: Call, wider: float = 1.0) -> Call:
    """Return a call with a ball around its keys, or with a wider one."""
    ball = Ball.around(call["k"])
    return call | {"ball": Ball(ball.centre, wider * ball.radius, ball.keys)}


def read(call: Call) -> Tensor:
    """Return the first key that decoding reads and the end of those it reads, `[2, batch, key_heads]`."""
    return triton.decode_few(pose(**{"mask": Causal()} | call), False)[3]


# Examples take long here, and so would making a failing one smaller.
@settings(max_examples=20, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_any_call(data: st.DataObject, any_call: Callable[..., Call], check_forward: Check) -> None:
    call = any_call(data, most_queries=5)
    if data.draw(st.booleans(), label="ball"):
        call = with_ball(call)
    with pytest.MonkeyPatch.context() as patch:
        launch = importlib.import_module("lengthen.attention.backends.triton.launch")
        patch.setattr(launch, "DECODERS", data.draw(st.sampled_from([1, 7, 24, 200]), label="DECODERS"))
        check_forward(call)


@pytest.mark.parametrize("bias", ["none", "linear", "table", "extended"])
@pytest.mark.parametrize("mask", ["causal", "window", "full", "causal padded"])
@pytest.mark.parametrize("queries", [1, 3])
def test_every_bias(
    queries: int,
    mask: str,
    bias: str,
    qkv: Callable[..., Call],
    mask_of: Callable[..., Any],
    bias_of: Callable[..., Any],
    check_forward: Check,
) -> None:
    call = qkv(2, 4, queries, keys=50, key_heads=2) | {"mask": mask_of(mask, 50)}
    call["bias"] = bias_of(bias, call)
    check_forward(call)
    check_forward(with_ball(call))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(1, 16), (40, 64), (17, 3), (16, 256), (256, 16)])
def test_any_width_up_to_256(head_dim: int, value_dim: int, qkv: Callable[..., Call], check_forward: Check) -> None:
    check_forward(qkv(1, 2, 2, head_dim, keys=40, value_dim=value_dim) | {"bias": Linear(torch.tensor([0.3, 2]))})


def test_sequences_may_stand_at_places_of_their_own(qkv: Callable[..., Call], check_forward: Check) -> None:
    call = qkv(2, 4, 2, keys=60, key_heads=2) | {"bias": Linear(alibi_slopes(4))}
    for q_start in ([12, 58], [30, -1], [90, 5]):
        check_forward(with_ball(call | {"q_start": torch.tensor(q_start)}))


def test_of_16_bits_out_is_rounded_once(qkv: Callable[..., Call], check_forward: Check) -> None:
    # Weights are rounded to 16 bits for their product with the values, and the result is again.
    call = qkv(1, 2, 2, keys=70, key_heads=1, dtype=torch.float16) | {"bias": Linear(torch.tensor([0.1, 0.4]))}
    check_forward(with_ball(call), within=1e-3)


@pytest.mark.parametrize("mask", [Causal(), Blockwise(9)], ids=["causal", "blockwise"])
def test_one_token_at_a_time_gives_the_rows_of_one_long_call(mask: Any, qkv: Callable[..., Call]) -> None:
    call, bias = qkv(1, 2, 25, key_heads=1), Linear(64 * alibi_slopes(2))
    wide = {name: x.double() for name, x in call.items()}
    expected = lengthen.attention(**wide, bias=bias, mask=mask, backend="reference", return_lse=True)
    keys, values = (torch.full_like(call[name], torch.nan) for name in "kv")  # a cache: the rest of it is not filled
    ball = Ball.around(call["k"][:, :, :0])
    for at in range(25):
        keys[:, :, at], values[:, :, at] = call["k"][:, :, at], call["v"][:, :, at]
        ball = ball.appended(call["k"][:, :, at : at + 1])
        here = {"q": call["q"][:, :, at : at + 1], "k": keys[:, :, : at + 1], "v": values[:, :, : at + 1]}
        got = lengthen.attention(**here, bias=bias, mask=mask, ball=ball, backend="triton", return_lse=True)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours[:, :, 0].double(), theirs[:, :, at], rtol=1e-6, atol=1e-5)


def test_how_keys_are_split_changes_nothing_but_rounding(
    qkv: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = qkv(1, 2, 3, keys=150) | {"bias": Linear(torch.tensor([0.5, 0.01]))}
    launch = importlib.import_module("lengthen.attention.backends.triton.launch")
    results = []
    for programs in (1, 6, 200, 200):
        monkeypatch.setattr(launch, "DECODERS", programs)
        results.append(lengthen.attention(**call, backend="triton", return_lse=True))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=2e-6)
    assert torch.equal(results[2][0], results[3][0])  # two runs are equal to the bit


@pytest.mark.parametrize("layout", ["heads beside each other", "features apart", "part of a longer cache"])
def test_strides_of_a_cache_make_no_difference(layout: str, qkv: Callable[..., Call]) -> None:
    call = with_ball(qkv(2, 4, 2, keys=60, key_heads=2) | {"bias": Linear(alibi_slopes(4))})

    def laid_out(x: Tensor) -> Tensor:
        if layout == "heads beside each other":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "features apart":
            return x.mT.contiguous().mT
        return torch.cat((x, torch.full_like(x, torch.nan)), dim=2)[:, :, : x.shape[2]]

    strided = call | {name: laid_out(call[name]) for name in "qkv"}
    assert not strided["k"].is_contiguous()
    for ours, theirs in zip(
        *(lengthen.attention(**x, backend="triton", return_lse=True) for x in (strided, call)), strict=True
    ):
        assert torch.equal(ours, theirs)


# How far it reads.


@pytest.mark.parametrize("queries", [1, 4])
def test_steep_heads_read_less_than_flat_ones(queries: int, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 4, queries, keys=300) | {"bias": Linear(torch.tensor([0.0, 0.1, 0.4, 2.0]))}
    first, end = read(with_ball(call))[:, 0]
    assert first[0] == 0
    assert bool((first.diff() > 0).all())
    assert first[3] >= 300 - 3 * BLOCK
    assert end.tolist() == [300] * 4


def test_heads_that_share_keys_read_as_far_as_the_flattest(qkv: Callable[..., Call]) -> None:
    call, slopes = qkv(1, 4, 2, keys=300, key_heads=2), torch.tensor([3.0, 0.2, 0.5, 2.0])
    together = read(with_ball(call | {"bias": Linear(slopes)}))[0, 0]
    alone = []
    for head in range(4):
        part = {"q": call["q"][:, [head]]} | {name: call[name][:, [head // 2]] for name in "kv"}
        alone.append(int(read(with_ball(part | {"bias": Linear(slopes[[head]])}))[0]))
    assert together.tolist() == [min(alone[:2]), min(alone[2:])]
    assert alone[0] > alone[1]


@pytest.mark.parametrize("queries", [1, 3])
def test_far_keys_and_values_are_not_touched(queries: int, qkv: Callable[..., Call]) -> None:
    call = qkv(2, 4, queries, keys=250, key_heads=2) | {"bias": Linear(torch.tensor([2.0, 0.7, 1.0, 0.5]))}
    call = with_ball(call)
    expected, first = lengthen.attention(**call, backend="triton", return_lse=True), read(call)[0]
    assert first.min() >= 2 * BLOCK
    for name in "kv":
        for b in range(2):
            for head in range(2):
                call[name][b, head, : first[b, head]] = torch.nan
    for ours, theirs in zip(lengthen.attention(**call, backend="triton", return_lse=True), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tolerance", [0.2, 1e-5])
@pytest.mark.parametrize(("queries", "scale"), [(1, 0.25), (5, -0.25)])
def test_no_more_than_tolerance_is_left_unread(tolerance: float, queries: int, scale: float) -> None:
    # Near keys score −2 and far ones 2, the most that the bound allows; where they turn differs between sequences, and
    # for one of them it is just where reading ends. A flat slope makes the sum of what is unread long.
    keys, turns = 180, torch.arange(28, 160, 12)[:, None]
    k = torch.where(torch.arange(keys) < turns, 0.25, -0.25)[:, None, :, None].expand(-1, 1, -1, 16).contiguous()
    q = torch.full_like(k[:, :, :queries], 0.5 / scale)
    call: Call = {"q": q, "k": k, "v": torch.zeros_like(k), "scale": scale, "tolerance": tolerance}
    call |= {"bias": Linear(torch.tensor([0.1]))}
    first = read(with_ball(call))[0][..., None, None]
    j, distance = torch.arange(keys), torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    score = scale * q.double() @ k.double().mT + call["bias"].at(distance, torch.float64)
    unread = score.masked_fill(distance < 0, -torch.inf).softmax(-1).masked_fill(j >= first, 0).sum(-1)
    assert 0.05 * tolerance < unread.max() <= tolerance


def test_a_ball_too_wide_reads_more_and_gives_the_same(qkv: Callable[..., Call], check_forward: Check) -> None:
    call = qkv(1, 2, 2, keys=200) | {"bias": Linear(torch.tensor([0.7, 1.5]))}
    firsts = [read(with_ball(call, wider))[0, 0] for wider in (1, 8, 1000, torch.inf)]
    check_forward(with_ball(call, 8))
    assert bool((firsts[1] < firsts[0]).all())
    assert firsts[2].tolist() == firsts[3].tolist() == [0, 0]


def test_each_head_of_keys_goes_by_its_own_ball(qkv: Callable[..., Call], check_forward: Check) -> None:
    call = qkv(2, 2, 1, keys=200) | {"bias": Linear(torch.tensor([1.0, 1.0]))}
    size = torch.tensor([[0.1, 4.0], [4.0, 0.1]])
    call["k"] *= size[..., None, None]
    first = read(with_ball(call))[0]
    assert first[size > 1].max() < first[size < 1].min()
    check_forward(with_ball(call))


def test_without_a_ball_a_tolerance_or_a_slope_everything_is_read(qkv: Callable[..., Call]) -> None:
    call, steep = with_ball(qkv(1, 2, 1, keys=200)), {"bias": Linear(torch.tensor([4.0, 4.0]))}
    everything = [[[0, 0]], [[200, 200]]]
    assert read(call | steep)[0].min() > 100
    assert read(call | steep | {"ball": None}).tolist() == everything
    assert read(call | steep | {"tolerance": 0}).tolist() == everything
    assert read(call | {"bias": Linear(torch.zeros(2))}).tolist() == everything
    assert read(call).tolist() == everything


def test_a_query_that_looks_ahead_reads_everything(qkv: Callable[..., Call], check_forward: Check) -> None:
    # The last keys are far ahead and the slope behind is steep: neither says how far back of them to read.
    call = qkv(1, 2, 2, keys=150) | {"mask": Bidirectional(), "q_start": 20}
    check_forward(with_ball(call | {"bias": Linear(torch.tensor([3.0, 2.0]), torch.tensor([0.01, 0.1]))}))


def test_a_window_and_blocks_end_what_is_read(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 2, keys=200)
    for change, expected in (
        ({"mask": Window(40)}, [159, 200]),  # what the first of them sees
        ({"mask": Blockwise(50)}, [100, 200]),
        ({"q_start": 70}, [0, 72]),
    ):
        assert read(call | change).flatten().tolist() == expected


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("size", [20.0, 230.0, 1e3])
def test_far_keys_may_score_far_above_the_nearest(
    size: float, queries: int, qkv: Callable[..., Call], check_forward: Check
) -> None:
    # By 13, 146 and 635 in units of log 2: the second is more than a weight can hold, and not too much for a unit.
    call = qkv(1, 2, queries, keys=100) | {"bias": Linear(torch.tensor([0.01, 0.02]))}
    call["q"], call["k"] = torch.full_like(call["q"], 1.0), torch.full_like(call["k"], -0.01)
    call["k"][:, :, 10:12] = size * torch.tensor([0.1, 0.11])[:, None]
    check_forward(with_ball(call))
    check_forward(with_ball(call | {"scale": 4.0}, 1.5))


tl: Any = None  # Triton's language and a kernel's part: the interpreter looks for them among a module's names
programs_of: Any = None


def test_flat_heads_get_most_programs_and_every_head_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = importlib.import_module("triton")
    monkeypatch.setitem(globals(), "tl", compiler.language)
    decode = importlib.import_module("lengthen.attention.backends.triton.decode")
    monkeypatch.setitem(globals(), "programs_of", decode.programs_of)
    sizes_of = importlib.import_module("lengthen.attention.backends.triton.tile").Sizes

    def cut(slopes, counts, ends, sizes, programs, HEADS: tl.constexpr, REACH: tl.constexpr):  # type: ignore[no-untyped-def]
        count, end = programs_of(slopes, sizes, programs, 16, HEADS, REACH)
        one = tl.arange(0, HEADS)
        tl.store(counts + one, count)
        tl.store(ends + one, end)

    def counts_of(slopes: list[float], group: int, programs: int, reach: bool) -> list[int]:
        key_heads = len(slopes) // group
        counts, ends = torch.zeros(2, 8, dtype=torch.int32)
        sizes = sizes_of(1, len(slopes), key_heads, group, 1, 9600)
        compiler.jit(cut)[(1,)](torch.tensor(slopes), counts, ends, sizes, programs, 8, reach)
        assert bool((ends == counts.cumsum(0)).all())
        assert ends[-1] <= programs
        assert not counts[key_heads:].any()
        return counts[:key_heads].tolist()

    assert counts_of([0.5, 0.5, 0.5], 1, 30, False) == [10, 10, 10]
    assert counts_of([0.5, 0.5, 0.5], 1, 32, False) == [10, 10, 10]
    steep, less, flat_one = counts_of([8.0, 0.01, 0.0025], 1, 200, True)
    assert steep == 1
    assert 1 < less < flat_one / 3
    assert steep + less + flat_one > 190
    assert counts_of([8.0, 8.0, 8.0, 0.01], 1, 8, True) == [1, 1, 1, 5]  # steep heads leave what they do not need
    assert counts_of([8.0, 8.0, 8.0], 1, 200, True) == [1, 1, 1]  # one block each: more would have nothing to read
    assert counts_of([8.0, 0.0, 8.0, 8.0], 2, 200, True)[0] > 150  # the flattest of those that share keys
    assert counts_of([0.1, 0.2, 0.3], 1, 3, True) == [1, 1, 1]


# Which calls are decoded, and what torch knows of the op.


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the ops that are called from now on."""
    names: list[str] = []

    def spy(op: Any) -> Callable[..., Any]:
        forward = op.forward

        def call(*arguments: Any) -> Any:
            names.append(op.name)
            return forward(*arguments)

        return call

    for op in (triton.attend_op, triton.decode_op):
        monkeypatch.setattr(op, "forward", spy(op))
    return names


def test_few_queries_are_decoded(qkv: Callable[..., Call], seen: list[str], check_forward: Check) -> None:
    queries, group = shapes.FEW, shapes.FEW_ROWS // shapes.FEW
    slow, fast = (Decay(torch.linspace(rate, 1, 16, dtype=torch.float64)) for rate in (0.8, 0.71))
    for call, op in (
        (qkv(1, group, queries, keys=50, key_heads=1) | {"bias": Linear(alibi_slopes(group))}, "decode"),
        (qkv(1, shapes.FEW_ROWS, 1, keys=50, key_heads=1), "decode"),
        (qkv(1, 1, shapes.FEW + 1, keys=40), "attend"),
        (qkv(1, 5, shapes.FEW, keys=40, key_heads=1), "attend"),  # few, but too many rows
        (qkv(2, 4, 3, keys=90, key_heads=2) | {"bias": Linear(alibi_slopes(4)), "decay": slow}, "decode"),
        (qkv(1, 1, 1, keys=140) | {"decay": fast}, "attend"),  # 128 keys are a segment
    ):
        seen.clear()
        check_forward(call)
        assert seen == [op]


@pytest.mark.parametrize("leaf", ["q", "v", "slopes", "ahead"])
def test_a_call_that_needs_a_gradient_is_not_decoded(leaf: str, qkv: Callable[..., Call], seen: list[str]) -> None:
    call = qkv(1, 2, 2, keys=40)
    slopes = {"slopes": torch.tensor([0.5, 0.1]), "ahead": torch.tensor([0.2, 0.3])}
    (call | slopes)[leaf].requires_grad_()
    call |= {"bias": Linear(slopes["slopes"], slopes["ahead"]), "mask": Bidirectional()}
    lengthen.attention(**call, backend="triton")
    with torch.no_grad():
        lengthen.attention(**call, backend="triton")
    assert seen == ["attend", "decode"]


@pytest.mark.parametrize("bias", ["linear", "table"])
@pytest.mark.parametrize("queries", [1, 3])
def test_gradients_of_few_queries_are_right(
    queries: int, bias: str, qkv: Callable[..., Call], bias_of: Callable[..., Any], check: Check, seen: list[str]
) -> None:
    call = qkv(1, 4, queries, keys=40, key_heads=2)
    check(call | {"bias": bias_of(bias, call)})
    assert seen == ["attend"]


def test_the_op_itself_refuses_a_gradient(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 1, keys=20)
    call["q"].requires_grad_()
    out = triton.decode_op.op(*flat(pose(**call, mask=Causal())))[0]
    with pytest.raises(RuntimeError, match="lengthen::decode: there is no gradient of this op"):
        out.sum().backward()


@pytest.mark.parametrize("case", ["plain", "ball", "padded, table", "both sides"])
def test_torch_finds_nothing_wrong_with_the_op(case: str, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 3, keys=24, key_heads=1, value_dim=24) | {"mask": Causal()}
    slopes = torch.tensor([1.0, 0.2])
    changes: dict[str, Call] = {
        "plain": {},
        "ball": with_ball(call) | {"bias": Linear(slopes), "mask": Window(8)},
        "padded, table": {"bias": Table(torch.randn(2, 30)), "mask": Causal().padded(torch.tensor([3]))},
        "both sides": {"bias": Linear(slopes, slopes.flip(0)), "mask": Bidirectional()},
    }
    torch.library.opcheck(triton.decode_op.op, flat(pose(**call | changes[case])))


def test_its_scale_may_be_any(qkv: Callable[..., Call], check_forward: Check) -> None:
    for scale in (-1 / math.sqrt(16), 0.0, 3.0):
        check_forward(with_ball(qkv(1, 2, 2, keys=60) | {"bias": Linear(torch.tensor([0.5, 0.1])), "scale": scale}))
