"""A decay is what its rates are at the moment: nothing of it is kept from one call to the next."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Causal, Decay, Window, attention

BACKENDS = pytest.mark.parametrize("backend", [None, "chunked", "reference"])


def inputs(length: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, 2, length, 4, dtype=torch.float64)
    return q, k, v


def loss(decay: Decay, given: tuple[Tensor, Tensor, Tensor], backend: str | None) -> Tensor:
    return attention(*given, decay=decay, backend=backend).square().sum()


@BACKENDS
def test_rates_that_change_in_place_give_another_output(backend: str | None) -> None:
    given, decay = inputs(), Decay(torch.full((4,), 0.9).double())
    before = attention(*given, decay=decay, backend=backend)
    decay.rates.fill_(0.5)
    after = attention(*given, decay=decay, backend=backend)
    expected = attention(*given, decay=Decay(torch.full((4,), 0.5).double()), backend="reference")
    torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(before, after, atol=1e-3)


@BACKENDS
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_gradients_flow_after_a_call_without_them(backend: str | None, first: Any) -> None:
    given, rates = inputs(), torch.full((4,), 0.9).double().requires_grad_()
    decay = Decay(rates)
    with first():
        attention(*given, decay=decay, backend=backend)
    (got,) = torch.autograd.grad(loss(decay, given, backend), rates)
    (expected,) = torch.autograd.grad(loss(Decay(rates), given, "reference"), rates)
    assert got.abs().min() > 0
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@BACKENDS
def test_two_steps_of_training(backend: str | None) -> None:
    given, runs = inputs(), []
    for which in (backend, "reference"):
        rates = torch.full((4,), 0.9).double().requires_grad_()
        decay = Decay(rates)
        for _ in range(2):
            rates.grad = None
            loss(decay, given, which).backward()
            assert rates.grad is not None
            with torch.no_grad():
                rates -= 1e-3 * rates.grad
        runs.append(rates.detach())
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-9, atol=1e-9)


def test_nothing_is_kept_for_each_size() -> None:
    decay = Decay(torch.full((4,), 0.9).double())
    before = dict(vars(decay))
    for length in (3, 20, 50):
        attention(*inputs(length), decay=decay, mask=Window(7))
        attention(*inputs(length), decay=decay, mask=Causal(), backend="chunked")
    assert vars(decay).keys() == before.keys()
    assert all(value is before[name] for name, value in vars(decay).items())
