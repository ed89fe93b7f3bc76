"""Steps of fixed shapes give what steps over the same cache give, bounds included."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Causal, Linear, Window, attention
from lengthen.attention.cache import Cache
from lengthen.attention.static import StaticCache

HEADS, WIDTH, READ, LENGTH = 4, 8, 40, 160
BIAS = Linear(torch.tensor([3.0, 1.0, 0.5, 0.1], dtype=torch.float64))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def drawn(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, HEADS, LENGTH, WIDTH, dtype=torch.float64)
    k, v = torch.randn(2, batch, 2, LENGTH, WIDTH, dtype=torch.float64)
    q[:, :, 120] *= 6  # one that looks farther than all before it
    k[:, :, 90] *= 3
    return q, k, v


def attended(cache: Cache | StaticCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slots = cache.begin(q.shape[2], q.device)
    return cache.layers[0].attend(q, k, v, BIAS, None, slots.mask, slots.forget)


def stepped(cache: Cache, static: bool, at: range, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts, steps = [], StaticCache(cache, q.device) if static else cache
    for i in at:
        if isinstance(steps, StaticCache):
            steps.prepare()
        parts.append(attended(steps, *(x[:, :, i : i + 1] for x in (q, k, v))))
        if isinstance(steps, StaticCache):
            steps.advance()
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize("room", [None, LENGTH])
@pytest.mark.parametrize("starts", [None, [0, 17], [12, 5]])
@pytest.mark.parametrize("tolerance", [None, 1e-2])
def test_everything_kept(tolerance: float | None, starts: list[int] | None, room: int | None) -> None:
    q, k, v = drawn(2)
    found, positions = [], []
    for static in (False, True):
        cache = Cache(1, starts=starts, room=room, tolerance=tolerance)
        attended(cache, *(x[:, :, :READ] for x in (q, k, v)))
        found.append(stepped(cache, static, range(READ, LENGTH), q, k, v))
        assert cache.length == LENGTH
        positions.append(cache.begin(1, q.device).positions)
    close = {"rtol": 1e-10, "atol": 1e-10} if tolerance is None else {"rtol": 0, "atol": 0.1}
    torch.testing.assert_close(found[1], found[0], **close)
    assert positions[0].equal(positions[1])


@pytest.mark.parametrize("tolerance", [1e-3, 1e-9])
@pytest.mark.parametrize("highest", [None, 5.0])
def test_what_is_given_up_is_bounded(tolerance: float, highest: float | None) -> None:
    q, k, v = drawn(2)
    if highest is not None:
        q, k = (x / x.norm(dim=-1, keepdim=True) * (highest * WIDTH**0.5) ** 0.5 for x in (q, k))
    whole, bounds = attention(q, k, v, bias=BIAS, tolerance=0)[:, :, READ:], []
    for static in (False, True):
        options: dict[str, Any] = {"highest": None if highest is None else [highest], "page": 8}
        cache = Cache(1, "reach", mode="certified", tolerance=tolerance, **options)
        attended(cache, *(x[:, :, :READ] for x in (q, k, v)))
        found = stepped(cache, static, range(READ, LENGTH), q, k, v)
        error = float((found - whole).norm(dim=-1).amax())
        assert error <= 2 * cache.bound * float(v.norm(dim=-1).amax()) + 1e-12
        bounds.append(cache.bound)
        assert sum(len(group.pages) for group in cache.layers[0].groups) > 0  # type: ignore[union-attr]
    # Storage holds a little more than a step by itself would read: the bound is no larger.
    assert 0 < bounds[1] <= bounds[0] * (1 + 1e-9)
    if highest is not None:
        assert bounds[0] <= tolerance


@pytest.mark.parametrize("policy", ["full", "reach"])
def test_rows_that_are_left_and_steps_in_between(policy: str) -> None:
    q, k, v = drawn(3)
    options = {"mode": "certified", "tolerance": 1e-13, "page": 8} if policy == "reach" else {}
    found = []
    for static in (False, True):
        cache = Cache(1, policy, **options)
        attended(cache, *(x[:, :, :READ] for x in (q, k, v)))
        parts = [stepped(cache, static, range(READ, 70), q, k, v)[[2, 0]]]
        cache, fewer = cache.rows([2, 0]), [x[[2, 0]] for x in (q, k, v)]
        parts += [stepped(cache, static, range(70, 90), *fewer), stepped(cache, False, range(90, 100), *fewer)]
        parts += [stepped(cache, static, range(100, 130), *fewer)]
        found.append(torch.cat(parts, dim=2))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


def test_the_work_is_the_same_until_storage_is_replaced() -> None:
    q, k, v = drawn(1)
    cache = Cache(1, room=LENGTH)
    attended(cache, *(x[:, :, :READ] for x in (q, k, v)))
    steps, seen = StaticCache(cache, q.device), set()
    for i in range(READ, LENGTH):
        seen.add(steps.prepare())
        attended(steps, *(x[:, :, i : i + 1] for x in (q, k, v)))
        steps.advance()
    assert len(seen) == 1


def test_which_caches_it_is_for() -> None:
    q, k, v = (x[:, :, :READ] for x in drawn(2))

    def fits(*args: Any, **options: Any) -> bool:
        cache = Cache(1, *args, **options)
        attended(cache, q, k, v)
        return StaticCache.fits(cache)

    assert not StaticCache.fits(Cache(1))  # nothing was read
    assert fits()
    assert fits("full", Causal(), starts=[0, 3])
    assert fits("reach", mode="certified")
    assert fits("reach", mode="certified", starts=[0, 0])
    assert not fits("reach", mode="certified", starts=[0, 3])
    assert not fits("reach", mode="exact")
    assert not fits("full", Window(9))
    cache = Cache(1)
    attended(cache, q, k, v)
    with pytest.raises(ValueError, match="new: expected steps of one token, got 2"):
        StaticCache(cache, q.device).begin(2, q.device)
