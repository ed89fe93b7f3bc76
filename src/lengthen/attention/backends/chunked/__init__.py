"""Attention in plain torch, in O(length) memory forward and backward, on any device.

runs.py     which queries read which keys in one call
forward.py  reads near keys, asks how far there is anything to read (reach.py), reads on, joins the parts
backward.py computes scores again from lse, and reads what the forward read
scores.py   what both compute on: the tensors of a call in the dtype that is computed in, its bias, its masks

On the CPU a run is one call of torch's fused kernels, which fills all cores. Decays, gradients of biases and other
devices take the same runs in plain torch. Inputs that are not finite go to the reference, a few rows at a time.
"""

from __future__ import annotations

from torch import Tensor

from lengthen.attention.backends.chunked import backward, forward
from lengthen.attention.backends.ops import Op
from lengthen.attention.problem import Problem

op = Op("chunked", forward.forward, backward.backward, forward.spans_shape, ("CompositeExplicitAutograd",))


def unfit(problem: Problem) -> str | None:
    """Return None: it can do everything."""
    return None


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return out in q's dtype and lse in the dtype computed in; the reference says what they are."""
    return op(problem)[:2]
