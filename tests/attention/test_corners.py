"""Calls that are rare, and right: masks that are nearly those of the package, odd sizes, far places, odd gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lengthen import (
    Ball,
    Bidirectional,
    Blockwise,
    Causal,
    Decay,
    Linear,
    Table,
    Window,
    alibi_slopes,
    attention,
    merge,
    reach,
)
from lengthen.attention import Mask


class BothWays(Window):
    """A window that goes on to the end."""

    two_sided: ClassVar[bool] = True


class TwoBlocks(Blockwise):
    """Two blocks before the query's own."""

    def band(self) -> tuple[int, int]:
        return 2 * self.block, self.block


def inputs(*widths: int, length: int = 40) -> list[Tensor]:
    return [torch.randn(2, 4, length, width, dtype=torch.float64, requires_grad=True) for width in widths or (8, 8, 8)]


@pytest.mark.parametrize("mask", [BothWays(5), TwoBlocks(8), BothWays(5).padded(torch.tensor([0, 9]))])
def test_a_subclass_is_the_same_mask_with_gradients_and_without(mask: Mask, assert_as_defined: Any) -> None:
    q, k, v = inputs()
    assert_as_defined({"q": q, "k": k, "v": v, "mask": mask, "bias": Linear(alibi_slopes(4).double())})
    with torch.no_grad():
        plain = attention(q, k, v, mask=mask, backend="chunked")
    torch.testing.assert_close(attention(q, k, v, mask=mask, backend="chunked"), plain)


@pytest.mark.parametrize("far", [2**32 + 5, -(2**32) + 5])
@pytest.mark.parametrize("mask", [Window(10), Causal()])
def test_queries_far_away_see_what_the_definition_says(far: int, mask: Mask, assert_as_defined: Any) -> None:
    q, k, v = inputs()
    assert_as_defined({"q": q, "k": k, "v": v, "mask": mask.padded(torch.tensor([0, 3])), "q_start": far})


def test_values_without_features_leave_lse_as_it_is(assert_as_defined: Any) -> None:
    q, k, v = inputs(8, 8, 0)
    assert_as_defined({"q": q, "k": k, "v": v})
    assert_as_defined({"q": q, "k": k, "v": v, "decay": Decay(torch.full((8,), 0.9).double())})


def test_a_ball_beside_values_wider_than_keys(assert_as_defined: Any) -> None:
    q, k, v = inputs(8, 8, 16)
    assert_as_defined({"q": q, "k": k, "v": v, "bias": Linear(alibi_slopes(4).double()), "ball": Ball.around(k)})


def test_the_smallest_tolerance_there_is() -> None:
    q, k, v = inputs()
    options: dict[str, Any] = {"bias": Linear(alibi_slopes(4)), "mask": Bidirectional()}
    out = attention(q, k, v, **options, tolerance=5e-324, ball=Ball.around(k))
    torch.testing.assert_close(out, attention(q, k, v, **options, tolerance=0))


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_a_gradient_of_the_lse_of_who_sees_nothing_changes_nothing(backend: str) -> None:
    q, k, v = inputs()
    _, lse = attention(q, k, v, mask=Causal().padded(torch.tensor([3, 3])), return_lse=True, backend=backend)
    blind = lse == -torch.inf
    d_lse = torch.ones_like(lse).masked_fill(blind, torch.nan)
    found = torch.autograd.grad(lse, (q, k), d_lse, retain_graph=True)
    expected = torch.autograd.grad(lse, (q, k), d_lse.nan_to_num(0))
    for x, y in zip(found, expected, strict=True):
        assert bool(x.isfinite().all())
        torch.testing.assert_close(x, y)


def test_a_gradient_of_lse_that_is_not_finite_stays_with_the_keys_that_its_query_sees() -> None:
    q, k, v = inputs()
    _, lse = attention(q, k, v, return_lse=True, backend="chunked")
    d_lse = torch.ones_like(lse)
    d_lse[:, :, 5] = torch.nan
    (d_k,) = torch.autograd.grad(lse, k, d_lse)
    assert bool(d_k[:, :, 6:].isfinite().all())
    assert bool(d_k[:, :, :6].isnan().all())


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_who_sees_only_scores_of_minus_infinity_has_gradients_of_0(backend: str) -> None:
    q, k, v = inputs()
    values = torch.zeros(4, 40).index_fill(1, torch.tensor([0]), -torch.inf).requires_grad_()
    out = attention(q, k, v, bias=Table(values), backend=backend)  # the first query sees itself alone, at distance 0
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, values))
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert bool((grads[0][:, :, 0] == 0).all())


def test_gradients_of_float32_rates_are_summed_in_float64() -> None:
    q, k, v = inputs(length=100)
    rates, found = torch.linspace(0.9, 0.999, 8), []
    for backend in ("chunked", "reference"):
        leaf = rates.clone().requires_grad_()
        out = attention(q, k, v, decay=Decay(leaf), backend=backend)
        found += torch.autograd.grad(out.square().sum(), leaf)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


def test_reach_is_no_shorter_under_autocast() -> None:
    q, k = torch.randn(2, 1, 4, 300, 32) * 3
    bias = Linear(alibi_slopes(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = reach(q, k, bias, 1e-6)
    assert torch.equal(found, reach(q, k, bias, 1e-6))


class Odd(Mask):
    """A mask of one's own with something else in the place of a span."""

    def __init__(self, span: Any) -> None:
        super().__init__()
        object.__setattr__(self, "found", span)

    def span(self, position: Tensor) -> Any:
        return self.found  # type: ignore[attr-defined]


K = torch.zeros(2, 4, 20, 8)
LISTED = Causal().listed(20, 20, 0, torch.device("cpu"))
RATES = torch.full((8,), 0.5)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "padded after listed": (lambda: LISTED.padded(torch.tensor([5])), r"mask: expected \.padded\(…\) before \.listed"),
    "packed after listed": (lambda: LISTED.packed(torch.zeros(1, 20).long()), r"mask: expected \.packed\(…\) before"),
    "listed for others": (
        lambda: attention(K, K[:, :, 1:], K[:, :, 1:], mask=LISTED, q_start=0),
        "mask: expected one listed for 20 queries and 19 keys, got one for 20 queries and 20 keys",
    ),
    "no span": (lambda: attention(K, K, K, mask=Mask()), "mask: expected a class with a `span`, got Mask"),
    "a number": (lambda: attention(K, K, K, mask=Odd(3)), r"mask: expected Odd\.span to return two integer tensors"),
    "floats": (lambda: attention(K, K, K, mask=Odd((torch.zeros(1, 20),) * 2)), r"Odd\.span to return two integer"),
    "one inside another": (
        lambda: Causal().packed(torch.tensor([[0, 0, 1, 1]])),
        "document_starts: expected a document to begin at its start",
    ),
    "q_start": (lambda: attention(K, K, K, q_start=2**63), r"q_start: expected a position within ±2\^60, got 922"),
    "scale": (lambda: attention(K, K, K, scale=10**400), "scale: expected a finite number, got 1000"),
    "backend": (lambda: attention(K, K, K, backend=["native"]), r"backend: expected one of .*, got \['native'\]"),  # type: ignore[arg-type, call-overload]
    "merge": (lambda: merge((K, None), (K, K[..., 0])), r"a: expected \(out, lse\), two tensors, got .*None"),  # type: ignore[arg-type]
    "floor above": (lambda: Decay(RATES, floor=0.6), r"Decay\.floor: expected at most the lowest rate, 0\.5, got 0\.6"),
    "floor 0": (lambda: Decay(RATES, floor=0.0), r"Decay\.floor: expected more than 0, got 0"),
    "floor x": (lambda: Decay(RATES, floor="x"), r"Decay\.floor: expected a number, got 'x'"),  # type: ignore[arg-type]
    "ball of nothing": (lambda: Ball.around(None), r"k: expected keys \[batch, key_heads, keys, head_dim\]"),  # type: ignore[arg-type]
    "ball of other keys": (lambda: Ball.around(K).appended(K[:1]), r"k: expected \[2, 4, keys, 8\] like the ball's"),
    "empty table": (lambda: Table(torch.zeros(4, 9), torch.zeros(4, 0)), r"Table\.ahead: expected at least one dist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_odd_is_refused_by_name(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        call()


def test_unsigned_padding_will_do() -> None:
    q, k, v = torch.randn(3, 2, 4, 20, 8)
    start, end = torch.tensor([1, 2]), torch.tensor([15, 20])
    found = attention(q, k, v, mask=Causal().padded(start.to(torch.uint16), end.to(torch.uint16)))
    assert torch.equal(found, attention(q, k, v, mask=Causal().padded(start, end)))
