"""Several methods in one model, each in its own place: rotary with ALiBi, sinusoidal with T5's bias.

Each of the four places (embed, rotate, decay, bias) is taken at most once. Which ones a method takes is read
off its class, so a method of one's own needs no entry anywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from lengthen.attention.biases import Bias, Decay
from lengthen.checks import describe
from lengthen.positions.method import PLACES, Placed, PositionMethod
from lengthen.positions.nothing import NoPosition

# What two methods in one place would both do, and why they may not.
TWICE = {
    "embed": "add to the embeddings: positions would be added twice",
    "rotate": "rotate queries and keys: the angles would add up",
    "decay": "decay the scores with distance: the rates would multiply",
    "bias": "add a bias to the scores: the bias would be added twice",
}


def compose(*methods: PositionMethod) -> PositionMethod:
    """Return one method that does what all of these do, or raise an error that names two that conflict."""
    if not methods:
        raise ValueError("compose: expected at least one method, got none")
    for method in methods:
        if not isinstance(method, PositionMethod):
            raise TypeError(f"compose: expected position methods, as `build` returns, got {describe(method)}")
    if len(methods) == 1:
        return methods[0]
    parts = [part for method in methods for part in (method.parts if isinstance(method, Composed) else [method])]
    _refuse_none(parts)
    _refuse_two_in_one_place(parts)
    _refuse_unlike_sizes(parts)
    return Composed(parts)


class Composed(PositionMethod):
    """Several methods as one; made by `compose`, which checks that they go together."""

    def __init__(self, parts: list[PositionMethod]) -> None:
        first = parts[0]
        super().__init__(heads=first.heads, head_dim=first.head_dim, width=first.width)
        self.methods = nn.ModuleList(parts)

    @property
    def parts(self) -> list[PositionMethod]:
        """The methods, in the order given."""
        return [cast(PositionMethod, method) for method in self.methods]

    @property
    def places(self) -> tuple[str, ...]:
        """Which places are taken by any of the methods."""
        return tuple(place for place in PLACES if any(place in part.places for part in self.parts))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Do what the method that embeds does."""
        for part in self.parts:
            x = part.embed(x, positions)
        return x

    @property
    def _rotating(self) -> PositionMethod | None:
        return next((part for part in self.parts if "rotate" in part.places), None)

    def at(self, positions: Tensor, dtype: torch.dtype, two_sided: bool, cached: int | None = None) -> Placed:
        """Return the method that rotates at these positions, with the bias and the decay of those that have one."""
        if self._rotating is None:
            return super().at(positions, dtype, two_sided, cached)
        placed = self._rotating.at(positions, dtype, two_sided, cached)
        decay = placed.decay if "decay" in self._rotating.places else self.decay()  # its own may be in its angles
        farthest = max((cached or 0) + positions.shape[-1] - 1, 0)
        return replace(placed, method=self, bias=self.bias(farthest), decay=decay)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Do what the method that rotates does."""
        return x if self._rotating is None else self._rotating.rotate(x, positions)

    def decay(self) -> Decay | None:
        """Return the decay of the method that has one."""
        return next((part.decay() for part in self.parts if "decay" in part.places), None)

    def bias(self, max_distance: int) -> Bias | None:
        """Return the bias of the method that has one."""
        return next((part.bias(max_distance) for part in self.parts if "bias" in part.places), None)


def _refuse_none(parts: list[PositionMethod]) -> None:
    if any(isinstance(part, NoPosition) for part in parts):
        raise ValueError(
            f"compose: expected methods other than 'none', got {_listed(parts)}: "
            "none says that there is no position information, so it stands alone"
        )


def _refuse_two_in_one_place(parts: list[PositionMethod]) -> None:
    for place, reason in TWICE.items():
        takers = [part.name for part in parts if place in part.places]
        if len(takers) > 1:
            raise ValueError(f"compose: {takers[0]} and {takers[1]} both {reason}; keep one of them")


def _refuse_unlike_sizes(parts: list[PositionMethod]) -> None:
    for size in ("heads", "head_dim", "width"):
        values = [getattr(part, size) for part in parts]
        if len(set(values)) > 1:
            raise ValueError(f"{size}: expected the same for every method composed, got {values} for {_listed(parts)}")


def _listed(parts: list[PositionMethod]) -> str:
    return " + ".join(part.name for part in parts)
