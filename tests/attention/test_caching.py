"""Parts of a long call: with a cache, token by token or many at once, each sequence at its own place."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Ball, Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes, attention

Call = dict[str, Any]
Context = Callable[..., AbstractContextManager[None]]
LENGTH, HEADS = 61, 4
METHODS: dict[str, Callable[[], Call]] = {
    "none": lambda: {},
    "linear": lambda: {"bias": Linear(alibi_slopes(HEADS).double())},
    "table": lambda: {"bias": Table(torch.randn(HEADS, 2 * LENGTH).double())},
    "extended": lambda: {"bias": Table(torch.randn(HEADS, 9).double(), torch.randn(HEADS, 5).double(), extended=True)},
    "decay": lambda: {"decay": Decay(0.8 + 0.2 * torch.rand(8).double())},
}
MASKS: dict[str, Callable[[int], Any]] = {
    "causal": lambda keys: Causal(),
    "window": lambda keys: Window(9),
    "blockwise": lambda keys: Blockwise(8),
    "padded": lambda keys: Causal().padded(torch.tensor([0, 23])),
    "padded blockwise": lambda keys: Blockwise(8).padded(torch.tensor([5, 30])),
    "packed": lambda keys: Window(20).packed(torch.arange(keys).unsqueeze(0) // 25 * 25),
}
EACH_METHOD = pytest.mark.parametrize("method", METHODS)


def inputs(queries: int = LENGTH, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, HEADS, queries, 8, dtype=torch.float64)
    k, v = torch.randn(2, batch, 2, LENGTH, 8, dtype=torch.float64)
    return q, k, v


@pytest.mark.parametrize("mask", MASKS)
@EACH_METHOD
def test_reading_with_a_cache_is_reading_the_whole(method: str, mask: str, small_runs: Context) -> None:
    (q, k, v), options = inputs(), METHODS[method]()
    whole = attention(q, k, v, **options, mask=MASKS[mask](LENGTH), backend="reference")
    for step in (1, 3, 17):
        parts = []
        with small_runs():
            for i in range(0, LENGTH, step):
                end = min(i + step, LENGTH)
                seen = {"k": k[:, :, :end], "v": v[:, :, :end], "mask": MASKS[mask](end)}
                parts.append(attention(q[:, :, i:end], **seen, **options))
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-10, atol=1e-10)


@EACH_METHOD
@pytest.mark.parametrize("step", [1, 3, 17])
def test_both_sides_in_parts_are_the_whole(method: str, step: int, small_runs: Context) -> None:
    (q, k, v), options = inputs(), METHODS[method]()
    whole = attention(q, k, v, **options, mask=Bidirectional(), backend="reference")
    with small_runs():
        parts = [
            attention(part, k, v, **options, mask=Bidirectional(), q_start=i * step)
            for i, part in enumerate(q.split(step, dim=2))
        ]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-10, atol=1e-10)


# Where each of three sequences stands: before its keys, among them, after them.
STARTS = torch.tensor([-3, 40, LENGTH - 2])
EACH_STARTS: dict[str, Any] = {
    "causal": Causal(),
    "window": Window(9),
    "blockwise": Blockwise(8),
    "both": Bidirectional(),
    "padded": Causal().padded(torch.tensor([0, 23, 7])),
    "padded for all": Window(20).padded(torch.tensor([5])),
    "both ends": Bidirectional().padded(torch.tensor([0, 42, 7]), torch.tensor([LENGTH, 50, 60])),
}


def rows_of(mask: Any, one: slice) -> Any:
    """Return the mask of one sequence."""
    ends = {name: getattr(mask, name) for name in ("key_start", "key_end")}
    return mask.padded(**{name: x if x is None or len(x) == 1 else x[one] for name, x in ends.items()})


@pytest.mark.parametrize("mask", EACH_STARTS)
@EACH_METHOD
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_sequences_at_places_of_their_own(method: str, mask: str, backend: str, small_runs: Context) -> None:
    (q, k, v), options = inputs(7, batch=3), METHODS[method]()
    leaves = [q, k, v]
    for x in options.values():
        leaves += [x.rates] if isinstance(x, Decay) else [part for part in x.tensors if part is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    weights = torch.randn(3, HEADS, 7, 8, dtype=torch.float64), torch.randn(3, HEADS, 7, dtype=torch.float64)

    def results(one: slice, **more: Any) -> list[Tensor]:
        found = attention(q[one], k[one], v[one], **options, **more, return_lse=True, backend=backend)
        loss = sum((x.where(x.isfinite(), 0) * weight[one]).sum() for x, weight in zip(found, weights, strict=True))
        return [*found, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]

    with small_runs():
        together = results(slice(None), q_start=STARTS, mask=EACH_STARTS[mask])
    sums = [torch.zeros_like(x) for x in leaves]
    for b, start in enumerate(STARTS.tolist()):
        one = slice(b, b + 1)
        out, lse, *grads = results(one, q_start=start, mask=rows_of(EACH_STARTS[mask], one))
        torch.testing.assert_close(together[0][one], out, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(together[1][one], lse, rtol=1e-10, atol=1e-10)
        sums = [total + grad for total, grad in zip(sums, grads, strict=True)]
    for ours, theirs in zip(together[2:], sums, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@EACH_METHOD
@pytest.mark.parametrize("backend", ["reference", "chunked", None])
def test_a_static_cache_with_unused_slots(method: str, backend: str | None) -> None:
    # Sequences of 5, 30 and 60 tokens decode two more on one cache, of which the rest holds what it likes.
    (q, k, v), options = inputs(2, batch=3), METHODS[method]()
    starts = torch.tensor([5, 30, LENGTH - 2])
    for odd in (torch.nan, torch.inf, 3.0):
        for b, start in enumerate(starts.tolist()):
            k[b, :, start + 2 :], v[b, :, start + 2 :] = odd, odd
        out = attention(q, k, v, **options, q_start=starts, backend=backend)
        for b, start in enumerate(starts.tolist()):
            one, used = slice(b, b + 1), slice(0, start + 2)
            alone = attention(q[one], k[one, :, used], v[one, :, used], **options, backend="reference")
            torch.testing.assert_close(out[one], alone, rtol=1e-10, atol=1e-10)


def test_a_ball_of_sequences_at_places_of_their_own() -> None:
    (q, k, v), bias = inputs(2, batch=3), Linear(torch.ones(HEADS).double())
    starts = torch.tensor([5, 30, LENGTH - 2])
    expected = attention(q, k, v, bias=bias, q_start=starts, backend="reference")
    got = attention(q, k, v, bias=bias, q_start=starts, ball=Ball.around(k), backend="chunked")
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("q_start", "error", "message"),
    [
        (torch.tensor([1.0, 2.0]), TypeError, r"q_start: expected an integer tensor, got a torch\.float32"),
        (torch.tensor([[1, 2]]), ValueError, r"q_start: expected 1 dimension.*\[1, 2\]"),
        (torch.tensor([1, 2, 3]), ValueError, r"q_start: expected one number for each of 2 sequences, got .*\[3\]"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, r"q_start: expected a tensor on cpu like q"),
    ],
)
def test_places_are_checked(q_start: Tensor, error: type[Exception], message: str) -> None:
    q, k, v = inputs(3)
    with pytest.raises(error, match=message):
        attention(q, k, v, q_start=q_start)


def test_more_queries_than_keys_must_say_where_they_stand() -> None:
    q, k, v = inputs(LENGTH + 4)
    with pytest.raises(ValueError, match=r"q_start: expected a position, since of 65 queries and 61 keys .*got None"):
        attention(q, k, v)
    assert attention(q, k, v, q_start=0).isfinite().all()
    assert attention(q, k[:, :, :0], v[:, :, :0]).eq(0).all()  # no keys at all: nothing is seen from anywhere
