"""A learned vector for each position, added to the embeddings (Gehring et al., 2017; Devlin et al., 2019).

    x_p + weight[p],    p < max_length

There is no vector for a position that was not trained, so the method cannot be used beyond `max_length` at
all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthen.checks import whole_number
from lengthen.positions.method import PositionMethod, check_positions

INIT_STD = 0.02  # that of GPT-2's and BERT's token and position embeddings


class Learned(PositionMethod):
    """A learned vector for each position up to `max_length`, added to the embeddings."""

    name = "learned"

    def __init__(self, *, heads: int, head_dim: int, width: int, max_length: int) -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width)
        self.max_length = whole_number("learned.max_length", max_length, at_least=1)
        self.weight = nn.Parameter(torch.empty(max_length, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.normal_(self.weight, std=INIT_STD)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x with its positions' vectors added, in x's dtype."""
        check_positions(x, positions, 3, ("width", self.width))
        # Reading the values is free on the CPU only; elsewhere the lookup itself stops at a position outside.
        if positions.device.type == "cpu" and not torch.compiler.is_compiling() and positions.numel():
            low, high = int(positions.min()), int(positions.max())
            if low < 0 or high >= self.max_length:
                raise ValueError(
                    f"positions: expected 0 … {self.max_length - 1}, got {low if low < 0 else high}: a "
                    f"learned table has max_length={self.max_length} rows and cannot be stretched"
                )
        return x + F.embedding(positions.long(), self.weight).to(x.dtype)
