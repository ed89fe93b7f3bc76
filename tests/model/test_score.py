"""The scoring loop: losses against logits, in which precision, and a model that is afterwards as it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lengthen.model import IGNORED, Transformer
from lengthen.model.score import BATCH_TOKENS, Reading, batches, evaluating, losses, window_losses

Make = Callable[..., Transformer]
TEXT = np.random.default_rng(0).integers(0, 19, 100)


def read(start: int, stop: int) -> np.ndarray:  # type: ignore[type-arg]
    return TEXT[start:stop]


def test_windows_of_one_length_are_read_together_in_order() -> None:
    readings = [Reading(0, 8, 0), Reading(4, 12, 6), Reading(8, 16, 0), Reading(16, 20, 0)]
    found = [(group, both.tolist()) for group, both in batches(read, readings, most=17)]
    assert [group for group, _ in found] == [readings[:2], readings[2:3], readings[3:]]
    assert found[0][1] == [TEXT[0:9].tolist(), TEXT[4:13].tolist()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_are_those_of_the_logits(make: Make, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(dtype=dtype, dropout=0.5).train()  # which is off while scoring
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 16)
    for group, each in window_losses(model, read, [Reading(8 * n, 8 * n + 8, 0) for n in range(5)]):
        assert (each.dtype, each.shape) == (torch.float64, (len(group), 8))
        for one, row in zip(group, each, strict=True):
            ids = torch.from_numpy(read(one.start, one.stop + 1))
            logits = model.eval()(ids[None, :-1])[0].detach()
            model.train()
            right = F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), ids[1:], reduction="none")
            torch.testing.assert_close(row, right.double(), rtol=1e-5, atol=1e-5)


def test_what_is_ignored_and_in_which_precision(make: Make) -> None:
    model, ids = make(dtype=torch.float32), torch.from_numpy(TEXT[:20].reshape(2, 10))
    targets = ids.roll(-1, 1)
    targets[0] = IGNORED
    wide, narrow = losses(model, ids, targets), losses(model, ids, targets, precision=torch.bfloat16)
    assert wide[0].eq(0).all()
    assert wide.dtype == narrow.dtype == torch.float64
    assert not torch.equal(wide, narrow)
    torch.testing.assert_close(narrow, wide, rtol=0.05, atol=0.05)


def test_the_model_is_afterwards_as_it_was(make: Make) -> None:
    model = make().train()
    model.blocks[0].eval()  # somebody keeps it so
    was = [module.training for module in model.modules()]

    def fail() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert [module.training for module in model.modules()] == was
    windows = window_losses(model, read, [Reading(0, 8, 0), Reading(8, 12, 0)])
    next(windows)  # and between two batches
    assert [module.training for module in model.modules()] == was
    assert torch.is_grad_enabled()
