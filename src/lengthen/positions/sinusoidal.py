"""Sines and cosines of the position, added to the embeddings (Vaswani et al., 2017, arXiv 1706.03762).

    x_p[2i]     + amplitude · sin(p · base^(−2i/width))
    x_p[2i + 1] + amplitude · cos(p · base^(−2i/width))

Defined at every position, but a model trained with it fails a few dozen positions past its training length.
In the paper embeddings and sinusoids are both of size 1; here the embeddings of a new model are of size 1/2, and so are
these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lengthen.checks import number
from lengthen.positions.method import PositionMethod, check_positions


class Sinusoidal(PositionMethod):
    """Sines and cosines of the position, added to the embeddings."""

    name = "sinusoidal"

    def __init__(self, *, heads: int, head_dim: int, width: int, base: float = 10000.0, amplitude: float = 0.5) -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width)
        if width % 2:
            raise ValueError(f"width: expected an even number (a sine and a cosine for each frequency), got {width}")
        self.base = number("sinusoidal.base", base, above=1)
        self.amplitude = number("sinusoidal.amplitude", amplitude, above=0)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x with the sinusoids of its positions added, in x's dtype."""
        check_positions(x, positions, 3, ("width", self.width))
        pair = torch.arange(0, self.width, 2, dtype=torch.float64, device=x.device)
        angle = positions.unsqueeze(-1) * self.base ** (-pair / self.width)
        return x + (self.amplitude * torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)).to(x.dtype)
