"""What attention adds to a score, or multiplies into it, as a function of distance alone.

A distance is the integer d = i − j: positive when the key stands behind the query, negative when it stands
ahead. `Linear` and `Table` are added to the score, after the 1/√d scaling and unscaled by it; `Decay` weighs each
feature's part of the score before it. None of them ever holds a length × length matrix.

A bias b also knows its tail, what all keys from a distance on can weigh together if their scores are 0:

    T(D) = log Σ_{d ≥ D} e^b(d)

which is all that reach needs to know of it (reach.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen.attention.checks import can_look, index_tensor, wide_tensor
from lengthen.checks import describe, flag, number, whole_number

MOST_HEADS = 1 << 16  # that there are slopes for


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Return ALiBi's slopes for `heads` heads, steepest first, as float32 (Press et al., 2022).

    For a power of two, m_h = 2^(−8h/heads) with h = 1 … heads. For any other count: the slopes of the largest power
    of two c below it, then every second slope of 2c, from the first, until there are enough.
    """
    whole_number("heads", heads, at_least=1)
    if heads > MOST_HEADS:
        raise ValueError(f"heads: expected at most {MOST_HEADS}, got {heads}")
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / below) for h in range(1, below + 1)]
    slopes += [2.0 ** (-8.0 * h / (2 * below)) for h in range(1, 2 * (heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


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
            low, high = map(float, checked.detach().aminmax()) if can_look(checked) and checked.numel() else (0.0, 0.0)
            if not (low >= 0 and high < torch.inf):  # of a NaN, both are NaN
                raise ValueError(
                    f"Linear.{name}: expected finite slopes of at least 0 (the minus sign is the bias's), "
                    f"got {high if low >= 0 else low}"
                )
        if self.ahead is not None and self.ahead.shape != self.slopes.shape:
            raise ValueError(
                f"Linear.ahead: expected one slope per head like slopes, {list(self.slopes.shape)}, "
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

    def tail(self, distance: Tensor, farthest: int, ahead: bool = False) -> Tensor:
        """Return T(D) = −m·D − log(1 − e^−m), the sum of a geometric series without end, `[heads, *distance.shape]`."""
        slopes = _side(self, ahead).view(-1, *[1] * distance.dim())
        return -slopes * distance - torch.log(-torch.expm1(-slopes))

    def reach(self, limit: Tensor, farthest: int, ahead: bool = False) -> Tensor:
        """Return the distances from which on the tail is below `limit` `[…, heads, rows]`; NaN or ∞: from none."""
        slopes = _side(self, ahead).to(limit.dtype).unsqueeze(-1)
        return -(limit + torch.log(-torch.expm1(-slopes))) / slopes


@dataclass(frozen=True, eq=False)
class Table:
    """Any function of distance: values[h, i − j], in O(heads × length) memory.

    `values[h, d]` is for keys d positions behind the query. `ahead[h, d]` is for keys d positions ahead of it; None
    uses `values` on both sides. A distance past the end of a table is refused by the call, unless the table is
    `extended`: then all distances past its end have its last value, as in T5's last bucket.
    """

    values: Tensor
    ahead: Tensor | None = None
    extended: bool = False

    def __post_init__(self) -> None:
        flag("Table.extended", self.extended)
        wide_tensor("Table.values", self.values, (2,))
        if self.ahead is not None:
            wide_tensor("Table.ahead", self.ahead, (2,))
            if self.ahead.shape[0] != self.values.shape[0]:
                raise ValueError(
                    f"Table.ahead: expected {self.values.shape[0]} heads like values, got {describe(self.ahead)}"
                )
        for name, values in (("values", self.values), ("ahead", self.ahead)):
            if values is not None and not values.shape[1]:
                raise ValueError(f"Table.{name}: expected at least one distance, got {describe(values)}")

    @property
    def heads(self) -> int:
        """How many heads there is a row for."""
        return self.values.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """What gradients flow to: behind, ahead."""
        return self.values, self.ahead

    def at(self, distance: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the bias at integer distances i − j, `[heads, *distance.shape]`."""
        integer_distance(distance)
        behind = self._of(
            self.values.to(dtype or self.values.dtype), distance.abs() if self.ahead is None else distance
        )
        if self.ahead is None:
            return behind
        return torch.where(distance >= 0, behind, self._of(self.ahead.to(behind.dtype), -distance))

    def _of(self, values: Tensor, distance: Tensor) -> Tensor:
        """Return values at distances, of which those below 0 are of no interest."""
        last = values.shape[1] - 1 if self.extended else None
        return values[:, distance.clamp(min=0, max=last)]

    def tails(self, farthest: int, ahead: bool = False, step: int = 1) -> Tensor:
        """Return T(D) at D = 0, step, 2·step, … to beyond the farthest distance, float64 `[heads, …]`; it falls."""
        values = _side(self, ahead).detach().double()  # a long sum: float32 would lose what the proof counts on
        known, count = values[:, : farthest + 1], farthest // step + 2
        groups = -(-known.shape[1] // step)
        sums = F.pad(known, (0, groups * step - known.shape[1]), value=-torch.inf).view(-1, groups, step).logsumexp(-1)
        tails = F.pad(sums.flip(1).logcumsumexp(1).flip(1), (0, count - groups), value=-torch.inf)
        if self.extended:
            start = (torch.arange(count, device=values.device) * step).clamp(min=values.shape[1])
            tails = torch.logaddexp(tails, values[:, -1:] + (farthest + 1 - start).clamp(min=0).double().log())
        return tails

    def tail(self, distance: Tensor, farthest: int, ahead: bool = False) -> Tensor:
        """Return T(D) summed up to the farthest distance there is, `[heads, *distance.shape]`."""
        return self.tails(farthest, ahead)[:, distance.clamp(max=farthest + 1)]

    def reach(self, limit: Tensor, farthest: int, ahead: bool = False) -> Tensor:
        """Return the distances from which on the tail is below `limit` `[…, heads, rows]`."""
        rising, wanted = -self.tails(farthest, ahead), -limit.double().movedim(-2, 0)
        found = torch.searchsorted(rising, wanted.reshape(rising.shape[0], -1).contiguous())
        return found.view(wanted.shape).movedim(0, -2).to(limit.dtype)


Bias = Linear | Table


def _side(bias: Bias, ahead: bool) -> Tensor:
    """Return the slopes or values of one side."""
    behind, other = bias.tensors
    return behind if other is None or not ahead else other


@dataclass(frozen=True, eq=False)
class Decay:
    """xPos's decay: feature f's part of the score is multiplied by rates[f]^|i − j|, 0 < rate ≤ 1.

    `rates` is `[head_dim]`, or `[heads, head_dim]` for a decay of each head's own. It is applied inside the op, where
    keys are scaled relative to their own block, so that it is finite and right at any position; scaling q and k by
    opposite powers of their positions, as is usual, overflows. float64 rates are worth their few bytes:
    float32 ones are off by 0.1 % at distance 20,000.

    `floor` is a number that no rate is below, where the maker knows one: the GPU kernels then need not wait for the
    rates to be read.
    """

    rates: Tensor
    floor: float | None = None

    def __post_init__(self) -> None:
        rates = wide_tensor("Decay.rates", self.rates, (1, 2))
        if can_look(rates) and not bool(((rates > 0) & (rates <= 1)).all()):
            raise ValueError(
                "Decay.rates: expected every rate in (0, 1], got values from "
                f"{rates.min().item()} to {rates.max().item()}"
            )
        if self.floor is not None:
            floor = number("Decay.floor", self.floor, above=0)
            if can_look(rates) and rates.numel() and floor > float(rates.detach().min()):
                raise ValueError(f"Decay.floor: expected at most the lowest rate, {rates.min().item()}, got {floor}")

    def lowest(self) -> float | None:
        """Return a number that no rate is below; None where none is known and looking would have the CPU wait."""
        if self.floor is None and can_look(self.rates):
            return float(self.rates.detach().min())
        return self.floor

    def power(self, steps: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rate^steps for steps `[length]`, `[heads or 1, length, head_dim]`; they may be negative."""
        log_rate = self.rates.double().log().reshape(-1, 1, self.rates.shape[-1])
        return torch.exp(log_rate * steps.unsqueeze(-1)).to(dtype)

    def at(self, distance: Tensor, feature: int, dtype: torch.dtype) -> Tensor:
        """Return the factor of one feature at integer distances, `[heads or 1, *distance.shape]`."""
        integer_distance(distance)
        rates = self.rates[..., feature].reshape(-1, *[1] * distance.dim())
        return (rates.double() ** distance.abs()).to(dtype)


def integer_distance(distance: Tensor) -> Tensor:
    """Refuse a distance that is not an integer: in 16-bit floats, neighbours past 256 share one value."""
    return index_tensor("distance", distance, distance.dim() if isinstance(distance, Tensor) else 0)
