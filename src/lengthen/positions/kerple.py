"""Kerple: a learned kernel of distance, logarithmic or a power (Chi et al., 2022, arXiv 2205.09921).

    log      −r₁·ln(1 + r₂·d),    r₁ > 0, r₂ > 0
    power    −r₁·d^r₂,            r₁ > 0, 0 < r₂ ≤ 2      (r₂ = 1 is ALiBi)

r₁ and r₂ are learned for each head, and held in range by what is stored: ln r₁, ln r₂, and for the power the
logit of r₂/2. In an encoder keys stand ahead of the query too: `sides` says whether they have an r₁ and r₂ of their
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lengthen.attention.biases import Table
from lengthen.checks import choice, whole_number
from lengthen.positions.method import PositionMethod, side_factors, widen


class Kerple(PositionMethod):
    """A learned penalty that grows with the logarithm of distance, or with a power of it."""

    name = "kerple"
    two_sided: ClassVar[Mapping[str, Any]] = {"sides": "separate"}
    ahead_r1: nn.Parameter | None
    ahead_r2: nn.Parameter | None

    def __init__(self, *, heads: int, head_dim: int, width: int, kind: str = "log", sides: str = "same") -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width)
        self.kind = choice("kerple.kind", kind, ("log", "power"))
        self.sides = choice("kerple.sides", sides, ("same", "separate"))
        self.raw_r1 = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.raw_r2 = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.ahead_r1 = self.ahead_r2 = None
        if self.sides == "separate":
            self.ahead_r1 = nn.Parameter(torch.empty(heads, dtype=torch.float32))
            self.ahead_r2 = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Spread the heads evenly, steepest first: s = 1 … 1/heads gives r₁ and r₂.

        For the log, r₁ = 2s and r₂ = s, which fill (0, 2] and (0, 1], where the paper draws them at random.
        For the power, r₁ = r₂ = s, so that no head begins steeper than −d: the paper's range for r₂ goes on
        to 2, where a head sees little but the token itself. Nothing is random, so that two models start
        alike. With separate sides, r₁ is four times as large on one of them, in turn.
        """
        s = torch.arange(self.heads, 0, -1, dtype=torch.float64, device=self.raw_r1.device) / self.heads
        with torch.no_grad():
            if self.kind == "log":
                self.raw_r1.copy_((2 * s).log())
                self.raw_r2.copy_(s.log())
            else:
                self.raw_r1.copy_(s.log())
                self.raw_r2.copy_((s / 2).logit())
            if self.ahead_r1 is not None and self.ahead_r2 is not None:
                behind, ahead = (factor.to(s.device) for factor in side_factors(self.heads))
                self.ahead_r1.copy_(self.raw_r1 + ahead.log())
                self.ahead_r2.copy_(self.raw_r2)
                self.raw_r1.add_(behind.log())

    @property
    def r1(self) -> Tensor:
        """r₁ of each head as it is now, for keys behind the query."""
        return self._ranged(self.raw_r1, self.raw_r2)[0]

    @property
    def r2(self) -> Tensor:
        """r₂ of each head as it is now, for keys behind the query."""
        return self._ranged(self.raw_r1, self.raw_r2)[1]

    def bias(self, max_distance: int) -> Table:
        """Return the kernel at every distance, float32 at least; gradients flow to r₁ and r₂."""
        length = whole_number("max_distance", max_distance, at_least=0) + 1
        behind = self._kernel(length, *self._ranged(self.raw_r1, self.raw_r2))
        if self.ahead_r1 is None or self.ahead_r2 is None:
            return Table(behind)
        return Table(behind, self._kernel(length, *self._ranged(self.ahead_r1, self.ahead_r2)))

    def _ranged(self, raw_r1: Tensor, raw_r2: Tensor) -> tuple[Tensor, Tensor]:
        """Return r₁ and r₂ from what is stored of them."""
        r1, raw = widen(raw_r1).exp(), widen(raw_r2)
        return r1, raw.exp() if self.kind == "log" else 2 * raw.sigmoid()

    def _kernel(self, length: int, r1: Tensor, r2: Tensor) -> Tensor:
        """Return the kernel at distances 0 … length − 1, `[heads, length]`."""
        distance = torch.arange(length, dtype=torch.promote_types(r1.dtype, r2.dtype), device=r1.device)
        r1, r2 = r1.unsqueeze(1), r2.unsqueeze(1)
        # The gradient of d^r₂ is d^r₂·ln d, which pow knows to be 0 at distance 0.
        return -r1 * ((r2 * distance).log1p() if self.kind == "log" else distance.pow(r2))
