"""Triton kernels behind `lengthen.attention`, for NVIDIA GPUs (and, for tests, Triton's interpreter on a CPU).

ops.py       the registered torch ops
launch.py    grids and arguments
shapes.py    block shapes
forward.py   the forward, with reach inside it
backward.py  the gradients of queries, keys and values
decoding.py  few queries against many keys
table.py     the gradient of a table of distances
decaying.py  queries and keys with a decay in them
ball.py      how long keys are, for reach
repair.py    values that are NaN or infinite
codes.py     the numbers for masks and biases
launcher.py  a launch that costs the CPU little
plans.py     the launches of a call like one before
tile.py      what the kernels share

Nothing here needs Triton to be imported; calling the kernels does.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from typing import Any

import torch
from torch import Tensor

from lengthen.attention.biases import Bias, Decay, Linear, Table
from lengthen.attention.kernels import codes, plans, shapes
from lengthen.attention.kernels.ops import attend, decode, run_attend, run_decode, unwatched
from lengthen.attention.masks import Bidirectional, Blockwise, Causal, Mask, Window

WIDEST = 256  # features of a key or value
RATES = 7  # where the rates of a decay stand among the ops' arguments
SEGMENT, SEGMENT_UNIT = 1 << 16, 128  # keys that a decay is scaled into from one start: at most, and a divisor of it
# log₂ of how small a decay's power may get within a segment, and so how large in its keys: far from the dtype's ends.
LEAST_POWER = {torch.float16: -5, torch.bfloat16: -64, torch.float32: -64}


HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # then Triton runs kernels on a CPU, and slowly


def unfit(q: Tensor, v: Tensor, bias: Bias | None, decay: Decay | None, mask: Mask) -> str:
    """Return why this call is not for the kernels; empty: it is."""
    if q.device.type != "cuda" and not (q.device.type == "cpu" and INTERPRETED):
        return f"they run on an NVIDIA GPU, and q is on {q.device}"
    if not HAS_TRITON:
        return "they need the package triton"
    if q.is_cuda and not torch.compiler.is_compiling() and (reason := _too_old(q.device)):
        return reason
    if q.dtype == torch.float64:
        return "they compute in float32 at most"
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"head_dim and value width may be {WIDEST} at most"
    if type(mask) not in (Causal, Window, Blockwise, Bidirectional):
        return "they know no mask of one's own"
    if decay is not None and (reason := _undecayable(q, bias, decay, mask)):
        return reason
    if not (q.numel() and v.numel()):
        return "there is nothing to read"
    return ""


@functools.cache
def _too_old(device: torch.device) -> str:
    """Return why the kernels do not run on this GPU; empty: they do."""
    if torch.version.hip is not None:
        return "they are for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= 8 else f"they need compute capability 8.0, and {device} has {major}.{minor}"


def _undecayable(q: Tensor, bias: Bias | None, decay: Decay, mask: Mask) -> str:
    """Return why the kernels cannot do this decay; empty: they can."""
    if isinstance(mask, Bidirectional):
        return "they know no decay for keys ahead of the query"
    if decay.rates.requires_grad:
        return "they have no gradient for the decay's rates"
    if isinstance(bias, Table) and any(t is not None and t.requires_grad for t in bias.tensors):
        return "they have no gradient for a table beside a decay"
    if decay.floor is None and torch.compiler.is_compiling():
        return "how fast the decay is cannot be looked at"
    return "" if _segment(decay, q.dtype) else "the decay is too fast for them"


def _segment(decay: Decay, dtype: torch.dtype) -> int:
    """Return over how many keys a decay may be scaled into them inside what the dtype can hold; 0: too few."""
    floor = float(decay.rates.detach().min()) if decay.floor is None else decay.floor
    most = SEGMENT if floor >= 1 else min(SEGMENT, int(LEAST_POWER[dtype] / math.log2(floor)))
    return most // SEGMENT_UNIT * SEGMENT_UNIT


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    decay: Decay | None,
    mask: Mask,
    scale: float,
    q_start: int,
    tolerance: float,
    key_norm: Tensor | None = None,
    key: plans.Key | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse; only for calls that `unfit` has no word against. `key`: what to keep the launches under."""
    if not torch.compiler.is_compiling() and getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        raise RuntimeError("lengthen.attention: the kernels have no forward-mode derivative; backend='reference' has")
    behind, ahead = bias.tensors if bias is not None else (None, None)
    pulled = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, behind, ahead))
    direct = not pulled and unwatched(q, k, v)
    arguments = _arguments(q, k, v, bias, decay, mask, scale, q_start, tolerance, key_norm)
    few = not pulled and arguments[RATES] is None and shapes.few(q.shape[2], q.shape[1] // k.shape[1])
    if direct:
        run = run_decode if few else run_attend
        if key is not None and plans.due(key) and isinstance(bias, Linear):
            return plans.keep(key, run, arguments, plans.inputs_of(q, k, v, bias, key_norm), zeroed=not few)
        return run(*arguments)[:2]
    return (decode if few else attend)(*arguments)[:2]  # type: ignore[no-any-return]


def decode_spans(q: Tensor, k: Tensor, v: Tensor, bias: Bias | None = None, key_norm: Tensor | None = None) -> Tensor:
    """Return the keys that decoding reads, int32 `[2, batch, key_heads]`: first and end (exclusive)."""
    from lengthen.attention.op import check_call

    call = check_call(q, k, v, bias, None, Causal(), None, None, None, key_norm)
    arguments = _arguments(q, k, v, bias, None, Causal(), call.scale, call.q_start, call.tolerance, key_norm)
    return decode(*arguments)[2]  # type: ignore[no-any-return]


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
    """Return the keys that the kernels read, int32 `[2, batch, heads, query blocks]`: first and end (exclusive)."""
    from lengthen.attention.op import check_call

    mask = Causal() if mask is None else mask
    call = check_call(q, k, v, bias, None, mask, scale, q_start, tolerance)
    if reason := unfit(q, v, bias, None, mask):
        raise ValueError(f"q: not for the kernels: {reason}")
    arguments = _arguments(q, k, v, bias, None, mask, call.scale, call.q_start, call.tolerance, None)
    return attend(*arguments)[2]  # type: ignore[no-any-return]


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    decay: Decay | None,
    mask: Mask,
    scale: float,
    q_start: int,
    tolerance: float,
    key_norm: Tensor | None,
) -> tuple[Any, ...]:
    """Return what the ops take."""
    behind, ahead = bias.tensors if bias is not None else (None, None)
    key_norm = None if key_norm is None else key_norm.contiguous()
    kind, size = codes.CAUSAL, 0
    if isinstance(mask, Window):
        kind, size = codes.WINDOW, mask.size
    elif isinstance(mask, Blockwise):
        kind, size = codes.BLOCKWISE, mask.block
    elif isinstance(mask, Bidirectional):
        kind = codes.FULL
    first = last = None
    if mask.key_start is not None or mask.document_starts is not None:
        kind = codes.LISTED
        first, last = (x.to(torch.int32).contiguous() for x in mask.interval(q.shape[2], k.shape[2], q_start, q.device))
    two_sided = isinstance(mask, Bidirectional)
    linear = isinstance(bias, Linear)
    level = -1  # a table has none, or it is farther than any key
    if isinstance(bias, Table) and bias.level is not None and not two_sided and bias.level < bias.values.shape[1]:
        level = bias.level
    rates, segment = None, 0
    if decay is not None:
        segment = _segment(decay, q.dtype)
        rates = decay.rates.double().log2().float().expand(q.shape[1], -1).contiguous()  # in units of log 2
        if decay.rates.dim() > 1 and k.shape[1] != q.shape[1]:  # a decay of each head's own, and heads that share keys
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        k = _scaled(k, rates, segment, 0, grow=True)
        if q_start >= 0 and max(q_start + q.shape[2], k.shape[2]) <= segment:  # then there is no more to it
            q = _scaled(q, rates, segment, q_start, grow=False)
            rates, segment, tolerance, key_norm = None, 0, 0.0, None
    return (  # rates at RATES
        *(q, k, v, behind, ahead, first, last, rates, key_norm),
        *(kind, size, linear, two_sided, scale, q_start, tolerance, segment, level),
    )


def _scaled(x: Tensor, rates: Tensor, segment: int, start: int, grow: bool) -> Tensor:
    """Return x, whose first row stands at `start`, times its decay since the start of its segment; or divided by it."""
    if unwatched(x):
        return Scaled.apply(x, rates, segment, start, grow)  # type: ignore[no-any-return,no-untyped-call]
    steps = torch.arange(start, start + x.shape[2], device=x.device) % segment  # torch.compile makes one pass of it
    sign = -1 if grow else 1
    return (x * torch.exp2(sign * rates[: x.shape[1]].unsqueeze(1) * steps.unsqueeze(-1))).to(x.dtype)


class Scaled(torch.autograd.Function):
    """x with a decay in it or out of it, in one pass each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rates: Tensor, *how: Any) -> Tensor:
        """Return what goes into the kernels."""
        ctx.save_for_backward(rates)
        ctx.how = how
        return _scale(x, rates, *how)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x; nothing else has one."""
        (rates,) = ctx.saved_tensors
        return _scale(gradient, rates, *ctx.how), None, None, None, None


def _scale(x: Tensor, rates: Tensor, segment: int, start: int, grow: bool) -> Tensor:
    from lengthen.attention.kernels.launch import scaled_rows

    x = x if x.stride(3) == 1 else x.contiguous()
    with torch.cuda.device(x.get_device()):
        return scaled_rows(x, rates, segment, start, grow)
