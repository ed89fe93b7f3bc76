"""What a cache keeps, that reading it is reading everything, and that what was given up is bounded."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes, attention
from lengthen.attention.cache import Cache
from lengthen.attention.reach_cache import ReachLayer

HEADS, WIDTH = 4, 8


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def drawn(length: int, batch: int = 2, key_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64)
    k, v = torch.randn(2, batch, key_heads, length, WIDTH, dtype=torch.float64)
    return q, k, v


def through(cache: Cache, q: Tensor, k: Tensor, v: Tensor, chunk: int, bias: Any = None, decay: Any = None) -> Tensor:
    parts = []
    for i in range(0, q.shape[2], chunk):
        slots = cache.begin(min(chunk, q.shape[2] - i), q.device)
        new = (x[:, :, i : i + chunk] for x in (q, k, v))
        parts.append(cache.layers[0].attend(*new, bias, decay, slots.mask, slots.forget))
    return torch.cat(parts, dim=2)


def pages(cache: Cache) -> int:
    layer = cache.layers[0]
    assert isinstance(layer, ReachLayer)
    return sum(len(group.pages) for group in layer.groups)


BIASES: dict[str, Callable[[], Any]] = {
    "linear": lambda: Linear(torch.tensor([3.0, 1.0, 2.0, 0.5], dtype=torch.float64)),
    "table": lambda: Table(-torch.tensor([[0.02], [0.01], [0.3], [0.1]]).double() * torch.arange(120.0).double() ** 2),
}
MASKS: dict[str, Callable[[], Any]] = {
    "causal": Causal,
    "window": lambda: Window(50),
    "blockwise": lambda: Blockwise(21),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("mode", ["exact", "certified"])
def test_what_a_head_gave_up_is_bounded_or_fetched(mode: str, decayed: bool, bias: str, mask: str) -> None:
    q, k, v = drawn(100)
    q[:, :, 90] *= 8  # a query that looks farther than any before it
    starts = [0, 13]
    options = {"bias": BIASES[bias](), "decay": Decay(torch.linspace(0.9, 1, WIDTH).double()) if decayed else None}
    padded = MASKS[mask]().padded(torch.tensor(starts))
    whole = attention(q, k, v, **options, mask=padded, tolerance=0, backend="reference")
    for chunk, tolerance in ((1, 1e-4), (7, 1e-4), (100, 1e-14), (9, 0.0)):
        cache = Cache(1, "reach", MASKS[mask](), mode=mode, starts=starts, tolerance=tolerance, page=3)
        found = through(cache, q, k, v, chunk, **options)
        if mask == "causal" and chunk == 1:
            assert pages(cache) > 0
        error = float((found - whole)[1, :, 13:].norm(dim=-1).amax().maximum((found - whole)[0].norm(dim=-1).amax()))
        assert error <= 2 * cache.bound * float(v.norm(dim=-1).amax()) + 1e-12
        if mode == "exact":
            assert cache.bound <= tolerance * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["exact", "certified"])
def test_keys_that_grow_and_sinks_stay_within_the_bound(mode: str) -> None:
    length, bias = 200, Linear(torch.tensor([2.0, 1.0, 0.5, 0.25], dtype=torch.float64))
    q, k, v = drawn(length, batch=1, key_heads=4)
    k = k * torch.linspace(0.2, 2, length).double().unsqueeze(1)
    k[:, :, 0] *= 400 if mode == "exact" else 40  # sinks
    k[:, :, 100] *= 5
    v[:, :, 0] *= 10
    whole = attention(q, k, v, bias=bias, tolerance=0, backend="reference")
    for tolerance in (1e-2, 1e-6):
        cache = Cache(1, "reach", mode=mode, tolerance=tolerance, page=8)
        found = through(cache, q, k, v, 1, bias)
        assert pages(cache) > 0
        error = float((found - whole).norm(dim=-1).amax())
        assert error <= 2 * cache.bound * float(v.norm(dim=-1).amax()) + 1e-12
        if mode == "exact":
            assert cache.bound <= tolerance * (1 + 1e-9)


def test_a_query_that_asks_for_what_is_gone_raises_the_bound() -> None:
    bias = Linear(torch.full((HEADS,), 1.0, dtype=torch.float64))
    q, k, v = drawn(200, batch=1)
    calm = Cache(1, "reach", mode="certified", tolerance=1e-3, page=8)
    through(calm, q, k, v, 1, bias)
    assert calm.bound <= 1e-3
    q[:, :, 199] = 100 * k[:, :, 3].repeat_interleave(2, dim=1)  # long gone
    whole = attention(q, k, v, bias=bias, tolerance=0)
    cache = Cache(1, "reach", mode="certified", tolerance=1e-3, page=8)
    found = through(cache, q, k, v, 1, bias)
    assert float((found - whole)[:, :, 199].norm(dim=-1).amax()) > 0.1  # it is wrong, and says so
    assert cache.bound > 1
    exact = Cache(1, "reach", mode="exact", tolerance=1e-3, page=8)
    torch.testing.assert_close(through(exact, q, k, v, 1, bias), whole, atol=1e-2, rtol=0)


def test_memory_stays_where_heads_forget() -> None:
    bias = Linear(torch.tensor([2.0, 1.0, 0.5, 0.25], dtype=torch.float64))
    q, k, v = (x / 4 for x in drawn(2000, batch=1))
    sizes: dict[str, list[int]] = {}
    for mode in ("certified", "exact"):
        cache = Cache(1, "reach", mode=mode, tolerance=1e-3, page=16)
        sizes[mode] = []
        for i in range(0, 2000, 200):
            through(cache, *(x[:, :, i : i + 200] for x in (q, k, v)), 20, bias)
            sizes[mode].append(cache.nbytes)
        assert (cache.host_nbytes > 0) == (mode == "exact")
    assert sizes["certified"][-1] <= 1.2 * sizes["certified"][2]
    full = Cache(1)
    through(full, q, k, v, 100, bias)
    assert sizes["certified"][-1] < full.nbytes / 8
    assert pages(cache) > 50


@pytest.mark.parametrize("mode", ["exact", "certified"])
def test_who_reads_the_bound_at_each_step_keeps_no_more(mode: str) -> None:
    bias = Linear(torch.tensor([2.0, 1.0, 0.5, 0.25], dtype=torch.float64))
    q, k, v = drawn(300, batch=1)
    found = []
    for often in (False, True):
        cache, kept = Cache(1, "reach", mode=mode, tolerance=1e-3, page=16), []
        for i in range(300):
            through(cache, *(x[:, :, i : i + 1] for x in (q, k, v)), 1, bias)
            kept.append(cache.nbytes)
            if often:
                assert cache.bound < 1
        found.append((kept, pages(cache), cache.bound))
    assert found[0] == found[1]
    assert pages(cache) > 0


def test_balls_of_what_was_given_up_are_few() -> None:
    bias = Linear(torch.full((HEADS,), 2.0, dtype=torch.float64))
    q, k, v = drawn(3000, batch=1)
    cache = Cache(1, "reach", mode="certified", tolerance=1e-3, page=4)
    through(cache, q, k, v, 50, bias)
    assert 0 < pages(cache) <= 2 * 11  # two of each size, of which there are log₂(3000/4)


@pytest.mark.parametrize("mask", [Window(20), Blockwise(16)])
def test_a_window_keeps_what_its_mask_sees(mask: Any) -> None:
    q, k, v = drawn(500)
    for chunk in (1, 7):
        cache = Cache(1, "window", mask, starts=[0, 5])
        torch.testing.assert_close(
            through(cache, q, k, v, chunk)[0], attention(q, k, v, mask=mask)[0], rtol=1e-10, atol=1e-10
        )
        assert cache.length == 500
        assert cache.nbytes <= 2 * 2 * 2 * 256 * WIDTH * 8  # of 500 slots, room for 256 at most


def test_storage_is_made_once_where_the_length_is_known_and_grows_by_doubling_elsewhere() -> None:
    q, k, v = drawn(300)
    known, unknown = Cache(1, room=300), Cache(1)
    sizes = {"known": set(), "unknown": set()}  # type: dict[str, set[int]]
    for i in range(300):
        one = [x[:, :, i : i + 1] for x in (q, k, v)]
        for name, cache in (("known", known), ("unknown", unknown)):
            through(cache, *one, 1)
            sizes[name].add(cache.nbytes)
    assert len(sizes["known"]) == 1
    assert len(sizes["unknown"]) <= 4


@pytest.mark.parametrize("policy", ["full", "reach"])
def test_rows_are_removed_and_repeated(policy: str) -> None:
    q, k, v = drawn(60, batch=3)
    bias = BIASES["linear"]()
    options = {"policy": policy, "tolerance": 1e-14, "page": 3}
    whole = attention(q, k, v, bias=bias, tolerance=0)
    cache = Cache(1, **options)
    through(cache, *(x[:, :, :30] for x in (q, k, v)), 4, bias)
    other = cache.rows([2, 0, 0])
    found = through(other, *(x[[2, 0, 0], :, 30:] for x in (q, k, v)), 4, bias)
    torch.testing.assert_close(found, whole[[2, 0, 0], :, 30:], rtol=1e-10, atol=1e-10)
    found = through(cache, *(x[:, :, 30:] for x in (q, k, v)), 4, bias)  # what the other did does not show
    torch.testing.assert_close(found, whole[:, :, 30:], rtol=1e-10, atol=1e-10)


def test_bounded_scores_promise_before_they_start() -> None:
    q, k, v = drawn(200, batch=1)
    q, k = (x / x.norm(dim=-1, keepdim=True) * WIDTH**0.5 for x in (q, k))
    highest = WIDTH**0.5
    bias = Linear(torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=torch.float64))
    cache = Cache(1, "reach", mode="certified", tolerance=1e-3, highest=[highest], page=8)
    found = through(cache, q, k, v, 1, bias)
    assert pages(cache) > 0
    assert cache.bound <= 1e-3
    whole = attention(q, k, v, bias=bias, tolerance=0)
    assert float((found - whole).norm(dim=-1).amax()) <= 2e-3 * float(v.norm(dim=-1).amax())


def test_a_promise_holds_for_the_worst_keys() -> None:
    # Reach ends just before a power of two, so that little is kept to spare. Most old keys stand with the query, the
    # others and all new ones against it: a ball of old ones alone says more than the promise does.
    highest, tolerance, slope, length = 8.0, 1e-3, 0.1057, 900
    needed = (2 * highest - math.log(tolerance) - math.log(-math.expm1(-slope))) / slope
    assert 235 < needed < 255
    bias = Linear(torch.full((HEADS,), slope, dtype=torch.float64))
    q, k, v = drawn(length, batch=1)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = (highest * WIDTH**0.5) ** 0.5
    slot = torch.arange(length)
    k[..., 0] = torch.where((slot < length // 2) & (slot % 5 > 0), 1, -1) * q[0, 0, 0, 0]
    whole = attention(q, k, v, bias=bias, tolerance=0)
    cache = Cache(1, "reach", mode="certified", tolerance=tolerance, highest=[highest * (1 + 1e-9)], page=8)
    found = through(cache, q, k, v, 8, bias)
    assert pages(cache) > 0
    error = float((found - whole).norm(dim=-1).amax())
    assert error <= 2 * cache.bound * float(v.norm(dim=-1).amax()) + 1e-12
    assert cache.bound <= tolerance


def test_what_is_not_finite_is_no_bound() -> None:
    q, k, v = drawn(60, batch=1)
    k[:, :, 5] = torch.nan
    for highest in (None, [5.0]):
        cache = Cache(1, "reach", mode="certified", tolerance=1e-3, page=4, highest=highest)
        through(cache, q, k, v, 1, BIASES["linear"]())
        assert cache.bound == float("inf") or pages(cache) == 0


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cache: 'window' keeps what a mask can still see"):
        Cache(1, "window")
    with pytest.raises(ValueError, match="cache: expected 'full' or 'window' or 'reach'"):
        Cache(1, "all")
    with pytest.raises(ValueError, match="mode: expected"):
        Cache(1, "reach", mode="rough")
    with pytest.raises(ValueError, match="tolerance: expected a fraction"):
        Cache(1, tolerance=1.5)
    q, k, v = drawn(5)
    with pytest.raises(ValueError, match=r"cache: 'reach' .* expected a position method"):
        through(Cache(1, "reach"), q, k, v, 1)
    cache = Cache(2)
    through(cache, q, k, v, 5)
    with pytest.raises(RuntimeError, match="cache: expected layers of one length"):
        cache.begin(1, q.device)


def test_float32_with_the_usual_slopes() -> None:
    q, k, v = (x.float() for x in drawn(700, batch=1))
    bias = Linear(alibi_slopes(HEADS))
    whole = attention(q, k, v, bias=bias, tolerance=0)
    for mode in ("exact", "certified"):
        cache = Cache(1, "reach", mode=mode)
        torch.testing.assert_close(through(cache, q, k, v, 10, bias), whole, rtol=1e-5, atol=1e-5)
        assert pages(cache) > 0
        assert cache.bound <= 1e-6
