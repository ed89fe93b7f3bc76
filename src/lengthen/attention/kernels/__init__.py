"""Triton kernels behind `lengthen.attention`, for NVIDIA GPUs (and, for tests, Triton's interpreter on a CPU).

ops.py       the two registered torch ops
launch.py    grids and arguments
shapes.py    block shapes
forward.py   the forward, with reach inside it
backward.py  the gradients of queries, keys and values
table.py     the gradient of a table of distances
ball.py      how long keys are, for reach
repair.py    values that are NaN or infinite
tile.py      what the kernels share

Nothing here needs Triton to be imported; calling the kernels does.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from lengthen.attention.biases import Bias, Decay, Linear
from lengthen.attention.kernels.ops import attend
from lengthen.attention.masks import Bidirectional, Blockwise, Causal, Mask, Window

WIDEST = 256  # features of a key or value


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def unfit(q: Tensor, v: Tensor, decay: Decay | None, mask: Mask) -> str:
    """Return why this call is not for the kernels; empty: it is."""
    if q.device.type != "cuda" and not (q.device.type == "cpu" and interpreted()):
        return f"they run on an NVIDIA GPU, and q is on {q.device}"
    if not _has_triton():
        return "they need the package triton"
    if q.dtype == torch.float64:
        return "they compute in float32 at most"
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"head_dim and value width may be {WIDEST} at most"
    if type(mask) not in (Causal, Window, Blockwise, Bidirectional):
        return "they know no mask of one's own"
    if decay is not None:
        return "they know no decay"
    if not (q.numel() and v.numel()):
        return "there is nothing to read"
    return ""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    mask: Mask,
    scale: float,
    q_start: int,
    tolerance: float,
    key_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse; only for calls that `unfit` has no word against."""
    out, lse, _, _ = _attend(q, k, v, bias, mask, scale, q_start, tolerance, key_norm)
    return out, lse


def spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    q_start: int | None = None,
    tolerance: float | None = None,
) -> Tensor:
    """Return the keys that the kernels read, int32 `[2, batch, heads, blocks of queries]`: first, and end (exclusive)."""
    from lengthen.attention.op import check_call

    mask = Causal() if mask is None else mask
    call = check_call(q, k, v, bias, None, mask, scale, q_start, tolerance)
    if reason := unfit(q, v, None, mask):
        raise ValueError(f"q: not for the kernels: {reason}")
    return _attend(q, k, v, bias, mask, call.scale, call.q_start, call.tolerance, None)[2]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    mask: Mask,
    scale: float,
    q_start: int,
    tolerance: float,
    key_norm: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    behind, ahead = bias.tensors if bias is not None else (None, None)
    kind, size = 0, 0
    if isinstance(mask, Window):
        kind, size = 1, mask.size
    elif isinstance(mask, Blockwise):
        kind, size = 2, mask.block
    elif isinstance(mask, Bidirectional):
        kind = 3
    first = last = None
    if mask.key_start is not None or mask.document_starts is not None:
        kind = 4
        first, last = (x.to(torch.int32).contiguous() for x in mask.interval(q.shape[2], k.shape[2], q_start, q.device))
    two_sided = isinstance(mask, Bidirectional)
    linear = isinstance(bias, Linear)
    return attend(  # type: ignore[no-any-return]
        q, k, v, behind, ahead, first, last, key_norm, kind, size, linear, two_sided, scale, q_start, tolerance
    )
