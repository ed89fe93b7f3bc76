"""An encoder's task: some tokens are hidden, and predicted from those on both sides (Devlin et al., 2019).

Of the tokens chosen, 80 % become the mask token, 10 % a random token, 10 % stay: so the model cannot rely on a token
being right because it is not masked. What happens to a token depends on the seed and on a number of its own: its place
in the text where a text is scored, so that the same tokens are hidden however it is cut; a count that continues over
the steps in training, so that each epoch hides others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lengthen.data.windows import IGNORED, mix

MASKED, RANDOM = 0.8, 0.1  # of the chosen tokens; the rest stay


@dataclass(frozen=True)
class Masking:
    """Which tokens are hidden, and by what."""

    fraction: float
    mask_id: int
    vocab_size: int
    seed: int = 0

    def __call__(self, ids: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids `[rows, length]` with some hidden, and targets that are scored there alone; a number per token."""
        chosen = self._drawn(0, numbers) < self.fraction
        fate = self._drawn(1, numbers)
        other = (self._drawn(2, numbers) * self.vocab_size).long()
        hidden = ids.where(~chosen | (fate >= MASKED), self.mask_id)
        hidden = hidden.where(~chosen | (fate < MASKED) | (fate >= MASKED + RANDOM), other)
        return hidden, ids.where(chosen, IGNORED)

    def _drawn(self, purpose: int, numbers: Tensor) -> Tensor:
        """Return a random number from 0 to below 1 for each token, float64."""
        bits = mix(mix(mix(self.seed, 4), purpose), numbers.numpy().astype(np.uint64))
        return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)
