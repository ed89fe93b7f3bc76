"""The next token from logits: greedy, or drawn after the usual filters.

In this order: repetition penalty (Keskar et al., 2019, arXiv 1909.05858), temperature, top_k, top_p (Holtzman et al.,
2020, arXiv 1904.09751), min_p (Nguyen et al., 2024, arXiv 2407.01082). Each sequence draws from a generator of its own,
one number per token, so its samples do not depend on the other sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from lengthen.checks import number, whole_number


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        number("temperature", self.temperature, at_least=0)
        number("repetition_penalty", self.repetition_penalty, above=0)
        if self.top_k is not None:
            whole_number("top_k", self.top_k, at_least=1)
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and number(name, value, at_least=0) > 1:
                raise ValueError(f"{name}: expected a fraction from 0 to 1, got {value}")

    def choose(self, logits: Tensor, seen: Tensor | None, generators: Sequence[Random]) -> Tensor:
        """Return the next token of each sequence.

        Args:
            logits: `[sequences, vocabulary]`.
            seen: which tokens each sequence has had, bool `[sequences, vocabulary]`; for the repetition penalty.
            generators: one for each sequence.
        """
        if not bool(torch.isfinite(logits).all()):
            raise FloatingPointError("logits: expected finite numbers, got NaN or infinity: the model is broken")
        logits = logits.double()
        if seen is not None and self.repetition_penalty != 1:
            penalty = self.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        below = logits - logits.amax(dim=-1, keepdim=True)  # else ∞ − ∞ at a tiny temperature
        ordered, order = (below / self.temperature).sort(dim=-1, descending=True, stable=True)
        chances = self._filtered(ordered).softmax(dim=-1)
        drawn = torch.tensor([one.random() for one in generators], dtype=torch.float64)
        heights = chances.cumsum(dim=-1)
        # Scaled by the last height, which rounding may have left short of 1: what has no chance is never drawn.
        target = drawn.to(logits.device).unsqueeze(-1) * heights[:, -1:]
        at = torch.searchsorted(heights, target, right=True).clamp(max=logits.shape[-1] - 1)
        return order.gather(1, at).squeeze(1)

    def _filtered(self, ordered: Tensor) -> Tensor:
        """Return logits, highest first, with −∞ for those that are not to be drawn; the highest always is."""
        hidden = torch.zeros_like(ordered, dtype=torch.bool)
        if self.top_k is not None:
            hidden[:, self.top_k :] = True
        if self.top_p is not None:
            chances = ordered.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            hidden |= chances.cumsum(dim=-1) - chances >= self.top_p  # the fewest that make up top_p
        if self.min_p is not None:
            chances = ordered.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            hidden |= chances < self.min_p * chances[:, :1]
        hidden[:, 0] = False
        return ordered.masked_fill(hidden, -torch.inf)
