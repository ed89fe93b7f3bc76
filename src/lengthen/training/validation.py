"""Validation loss while training: the same tokens at every length, so that the numbers can be compared.

The validation split's first tokens are cut into pieces of one length, each piece read by itself (nonoverlapping), every
token of a piece but its first predicted. A full evaluation, under other protocols too, is a matter of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lengthen.data import Tokens
from lengthen.model import IGNORED
from lengthen.model.score import Reading, batches, losses
from lengthen.training.parallel import World

# From pieces with the token after them, `[rows, length + 1]`, and their numbers: what is read, and what is predicted.
Task = Callable[[Tensor, list[int]], tuple[Tensor, Tensor]]


def pieces(tokens: Tokens, length: int, limit: int) -> int:
    """Return how many pieces of a length are scored: as many as the limit allows, and at least one."""
    return max(1, min(limit, len(tokens) - 1) // length)


def loss_at(
    model: nn.Module,
    tokens: Tokens,
    length: int,
    limit: int,
    rows: int,
    here: World,
    task: Task,
    precision: torch.dtype,
    tell: Callable[[float], None] = lambda part: None,
) -> tuple[float, int]:
    """Return the mean loss a token at a length, and how many tokens were scored, over all processes.

    `limit` is the number of tokens to score, `rows` how many pieces are read at once, `task` what is asked of a piece.
    Each process scores its part; all make the same number of passes, since a sharded model's are made together.
    """
    count = pieces(tokens, length, limit)
    passes = math.ceil(count / (rows * here.size))
    mine = [Reading(p * length, (p + 1) * length, 0) for p in range(here.rank, count, here.size)]
    if len(mine) == (passes - 1) * rows:
        mine.append(Reading(0, length, length))  # nothing is left for the last pass: read a piece, score none of it
    sums = torch.zeros(2, dtype=torch.float64, device=here.device)
    for number, (group, both) in enumerate(batches(tokens.read, mine, rows * length), 1):
        ids, targets = task(both, [one.start // length for one in group])
        if not group[0].scored:
            targets = torch.full_like(targets, IGNORED)
        sums[0] += losses(model, ids, targets, precision=precision).sum()
        sums[1] += (targets != IGNORED).sum()
        tell(number / passes)
    total, scored = here.sum(sums).tolist()
    return total / scored, int(scored)
