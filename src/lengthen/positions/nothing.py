"""No position information: what order the model knows comes from the causal mask alone.

    score[i, j] = q_i·k_j / √d

A causal decoder can still count, because a query at position i sees i + 1 keys (Haviv et al., 2022, arXiv
2203.16634). It is the baseline that every other method has to beat.
"""

from __future__ import annotations

from lengthen.positions.method import PositionMethod


class NoPosition(PositionMethod):
    """No position information: the causal mask alone tells the order."""

    name = "none"
