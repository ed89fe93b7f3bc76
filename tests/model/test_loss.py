"""Cross-entropy in chunks: the losses and gradients of all logits at once, without their memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lengthen.model import IGNORED, linear_cross_entropy, loss

Found = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(rows: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(rows, width, dtype=dtype), torch.randn(vocabulary, width, dtype=dtype)
    return hidden, weight, torch.randint(vocabulary, (rows,))


def in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.7) -> Found:
    """Return the sum, the losses and both gradients."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total, losses = linear_cross_entropy(hidden, weight, targets)
    assert not losses.requires_grad
    (factor * total).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return total.detach(), losses, hidden.grad, weight.grad


def at_once(hidden: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.7) -> Found:
    hidden, weight = (x.detach().clone().double().requires_grad_() for x in (hidden, weight))
    losses = F.cross_entropy(hidden @ weight.mT, targets, ignore_index=IGNORED, reduction="none")
    (factor * losses.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return losses.sum().detach(), losses.detach(), hidden.grad, weight.grad


def assert_same(got: Found, expected: Found, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    for name, ours, theirs in zip(("total", "losses", "hidden", "weight"), got, expected, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 6),
    vocabulary=st.integers(1, 30),
    chunk_rows=st.integers(1, 45),
    ignored=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_is_torchs_cross_entropy(
    rows: int, width: int, vocabulary: int, chunk_rows: int, ignored: float, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden, weight, targets = inputs(rows, width, vocabulary)
    targets[torch.rand(rows) < ignored] = IGNORED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_chunk_bytes", lambda _: chunk_rows * vocabulary * 8)
        got = in_chunks(hidden, weight, targets)
    assert_same(got, at_once(hidden, weight, targets))
    assert got[1][targets == IGNORED].eq(0).all()


def test_nothing_to_score() -> None:
    hidden, weight, targets = inputs(7, 3, 5)
    total, losses, d_hidden, d_weight = in_chunks(hidden, weight, targets.fill_(IGNORED))
    assert not any(x.any() for x in (total, losses, d_hidden, d_weight))
    total, losses, d_hidden, d_weight = in_chunks(hidden[:0], weight, targets[:0])
    assert total.item() == 0
    assert (losses.shape, d_hidden.shape) == ((0,), (0, 3))
    assert not d_weight.any()


@pytest.mark.parametrize("learns", ["hidden", "weight", "neither"])
def test_only_what_learns_gets_a_gradient(learns: str) -> None:
    given_inputs = inputs(9, 3, 5)
    expected = at_once(*given_inputs, factor=1.0)
    hidden, weight, targets = given_inputs
    leaves = {"hidden": hidden.clone(), "weight": weight.clone()}
    if learns != "neither":
        leaves[learns].requires_grad_()
    total, losses = linear_cross_entropy(leaves["hidden"], leaves["weight"], targets)
    torch.testing.assert_close(losses, expected[1])
    assert total.requires_grad == (learns != "neither")
    if learns != "neither":
        total.backward()
        torch.testing.assert_close(leaves[learns].grad, expected[2 if learns == "hidden" else 3])


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)], ids=str
)
def test_lower_precision_is_near(dtype: torch.dtype, within: float) -> None:
    hidden, weight, targets = inputs(50, 8, 70, dtype)
    got = in_chunks(hidden, weight, targets)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert got[2].dtype == got[3].dtype == dtype
    for ours, theirs in zip(got, at_once(hidden, weight, targets), strict=True):
        assert (ours.double() - theirs).norm() <= within * theirs.norm()


def test_under_autocast_products_are_in_16_bits_and_gradients_in_32() -> None:
    hidden, weight, targets = inputs(50, 8, 70, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = in_chunks(hidden, weight, targets)
    assert {x.dtype for x in got} == {torch.float32}
    rounded = at_once(hidden.bfloat16(), weight.bfloat16(), targets)
    for ours, near, exact in zip(got, rounded, at_once(hidden, weight, targets), strict=True):
        assert (ours.double() - near).norm() <= 1e-2 * near.norm()
        assert not torch.allclose(ours.double(), exact, rtol=1e-6, atol=0), "autocast changed nothing"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits(dtype: torch.dtype, size: float) -> None:
    hidden = torch.full((3, 1), 100.0, dtype=dtype)
    weight = torch.tensor([[size / 100], [0.0], [-size / 100]], dtype=dtype)
    targets = torch.tensor([0, 1, 2])
    got = in_chunks(hidden, weight, targets)
    assert all(x.isfinite().all() for x in got)
    expected = at_once(hidden, weight, targets)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=1e-6)
    assert expected[1].max() >= 2e4 - 200


def test_a_nan_is_not_hidden() -> None:
    hidden, weight, targets = inputs(4, 3, 5, torch.float32)
    hidden[2, 0] = torch.nan
    total, losses, d_hidden, _ = in_chunks(hidden, weight, targets)
    assert total.isnan()
    assert losses.isnan().tolist() == [False, False, True, False]
    assert d_hidden.isnan().any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize(("dtype", "scorer"), [(torch.float32, "_score_in_place"), (torch.bfloat16, "_score_and_pull")])
def test_no_chunk_is_larger_than_its_budget(dtype: torch.dtype, scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = inputs(103, 4, 50, dtype)
    monkeypatch.setattr(loss, "_chunk_bytes", lambda _: 1100)
    sizes: list[int] = []
    real = getattr(loss, scorer)

    def spy(logits: Tensor, targets: Tensor) -> Any:
        sizes.append(logits.numel() * logits.element_size())
        return real(logits, targets)

    monkeypatch.setattr(loss, scorer, spy)
    in_chunks(hidden, weight, targets)
    assert sum(sizes) == 103 * 50 * dtype.itemsize
    assert max(sizes) <= 1100 + 50 * dtype.itemsize  # a budget is rounded up to whole rows
    assert len(sizes) >= 103 * 50 * dtype.itemsize // 1100
    assert max(sizes) - min(sizes[:-1]) == 0


def test_scoring_alone_makes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("a gradient was computed for nothing")

    monkeypatch.setattr(loss, "_score_in_place", fail)
    hidden, weight, targets = inputs(9, 3, 5, torch.float32)
    with torch.no_grad():
        _, losses = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets)
    torch.testing.assert_close(losses.double(), at_once(hidden.detach(), weight.detach(), targets)[1])


def test_second_derivatives_are_refused() -> None:
    hidden, weight, targets = inputs(5, 3, 4)
    hidden.requires_grad_()
    total, _ = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: expected a first derivative, got create_graph=True"):
        torch.autograd.grad(total, hidden, create_graph=True)


def test_long_inputs_need_no_logits_sized_memory() -> None:
    """4,096 tokens over 50,304: 0.8 GB of float32 logits, and as much for their gradient."""
    program = """
import resource, torch
from lengthen.model import linear_cross_entropy
hidden = torch.randn(4096, 8, requires_grad=True)
weight = torch.randn(50304, 8, requires_grad=True)
targets = torch.randint(50304, (4096,))
linear_cross_entropy(hidden[:64], weight, targets[:64])[0].backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total, losses = linear_cross_entropy(hidden, weight, targets)
total.backward()
assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    assert float(done.stdout) < 0.25  # GB
