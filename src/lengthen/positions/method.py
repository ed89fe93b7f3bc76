"""Where position enters a transformer: four places, and a method overrides those it needs.

    embed     x + something of the position       before the first layer      sinusoidal, learned
    rotate    queries and keys rotated by angles    in each layer               rotary, xPos
    decay     rates[f]^|i − j| on each feature     inside the attention op     xPos
    bias      a function of i − j on each score    inside the attention op     ALiBi, T5, Kerple, Sandwich

The rest of a model does not depend on the method: once per forward pass it calls `at(positions)`, which returns an
object that applies the method to embeddings and projections and holds the op's bias and decay. One module serves every
layer, so learned parameters are shared by all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lengthen.attention.biases import Bias, Decay
from lengthen.attention.checks import index_tensor
from lengthen.checks import describe, whole_number

PLACES = ("embed", "rotate", "decay", "bias")
STEEPER = 4.0  # a penalty on one side of the query, beside that on the other: 2 is worse, more is not better


@dataclass(frozen=True, eq=False)
class Placed:
    """A method at the positions of one forward pass: computed once, reused by every layer."""

    method: PositionMethod
    positions: Tensor
    bias: Bias | None
    decay: Decay | None

    def embed(self, x: Tensor) -> Tensor:
        """Return the embeddings x `[batch, length, width]` with their positions in them."""
        return self.method.embed(x, self.positions)

    def split(self, qkv: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, rotated, and values, `[batch, heads, length, head_dim]`.

        From one projection `[batch, length, heads + 2·key_heads, head_dim]`.
        """
        q, k, v = (part.transpose(1, 2) for part in torch.split(qkv, [heads, key_heads, key_heads], dim=2))
        return self.method.rotate(q, self.positions), self.method.rotate(k, self.positions), v


class PositionMethod(nn.Module):
    """Base class of position methods; it adds no position information itself.

    Numbers that are fixed (slopes, frequencies) are not buffers, because `module.to(torch.bfloat16)` would
    round them: they are computed where they are needed, in float32 at least, on the module's device. Learned
    numbers are parameters, which the caller may cast; what `decay` and `bias` return is computed from them in
    float32 at least.
    """

    name: ClassVar[str] = "PositionMethod"  # what `build` calls it; a subclass has its class name by default
    two_sided: ClassVar[Mapping[str, Any]] = {}  # options that tell keys ahead from keys behind: an encoder's defaults
    _here: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def __init__(self, *, heads: int, head_dim: int, width: int) -> None:
        super().__init__()
        self.heads = whole_number("heads", heads, at_least=1)
        self.head_dim = whole_number("head_dim", head_dim, at_least=1)
        self.width = whole_number("width", width, at_least=1)
        # An empty buffer that `module.to(device)` moves: the device of a method without parameters.
        self.register_buffer("_here", torch.empty(0), persistent=False)
        self._kept: Any = None  # what a method remembers between calls; never copied or saved with it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    @property
    def device(self) -> torch.device:
        """Where the module is, and so where `decay` and `bias` put their tensors."""
        return self._here.device

    @property
    def places(self) -> tuple[str, ...]:
        """Which of embed, rotate, decay and bias this method's class overrides."""
        return tuple(place for place in PLACES if getattr(type(self), place) is not getattr(PositionMethod, place))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x `[batch, length, width]` with its positions, `[length]` or `[batch, length]`, in it."""
        return x

    def at(self, positions: Tensor, dtype: torch.dtype, two_sided: bool, cached: int | None = None) -> Placed:
        """Return the method at these positions, for projections of this dtype.

        `two_sided`: queries may look ahead. `cached`: queries read keys of other passes too, so many before these;
        None: there is no cache, and keys are for the queries of this pass alone.
        """
        return Placed(self, positions, self.bias(max((cached or 0) + positions.shape[-1] - 1, 0)), self.decay())

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return a query or key `[batch, heads, length, head_dim]` rotated by its positions; any heads."""
        return x

    def decay(self) -> Decay | None:
        """Return the factor per position by which each feature's part of a score decays, or None."""
        return None

    def bias(self, max_distance: int) -> Bias | None:
        """Return what is added to scores, defined for distances of at most `max_distance`, or None."""
        return None


def side_factors(heads: int) -> tuple[Tensor, Tensor]:
    """Return what a symmetric penalty is multiplied by behind and ahead of the query, one number per head, on the CPU.

    They are 4 and 1, then 1 and 4, in turn: each head prefers a side, and a steep one still looks near on both.
    """
    behind, ahead = torch.ones(2, heads, dtype=torch.float64, device="cpu")
    behind[0::2] = ahead[1::2] = STEEPER
    return behind, ahead


def check_positions(x: Tensor, positions: object, dims: int, last: tuple[str, int]) -> Tensor:
    """Return `positions` if it holds an integer for each place in the second-last dimension of x."""
    name, size = last
    if not isinstance(x, Tensor) or not x.is_floating_point():  # whole numbers would be rounded after a rotation
        raise TypeError(f"x: expected a floating-point tensor, got {describe(x)}")
    if x.dim() != dims or x.shape[-1] != size:
        raise ValueError(f"x: expected {dims} dimensions, the last of them {name}={size}, got {describe(x)}")
    two = isinstance(positions, Tensor) and positions.dim() == 2
    checked = index_tensor("positions", positions, 2 if two else 1)
    batch, length = x.shape[0], x.shape[-2]
    if checked.shape[-1] != length or (two and checked.shape[0] not in (1, batch)):
        raise ValueError(f"positions: expected shape [{length}] or [{batch}, {length}], got {describe(checked)}")
    if checked.device != x.device:
        raise ValueError(f"positions: expected a tensor on {x.device} like x, got {describe(checked)}")
    return checked


def widen(parameter: Tensor) -> Tensor:
    """Return a learned number in float32, or in float64 if that is what it is held in."""
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))
