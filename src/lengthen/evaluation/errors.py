"""Standard errors of means and of their differences, over segments of one text.

Tokens next to each other are not independent, so a mean's standard error is taken over segments of the text, each with
its sum of losses l_s and its count of tokens c_s: that of a ratio of sums,

    mean = Σ l_s / Σ c_s,        s.e. = √(n/(n − 1)·Σ (l_s − mean·c_s)²) / Σ c_s        over n segments

Two measurements of the same tokens share what makes a segment easy or hard. Their difference is the mean of the
segments' differences, l_s − l'_s, and its standard error, by the same formula, is far below that of either mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lengthen.model.loss import perplexity


@dataclass(frozen=True)
class Difference:
    """A difference of two mean losses in nats, and its standard error, if it has one."""

    loss: float
    error: float | None

    @property
    def ratio(self) -> float:
        """The ratio of the perplexities."""
        return perplexity(self.loss)

    @property
    def ratio_error(self) -> float | None:
        """The standard error of the ratio, to first order."""
        return None if self.error is None else self.ratio * self.error

    def __str__(self) -> str:
        """The ratio as a percentage, as in "+1.3 % ± 0.2"."""
        if not math.isfinite(self.ratio):
            return "not finite"
        change, error = 100 * (self.ratio - 1), ""
        if self.ratio_error is not None:
            error = f" ± {_short(100 * self.ratio_error)}"
        return f"{'+' if change >= 0 else '−'}{_short(abs(change))} %{error}"


def difference(
    losses: Sequence[float], counts: Sequence[int], other_losses: Sequence[float], other_counts: Sequence[int]
) -> Difference | None:
    """Return the first mean minus the second; None if they are not of the same tokens."""
    sizes = {len(one) for one in (losses, counts, other_losses, other_counts)}
    if len(sizes) > 1 or list(counts) != list(other_counts) or not sum(counts):
        return None
    between = [one - other for one, other in zip(losses, other_losses, strict=True)]
    return Difference(sum(between) / sum(counts), standard_error(between, counts))


def standard_error(losses: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return the standard error of Σ losses / Σ counts over segments; None for fewer than two with tokens in them."""
    seen = [(loss, count) for loss, count in zip(losses, counts, strict=True) if count > 0]
    if len(seen) < 2:
        return None
    total, n = sum(counts), len(seen)
    mean = sum(losses) / total
    squares = sum((loss - mean * count) ** 2 for loss, count in seen)
    return math.sqrt(n / (n - 1) * squares) / total


def _short(value: float) -> str:
    """Return two digits of a number below 100, and whole numbers above."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
