"""xPos: rotary embedding whose scores decay with distance (Sun et al., 2022, arXiv 2212.10554).

    score[i, j] = Σ_n ζ_n^(|i − j| / scale_base) · (pair n of R_i q)·(pair n of R_j k)
    ζ_n = (n/(d/2) + γ) / (1 + γ),    n = 0 … d/2 − 1

The paper scales queries by ζ^(i/scale_base) and keys by ζ^(−j/scale_base), which overflows far from the
start. Here `rotate` only rotates, and the powers go into the op as a `Decay`, which is finite and right at
any position. The decay goes by |i − j|, so an encoder, where keys stand ahead of the query too, needs nothing
else.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthen.attention.biases import Decay
from lengthen.checks import flag, number
from lengthen.positions.method import Placed
from lengthen.positions.rotation import Rotated, Rotation

# How small a decay's power may get in a query or key, and so how large in another: far from what the dtype can hold.
LEAST_POWER = {torch.float16: 2.0**-5, torch.bfloat16: 2.0**-16, torch.float32: 2.0**-16, torch.float64: 2.0**-16}
LEAST_GAMMA = 1e-6  # softplus underflows to 0, where the slowest rate would be 0


class XPos(Rotation):
    """Rotary embedding whose scores decay with distance, slow pairs least."""

    name = "xpos"
    raw_gamma: nn.Parameter | None

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        width: int,
        gamma: float = 0.4,
        scale_base: float = 512.0,
        learned_gamma: bool = False,
        base: float = 10000.0,
        pairs: str = "halves",
    ) -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width, base=base, pairs=pairs)
        self.initial_gamma = number("xpos.gamma", gamma, above=0)
        self.scale_base = number("xpos.scale_base", scale_base, above=0)
        learned = flag("xpos.learned_gamma", learned_gamma)
        self.raw_gamma = nn.Parameter(torch.empty((), dtype=torch.float32)) if learned else None
        fixed = self.initial_gamma / (1 + self.initial_gamma)  # pair 0 decays fastest
        # A hair less, because torch rounds powers otherwise than Python does.
        self._floor = None if learned else fixed ** (1 / self.scale_base) * (1 - 1e-12)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a learned γ back to the value it was built with."""
        if self.raw_gamma is not None:
            # The inverse of softplus: γ = log(1 + e^raw).
            gamma = max(self.initial_gamma - LEAST_GAMMA, LEAST_GAMMA)
            nn.init.constant_(self.raw_gamma, gamma + math.log(-math.expm1(-gamma)))

    @property
    def gamma(self) -> Tensor:
        """γ as it is now, a float64 scalar, above 0 whatever was learned."""
        if self.raw_gamma is not None:
            return F.softplus(self.raw_gamma.double()) + LEAST_GAMMA
        return torch.full((), self.initial_gamma, dtype=torch.float64, device=self.device)

    def decay(self) -> Decay:
        """Return ζ^(1/scale_base) for each feature, float64; gradients flow to a learned γ."""
        half = self.head_dim // 2
        pair = torch.arange(half, dtype=torch.float64, device=self.device)
        gamma = self.gamma
        rates = ((pair / half + gamma) / (1 + gamma)) ** (1 / self.scale_base)
        rates = torch.cat((rates, rates)) if self.pairs == "halves" else torch.stack((rates, rates), -1).flatten()
        return Decay(rates, self._floor)

    def at(self, positions: Tensor, dtype: torch.dtype, two_sided: bool, cached: int | None = None) -> Placed:
        """Return the angles of these positions; where it fits the dtype, with the decay in them, as the paper has it.

        Then the op need not know of it. A decay over so few positions that its powers stay far from the dtype's ends
        costs nothing there. Keys ahead of a query would get the inverse of what they should, and keys of a cache powers
        that are relative to another pass.
        """
        placed = super().at(positions, dtype, two_sided, cached)
        decay, length = placed.decay, positions.shape[-1]
        lowest = None if decay is None else decay.lowest()
        short = lowest is not None and lowest ** (length / 2) >= LEAST_POWER[dtype]
        if two_sided or cached is not None or not short or not isinstance(placed, Rotated) or decay is None:
            return placed
        steps = torch.arange(length, device=positions.device) - length / 2
        tables = [decay.power(sign * steps, placed.tables.dtype).squeeze(0) for sign in (1, 1, -1, -1)]
        by = (
            torch.stack(tables)[..., : self.head_dim // 2] if self.pairs == "halves" else torch.stack(tables)[..., 0::2]
        )
        if placed.tables.dim() > 3:  # positions of each sequence
            by = by[:, None, None]
        return replace(placed, decay=None, tables=placed.tables * by)
