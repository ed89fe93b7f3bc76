"""Reach: how far each head of a model with a bias looks on real text, and how much of the score matrix that is.

`lengthen.reach` proves, for each query, how many keys back may matter at all: what stands further weighs less than half
a unit in the last place together (`docs/reach.md`). With D_i that number for the query at i (never above i + 1),

    reach  =  mean of D_i over queries                    keys read by a query
    share  =  Σ D_i / Σ (i + 1)                           of the causal half of the score matrix

A method without a bias has no such bound: every key may matter, whatever its distance. So may it with a bias that does
not fall; then the reach is all that a query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthen.attention import reach
from lengthen.evaluation.capture import Call, each_layer
from lengthen.model import Transformer


@dataclass(frozen=True, eq=False)
class Reaches:
    """For each layer and head, `[layers, heads]`: keys that a query reads on average, and the share of the matrix."""

    reach: Tensor
    share: Tensor


def refuse_unbounded(model: Transformer) -> None:
    """Raise an error if a model's position method bounds no head's reach."""
    if model.method.bias(0) is None:
        raise ValueError(
            f"reach: expected a model with a bias on its scores (alibi, t5, kerple, sandwich, or a method with one), "
            f"got {model.config.positions!r}: nothing bounds how far its heads look"
        )


def keys_read(call: Call, tolerance: float | None = None) -> Tensor:
    """Return how many keys back each head's queries must look on average, float64 `[heads]`."""
    if call.bias is None:
        raise TypeError("bias: expected Linear or Table, whose tail bounds how far a head looks, got None")
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
