"""The call, checked once: what every backend is given, and what each of them must solve.

    softmax(scale · q·k + bias(distance)) · v        over the keys that the mask lets each query see

A backend is a module with two functions: `unfit(problem)` says why it cannot solve a problem, or None; `run(problem)`
returns out and lse. reference.py defines what they are.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from lengthen.attention.biases import Bias, Decay, Linear, Table
from lengthen.attention.checks import can_look, index_tensor, on_device
from lengthen.attention.masks import Mask, positions
from lengthen.attention.reach import Ball, default_tolerance
from lengthen.checks import describe, whole_number

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FARTHEST = 1 << 60  # a position: distances between two stay inside 64 bits


class Problem(NamedTuple):
    """A call that fits together, with its defaults filled in; made by `pose`."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias | None
    decay: Decay | None
    mask: Mask
    scale: float
    q_start: int | Tensor
    tolerance: float
    ball: Ball | None = None
    needs_lse: bool = True

    @property
    def group(self) -> int:
        """How many heads of queries share a head of keys."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def compute(self) -> torch.dtype:
        """What scores are computed in: float32 at least."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to read, or nobody to read it."""
        return not (self.q.numel() and self.k.numel())

    def interval(self) -> tuple[Tensor, Tensor]:
        """Return the first and last key that each query sees, int64 `[batch or 1, queries]`."""
        return self.mask.interval(self.q.shape[2], self.k.shape[2], self.q_start, self.q.device)


def pose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    decay: Decay | None = None,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    q_start: int | Tensor | None = None,
    tolerance: float | None = None,
    ball: Ball | None = None,
    needs_lse: bool = True,
) -> Problem:
    """Return the problem, or refuse what does not fit together by name."""
    _check_tensors(q, k, v)
    if not isinstance(mask, Mask):
        raise TypeError(f"mask: expected Causal(), Window(n), Blockwise(n) or Bidirectional(), got {describe(mask)}")
    for name, value in mask.rows().items():
        if value.shape[0] not in (1, q.shape[0]):
            raise ValueError(f"mask.{name}: expected one row for each of {q.shape[0]} sequences, got {describe(value)}")
    if scale is None:
        scale = 1 / math.sqrt(q.shape[3])
    elif not isinstance(scale, int | float) or isinstance(scale, bool) or not abs(scale) <= sys.float_info.max:
        raise TypeError(f"scale: expected a finite number, got {describe(scale)}")
    if tolerance is None:
        tolerance = default_tolerance(q.dtype)
    elif not isinstance(tolerance, int | float) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance: expected a number, got {describe(tolerance)}")
    elif not 0 <= tolerance < 1:
        raise ValueError(f"tolerance: expected a fraction from 0 to below 1, got {tolerance}")
    q_start = _check_q_start(q_start, q, k)
    if bias is not None:
        _check_bias(bias, q, k, mask, q_start)
    if decay is not None:
        if not isinstance(decay, Decay):
            raise TypeError(f"decay: expected Decay, got {describe(decay)}")
        rates, width = on_device("decay.rates", decay.rates, q.device), q.shape[3]
        if rates.shape not in ((width,), (q.shape[1], width)):
            raise ValueError(f"decay.rates: expected [{width}] or [{q.shape[1]}, {width}], got {describe(rates)}")
    if ball is not None:
        if not isinstance(ball, Ball):
            raise TypeError(f"ball: expected a Ball (Ball.around(k)), got {describe(ball)}")
        ball.check_covers(k)
    return Problem(q, k, v, bias, decay, mask, float(scale), q_start, float(tolerance), ball, needs_lse)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what is no set of queries, keys and values."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {describe(x)}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {describe(x)}")
        if x.dim() != 4:
            raise ValueError(f"{name}: expected [batch, heads, length, width], got {describe(x)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected {q.dtype} like q, got {describe(x)}")
        on_device(name, x, q.device)
    (batch, heads, _, width), key_shape, value_shape = q.shape, k.shape, v.shape
    if width == 0 or key_shape[3] != width:
        raise ValueError(f"k: expected head_dim {width} like q, at least 1, got {describe(k)}")
    if key_shape[0] != batch or value_shape[0] != batch:
        name, odd = ("k", k) if key_shape[0] != batch else ("v", v)
        raise ValueError(f"{name}: expected batch {batch} like q, got {describe(odd)}")
    if value_shape[1:3] != key_shape[1:3]:
        raise ValueError(f"v: expected heads and length {list(key_shape[1:3])} like k, got {describe(v)}")
    if key_shape[1] == 0 or heads % key_shape[1]:
        raise ValueError(f"k: expected a head count that divides q's {heads}, got {describe(k)}")


def _check_q_start(q_start: object, q: Tensor, k: Tensor) -> int | Tensor:
    """Return where the first query stands: a number, or one for each sequence."""
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    if q_start is None:
        if queries > keys > 0:
            raise ValueError(
                f"q_start: expected a position, since of {queries} queries and {keys} keys the last query at the last "
                "key would leave the first ones before all keys, got None"
            )
        return keys - queries
    if not isinstance(q_start, Tensor):
        if abs(whole_number("q_start", q_start)) > FARTHEST:
            raise ValueError(f"q_start: expected a position within ±2^60, got {q_start}")
        return whole_number("q_start", q_start)
    starts = on_device("q_start", index_tensor("q_start", q_start, 1), q.device)
    if starts.shape[0] not in (1, batch):
        raise ValueError(f"q_start: expected one number for each of {batch} sequences, got {describe(starts)}")
    return starts


def _check_bias(bias: Bias, q: Tensor, k: Tensor, mask: Mask, q_start: int | Tensor) -> None:
    if not isinstance(bias, Linear | Table):
        raise TypeError(f"bias: expected Linear or Table, got {describe(bias)}")
    name = "bias.slopes" if isinstance(bias, Linear) else "bias.values"
    for part, tensor in ((name, bias.tensors[0]), ("bias.ahead", bias.tensors[1])):
        if tensor is not None:
            on_device(part, tensor, q.device)
    if bias.heads != q.shape[1]:
        raise ValueError(
            f"{name}: expected one row for each of q's {q.shape[1]} heads, got {describe(bias.tensors[0])}"
        )
    if isinstance(bias, Table) and not bias.extended:
        _check_table(bias, q.shape[2], k.shape[2], mask, q_start)


def _check_table(table: Table, queries: int, keys: int, mask: Mask, q_start: int | Tensor) -> None:
    """Refuse a table that ends before the farthest distance that a query sees."""
    ends = table.values.shape[1], (table.values if table.ahead is None else table.ahead).shape[1]
    alone = mask.formula() is not None and isinstance(q_start, int)  # then no tensor tells what is visible
    device = torch.device("cpu") if alone else table.values.device
    if isinstance(q_start, int):  # were everything visible
        behind, ahead = max(0, q_start + queries - 1), max(0, keys - 1 - q_start)
        if behind < ends[0] and (ahead < ends[1] or not mask.two_sided):
            return
    if not keys or not queries:
        return
    first, last = mask.interval(queries, keys, q_start, device)
    if not first.numel():
        return
    place, seen = positions(queries, q_start, device), first <= last
    far = [(place - first).where(seen, 0).amax(), (last - place).where(seen, 0).amax()]
    if not can_look(far[0]):  # nobody waits for a GPU: it stops there by itself
        torch._assert_async((far[0] < ends[0]) & (far[1] < ends[1]), "bias: a query sees past the table's end")
        return
    names = ("values", "values" if table.ahead is None else "ahead")
    for name, needed, end in zip(names, map(int, far), ends, strict=True):
        if needed >= end:
            raise ValueError(
                f"bias.{name}: expected distances 0 … {needed}, the farthest that the mask lets a query see, "
                f"got a table for 0 … {end - 1}"
            )
