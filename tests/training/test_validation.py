"""Validation over several processes: all make as many passes, and score what one alone would."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from lengthen.data import Corpus
from lengthen.training.parallel import World
from lengthen.training.validation import loss_at


@dataclass(frozen=True)
class Part(World):
    """One of several processes, whose sums are its own."""

    def sum(self, values: Tensor) -> Tensor:
        return values + torch.tensor([0.0, 1e-9], dtype=torch.float64)  # a process that scores none divides by this


class Known(nn.Module):
    """A model whose loss is its target."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.passes = nn.Parameter(torch.zeros(1)), 0

    def forward(self, ids: Tensor, targets: Tensor, mask: None = None) -> tuple[Tensor, Tensor]:
        self.passes += 1
        each = targets.clamp(min=0).double()
        return each.sum(), each


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("limit", [8, 40, 96])
def test_every_piece_is_scored_once(corpus: Corpus, size: int, rows: int, limit: int) -> None:
    tokens, passes, total, scored = corpus["validation"], set(), 0.0, 0
    for rank in range(size):
        model, told = Known(), []
        here = Part(rank, size, torch.device("cpu"))
        task = lambda both, numbers: (both[:, :-1], both[:, 1:])  # noqa: E731
        loss, count = loss_at(model, tokens, 8, limit, rows, here, task, torch.float32, told.append)
        passes.add(model.passes)
        total, scored = total + loss * count, scored + count
        assert told[-1] == 1
    assert len(passes) == 1
    assert scored == limit
    assert total == pytest.approx(float(tokens.read(1, limit + 1).sum()))
