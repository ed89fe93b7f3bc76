"""Rotary embedding: queries and keys turned by their position (Su et al., 2021, RoFormer, arXiv 2104.09864).

    score[i, j] = (R_i q)·(R_j k) = q·R_(j − i) k,    R_p turns pair n by p·θ_n,  θ_n = base^(−2n/d)

It does not extrapolate by itself. `scaling` stretches a model that was trained at some length by `factor`:

    linear   θ_n / factor                                   (Chen et al., 2023, arXiv 2306.15595)
    ntk      base · factor^(d/(d − 2)) in place of base: the fastest pair keeps its θ_n, the slowest
             gets θ_n / factor
    yarn     pairs that turn often over the original length keep θ_n, those that turn less than once get
             θ_n / factor, with a ramp between; queries and keys are each multiplied by 0.1·ln(factor) + 1
                                                            (Peng et al., 2023, arXiv 2309.00071)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lengthen.checks import choice, number, whole_number
from lengthen.positions.rotation import Rotation

SCALINGS = ("linear", "ntk", "yarn")
BETA_FAST, BETA_SLOW = 32.0, 1.0  # turns over the original length: YaRN's values for Llama


class Rotary(Rotation):
    """Rotary embedding: queries and keys turned by their position, with linear, NTK or YaRN scaling."""

    name = "rotary"

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        width: int,
        base: float = 10000.0,
        pairs: str = "halves",
        scaling: str | None = None,
        factor: float | None = None,
        original_length: int | None = None,
        beta_fast: float = BETA_FAST,
        beta_slow: float = BETA_SLOW,
    ) -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width, base=base, pairs=pairs)
        self.scaling = None if scaling is None else choice("rotary.scaling", scaling, SCALINGS)
        self.factor = self._checked_factor(factor)
        if self.scaling == "ntk" and head_dim == 2:
            raise ValueError("head_dim: expected at least 4 with scaling='ntk' (its exponent is d/(d − 2)), got 2")
        self.beta_fast = number("rotary.beta_fast", beta_fast, above=0)
        self.beta_slow = number("rotary.beta_slow", beta_slow, above=0)
        self.original_length = self._checked_length(original_length)
        if self.scaling == "yarn":
            self.magnitude = 0.1 * math.log(self.factor) + 1.0

    def _checked_factor(self, factor: float | None) -> float:
        if self.scaling is None:
            if factor is not None:
                raise ValueError(
                    f"rotary.factor: expected none without scaling ('linear', 'ntk', 'yarn'), got {factor}"
                )
            return 1.0
        if factor is None:
            raise ValueError(f"rotary.factor: expected a number of at least 1 with scaling={self.scaling!r}, got None")
        return number("rotary.factor", factor, at_least=1)

    def _checked_length(self, original_length: int | None) -> int | None:
        if self.scaling != "yarn":
            for name, value, default in (
                ("original_length", original_length, None),
                ("beta_fast", self.beta_fast, BETA_FAST),
                ("beta_slow", self.beta_slow, BETA_SLOW),
            ):
                if value != default:
                    raise ValueError(
                        f"rotary.{name}: expected only with scaling='yarn', got {value} with {self.scaling!r}"
                    )
            return None
        if original_length is None:
            raise ValueError("rotary.original_length: expected the length trained at, with scaling='yarn', got None")
        whole_number("rotary.original_length", original_length, at_least=1)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"rotary.beta_fast: expected more than beta_slow={self.beta_slow:g}, got {self.beta_fast:g}"
            )
        if original_length <= 2 * math.pi * self.beta_slow:
            raise ValueError(
                "rotary.original_length: expected more than 2π·beta_slow (else no pair turns that often), "
                f"got {original_length}"
            )
        return original_length

    def frequencies(self, device: torch.device) -> Tensor:
        """Return θ for each pair as scaled, float64 `[head_dim / 2]`."""
        if self.scaling == "ntk":
            base = self.base * self.factor ** (self.head_dim / (self.head_dim - 2))
            pair = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
            return torch.pow(base, -pair / self.head_dim)
        theta = super().frequencies(device)
        if self.scaling == "yarn":
            stretched = self._ramp(device)
            return theta * (1 - stretched) + theta / self.factor * stretched
        return theta / self.factor

    def _ramp(self, device: torch.device) -> Tensor:
        """Return how far each pair is stretched, from 0 (turns beta_fast times) to 1 (beta_slow times)."""
        length = self.original_length
        assert length is not None

        def pair_turning(times: float) -> float:  # the pair that turns this often over the original length
            return self.head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(self.base))

        # Rounded outwards, and the upper end held below head_dim (not head_dim / 2), as in the authors' code.
        low = max(math.floor(pair_turning(self.beta_fast)), 0)
        high = float(min(math.ceil(pair_turning(self.beta_slow)), self.head_dim - 1))
        if low == high:
            high += 0.001
        pair = torch.arange(self.head_dim // 2, dtype=torch.float64, device=device)
        return ((pair - low) / (high - low)).clamp(0, 1)
