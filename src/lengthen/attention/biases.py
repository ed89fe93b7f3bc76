"""What attention adds to a score, or multiplies into it, as a function of distance alone.

A distance is the integer d = i − j: positive when the key stands behind the query, negative when it stands
ahead. `Linear` and `Table` are added to the score, after the 1/√d scaling and unscaled by it; `Decay` weighs each
feature's share of the score before it. None of them ever holds a length × length matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lengthen.attention.checks import can_look, describe, index_tensor, whole_number, wide_tensor


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slopes for `heads` heads, steepest first, as float32 (Press et al., 2022).

    For a power of two, m_h = 2^(−8h/heads) with h = 1 … heads. For any other count: the slopes of the largest power
    of two c below it, then every second slope of 2c, from the first, until there are enough.
    """
    whole_number("heads", heads, at_least=1)
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / below) for h in range(1, below + 1)]
    slopes += [2.0 ** (-8.0 * h / (2 * below)) for h in range(1, 2 * (heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


@dataclass(frozen=True, eq=False)
class Linear:
    """ALiBi's bias: −slopes[h]·|i − j|.

    `ahead` holds the slopes for keys that stand after the query (encoders); None uses `slopes` on both sides.
    Values are checked where reading them is free (on the CPU); a slope of 0 adds nothing.
    """

    slopes: Tensor
    ahead: Tensor | None = None

    def __post_init__(self) -> None:
        for name, slopes in (("slopes", self.slopes), ("ahead", self.ahead)):
            if name == "ahead" and slopes is None:
                continue
            checked = wide_tensor(f"Linear.{name}", slopes, (1,))
            if can_look(checked) and bool((checked < 0).any()):
                worst = checked.min().item()
                raise ValueError(
                    f"Linear.{name}: expected slopes of at least 0 (the minus sign is the bias's), got {worst}"
                )
        if self.ahead is not None and self.ahead.shape != self.slopes.shape:
            raise ValueError(
                f"Linear.ahead: expected one slope a head like slopes, {list(self.slopes.shape)}, "
                f"got {describe(self.ahead)}"
            )

    @property
    def heads(self) -> int:
        """How many heads there is a slope for."""
        return self.slopes.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """What gradients flow to: behind, ahead."""
        return self.slopes, self.ahead

    def of(self, heads: slice) -> Linear:
        """Return the bias of some of the heads."""
        return Linear(self.slopes[heads], None if self.ahead is None else self.ahead[heads])

    def at(self, distance: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the bias at integer distances i − j, `[heads, *distance.shape]`."""
        integer_distance(distance)
        slopes = self.slopes.to(dtype or self.slopes.dtype)
        shape = (-1, *[1] * distance.dim())
        steps = -distance.abs().to(slopes.dtype)
        bias = slopes.view(shape) * steps
        if self.ahead is None:
            return bias
        return torch.where(distance >= 0, bias, self.ahead.to(slopes.dtype).view(shape) * steps)


@dataclass(frozen=True, eq=False)
class Table:
    """Any function of distance: values[h, i − j], in O(heads × length) memory.

    `values[h, d]` is for keys d positions behind the query. `ahead[h, d]` is for keys d positions ahead of it; None
    uses `values` on both sides. A distance past the end of a table is refused by the call, never clamped.

    `level` is a distance from which on all of `values` are one and the same number, where the maker knows one, as T5
    does. The GPU kernels then look far keys' bias up once, and give the sum of those values' gradients to the first.
    """

    values: Tensor
    ahead: Tensor | None = None
    level: int | None = None

    def __post_init__(self) -> None:
        wide_tensor("Table.values", self.values, (2,))
        if self.level is not None:
            whole_number("Table.level", self.level, at_least=1)
        if self.ahead is not None:
            wide_tensor("Table.ahead", self.ahead, (2,))
            if self.ahead.shape[0] != self.values.shape[0]:
                raise ValueError(
                    f"Table.ahead: expected {self.values.shape[0]} heads like values, got {describe(self.ahead)}"
                )

    @property
    def heads(self) -> int:
        """How many heads there is a row for."""
        return self.values.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """What gradients flow to: behind, ahead."""
        return self.values, self.ahead

    def of(self, heads: slice) -> Table:
        """Return the bias of some of the heads."""
        return Table(self.values[heads], None if self.ahead is None else self.ahead[heads], self.level)

    def at(self, distance: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the bias at integer distances i − j, `[heads, *distance.shape]`."""
        integer_distance(distance)
        values = self.values.to(dtype or self.values.dtype)
        if self.ahead is None:
            return values[:, distance.abs()]
        behind = values[:, distance.clamp(min=0)]
        return torch.where(distance >= 0, behind, self.ahead.to(values.dtype)[:, (-distance).clamp(min=0)])


Bias = Linear | Table


@dataclass(frozen=True, eq=False)
class Decay:
    """xPos's decay: feature f's share of the score is multiplied by rates[f]^|i − j|, 0 < rate ≤ 1.

    `rates` is `[head_dim]`, or `[heads, head_dim]` for a decay of each head's own. It is applied inside the op, where
    keys are scaled relative to their own block, so that it is finite and right at any position; scaling q and k by
    opposite powers of their positions, as is usual, overflows. float64 rates are worth their few bytes:
    float32 ones are off by 0.1 % at distance 20,000.

    `floor` is a number that no rate is below, where the maker knows one: with it, short calls on a GPU can go to
    torch's own attention without waiting for the rates to be read.
    """

    rates: Tensor
    floor: float | None = None
    _kept: dict[tuple[int, int, int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        rates = wide_tensor("Decay.rates", self.rates, (1, 2))
        if can_look(rates) and not bool(((rates > 0) & (rates <= 1)).all()):
            raise ValueError(
                "Decay.rates: expected every rate in (0, 1], got values from "
                f"{rates.min().item()} to {rates.max().item()}"
            )

    def powers(self, queries: int, keys: int, q_start: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return rate^(i − m) for queries and rate^(m − j) for keys, m their middle: `[heads or 1, length, head_dim]`.

        Their product is the decay of a key behind its query. They are kept, so that a model which asks before its
        first layer has them in every layer, compiled or not.
        """
        size = (queries, keys, q_start, dtype)
        if size not in self._kept:
            middle = (q_start + queries) / 2
            log_rate = self.rates.double().log().reshape(-1, 1, self.rates.shape[-1])
            i = torch.arange(queries, device=self.rates.device, dtype=torch.float64).unsqueeze(-1) + (q_start - middle)
            j = torch.arange(keys, device=self.rates.device, dtype=torch.float64).unsqueeze(-1) - middle
            self._kept[size] = (log_rate * i).exp().to(dtype), (-log_rate * j).exp().to(dtype)
        return self._kept[size]

    def at(self, distance: Tensor, feature: int, dtype: torch.dtype) -> Tensor:
        """Return the factor of one feature at integer distances, `[heads or 1, *distance.shape]`."""
        integer_distance(distance)
        rates = self.rates[..., feature].reshape(-1, *[1] * distance.dim())
        return (rates.double() ** distance.abs()).to(dtype)


def integer_distance(distance: Tensor) -> Tensor:
    """Refuse a distance that is not an integer: in 16-bit floats, neighbours past 256 share one value."""
    return index_tensor("distance", distance, distance.dim() if isinstance(distance, Tensor) else 0)
