"""Reach: how far each head of an ALiBi model looks on real text, and how much of the score matrix that is.

`lengthen.reach` proves, for each query, how many keys back may matter at all: what stands further weighs less than half
a unit in the last place together (`docs/reach.md`). With D_i that number for the query at i (never above i + 1),

    reach  =  mean of D_i over queries                    keys read by a query
    share  =  Σ D_i / Σ (i + 1)                           of the causal half of the score matrix

Other methods have no such bound: every key may matter, whatever its distance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthen.attention import Linear, reach
from lengthen.evaluation.capture import Call, each_layer
from lengthen.model import Transformer


@dataclass(frozen=True, eq=False)
class Reaches:
    """For each layer and head, `[layers, heads]`: keys that a query reads on average, and the share of the matrix."""

    reach: Tensor
    share: Tensor


def refuse_unbounded(model: Transformer) -> None:
    """Raise an error if a model's position method bounds no head's reach."""
    bias = model.method.bias(0)
    if not isinstance(bias, Linear):
        raise ValueError(
            f"reach: expected a model whose scores fall in proportion to distance (alibi, or a method with it), got "
            f"{model.config.positions!r}: nothing bounds how far its heads look"
        )


def keys_read(call: Call, tolerance: float | None = None) -> Tensor:
    """Return how many keys back each head's queries must look on average, float64 `[heads]`."""
    if not isinstance(call.bias, Linear):
        raise TypeError(f"bias: expected Linear (no other bias has a bounded reach), got {type(call.bias).__name__}")
    if call.decay is not None:
        raise ValueError("decay: expected none: reach is not computed for ALiBi with a decay at this length")
    far = reach(call.q, call.k, call.bias, tolerance, mask=call.mask, scale=call.scale)
    return far.double().mean(dim=(0, 2))


def of_model(
    model: Transformer,
    batches: Iterable[Tensor],
    tolerance: float | None = None,
    tell: Callable[[int], None] = lambda texts: None,
) -> Reaches:
    """Return the reach of every head over batches of texts `[texts, length]`, all of one length."""
    refuse_unbounded(model)
    read, total, length = 0, torch.zeros(()), 1
    for ids in batches:
        layers: list[Tensor] = []
        each_layer(model, ids, lambda call, layers=layers: layers.append(keys_read(call, tolerance)))  # type: ignore[misc]
        total = total + ids.shape[0] * torch.stack(layers).cpu()
        read, length = read + ids.shape[0], ids.shape[1]
        tell(read)
    if not read:
        raise ValueError("batches: expected at least one text, got none")
    mean = total / read
    return Reaches(mean, mean / ((length + 1) / 2))
