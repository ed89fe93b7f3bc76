"""The scoring loop: losses against logits, in which precision, and a model that is afterwards as it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lengthen.attention import Window
from lengthen.model import IGNORED, Transformer
from lengthen.model.score import BATCH_TOKENS, Reading, Task, evaluating, logits_at, losses, precision_of, window_losses

Make = Callable[..., Transformer]
TEXT = np.random.default_rng(0).integers(0, 19, 100)


class Words:
    """A text in memory, of documents that begin at 5 and at 7."""

    def read(self, start: int, stop: int) -> np.ndarray:  # type: ignore[type-arg]
        return TEXT[start:stop]

    def document_starts(self, start: int, stop: int) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([max((b - start for b in (0, 5, 7) if start < b <= t), default=0) for t in range(start, stop)])


TASK = Task(Words())


def test_windows_of_one_length_are_read_together_in_order() -> None:
    readings = [Reading(0, 8, 0), Reading(4, 12, 6), Reading(8, 16, 0), Reading(16, 20, 0)]
    sizes: list[list[int]] = []

    def model(ids: torch.Tensor) -> torch.Tensor:
        sizes.append(list(ids.shape))
        return torch.zeros(*ids.shape, 19)

    found = list(window_losses(model, TASK, readings, most=17))
    assert [group for group, _, _ in found] == [readings[:2], readings[2:3], readings[3:]]
    assert sizes == [[2, 8], [1, 8], [1, 4]]
    targets = found[0][1]
    assert targets.tolist() == [TEXT[1:9].tolist(), [IGNORED] * 6 + TEXT[11:13].tolist()]
    for _, asked, each in found:
        torch.testing.assert_close(each, (asked != IGNORED) * torch.tensor(19.0).log().double(), rtol=1e-6, atol=0)


def test_documents_apart_and_tokens_hidden() -> None:
    group = [Reading(2, 10, 0), Reading(6, 14, 2)]
    ids, targets, starts = Task(Words(), document_mask=True).batch(group)
    assert ids.tolist() == [TEXT[2:10].tolist(), TEXT[6:14].tolist()]
    assert starts is not None
    assert starts.tolist() == [[0, 0, 0, 3, 3, 5, 5, 5], [0, 1, 1, 1, 1, 1, 1, 1]]
    expected = np.stack([TEXT[3:11], TEXT[7:15]])
    expected[0, [2, 4]] = IGNORED  # the next token is another document's first
    expected[1, :2] = IGNORED  # context
    assert targets.tolist() == expected.tolist()

    def hide(ids: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert places.tolist() == [list(range(2, 10)), list(range(6, 14))]
        return ids.where(places != 8, 0), ids.where(places == 8, IGNORED)

    ids, targets, starts = Task(Words(), hide, document_mask=True).batch(group)
    assert ids[:, [6, 2]].diagonal().tolist() == [0, 0]
    assert targets[0].tolist() == [IGNORED] * 6 + [TEXT[8], IGNORED]
    assert starts is not None
    assert starts.shape == ids.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_are_those_of_the_logits(make: Make, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(dtype=dtype, dropout=0.5).train()  # which is off while scoring
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 16)
    for group, _, each in window_losses(model, TASK, [Reading(8 * n, 8 * n + 8, 0) for n in range(5)]):
        assert (each.dtype, each.shape) == (torch.float64, (len(group), 8))
        for one, row in zip(group, each, strict=True):
            ids = torch.from_numpy(TEXT[one.start : one.stop + 1])
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
    assert [precision_of(model, dtype) for dtype in (torch.float32, torch.bfloat16)] == ["float32", "bfloat16"]
    assert precision_of(model.double(), torch.float32) == "float64"


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
    windows = window_losses(model, TASK, [Reading(0, 8, 0), Reading(8, 12, 0)])
    next(windows)  # and between two batches
    assert [module.training for module in model.modules()] == was
    assert torch.is_grad_enabled()


def test_logits_at_some_places(make: Make) -> None:
    """Those of the whole, row by row; of a plain function, of what has `.logits`, and of our own model alike."""
    model = make().train()
    ids = torch.from_numpy(TEXT[:40]).view(2, 20)
    where = torch.zeros(2, 20, dtype=torch.bool)
    where[0, 3] = where[1, 2] = where[1, 19] = True
    whole = model(ids).detach()
    expected = torch.stack([whole[0, 3], whole[1, 2], whole[1, 19]])
    torch.testing.assert_close(logits_at(model, ids, where), expected)
    assert model.training
    torch.testing.assert_close(logits_at(lambda ids: model(ids), ids, where), expected)
    narrow = logits_at(model, ids, where, Window(4))
    torch.testing.assert_close(narrow, model(ids, mask=Window(4)).detach()[where])
    assert not torch.allclose(narrow, expected)
