"""Kerple: a learned kernel of distance, logarithmic or a power (Chi et al., 2022, arXiv 2205.09921).

    log      −r₁·ln(1 + r₂·d),    r₁ > 0, r₂ > 0
    power    −r₁·d^r₂,            r₁ > 0, 0 < r₂ ≤ 2      (r₂ = 1 is ALiBi)

r₁ and r₂ are learned for each head, and held in range by what is stored: ln r₁, ln r₂, and for the power the
logit of r₂/2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lengthen.attention.biases import Table
from lengthen.checks import choice, whole_number
from lengthen.positions.method import PositionMethod, widen


class Kerple(PositionMethod):
    """A learned penalty that grows with the logarithm of distance, or with a power of it."""

    name = "kerple"

    def __init__(self, *, heads: int, head_dim: int, width: int, kind: str = "log") -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width)
        self.kind = choice("kerple.kind", kind, ("log", "power"))
        self.raw_r1 = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.raw_r2 = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Spread the heads evenly, steepest first: the share s = 1 … 1/heads gives r₁ and r₂.

        For the log, r₁ = 2s and r₂ = s, which fill (0, 2] and (0, 1], where the paper draws them at random.
        For the power, r₁ = r₂ = s, so that no head begins steeper than −d: the paper's range for r₂ goes on
        to 2, where a head sees little but the token itself. Nothing is random, so that two models start
        alike.
        """
        share = torch.arange(self.heads, 0, -1, dtype=torch.float64, device=self.raw_r1.device) / self.heads
        with torch.no_grad():
            if self.kind == "log":
                self.raw_r1.copy_((2 * share).log())
                self.raw_r2.copy_(share.log())
            else:
                self.raw_r1.copy_(share.log())
                self.raw_r2.copy_((share / 2).logit())

    @property
    def r1(self) -> Tensor:
        """r₁ of each head as it is now."""
        return widen(self.raw_r1).exp()

    @property
    def r2(self) -> Tensor:
        """r₂ of each head as it is now."""
        raw = widen(self.raw_r2)
        return raw.exp() if self.kind == "log" else 2 * raw.sigmoid()

    def bias(self, max_distance: int) -> Table:
        """Return the kernel at every distance, float32 at least; gradients flow to r₁ and r₂."""
        length = whole_number("max_distance", max_distance, at_least=0) + 1
        r1, r2 = self.r1.unsqueeze(1), self.r2.unsqueeze(1)
        distance = torch.arange(length, dtype=torch.promote_types(r1.dtype, r2.dtype), device=r1.device)
        if self.kind == "log":
            return Table(-r1 * (r2 * distance).log1p())
        # The gradient of d^r₂ is d^r₂·ln d, which pow knows to be 0 at distance 0.
        return Table(-r1 * distance.pow(r2))
