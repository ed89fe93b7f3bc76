"""Validation loss while training: the same tokens at every length, so that the numbers can be compared.

The validation split's first tokens are cut into pieces of one length, each piece read by itself (nonoverlapping), every
token of a piece but its first predicted. A full evaluation, under other protocols too, is a matter of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from lengthen.data import Tokens
from lengthen.model import IGNORED
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
    tell: Callable[[float], None] = lambda share: None,
) -> tuple[float, int]:
    """Return the mean loss a token at a length, and how many tokens were scored, over all processes.

    `limit` is the number of tokens to score, `rows` how many pieces are read at once, `task` what is asked of a piece.
    Each process scores its share; all make the same number of passes, since a sharded model's are made together.
    """
    count = pieces(tokens, length, limit)
    passes = math.ceil(count / (rows * here.size))
    sums = torch.zeros(2, dtype=torch.float64, device=here.device)
    with _evaluating(model), torch.no_grad():
        for number in range(passes):
            mine = range(number * rows * here.size + here.rank, count, here.size)[:rows]
            # A process with nothing left reads piece 0 and scores none of it.
            both = np.stack([tokens.read(p * length, (p + 1) * length + 1) for p in mine or [0]])
            ids, targets = task(torch.from_numpy(both), [*mine] or [0])
            if not mine:
                targets = torch.full_like(targets, IGNORED)
            total, _ = model(ids.to(here.device), targets.to(here.device))
            scored = (targets != IGNORED).sum().to(here.device)
            sums += torch.stack((total.double(), scored.double()))
            tell((number + 1) / passes)
    total_loss, all_scored = here.sum(sums).tolist()
    return total_loss / all_scored, int(all_scored)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and run uncompiled: compiling anew for lengths of one's own would slow training for good."""
    was = model.training
    model.eval()
    try:
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
    finally:
        model.train(was)
