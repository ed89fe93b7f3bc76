"""ALiBi: a penalty that grows in proportion to distance (Press et al., 2022, arXiv 2108.12409).

    score[i, j] = q_i·k_j / √d − m_h·|i − j|,    m_h = 2^(−8h/heads), h = 1 … heads

No position enters anywhere else. A model trained at one length keeps its perplexity, or betters it, at many
times that length. In an encoder keys stand ahead of the query too: `sides` says whether they are penalised
alike. If they are, the model cannot tell left from right. If not, one side is four times as steep, in turn:

    4·m_h·(i − j) behind and m_h·(j − i) ahead for h = 1, 3, 5 …, the reverse for h = 2, 4, 6 …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lengthen.attention.biases import Linear, alibi_slopes
from lengthen.checks import choice, describe, flag, number, whole_number
from lengthen.positions.method import PositionMethod, side_factors, widen


class ALiBi(PositionMethod):
    """A penalty that grows in proportion to distance, steeper in some heads than in others."""

    name = "alibi"
    two_sided: ClassVar[Mapping[str, Any]] = {"sides": "separate"}
    log_slopes: nn.Parameter | None
    log_ahead: nn.Parameter | None

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        width: int,
        learned: bool = False,
        sides: str = "same",
        slopes: Sequence[float] | Tensor | None = None,
    ) -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width)
        self.learned = flag("alibi.learned", learned)
        self.sides = choice("alibi.sides", sides, ("same", "separate"))
        self.initial_slopes = standard_slopes(heads) if slopes is None else own_slopes(slopes, heads)
        self.log_slopes = self.log_ahead = None
        if self.learned:
            self.log_slopes = nn.Parameter(torch.empty(heads, dtype=torch.float32))
            if self.sides == "separate":
                self.log_ahead = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set learned slopes back to those the module was built with."""
        slopes, ahead = self._both_sides()
        with torch.no_grad():
            if self.log_slopes is not None:
                self.log_slopes.copy_(slopes.log())
            if self.log_ahead is not None:
                self.log_ahead.copy_(ahead.log())

    def bias(self, max_distance: int) -> Linear:
        """Return the slopes, float32 at least; gradients flow to them if they are learned."""
        whole_number("max_distance", max_distance, at_least=0)
        if self.log_slopes is None:
            return self._fixed()
        ahead = None if self.log_ahead is None else widen(self.log_ahead).exp()
        return Linear(widen(self.log_slopes).exp(), ahead)

    def _both_sides(self) -> tuple[Tensor, Tensor]:
        """Return the slopes that the module was built with, behind and ahead of the query, float64 on the CPU."""
        slopes = torch.tensor(self.initial_slopes, dtype=torch.float64, device="cpu")
        behind, ahead = side_factors(self.heads)
        return (slopes, slopes) if self.sides == "same" else (slopes * behind, slopes * ahead)

    def _fixed(self) -> Linear:
        kept: Tensor | None = self._kept
        if kept is None or kept.device != self.device:  # once: to make them on a GPU, the CPU waits for it
            with torch.inference_mode(False):  # else a later training step could not use what was made here
                kept = self._kept = torch.stack(self._both_sides()).float().to(self.device)
        slopes, ahead = kept.clone()  # which a caller may change
        return Linear(slopes, ahead if self.sides == "separate" else None)


def standard_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes as Python numbers, which no cast can round."""
    with torch.device("cpu"):
        return tuple(alibi_slopes(heads).tolist())


def own_slopes(slopes: Sequence[float] | Tensor, heads: int) -> tuple[float, ...]:
    """Return given slopes as Python numbers: one per head, each above 0."""
    listed: object = slopes.tolist() if isinstance(slopes, Tensor) else slopes
    if not isinstance(listed, list | tuple):
        raise TypeError(f"alibi.slopes: expected a list or tensor of {heads} numbers, got {describe(slopes)}")
    if len(listed) != heads:
        raise ValueError(f"alibi.slopes: expected one slope for each of the {heads} heads, got {len(listed)}")
    return tuple(number(f"alibi.slopes[{h}]", slope, above=0) for h, slope in enumerate(listed))
