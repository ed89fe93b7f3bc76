"""Validation over several processes: all make as many passes, and score what one alone would."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lengthen.data import Corpus
from lengthen.model import IGNORED
from lengthen.model.score import Task
from lengthen.training.parallel import World
from lengthen.training.validation import loss_at


@dataclass(frozen=True)
class Part(World):
    """One of several processes, whose sums are its own."""

    def sum(self, values: Tensor) -> Tensor:
        return values


class Known:
    """A model whose loss is its target."""

    passes = 0

    def __call__(self, ids: Tensor) -> Tensor:
        raise AssertionError("it is asked for losses, which it has")

    def losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        self.passes += 1
        return targets.where(targets != IGNORED, 0).double()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 5, 12])
def test_every_piece_is_scored_once(corpus: Corpus, size: int, rows: int, count: int) -> None:
    tokens, passes, total, scored = corpus["validation"], set(), 0.0, 0
    for rank in range(size):
        model, told = Known(), []
        here = Part(rank, size, torch.device("cpu"))
        loss, there = loss_at(model, Task(tokens), 8, count, rows, here, torch.float32, told.append)
        passes.add(model.passes)
        total, scored = total + loss * there, scored + there
        assert told[-1] == 1
    assert len(passes) == 1
    assert scored == 8 * count
    assert total == pytest.approx(float(tokens.read(1, 8 * count + 1).sum()))
