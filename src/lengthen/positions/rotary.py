"""Rotary embedding: queries and keys rotated by their position (Su et al., 2021, RoFormer, arXiv 2104.09864).

    score[i, j] = (R_i q)·(R_j k) = q·R_(j − i) k,    R_p turns pair n by p·θ_n,  θ_n = base^(−2n/d)

`rotary_dim` turns the first rotary_dim/2 pairs alone, with d = rotary_dim (GPT-NeoX), and leaves the rest as they are.

It does not extrapolate by itself. `scaling` stretches a model that was trained at some length by `factor`:

    linear   θ_n / factor                                   (Chen et al., 2023, arXiv 2306.15595)
    ntk      base · factor^(d/(d − 2)) in place of base: the fastest pair keeps its θ_n, the slowest
             gets θ_n / factor
    dynamic  ntk with a factor that grows with a pass of L tokens, factor·L/original − (factor − 1), and none up to
             the original length: keys of a cache would be rotated otherwise, so a cache ends there
    yarn     pairs that turn beta_fast times over the original length keep θ_n, those that turn less than
             beta_slow times get θ_n / factor, with a ramp over the pairs between; queries and keys are each
             multiplied by 0.1·ln(factor) + 1              (Peng et al., 2023, arXiv 2309.00071)
    llama3   the same with a ramp over how often pairs turn, and no multiplication (Llama 3.1, arXiv 2407.21783)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen.checks import choice, number, whole_number
from lengthen.positions.method import Placed
from lengthen.positions.rotation import Rotation

SCALINGS = ("linear", "ntk", "dynamic", "yarn", "llama3")
BETA_FAST = {"yarn": 32.0, "llama3": 4.0}  # turns over the original length: the values for Llama
BETA_SLOW = 1.0
LENGTHS = ("dynamic", *BETA_FAST)  # scalings that are told the original length


class Rotary(Rotation):
    """Rotary embedding: queries and keys rotated by their position, with linear, NTK, YaRN or Llama 3's scaling."""

    name = "rotary"

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        width: int,
        base: float = 10000.0,
        pairs: str = "halves",
        rotary_dim: int | None = None,
        scaling: str | None = None,
        factor: float | None = None,
        original_length: int | None = None,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        attention_factor: float | None = None,
    ) -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width, base=base, pairs=pairs)
        self.rotary_dim = self._checked_dim(rotary_dim)
        self.scaling = None if scaling is None else choice("rotary.scaling", scaling, SCALINGS)
        self.factor = self._checked_factor(factor)
        if self.scaling in ("ntk", "dynamic") and self.rotary_dim == 2:
            raise ValueError(
                f"head_dim: expected at least 4 with scaling={self.scaling!r} (its exponent is d/(d − 2)), got 2"
            )
        self._refuse_unused(original_length=original_length, beta_fast=beta_fast, beta_slow=beta_slow)
        self.beta_fast = number(
            "rotary.beta_fast", BETA_FAST.get(scaling or "", 1.0) if beta_fast is None else beta_fast, above=0
        )
        self.beta_slow = number("rotary.beta_slow", BETA_SLOW if beta_slow is None else beta_slow, above=0)
        self.original_length = self._checked_length(original_length)
        if self.scaling == "yarn":
            usual = 0.1 * math.log(self.factor) + 1.0
            self.magnitude = usual if attention_factor is None else float(attention_factor)
            number("rotary.attention_factor", self.magnitude, above=0)
        elif attention_factor is not None:
            raise ValueError(
                f"rotary.attention_factor: expected only with scaling='yarn', got {attention_factor} with "
                f"{self.scaling!r}"
            )

    def _checked_dim(self, rotary_dim: int | None) -> int:
        if rotary_dim is None:
            return self.head_dim
        whole_number("rotary.rotary_dim", rotary_dim, at_least=2)
        if rotary_dim % 2 or rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary.rotary_dim: expected an even number of at most head_dim={self.head_dim}, got {rotary_dim}"
            )
        return rotary_dim

    def _checked_factor(self, factor: float | None) -> float:
        if self.scaling is None:
            if factor is not None:
                raise ValueError(
                    f"rotary.factor: expected none without scaling ({', '.join(map(repr, SCALINGS))}), got {factor}"
                )
            return 1.0
        if factor is None:
            raise ValueError(f"rotary.factor: expected a number of at least 1 with scaling={self.scaling!r}, got None")
        return number("rotary.factor", factor, at_least=1)

    def _refuse_unused(self, **given: float | None) -> None:
        for name, value in given.items():
            known = LENGTHS if name == "original_length" else tuple(BETA_FAST)
            if value is not None and self.scaling not in known:
                listed = " or ".join(map(repr, known))
                raise ValueError(
                    f"rotary.{name}: expected only with scaling={listed}, got {value} with {self.scaling!r}"
                )

    def _checked_length(self, original_length: int | None) -> int | None:
        if self.scaling not in LENGTHS:
            return None
        if original_length is None:
            raise ValueError(
                f"rotary.original_length: expected the length trained at, with scaling={self.scaling!r}, got None"
            )
        whole_number("rotary.original_length", original_length, at_least=1)
        if self.scaling in BETA_FAST and self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"rotary.beta_fast: expected more than beta_slow={self.beta_slow:g}, got {self.beta_fast:g}"
            )
        if self.scaling == "yarn" and original_length <= 2 * math.pi * self.beta_slow:
            raise ValueError(
                "rotary.original_length: expected more than 2π·beta_slow (else no pair turns that often), "
                f"got {original_length}"
            )
        return original_length

    def frequencies(self, device: torch.device) -> Tensor:
        """Return θ for each pair as scaled, float64 `[head_dim / 2]`; 0 for pairs that are not rotated."""
        return self._frequencies(device, self.factor if self.scaling == "ntk" else 1.0)

    def frequencies_at(self, positions: Tensor) -> Tensor:
        """Return θ for each pair in a pass over these positions: with "dynamic", it goes by the last of them."""
        if self.scaling != "dynamic" or not positions.numel():
            return self.frequencies(positions.device)
        assert self.original_length is not None
        times = max(1.0, (int(positions.max()) + 1) / self.original_length)
        return self._frequencies(positions.device, self.factor * times - (self.factor - 1))

    def at(self, positions: Tensor, dtype: torch.dtype, two_sided: bool, cached: int | None = None) -> Placed:
        """Return the angles of these positions; refuse a cache where later passes would be rotated otherwise."""
        total = (cached or 0) + positions.shape[-1]
        if self.scaling == "dynamic" and cached is not None and total > (self.original_length or 0):
            raise ValueError(
                f"positions: expected at most {self.original_length} tokens in a cache with scaling='dynamic', whose "
                f"angles change with the length, got {total}; scaling='ntk' has a factor for all lengths"
            )
        return super().at(positions, dtype, two_sided, cached)

    def _frequencies(self, device: torch.device, stretch: float) -> Tensor:
        """Return θ with the base stretched so far."""
        size, base = self.rotary_dim, self.base
        if stretch != 1:
            base *= stretch ** (size / (size - 2))
        theta = torch.pow(base, -torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)
        if self.scaling in BETA_FAST:
            stretched = self._stretched(theta)
            theta = theta * (1 - stretched) + theta / self.factor * stretched
        elif self.scaling == "linear":
            theta = theta / self.factor
        return F.pad(theta, (0, (self.head_dim - size) // 2))

    def _stretched(self, theta: Tensor) -> Tensor:
        """Return how far each pair is stretched, from 0 (turns beta_fast times) to 1 (beta_slow times)."""
        length = self.original_length
        assert length is not None
        if self.scaling == "llama3":
            turns = length * theta / (2 * math.pi)
            return ((self.beta_fast - turns) / (self.beta_fast - self.beta_slow)).clamp(0, 1)

        def pair_turning(times: float) -> float:  # the pair that turns this often over the original length
            return self.rotary_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(self.base))

        # Rounded outwards, and the upper end held below rotary_dim (not rotary_dim / 2), as in the authors' code.
        low = max(math.floor(pair_turning(self.beta_fast)), 0)
        high = float(min(math.ceil(pair_turning(self.beta_slow)), self.rotary_dim - 1))
        if low == high:
            high += 0.001
        pair = torch.arange(self.rotary_dim // 2, dtype=torch.float64, device=theta.device)
        return ((pair - low) / (high - low)).clamp(0, 1)
