"""Join two partial results of attention over different keys into the result over both."""

from __future__ import annotations

import torch
from torch import Tensor

from lengthen.checks import describe

Partial = tuple[Tensor, Tensor]


def merge(a: Partial, b: Partial) -> Partial:
    """Return (out, lse) of attention over the keys of both `a` and `b`, each an (out, lse) of the same queries.

    out = out_a·e^(lse_a − lse) + out_b·e^(lse_b − lse),  lse = log(e^lse_a + e^lse_b).

    A part that saw no key (lse −∞) leaves the other as it is. Gradients flow through both, so a sequence that is split
    over several devices can be trained. Any number of parts: `functools.reduce(lengthen.merge, parts)`.
    """
    for name, part in (("a", a), ("b", b)):
        if not isinstance(part, tuple) or len(part) != 2:
            raise TypeError(f"{name}: expected the pair (out, lse) of attention(..., return_lse=True), got {part!r}")
        out, lse = part
        if not all(isinstance(x, Tensor) for x in part):
            raise TypeError(f"{name}: expected (out, lse), two tensors, got {', '.join(map(describe, part))}")
        if out.shape[:-1] != lse.shape:
            raise ValueError(
                f"{name}: expected lse of out's shape without its last dimension, {list(out.shape[:-1])}, "
                f"got {describe(lse)}"
            )
    (out_a, lse_a), (out_b, lse_b) = a, b
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype:
        raise ValueError(f"b: expected out like a's, {describe(out_a)}, got {describe(out_b)}")
    # What neither part saw must not spoil a gradient, so no step of this is −∞ − (−∞) or log 0.
    top = torch.maximum(lse_a, lse_b).detach()
    top = top.masked_fill(top == -torch.inf, 0)
    weight_a, weight_b = (lse_a - top).exp(), (lse_b - top).exp()
    total, blind = weight_a + weight_b, (lse_a == -torch.inf) & (lse_b == -torch.inf)
    total = total.masked_fill(blind, 1)
    fraction_a, fraction_b = ((weight / total).unsqueeze(-1) for weight in (weight_a, weight_b))
    out = out_a.to(top.dtype) * fraction_a + out_b.to(top.dtype) * fraction_b
    return out.to(out_a.dtype), (top + total.log()).masked_fill(blind, -torch.inf)
