"""Validation loss while training: the same tokens at every length, so that the numbers can be compared.

The validation split's first tokens are cut into pieces of one length, each piece read by itself (nonoverlapping), by
the loop that `lengthen eval` scores with. A full evaluation, under other protocols too, is a matter of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from lengthen.model import IGNORED
from lengthen.model.score import Model, Reading, Task, window_losses
from lengthen.training.parallel import World


def loss_at(
    model: Model,
    task: Task,
    length: int,
    count: int,
    rows: int,
    here: World,
    precision: torch.dtype,
    tell: Callable[[float], None] = lambda part: None,
) -> tuple[float, int]:
    """Return the mean loss of `count` pieces of a length, and how many tokens were scored, over all processes.

    `rows` is how many pieces are read at once. Each process scores its part; all make the same number of passes, since
    a sharded model's are made together.
    """
    passes = math.ceil(count / (rows * here.size))
    mine = [Reading(p * length, (p + 1) * length, 0) for p in range(here.rank, count, here.size)]
    if len(mine) == (passes - 1) * rows:
        mine.append(Reading(0, length, length))  # nothing is left for the last pass: read a piece, score none of it
    sums = torch.zeros(2, dtype=torch.float64)
    read = window_losses(model, task, mine, precision=precision, most=rows * length)
    for number, (_, targets, losses) in enumerate(read, 1):
        sums += torch.stack((losses.sum(), (targets != IGNORED).sum()))
        tell(number / passes)
    total, scored = here.sum(sums.to(here.device)).tolist()
    return total / max(scored, 1), int(scored)
