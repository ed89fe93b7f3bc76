"""Reach: what is left unread never weighs more than the tolerance, and what is not finite is never left unread."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes, reach
from lengthen.positions import Kerple

Call = dict[str, Any]
Context = Callable[..., AbstractContextManager[Any]]
MASKS: dict[str, Any] = {
    "causal": Causal(),
    "both": Bidirectional(),
    "window": Window(30),
    "blockwise": Blockwise(25),
    "padded": Causal().padded(torch.tensor([7])),
    "padded both": Bidirectional().padded(torch.tensor([7])),
}


CONSTANTS = st.fixed_dictionaries(
    {
        "ROWS": st.integers(4, 32),
        "GRAIN": st.sampled_from([1, 128, 4096]),
        "NUMBERS": st.sampled_from([256, 4096]),
        "USUAL": st.sampled_from([-36.0, -12.0, -2.0, 11.0]),
        "UNIT": st.integers(2, 16),
        "TILE": st.sampled_from([1024, 4096, 16384]),
        "STEP": st.integers(7, 200),
    }
)


def draw_call(data: st.DataObject) -> Call:
    """Draw queries and keys of any size: scattered, clustered, far from the origin, or turned against the bound."""
    torch.manual_seed(data.draw(st.integers(0, 999), label="seed"))
    batch, heads, key_heads = data.draw(st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 2, 2)]))
    length, width = data.draw(st.integers(30, 250), label="length"), data.draw(st.integers(1, 5), label="width")
    q = torch.randn(batch, heads, length, width, dtype=torch.float64)
    k = torch.randn(batch, key_heads, length, width, dtype=torch.float64)
    kind = data.draw(
        st.sampled_from(["scattered", "clustered", "common mean", "outlier", "turned", "away"]), label="keys"
    )
    if kind == "clustered":
        centres = torch.randn(3, width, dtype=torch.float64)
        k = 0.01 * k + centres[torch.randint(3, k.shape[:3])]
    elif kind == "common mean":
        k = 0.1 * k + 30 * torch.randn(width, dtype=torch.float64)
    elif kind == "outlier":
        k[:, :, torch.randint(length, ())] *= 50
    elif kind == "turned":  # keys near the last queries point away from them, all the far ones at them
        q = torch.ones_like(q) + 0.01 * q
        k = torch.ones_like(k)
        k[:, :, length // 2 :] *= -1
    elif kind == "away":  # all keys point away: with a decay, the farther the less
        q = -torch.ones_like(q) - 0.01 * q
        k = torch.ones_like(k)
    # The norms of q and k are each 10⁻³ to 10³; in most draws their product is such that something can be left unread.
    size = data.draw(st.one_of(st.floats(-3, 1), st.floats(-3, 1), st.floats(-6, 6)), label="|q|·|k|")
    part = data.draw(st.floats(max(-3, size - 3), min(3, size + 3)), label="|q|")
    q, k = q * 10**part, k * 10 ** (size - part)
    steep = st.lists(st.one_of(st.floats(1, 3), st.floats(1, 10)), min_size=heads, max_size=heads)
    slopes = [2.0 ** -torch.tensor(data.draw(steep), dtype=torch.float64) for _ in range(1 + data.draw(st.booleans()))]
    bias: Any = Linear(*slopes)
    if data.draw(st.integers(0, 1), label="table"):  # one that falls on the whole, with steps up and down
        extended = data.draw(st.booleans(), label="extended")
        ends = [data.draw(st.integers(1, length)) if extended else length for _ in slopes]
        noise = data.draw(st.sampled_from([0.0, 1.0, 5.0]))
        tables = [
            noise * torch.rand(heads, end, dtype=torch.float64) - slope[:, None] * torch.arange(end) ** 1.2
            for slope, end in zip(slopes, ends, strict=True)
        ]
        bias = Table(*tables, extended=extended)  # type: ignore[misc]
    mask = MASKS[data.draw(st.sampled_from(list(MASKS)), label="mask")]
    v = torch.randn(batch, key_heads, length, 3, dtype=torch.float64)
    return {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "tolerance": 10 ** data.draw(st.floats(-12, -1))}


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_error_is_within_the_bound(data: st.DataObject, small_runs: Context) -> None:
    call = draw_call(data)
    if data.draw(st.integers(0, 3), label="decay") == 3:
        call["decay"] = Decay(0.9 + 0.1 * torch.rand(call["q"].shape[3], dtype=torch.float64))
    with small_runs(**data.draw(CONSTANTS)):
        out, lse = lengthen.attention(**call, return_lse=True, backend="chunked")
    expected, whole = lengthen.attention(**call, return_lse=True, backend="reference")
    tolerance, largest = call["tolerance"], call["v"].norm(dim=-1).max()
    # Scores may be as large as 10⁷ here: their rounding is then felt in the weights.
    rounding = 1e-9 + 4e-15 * call["q"].norm(dim=-1).max() * call["k"].norm(dim=-1).max()
    assert (out - expected).norm(dim=-1).max() <= 2 * tolerance * largest + rounding * largest
    left = -torch.expm1(lse - whole)[whole.isfinite()]  # the share of the mass that was not read
    assert left.max() <= tolerance + rounding
    assert left.min() >= -rounding
    event(
        f"{type(call['bias']).__name__}: {'something' if left.max() > rounding else 'nothing that counts'} left unread"
    )


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_lies_beyond_reach_weighs_no_more_than_the_tolerance(data: st.DataObject) -> None:
    call = draw_call(data)
    q, k, bias, mask, tolerance = (call[name] for name in ("q", "k", "bias", "mask", "tolerance"))
    length = q.shape[2]
    far = reach(q, k, bias, tolerance, mask=mask)
    assert far.dtype == torch.int64
    assert far.shape == q.shape[:3]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    first, last = (x[:, None, :, None] for x in mask.interval(length, length, 0, q.device))
    j = torch.arange(length)
    visible = (j >= first) & (j <= last)
    score = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT / math.sqrt(q.shape[3])
    score = (score + bias.at(distance)).masked_fill(~visible, -torch.inf)
    weight = torch.softmax(score, dim=-1).nan_to_num(0)
    unread = (weight * ((distance >= far[..., None]) & (distance >= 0))).sum(dim=-1)
    assert unread.max() <= tolerance * (1 + 1e-6)
    most = (torch.arange(length) - first[..., 0] + 1).clamp(min=0)
    assert bool(((far >= 0) & (far <= most)).all())
    event(f"{type(bias).__name__}: {'some beyond' if bool((far < most).any()) else 'all within'} reach")


def test_500_falling_tables_are_within_the_bound(small_runs: Context) -> None:
    left_out = 0
    for trial in range(500):
        torch.manual_seed(trial)
        heads, length, width = 2, 60 + trial % 60, 3
        two_sided, extended, tolerance = bool(trial % 2), trial % 5 == 4, 10.0 ** -(1 + trial % 7)
        q, k, v = torch.randn(3, 1, heads, length, width, dtype=torch.float64)
        ends = [length // 2 if extended else length] * (1 + two_sided)
        tables = [-(torch.rand(heads, end, dtype=torch.float64) * 0.8).cumsum(dim=1) for end in ends]
        for table in tables[: trial % 3]:
            table[:, torch.randint(table.shape[1], (3,))] += 1  # it falls on the whole, not at each step
        bias = Table(*tables, extended=extended)  # type: ignore[misc]
        call = {"q": q, "k": k, "v": v, "bias": bias, "mask": Bidirectional() if two_sided else Causal()}
        with small_runs(ROWS=4 + trial % 9, UNIT=2 + trial % 7, GRAIN=64):
            out, lse = lengthen.attention(**call, tolerance=tolerance, return_lse=True, backend="chunked")
        expected, whole = lengthen.attention(**call, return_lse=True, backend="reference")
        unread = -torch.expm1(lse - whole)
        assert unread.max() <= tolerance + 1e-12
        assert (out - expected).norm(dim=-1).max() <= 2 * tolerance * v.norm(dim=-1).max() + 1e-12
        left_out += bool(unread.max() > 1e-12)
    assert left_out > 300


@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "both"])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
def test_the_bound_is_tight_where_all_keys_are_alike(mask: Any, tolerance: float, small_runs: Context) -> None:
    # Rows are read one by one here: in a block, the row that looks farthest speaks for all.
    q, k = torch.zeros(1, 1, 3, 2, dtype=torch.float64), torch.zeros(1, 1, 1200, 2, dtype=torch.float64)
    call = {"q": q, "k": k, "v": k, "q_start": 600, "bias": Linear(torch.tensor([0.05])), "mask": mask}
    with small_runs(ROWS=1, GRAIN=0, UNIT=80, WASTE=1.0):
        lse = lengthen.attention(**call, tolerance=tolerance, return_lse=True, backend="chunked")[1]
    whole = lengthen.attention(**call, return_lse=True, backend="reference")[1]
    left = -torch.expm1(lse - whole)
    assert bool((left <= tolerance).all())
    assert bool((left >= 0.7 * tolerance).all())


def test_a_decay_may_bring_far_keys_forward(small_runs: Context) -> None:
    # All keys point away from all queries, but the decay takes that from the far ones: they weigh most.
    q, k = torch.full((2, 1, 1, 150, 1), 3.0, dtype=torch.float64)
    call: Call = {"q": -q, "k": k, "v": torch.randn_like(k), "scale": 1.0, "tolerance": 1e-2}
    call |= {"bias": Linear(torch.tensor([0.3])), "decay": Decay(torch.tensor([0.9]))}
    with small_runs():
        lse = lengthen.attention(**call, return_lse=True, backend="chunked")[1]
    whole = lengthen.attention(**call, return_lse=True, backend="reference")[1]
    assert (whole - lse).max() <= 1e-2


def test_much_is_left_unread_in_what_was_drawn(
    small_runs: Context, recorded: Context, scores_read: Callable[..., int]
) -> None:
    q, k, v = torch.randn(3, 1, 4, 80, 4, dtype=torch.float64)
    read = []
    for tolerance in (0.1, 1e-3, 1e-12, 0):
        with small_runs(), recorded() as reads:
            bias = Linear(torch.tensor([1.0, 0.7, 0.5, 0.5]))
            lengthen.attention(q, k, v, bias=bias, tolerance=tolerance, backend="chunked")
        read.append(scores_read(reads))
    assert read == sorted(read)
    assert read[0] < read[2] < read[3]
    assert read[0] < read[3] / 2


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_not_finite_goes_where_the_reference_lets_it_go(
    data: st.DataObject, constants: Any, small_runs: Context
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    length, heads = data.draw(st.integers(1, 60)), 2
    width, value_width = data.draw(st.sampled_from([(3, 3), (3, 2)]))
    call: Call = {
        "q": torch.randn(2, heads, length, width, dtype=torch.float64),
        "k": torch.randn(2, 1, length, width, dtype=torch.float64),
        "v": torch.randn(2, 1, length, value_width, dtype=torch.float64),
        "mask": MASKS[data.draw(st.sampled_from(list(MASKS)), label="mask")],
        "tolerance": data.draw(st.sampled_from([None, 1e-3, 0])),
    }
    slopes = torch.tensor([0.5, 0.05], dtype=torch.float64)
    rates = torch.full((width,), 0.9, dtype=torch.float64)
    call |= data.draw(st.sampled_from([{}, {"bias": Linear(slopes)}, {"decay": Decay(rates)}]))
    if data.draw(st.integers(0, 3)) == 3:
        call["bias"] = Table(torch.randn(heads, length, dtype=torch.float64))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from("qkv"), label="where")
        x, odd = call[name], data.draw(st.sampled_from([math.nan, math.inf, -math.inf]), label="what")
        x[tuple(data.draw(st.integers(0, size - 1)) for size in x.shape)] = odd
    with small_runs(**data.draw(constants)):
        out, lse = lengthen.attention(**call, return_lse=True, backend="chunked")
    expected, whole = lengthen.attention(**call, return_lse=True, backend="reference")
    within = {"rtol": 1e-9, "atol": 2e-2 if call["tolerance"] == 1e-3 else 1e-9, "equal_nan": True}
    torch.testing.assert_close(out, expected, **within, msg=lambda text: f"out: {text}")
    torch.testing.assert_close(lse, whole, **within, msg=lambda text: f"lse: {text}")


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_one_odd_number_far_away_is_not_missed(where: str, odd: float) -> None:
    # Of 1,100 keys a head this steep reads a few hundred; the first of them is seen all the same.
    call = {name: torch.randn(1, 1, 1100, 4) for name in "qkv"}
    if where == "k" and math.isinf(odd):  # a score of +∞, not of −∞
        call["q"][..., 0] = call["q"][..., 0].abs().copysign(torch.tensor(odd))
    call[where][0, 0, 0 if where != "q" else 1099, 0] = odd
    for mask in (Causal(), Bidirectional()):
        bias = Linear(torch.tensor([0.05]))
        got = lengthen.attention(**call, bias=bias, mask=mask, backend="chunked")
        expected = lengthen.attention(**call, bias=bias, mask=mask, backend="reference")
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert not expected[0, 0, 1099].isfinite().all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", ["linear", "flat", "none"])
def test_a_tolerance_of_zero_reads_every_visible_key_once(
    mask: str, bias: str, small_runs: Context, recorded: Context
) -> None:
    q, k, v = torch.randn(3, 2, 2, 90, 4, dtype=torch.float64)
    given = {"linear": Linear(torch.tensor([1.0, 0.01])), "flat": Linear(torch.zeros(2)), "none": None}
    options: Call = {"bias": given[bias], "mask": MASKS[mask]}
    options["tolerance"] = 0 if bias == "linear" else None  # without a slope there is nothing to leave out
    with small_runs(), recorded() as read:
        lengthen.attention(q, k, v, **options, backend="chunked")
    times = torch.zeros(2, 2, 90, 90, dtype=torch.int64)
    for run in read:
        for block in range(run.blocks):
            rows, lo = run.start + block * run.rows, run.lo + block * run.step
            times[run.batch, run.heads, rows : rows + run.rows, lo : lo + run.width] += 1
    first, last = (x[:, None, :, None] for x in MASKS[mask].interval(90, 90, 0, q.device))
    visible = ((torch.arange(90) >= first) & (torch.arange(90) <= last)).expand_as(times)
    assert times.max() == 1
    assert bool((times[visible] == 1).all())


def test_the_default_tolerance_vanishes_in_rounding(recorded: Context, scores_read: Callable[..., int]) -> None:
    q, k, v = torch.randn(3, 1, 8, 2048, 32)
    bias, read = Linear(alibi_slopes(8)), []
    outs = []
    for tolerance in (None, 0):
        with recorded() as reads:
            outs.append(lengthen.attention(q, k, v, bias=bias, tolerance=tolerance, backend="chunked"))
        read.append(scores_read(reads))
    assert read[0] < 0.8 * read[1]
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=8 * torch.finfo(torch.float32).eps)


def test_steep_heads_read_a_small_share_of_4096_keys(recorded: Context, scores_read: Callable[..., int]) -> None:
    q, k, v = torch.randn(3, 1, 2, 4096, 16)
    with recorded() as reads:
        lengthen.attention(q, k, v, bias=Linear(torch.tensor([0.5, 0.25])), backend="chunked")
    assert scores_read(reads) / (2 * 4096**2) < 0.15  # a causal call without reach reads a half


def test_kerple_s_power_kernel_reads_a_small_share_of_a_long_sequence(spans: Callable[..., Tensor]) -> None:
    q, k, v = 0.1 * torch.randn(3, 1, 4, 8192, 8)
    bias = Kerple(heads=4, head_dim=8, width=32, kind="power").bias(8191)
    for call in ({"mask": Causal()}, {"mask": Bidirectional()}):
        lo, hi = spans({"q": q, "k": k, "v": v, "bias": bias, **call})
        read = (hi - lo).double().mean(dim=(0, 2)) / 8192  # of each head, d¹ to d^¼
        assert read[0] < 0.1
        assert read.mean() < 0.5
    flat = spans({"q": q, "k": k, "v": v, "bias": Table(torch.zeros(4, 8192))})
    assert int((flat[1] - flat[0]).max()) == 8192  # nothing falls: everything is read


def test_a_mean_that_all_keys_share_costs_nothing(recorded: Context, scores_read: Callable[..., int]) -> None:
    q, k, v = torch.randn(3, 1, 1, 1500, 16)
    read = []
    for shift in (0, 20):
        with recorded() as reads:
            lengthen.attention(q, k + shift, v, bias=Linear(torch.tensor([0.2])), backend="chunked")
        read.append(scores_read(reads))
    assert read[1] <= 1.1 * read[0]
    assert torch.equal(reach(q, k, Linear(torch.tensor([0.2]))), reach(q, k.clone(), Linear(torch.tensor([0.2]))))
    shifted = reach(q, k + 20, Linear(torch.tensor([0.2])))
    assert (shifted - reach(q, k, Linear(torch.tensor([0.2])))).abs().max() <= 2


@pytest.mark.parametrize("slope", [0.7, 0.25, 0.1])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 1e-12])
def test_reach_is_the_closed_form(slope: float, tolerance: float) -> None:
    # Keys that are all alike: s = 0, and ℓ is that of the nearest keys, 128 of them at least and 255 at most.
    x = torch.zeros(1, 1, 600, 4, dtype=torch.float64)
    got = reach(x, x, Linear(torch.tensor([slope], dtype=torch.float64)), tolerance)[0, 0]

    def closed(near: int) -> int:
        lse = math.log(sum(math.exp(-slope * d) for d in range(near)))
        return math.ceil((-lse - math.log(tolerance) - math.log(1 - math.exp(-slope))) / slope)

    assert bool((got[300:] >= closed(255)).all())
    assert bool((got[300:] <= closed(128)).all())
    assert got[:5].tolist() == [1, 2, 3, 4, 5]  # never more than the query can see


def test_reach_grows_as_it_should() -> None:
    q, k = torch.randn(2, 1, 2, 700, 8, dtype=torch.float64)
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    base = reach(q, k, Linear(slopes), 1e-6)[..., 300:]
    assert bool((reach(q, k, Linear(slopes), 1e-9)[..., 300:] > base).all())
    assert bool((reach(q, k, Linear(slopes / 2), 1e-6)[..., 300:] > base).all())
    assert bool((reach(q, 2 * k, Linear(slopes), 1e-6)[..., 300:] >= base).all())
    assert bool((reach(q, k, Linear(slopes), 1e-6, scale=0.0)[..., 300:] <= base).all())
    # A tolerance smaller by 10³ costs the logarithm of it over the slope.
    step = (reach(q, k, Linear(slopes), 1e-9)[..., 300:] - base).double().mean(dim=(0, 2))
    torch.testing.assert_close(step, math.log(1e3) / slopes, rtol=0, atol=0.1)


def test_where_nothing_is_bounded_reach_is_all_that_is_seen() -> None:
    q, k = torch.randn(2, 1, 1, 40, 4)
    position = torch.arange(1, 41)
    assert torch.equal(reach(q, k, Linear(torch.zeros(1)))[0, 0], position)
    assert torch.equal(reach(q, k, Linear(torch.ones(1)), 0)[0, 0], position)
    for odd in (math.nan, math.inf):
        spoilt = k.clone()
        spoilt[0, 0, 3, 0] = odd
        assert torch.equal(reach(q, spoilt, Linear(torch.ones(1)))[0, 0], position)
    assert torch.equal(reach(q, k, Linear(torch.zeros(1)), mask=Window(5))[0, 0], position.clamp(max=5))
    padded = reach(q, k, Linear(torch.zeros(1)), mask=Causal().padded(torch.tensor([30])))[0, 0]
    assert torch.equal(padded, (position - 30).clamp(min=0))
    assert torch.equal(reach(q[:, :, :4], k, Linear(torch.zeros(1)))[0, 0], position[-4:])
    assert reach(q, k, Linear(torch.zeros(1)), q_start=100)[0, 0, 0] == 101


@pytest.mark.parametrize("bias", [Linear(torch.tensor([0.5, 0.2])), Table(-torch.arange(1.0, 81).view(2, 40).log())])
def test_reach_of_sequences_at_places_of_their_own(bias: Any) -> None:
    q, k = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 40, 4)
    together = reach(q, k, bias, 1e-2, q_start=torch.tensor([3, 30]))
    for b, start in enumerate((3, 30)):
        assert torch.equal(together[b : b + 1], reach(q[b : b + 1], k[b : b + 1], bias, 1e-2, q_start=start))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_default_is_half_a_unit_in_the_last_place(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 1, 2, 300, 8).to(dtype)
    bias = Linear(torch.tensor([0.5, 0.2]))
    assert torch.equal(reach(q, k, bias), reach(q, k, bias, torch.finfo(dtype).eps / 2))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bias": None}, TypeError, r"bias: expected Linear or Table, whose tail bounds how far .*, got None"),
        ({"bias": torch.ones(2)}, TypeError, r"bias: expected Linear or Table, got a torch\.float32 tensor"),
        ({"bias": Table(torch.zeros(2, 8))}, ValueError, r"bias\.values: expected distances 0 … 8, "),
        ({"bias": Linear(torch.ones(3))}, ValueError, r"bias\.slopes: expected one row for each of q's 2 heads"),
        ({"q": torch.zeros(1, 2, 9)}, ValueError, r"q: expected \[batch, heads, length, width\]"),
        ({"k": torch.zeros(1, 2, 9, 5)}, ValueError, r"k: expected head_dim 4 like q"),
        ({"k": torch.zeros(1, 2, 9, 4).half()}, TypeError, r"k: expected torch\.float32 like q"),
        ({"tolerance": 1.0}, ValueError, r"tolerance: expected a fraction from 0 to below 1, got 1\.0"),
        ({"tolerance": -0.1}, ValueError, r"tolerance: expected a fraction from 0 to below 1, got -0\.1"),
        ({"mask": "causal"}, TypeError, r"mask: expected Causal\(\)"),
        ({"scale": math.nan}, TypeError, r"scale: expected a finite number"),
        ({"q_start": 1.5}, TypeError, r"q_start: expected a whole number"),
    ],
)
def test_reach_checks_what_comes_in(changes: Call, error: type[Exception], message: str) -> None:
    given = {"q": torch.zeros(1, 2, 9, 4), "k": torch.zeros(1, 2, 9, 4), "bias": Linear(torch.ones(2))} | changes
    with pytest.raises(error, match=message):
        reach(**given)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 50, 50), (1, 0, 50), (1, 50, 0), (1, 0, 0)])
def test_reach_of_nothing(batch: int, queries: int, keys: int) -> None:
    q, k = torch.zeros(batch, 2, queries, 4), torch.zeros(batch, 2, keys, 4)
    got = reach(q, k, Linear(torch.ones(2)))
    assert got.shape == (batch, 2, queries)


def test_learned_slopes_lose_nothing_by_it(assert_as_defined: Any, small_runs: Context) -> None:
    call: Call = {name: torch.randn(1, 2, 90, 4, dtype=torch.float64) for name in "qkv"}
    slopes: Tensor = torch.tensor([0.9, 0.4], dtype=torch.float64)
    for tolerance, allowed in ((1e-15, 1e-12), (1e-6, 1e-3)):
        for mask in (Causal(), Bidirectional()):
            with small_runs():
                assert_as_defined(call | {"bias": Linear(slopes), "mask": mask, "tolerance": tolerance}, rest=allowed)
