"""An encoder's task: some tokens are hidden, and predicted from those on both sides (Devlin et al., 2019).

Of the tokens chosen, 80 % become the mask token, 10 % a random token, 10 % stay: so the model cannot rely on a token
being right because it is not masked. Which ones depends on the seed, the step and the row of the global batch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lengthen.model import IGNORED

MASKED, RANDOM = 0.8, 0.1  # of the chosen tokens; the rest stay


def hide(ids: Tensor, share: float, mask_id: int, vocab_size: int, seeds: list[int]) -> tuple[Tensor, Tensor]:
    """Return ids `[rows, length]` with some hidden, and targets that are scored there alone; one seed a row."""
    hidden, targets = ids.clone(), torch.full_like(ids, IGNORED)
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(ids.shape[1], generator=generator) < share
        fate = torch.rand(ids.shape[1], generator=generator)
        other = torch.randint(vocab_size, (ids.shape[1],), generator=generator)
        if not bool(chosen.any()):  # a row always has something to predict
            chosen[torch.randint(ids.shape[1], (1,), generator=generator)] = True
        targets[row, chosen] = ids[row, chosen]
        hidden[row, chosen & (fate < MASKED)] = mask_id
        swapped = chosen & (fate >= MASKED) & (fate < MASKED + RANDOM)
        hidden[row, swapped] = other[swapped]
    return hidden, targets
