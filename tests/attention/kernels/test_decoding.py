"""Few queries against many keys: the reference's results, whatever the shares, and no key read beyond the reach.

In this order: results, how far is read, odd values, what is decoded at all, the op. All share one comparison, so they
stand in one long file.
"""

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
from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes
from lengthen.attention import kernels
from lengthen.attention.kernels import codes, shapes
from lengthen.attention.kernels.ops import decode
from lengthen.positions.t5 import T5

# The interpreter takes a maximum by NumPy's nanmax.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
Call = dict[str, Any]
BLOCK = 16  # keys, in these tests


@pytest.fixture(autouse=True)
def programs(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow so few programs that the heads of a call have a few shares each."""
    monkeypatch.setattr(importlib.import_module("lengthen.attention.kernels.launch"), "DECODERS", 12)


def norms(k: Tensor) -> Tensor:
    """Return the norm of each head's longest key."""
    return k.norm(dim=-1).amax(dim=-1)


def both(call: Call, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return out and lse of the kernels, and the reference's in a dtype."""
    wide = call | {name: call[name].to(dtype) for name in "qkv"}
    got = lengthen.attention(**call, backend="triton", return_lse=True)
    return [got, lengthen.attention(**wide, backend="reference", return_lse=True)]


def assert_decoded(call: Call) -> tuple[Tensor, Tensor]:
    """Check out and lse against the reference in float64, and return them."""
    got, expected = both(call, torch.float64)
    assert got[0].dtype == call["q"].dtype
    assert got[1].dtype == torch.float32
    for name, ours, theirs in zip(("out", "lse"), got, expected, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=1e-6, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    return got


def read(
    call: Call, mask: int = 0, size: int = 0, q_start: int | None = None, norm: Tensor | None = None
) -> list[Tensor]:
    """Return the first key that decoding reads and the end of those it reads, `[batch, key_heads]` each."""
    q, k, v = (call[name] for name in "qkv")
    bias, tolerance = call.get("bias"), call.get("tolerance", 1e-5)
    slopes = None if bias is None else bias.tensors[0]
    q_start = k.shape[2] - q.shape[2] if q_start is None else q_start
    scale = call.get("scale", 1 / math.sqrt(q.shape[3]))
    norm = call.get("key_norm") if norm is None else norm
    numbers = (mask, size, isinstance(bias, Linear), False, scale, q_start, tolerance, 0, -1)
    return list(decode(q, k, v, slopes, None, None, None, None, norm, *numbers)[2])


def unread(call: Call) -> Tensor:
    """Return the share of each row's weight that causal decoding left unread, `[batch, heads, queries]`, in float64."""
    q, k = (call[name].double() for name in "qk")
    group, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    first = read(call)[0].repeat_interleave(group, dim=1)[..., None, None]
    j = torch.arange(keys)
    distance = torch.arange(keys - queries, keys)[:, None] - j
    product = call.get("scale", 1 / math.sqrt(q.shape[3])) * q @ k.repeat_interleave(group, dim=1).mT
    score = product + call["bias"].at(distance, torch.float64)
    weight = score.masked_fill(distance < 0, -torch.inf).softmax(-1)
    return weight.masked_fill(j >= first, 0).sum(-1)


# Examples take long here, and so would making a failing one smaller.
@settings(max_examples=24, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_is_the_reference_for_any_call(
    data: st.DataObject, qkv: Callable[..., Call], table_for: Callable[..., Table]
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99), label="seed"))
    batch, key_heads, group = data.draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 3), (2, 2, 2), (1, 1, 5)]))
    heads, queries = key_heads * group, data.draw(st.integers(1, 5), label="queries")
    keys = data.draw(st.one_of(st.integers(1, 90), st.sampled_from([16, 64, 80])), label="keys")
    head_dim = data.draw(st.sampled_from([16, 24, 40, 1]), label="head_dim")
    value_dim = data.draw(st.sampled_from([None, 3, 24, 40]), label="value_dim")
    call = qkv(batch, heads, queries, head_dim, keys=keys, key_heads=key_heads, value_dim=value_dim)
    call["q_start"] = data.draw(
        st.one_of(
            st.none(),
            st.integers(0, keys),
            st.integers(keys + 1, keys + 50),
            st.integers(-queries - 2, -1),
        ),
        label="q_start",
    )
    mask: Any = data.draw(
        st.one_of(
            st.sampled_from([Causal(), Bidirectional()]),
            st.builds(Window, st.integers(1, 50)),
            st.builds(Blockwise, st.integers(1, 50)),
        ),
        label="mask",
    )
    if data.draw(st.booleans(), label="padded"):
        mask = mask.padded(torch.tensor([data.draw(st.integers(0, keys + 2)) for _ in range(batch)]))
    call["mask"] = mask
    call["scale"] = data.draw(st.sampled_from([None, 0.3, -0.5]), label="scale")
    kind = data.draw(st.sampled_from(["none", "linear", "linear ahead", "table", "table ahead"]), label="bias")
    if kind.startswith("linear"):
        slopes = 2.0 ** -torch.linspace(-1, 7, 2 * heads)[torch.randperm(2 * heads)]
        call["bias"] = Linear(slopes[:heads], slopes[heads:] if kind == "linear ahead" else None)
    elif kind.startswith("table"):
        spare = data.draw(st.integers(0, 9), label="spare")
        call["bias"] = table_for(call, ahead=kind == "table ahead", spare=spare, dtype=torch.float32)
    if data.draw(st.booleans(), label="key_norm"):
        call["key_norm"] = norms(call["k"])
    with pytest.MonkeyPatch.context() as patch:
        launch = importlib.import_module("lengthen.attention.kernels.launch")
        patch.setattr(launch, "DECODERS", data.draw(st.sampled_from([1, 7, 24, 200]), label="DECODERS"))
        assert_decoded(call)


@pytest.mark.parametrize("head_dim", [1, 17, 80, 256])
def test_any_head_dim_up_to_256(head_dim: int, qkv: Callable[..., Call]) -> None:
    for widths in ((head_dim, 16), (16, head_dim)):
        assert_decoded(qkv(1, 2, 2, widths[0], keys=40, value_dim=widths[1]) | {"bias": Linear(torch.tensor([0.3, 2]))})


def test_as_many_queries_as_are_few(qkv: Callable[..., Call], seen: list[str]) -> None:
    queries, group = shapes.FEW, shapes.FEW_ROWS // shapes.FEW
    assert_decoded(qkv(1, group, queries, 16, keys=50, key_heads=1) | {"bias": Linear(alibi_slopes(group))})
    assert_decoded(qkv(1, shapes.FEW_ROWS, 1, 16, keys=50, key_heads=1))
    assert seen == ["decode"] * 2


def test_of_16_bits_out_is_rounded_once(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 2, 16, keys=70, key_heads=1, dtype=torch.float16) | {"bias": Linear(torch.tensor([0.1, 0.4]))}
    (out, _), (expected, _) = both(call, torch.float64)
    assert out.dtype == torch.float16
    # Weights are rounded to 16 bits for their product with the values, and the result is again.
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mask", [Causal(), Window(13), Blockwise(9)], ids=["causal", "window", "blockwise"])
@pytest.mark.parametrize("method", ["alibi", "t5"])
def test_one_token_at_a_time_gives_the_rows_of_one_long_call(mask: Any, method: str, qkv: Callable[..., Call]) -> None:
    length, heads = 25, 2
    call = qkv(1, heads, length, 16, key_heads=1)
    t5 = T5(heads=heads, head_dim=16, width=32, buckets=8, max_distance=20)
    torch.nn.init.normal_(t5.weight)
    bias = Linear(64 * alibi_slopes(heads)) if method == "alibi" else Table(t5.bias(length - 1).values.detach())
    wide = {name: x.double() for name, x in call.items()}
    expected = lengthen.attention(**wide, bias=bias, mask=mask, backend="reference", return_lse=True)
    keys, values = (torch.full_like(call[name], torch.nan) for name in "kv")  # a cache: the rest of it is not filled
    norm = torch.zeros(1, 1)
    for at in range(length):
        keys[:, :, at], values[:, :, at] = call["k"][:, :, at], call["v"][:, :, at]
        norm = torch.maximum(norm, call["k"][:, :, at].norm(dim=-1))
        here = {"q": call["q"][:, :, at : at + 1], "k": keys[:, :, : at + 1], "v": values[:, :, : at + 1]}
        got = lengthen.attention(**here, bias=bias, mask=mask, key_norm=norm, backend="triton", return_lse=True)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours[:, :, 0].double(), theirs[:, :, at], rtol=1e-6, atol=1e-5)


def test_how_keys_are_shared_out_changes_nothing_but_rounding(
    qkv: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = qkv(1, 2, 3, 16, keys=150) | {"bias": Linear(torch.tensor([0.5, 0.01]))}
    launch = importlib.import_module("lengthen.attention.kernels.launch")
    results = []
    for programs in (1, 6, 200):
        monkeypatch.setattr(launch, "DECODERS", programs)
        results.append(lengthen.attention(**call, backend="triton", return_lse=True))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("queries", [1, 3])
def test_two_runs_are_equal_to_the_bit(queries: int, qkv: Callable[..., Call]) -> None:
    call = qkv(2, 4, queries, 16, keys=120, key_heads=2) | {"bias": Linear(alibi_slopes(4))}
    call["key_norm"] = norms(call["k"])
    runs = [lengthen.attention(**call, backend="triton", return_lse=True) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


# How far it reads.


@pytest.mark.parametrize("queries", [1, 4])
def test_steep_heads_read_less_than_flat_ones(queries: int, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 4, queries, 16, keys=300)
    bias = Linear(torch.tensor([0.0, 0.1, 0.4, 2.0]))
    first, end = kernels.decode_spans(**call, bias=bias, key_norm=norms(call["k"]))[:, 0]
    assert first[0] == 0
    assert bool((first.diff() > 0).all())
    assert first[3] >= 300 - 3 * BLOCK
    assert end.tolist() == [300] * 4
    assert bool(((first == 0) | ((end - first) % BLOCK == 0)).all())


def test_heads_that_share_keys_read_as_far_as_the_flattest(qkv: Callable[..., Call]) -> None:
    call = qkv(2, 4, 2, 16, keys=300, key_heads=2)
    slopes, norm = torch.tensor([3.0, 0.2, 0.5, 2.0]), norms(call["k"])
    together = kernels.decode_spans(**call, bias=Linear(slopes), key_norm=norm)[0]
    alone = []
    for head in range(4):
        part = {"q": call["q"][:, [head]], "k": call["k"][:, [head // 2]], "v": call["v"][:, [head // 2]]}
        found = kernels.decode_spans(**part, bias=Linear(slopes[[head]]), key_norm=norm[:, [head // 2]])
        alone.append(found[0, :, 0])
    assert torch.equal(together, torch.stack((torch.minimum(*alone[:2]), torch.minimum(*alone[2:])), dim=1))
    assert bool((together[:, 0] < alone[0]).all())  # the flatter of the two reads farther


@pytest.mark.parametrize("queries", [1, 3])
def test_far_keys_and_values_are_not_touched(queries: int, qkv: Callable[..., Call]) -> None:
    call = qkv(2, 4, queries, 16, keys=250, key_heads=2) | {"bias": Linear(torch.tensor([2.0, 0.7, 1.0, 0.5]))}
    call["key_norm"] = norms(call["k"])
    expected = lengthen.attention(**call, backend="triton", return_lse=True)
    first = kernels.decode_spans(**call)[0]
    assert first.min() >= 2 * BLOCK
    for name in "kv":
        for b in range(2):
            for head in range(2):
                call[name][b, head, : first[b, head]] = torch.nan
    got = lengthen.attention(**call, backend="triton", return_lse=True)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-5])
@pytest.mark.parametrize("kind", ["scattered", "outlier", "turned", "still"])
@pytest.mark.parametrize("queries", [1, 4])
def test_no_more_than_tolerance_is_left_unread(
    kind: str, tolerance: float, queries: int, qkv: Callable[..., Call]
) -> None:
    call = qkv(1, 4, queries, 16, keys=250, key_heads=2)
    call |= {"bias": Linear(torch.tensor([2.0, 0.5, 0.3, 1.0])), "tolerance": tolerance}
    if kind == "outlier":
        call["k"][:, :, 3] *= 4
    elif kind == "turned":  # near keys point away from their queries, far ones at them
        call["q"].mul_(0.01).add_(0.5)
        call["k"].mul_(0.01).add_(0.5)
        call["k"][:, :, 150:] *= -1
    elif kind == "still":
        call["q"].zero_()
    call["key_norm"] = norms(call["k"])
    share = unread(call)
    assert share.max() <= tolerance
    assert share.max() > 0


@pytest.mark.parametrize("tolerance", [0.2, 0.02])
@pytest.mark.parametrize(("queries", "scale"), [(1, 0.25), (5, 0.25), (1, -0.25)])
def test_no_more_than_tolerance_is_left_unread_where_the_bound_is_tight(
    tolerance: float, queries: int, scale: float
) -> None:
    # Near keys score −2 and far ones 2, the most that the bound allows; where they turn differs between sequences, and
    # for one of them it is just where reading ends. A flat slope makes the sum of what is unread long.
    keys, turns = 180, torch.arange(68, 160, 8)[:, None]
    k = torch.where(torch.arange(keys) < turns, 0.25, -0.25)[:, None, :, None].expand(-1, 1, -1, 16).contiguous()
    q = torch.full_like(k[:, :, :queries], 0.5 / scale)
    call: Call = {"q": q, "k": k, "v": torch.zeros_like(k), "scale": scale, "tolerance": tolerance}
    share = unread(call | {"bias": Linear(torch.tensor([0.1])), "key_norm": norms(k)})
    assert share.max() <= tolerance
    assert share.max() > 0.1 * tolerance


def test_a_key_norm_too_large_reads_more_and_gives_the_same(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 2, 16, keys=200) | {"bias": Linear(torch.tensor([0.7, 1.5]))}
    norm, firsts = norms(call["k"]), []
    for factor in (1, 8, 1000, torch.inf):
        firsts.append(kernels.decode_spans(**call, key_norm=factor * norm)[0, 0])
    assert_decoded(call | {"key_norm": 8 * norm})
    assert bool((firsts[1] < firsts[0]).all())
    assert firsts[2].tolist() == firsts[3].tolist() == [0, 0]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("size", [20.0, 230.0, 1e3])
def test_far_keys_may_score_far_above_the_nearest(size: float, queries: int, qkv: Callable[..., Call]) -> None:
    # By 13, 146 and 635 in units of log 2: the second is more than a weight can hold, and not too much for a unit.
    call = qkv(1, 2, queries, 16, keys=100) | {"bias": Linear(torch.tensor([0.01, 0.02]))}
    call["q"] = torch.full_like(call["q"], 1.0)
    call["k"] = torch.full_like(call["k"], -0.01)
    call["k"][:, :, 10:12] = size * torch.tensor([0.1, 0.11])[:, None]
    assert_decoded(call | {"key_norm": norms(call["k"])})
    assert_decoded(call | {"key_norm": 1.5 * norms(call["k"]), "scale": 4.0})


def test_each_head_of_keys_goes_by_its_own_norm(qkv: Callable[..., Call]) -> None:
    call = qkv(2, 2, 1, 16, keys=200) | {"bias": Linear(torch.tensor([1.0, 1.0]))}
    size = torch.tensor([[0.1, 4.0], [4.0, 0.1]])
    call["k"] *= size[..., None, None]
    first = kernels.decode_spans(**call, key_norm=norms(call["k"]))[0]
    assert first[size > 1].max() < first[size < 1].min()
    assert_decoded(call | {"key_norm": norms(call["k"])})


def test_without_a_norm_a_tolerance_or_a_slope_everything_is_read(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 1, 16, keys=200)
    norm, steep = norms(call["k"]), Linear(torch.tensor([4.0, 4.0]))
    everything = [[[0, 0]], [[200, 200]]]
    assert kernels.decode_spans(**call, bias=steep, key_norm=norm)[0].min() > 100
    assert kernels.decode_spans(**call, bias=steep).tolist() == everything
    assert kernels.decode_spans(**call, bias=Linear(torch.zeros(2)), key_norm=norm).tolist() == everything
    assert kernels.decode_spans(**call, key_norm=norm).tolist() == everything
    assert kernels.decode_spans(**call, bias=Table(torch.zeros(2, 200)), key_norm=norm).tolist() == everything
    assert [x.tolist() for x in read(call | {"bias": steep, "tolerance": 0.0}, norm=norm)] == everything


def test_a_query_that_looks_ahead_reads_everything(qkv: Callable[..., Call]) -> None:
    # The last keys are far ahead and the slope behind is steep: neither says how far back of them to read.
    call = qkv(1, 2, 2, 16, keys=150) | {"mask": Bidirectional(), "q_start": 20}
    bias = Linear(torch.tensor([3.0, 2.0]), torch.tensor([0.01, 0.1]))
    assert_decoded(call | {"bias": bias, "key_norm": norms(call["k"])})


def test_a_window_and_blocks_end_what_is_read(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 2, 16, keys=200)
    assert [x.item() for x in read(call, mask=1, size=40)] == [159, 200]  # what the first of them sees
    assert [x.item() for x in read(call, mask=2, size=50)] == [100, 200]
    assert [x.item() for x in read(call, q_start=70)] == [0, 72]
    call |= {"bias": Linear(torch.tensor([4.0])), "key_norm": norms(call["k"])}
    assert read(call, mask=1, size=150)[0].item() > 64


# What is not finite, and what sees nothing.

FLAT = Linear(torch.tensor([0.02, 0.01]))
PLACES: dict[str, tuple[Any, int, int]] = {  # a mask, where the first query stands, and which key is odd
    "far": (Causal(), 77, 2),
    "at the query": (Causal(), 77, 77),
    "in the window": (Window(20), 77, 70),
    "beyond the last": (Causal(), 40, 43),  # of three queries the last stands at 42
    "in padding": (Causal().padded(torch.tensor([20])), 77, 19),
    "before the window": (Window(20), 77, 57),
    "before the block": (Blockwise(25), 77, 49),
}
HIDDEN = ("beyond the last", "in padding", "before the window", "before the block")


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("where", "kv")
@pytest.mark.parametrize("place", PLACES)
def test_odd_keys_and_values_reach_whom_they_would_reach_in_the_reference(
    place: str, where: str, odd: float, qkv: Callable[..., Call]
) -> None:
    mask, q_start, key = PLACES[place]
    for queries in (1, 3):
        call = qkv(1, 2, queries, 16, keys=80, key_heads=1) | {"mask": mask, "q_start": q_start, "bias": FLAT}
        call[where][0, 0, key, 3] = odd
        got, expected = both(call, torch.float32)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert bool(got[0].isfinite().all()) == (place in HIDDEN or (where == "k" and not _spoils(call, key)))


def _spoils(call: Call, key: int) -> bool:
    """Return whether a key's scores are something else than −∞, which hides it."""
    return not bool((call["q"] @ call["k"][:, :, key, :, None] == -torch.inf).all())


@pytest.mark.parametrize("mask", [Causal(), Window(20)], ids=["causal", "window"])
@pytest.mark.parametrize("where", "kv")
def test_of_several_queries_only_those_that_see_an_odd_key_are_spoilt(
    where: str, mask: Any, qkv: Callable[..., Call]
) -> None:
    call = qkv(1, 2, 4, 16, keys=80, key_heads=1) | {"mask": mask, "q_start": 60, "bias": FLAT}
    call[where][0, 0, 62] = torch.nan  # ahead of two queries
    got, expected = both(call, torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert bool(got[0][:, :, :2].isfinite().all())
    assert not bool(got[0][:, :, 2:].isfinite().any())
    call = qkv(1, 2, 4, 16, keys=80, key_heads=1) | {"mask": Window(20), "q_start": 60, "bias": FLAT}
    call[where][0, 0, 42] = torch.nan  # the window has left it behind for the last query
    got, expected = both(call, torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert bool(got[0][:, :, 2:].isfinite().all())
    assert not bool(got[0][:, :, :2].isfinite().any())


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("given_norm", [False, True])
def test_an_odd_query_spoils_itself_alone(odd: float, given_norm: bool, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 3, 16, keys=80, key_heads=1) | {"bias": Linear(torch.tensor([3.0, 1.0]))}
    call["q"][0, 0, 1, 3] = odd
    if given_norm:
        call["key_norm"] = norms(call["k"])
    got, expected = both(call, torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert not bool(got[0][0, 0, 1].isfinite().any())
    got[0][0, 0, 1] = 0
    assert bool(got[0].isfinite().all())


@pytest.mark.parametrize("queries", [1, 3])
def test_both_infinities_in_one_column_are_nan(queries: int, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, queries, 16, keys=80, key_heads=1) | {"bias": FLAT}
    call["v"][0, 0, 10, 1], call["v"][0, 0, 60, 1] = torch.inf, -torch.inf  # in two shares
    call["v"][0, 0, 30, 2], call["v"][0, 0, 31, 2] = torch.inf, -torch.inf  # in one
    call["v"][0, 0, 40, 3] = -torch.inf
    got, expected = both(call, torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert bool(got[0][..., 1:3].isnan().all())
    assert bool((got[0][..., 3] == -torch.inf).all())
    assert bool(got[0][..., 4:].isfinite().all())


@pytest.mark.parametrize("given_norm", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_who_sees_nothing_gets_nothing(queries: int, given_norm: bool, qkv: Callable[..., Call]) -> None:
    call = qkv(2, 2, queries, 16, keys=50, key_heads=1) | {"bias": Linear(torch.tensor([0.5, 2.0]))}
    if given_norm:
        call["key_norm"] = norms(call["k"])
    cases = {
        "all is padding": call | {"mask": Causal().padded(torch.tensor([0, 50]))},
        "before all keys": call | {"q_start": -queries},
        "the last alone sees": call | {"q_start": 1 - queries},
        "past the window": call | {"q_start": 80, "mask": Window(20)},
        "some are padding": call | {"q_start": 20, "mask": Window(9).padded(torch.tensor([20, 21]))},
    }
    blind = {}
    for name, case in cases.items():
        out, lse = assert_decoded(case)
        blind[name] = lse[:, 0] == -torch.inf
        assert bool((out[lse == -torch.inf] == 0).all())
        assert bool((out[lse != -torch.inf] != 0).any(-1).all())
    assert blind["all is padding"].tolist() == [[False] * queries, [True] * queries]
    assert bool(blind["before all keys"].all())
    assert blind["the last alone sees"].tolist() == [[True] * (queries - 1) + [False]] * 2
    assert bool(blind["past the window"].all())
    assert blind["some are padding"].tolist() == [[False] * queries, [True] + [False] * (queries - 1)]


def test_a_table_may_hide_keys(qkv: Callable[..., Call]) -> None:
    values = torch.randn(2, 60)
    values[0, 10:] = -torch.inf
    values[1] = -torch.inf
    out, lse = lengthen.attention(**qkv(1, 2, 2, 16, keys=60), bias=Table(values), backend="triton", return_lse=True)
    assert bool(lse[:, 0].isfinite().all())
    assert bool((lse[:, 1] == -torch.inf).all())
    assert bool((out[:, 1] == 0).all())
    assert_decoded(qkv(1, 2, 2, 16, keys=60) | {"bias": Table(values)})


# Which op takes a call, and what torch knows of it.


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the ops that were called."""
    names: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        op = getattr(kernels, name)

        def call(*arguments: Any) -> Any:
            names.append(name.removeprefix("run_"))
            return op(*arguments)

        return call

    for name in ("attend", "decode", "run_attend", "run_decode"):
        monkeypatch.setattr(kernels, name, spy(name))
    return names


def test_many_queries_or_a_fast_decay_are_not_decoded(qkv: Callable[..., Call], seen: list[str]) -> None:
    for call in (
        qkv(1, 1, shapes.FEW + 1, 16, keys=40),
        qkv(1, 5, shapes.FEW, 16, keys=40, key_heads=1),  # few, but too many rows
        qkv(1, 1, 1, 16, keys=140) | {"decay": Decay(torch.full((16,), 0.71))},  # 128 keys are a segment
    ):
        seen.clear()
        lengthen.attention(**call, backend="triton")
        assert seen == ["attend"]


@pytest.mark.parametrize("queries", [1, 3])
def test_a_slow_decay_is_decoded(queries: int, qkv: Callable[..., Call], seen: list[str]) -> None:
    call = qkv(2, 4, queries, 16, keys=90, key_heads=2) | {"bias": Linear(torch.tensor([0.3, 2, 1, 0.01]))}
    call["decay"] = Decay(torch.linspace(0.8, 1, 16, dtype=torch.float64))
    for known in ({}, {"key_norm": norms(call["k"])}):  # of keys that have no decay in them: here it says nothing
        assert_decoded(call | known)
    assert seen == ["decode", "decode"]


@pytest.mark.parametrize("leaf", ["q", "k", "v", "slopes", "ahead"])
def test_a_call_that_needs_a_gradient_is_not_decoded(leaf: str, qkv: Callable[..., Call], seen: list[str]) -> None:
    call = qkv(1, 2, 2, 16, keys=40)
    slopes = {"slopes": torch.tensor([0.5, 0.1]), "ahead": torch.tensor([0.2, 0.3])}
    (call | slopes)[leaf].requires_grad_()
    call |= {"bias": Linear(slopes["slopes"], slopes["ahead"]), "mask": Bidirectional()}
    lengthen.attention(**call, backend="triton")
    assert seen == ["attend"]
    with torch.no_grad():
        lengthen.attention(**call, backend="triton")
    assert seen == ["attend", "decode"]


@pytest.mark.parametrize("bias", ["linear", "table"])
@pytest.mark.parametrize("queries", [1, 3])
def test_gradients_of_few_queries_are_right(
    queries: int, bias: str, qkv: Callable[..., Call], bias_of: Callable[..., Any], off: Callable[..., Any], seen: Any
) -> None:
    call = qkv(1, 4, queries, 16, keys=40, key_heads=2)
    found = off(call | {"bias": bias_of(bias, call)})
    assert {"dq", "dk", "dv", "dbias"} <= set(found)
    assert max(found.values()) < 1e-5
    assert seen == ["attend"]


def test_the_op_itself_refuses_a_gradient(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 1, 16, keys=20)
    q, k, v = (call[name].requires_grad_() for name in "qkv")
    numbers = (0, 0, False, False, 0.25, 19, 0.0, 0, -1)
    out = decode(q, k, v, *[None] * 6, *numbers)[0]
    with pytest.raises(RuntimeError, match="lengthen::decode: expected inputs that need no gradient"):
        out.sum().backward()


@pytest.mark.parametrize("case", ["plain", "norm given", "padded, table", "both sides"])
def test_torch_finds_nothing_wrong_with_the_op(case: str, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 3, 16, keys=24, key_heads=1, value_dim=24)
    q, k, v = (call[name] for name in "qkv")
    slopes, values, norm = torch.tensor([1.0, 0.2]), torch.randn(2, 30), norms(k)
    listed = [x.to(torch.int32) for x in Causal().padded(torch.tensor([3])).interval(3, 24, 21, q.device)]
    numbers = (0.25, 21, 1e-4, 0, -1)
    more: tuple[Any, ...] = {
        "plain": (*[None] * 6, 0, 0, False, False),
        "norm given": (slopes, *[None] * 4, norm, 1, 8, True, False),
        "padded, table": (values, None, *listed, None, None, 4, 0, False, False),
        "both sides": (slopes, slopes.flip(0), *[None] * 4, 3, 0, True, True),
    }[case]
    torch.library.opcheck(torch.ops.lengthen.decode.default, (q, k, v, *more, *numbers))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", ["transposed", "features apart", "part of a longer cache"])
def test_strides_of_a_cache_make_no_difference(layout: str, queries: int, qkv: Callable[..., Call]) -> None:
    call = qkv(2, 4, queries, 16, keys=60, key_heads=2) | {"bias": Linear(alibi_slopes(4))}
    call["key_norm"] = norms(call["k"])

    def laid_out(x: Tensor) -> Tensor:
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "features apart":
            return x.mT.contiguous().mT
        return torch.cat((x, torch.full_like(x, torch.nan)), dim=2)[:, :, : x.shape[2]]

    expected = lengthen.attention(**call, backend="triton", return_lse=True)
    strided = call | {name: laid_out(call[name]) for name in "qkv"}
    assert not strided["k"].is_contiguous()
    got = lengthen.attention(**strided, backend="triton", return_lse=True)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_value_that_is_not_a_number_counts_where_a_table_hides_all_keys(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 1, 16, keys=80) | {"bias": Table(torch.full((1, 80), -torch.inf))}
    call["v"][0, 0, 3, 0] = torch.nan
    with torch.no_grad():
        out = lengthen.attention(**call, backend="triton")
        expected = lengthen.attention(**call, backend="reference")
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert out[0, 0, 0, 0].isnan()


tl: Any = None  # Triton's language and a kernel's part: the interpreter looks for them among a module's names
shares_of: Any = None


def test_flat_heads_get_most_programs_and_every_head_one(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = importlib.import_module("triton")
    monkeypatch.setitem(globals(), "tl", triton.language)
    monkeypatch.setitem(globals(), "shares_of", importlib.import_module("lengthen.attention.kernels.decoding").shares)

    def cut(  # type: ignore[no-untyped-def]
        slopes, counts, ends, group, key_heads, keys, programs,
        HEADS: tl.constexpr, GROUP: tl.constexpr, REACH: tl.constexpr,
    ):  # fmt: skip
        count, end = shares_of(slopes, group, key_heads, keys, programs, 16, HEADS, GROUP, REACH)
        one = tl.arange(0, HEADS)
        tl.store(counts + one, count)
        tl.store(ends + one, end)

    def shares(slopes: list[float], group: int, programs: int, reach: int) -> list[int]:
        key_heads = len(slopes) // group
        counts, ends = torch.zeros(2, 8, dtype=torch.int32)
        triton.jit(cut)[(1,)](torch.tensor(slopes), counts, ends, group, key_heads, 9600, programs, 8, 4, reach)
        assert bool((ends == counts.cumsum(0)).all())
        assert ends[-1] <= programs
        assert not counts[key_heads:].any()
        return counts[:key_heads].tolist()

    given = codes.GIVEN
    assert shares([0.5, 0.5, 0.5], 1, 30, codes.NO_REACH) == [10, 10, 10]
    assert shares([0.5, 0.5, 0.5], 1, 32, codes.NO_REACH) == [10, 10, 10]
    steep, less, flat = shares([8.0, 0.01, 0.0025], 1, 200, given)
    assert steep == 1
    assert 1 < less < flat / 3
    assert steep + less + flat > 190
    few = shares([8.0, 8.0, 8.0, 0.01], 1, 8, given)
    assert few == [1, 1, 1, 5]  # steep heads leave what they do not need
    assert shares([8.0, 8.0, 8.0], 1, 200, given) == [1, 1, 1]  # one block each: more would have nothing to read
    assert shares([8.0, 0.0, 8.0, 8.0], 2, 200, given)[0] > 150  # the flattest of those that share keys
    assert shares([0.1, 0.2, 0.3], 1, 3, given) == [1, 1, 1]
