"""Triton kernels for NVIDIA GPUs (and, for tests, Triton's interpreter on a CPU).

forward.py     the forward, with reach inside it
repair.py      what the forward could not be trusted with, once more
backward.py    the gradients of queries, keys and values
table_grad.py  the gradient of a table of distances
decode.py      few queries against many keys
decay.py       queries and keys with a decay in them
ball.py        a ball around the keys, for reach
tile.py        what the kernels share
shapes.py      block shapes
kernel.py      compiles a kernel and launches it
launch.py      from a problem to launches

Kernels are longer than functions elsewhere: a helper must be handed what they hold, and hand it back, value by value.

Nothing here needs Triton to be imported; calling the kernels does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lengthen.attention.backends.ops import Gradients, Op, Results, empty_results
from lengthen.attention.backends.triton import shapes
from lengthen.attention.biases import Decay, Table
from lengthen.attention.problem import Problem

WIDEST = 256  # features of a key or value
FARTHEST = 1 << 29  # positions that kernels count
SEGMENT, SEGMENT_UNIT = 1 << 16, 128  # keys that a decay is scaled into from one start: at most, and a divisor of it
# log₂ of how small a decay's power may get within a segment, and so how large in its keys: far from the dtype's ends.
LEAST_POWER = {torch.float16: -5, torch.bfloat16: -64, torch.float32: -64}

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # then Triton runs kernels on a CPU, and slowly


def unfit(problem: Problem) -> str | None:
    """Return why this problem is not for the kernels; None: it is."""
    q, v = problem.q, problem.v
    if q.device.type != "cuda" and not (q.device.type == "cpu" and INTERPRETED):
        return f"the kernels run on an NVIDIA GPU, and q is on {q.device}"
    if not HAS_TRITON:
        return "the kernels need the package triton"
    if q.is_cuda and not torch.compiler.is_compiling() and (reason := _too_old(q.device)):
        return reason
    if q.dtype == torch.float64:
        return "the kernels compute in float32 at most"
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"head_dim and value width may be {WIDEST} at most in the kernels"
    if isinstance(problem.q_start, int) and not (-FARTHEST < problem.q_start < FARTHEST - q.shape[2]):
        return f"the kernels count positions to {FARTHEST}, and q_start is {problem.q_start}"
    if problem.empty or not problem.v.shape[3]:
        return "there is nothing to read"
    return None if problem.decay is None else _undecayable(problem, problem.decay)


@functools.cache
def _too_old(device: torch.device) -> str:
    """Return why the kernels do not run on this GPU; empty: they do."""
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= 8 else f"the kernels need compute capability 8.0, and {device} has {major}.{minor}"


def _undecayable(problem: Problem, decay: Decay) -> str | None:
    """Return why the kernels cannot do this decay; None: they can."""
    if problem.mask.two_sided:
        return "the kernels know no decay for keys ahead of the query"
    if decay.rates.requires_grad:
        return "the kernels have no gradient for the decay's rates"
    if isinstance(problem.bias, Table) and any(t is not None and t.requires_grad for t in problem.bias.tensors):
        return "the kernels have no gradient for a table beside a decay"
    if isinstance(problem.q_start, Tensor):
        return "the kernels know no decay for sequences that stand at different places"
    if decay.floor is None and torch.compiler.is_compiling():
        return "how fast the decay is cannot be looked at"
    return None if segment_of(decay, problem.q.dtype) else "the decay is too fast for the kernels"


def segment_of(decay: Decay, dtype: torch.dtype) -> int:
    """Return over how many keys a decay may be scaled into them inside what the dtype can hold; 0: too few."""
    floor = float(decay.rates.detach().min()) if decay.floor is None else decay.floor
    most = SEGMENT if floor >= 1 else min(SEGMENT, int(LEAST_POWER[dtype] / math.log2(floor)))
    return most // SEGMENT_UNIT * SEGMENT_UNIT


def _in_one_segment(problem: Problem) -> bool:
    """Return whether no key and query stand in different segments of a decay: then the kernels need not know of it."""
    if problem.decay is None:
        return True
    assert isinstance(problem.q_start, int)
    last = max(problem.q_start + problem.q.shape[2], problem.k.shape[2])
    return problem.q_start >= 0 and last <= segment_of(problem.decay, problem.q.dtype)


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return out in q's dtype and lse in float32; the reference says what they are."""
    few = shapes.few(problem.q.shape[2], problem.group) and not attend_op.pulled(problem) and _in_one_segment(problem)
    out, lse, _, _ = (decode_op if few else attend_op)(problem)
    return out, lse


def spans(problem: Problem) -> Tensor:
    """Return the keys that the kernels read, int32 `[2, batch, heads, query blocks]`: first and end (exclusive)."""
    return attend(problem, False)[3][:2]


def attend(problem: Problem, wanted: bool) -> Results:
    """Return out, lse, what was lost in rounding if it is wanted, and what is noted of each block of queries."""
    results = empty_results(problem.q, problem.v, _spans_shape(problem.q, problem.k, problem.v), wanted)
    with _on(problem.q):
        _launch().run_forward(_launch().faded(problem)[0], *results)
    return results


def attend_backward(
    problem: Problem, results: Results, d_out: Tensor, d_lse: Tensor | None, of_bias: bool, of_rates: bool
) -> Gradients:
    """Return the gradients of q, k, v and of the bias's two tensors; rates have none."""
    with _on(problem.q):
        call, pull = _launch().faded(problem)
        d_q, d_k, d_v, d_behind, d_ahead = _launch().run_backward(call, results, d_out, d_lse, of_bias)
        return *pull(d_q, d_k, d_v), d_behind, d_ahead, None


def decode_few(problem: Problem, wanted: bool) -> Results:
    """Return out and lse of few queries, nothing, and which keys of each head were read, `[2, batch, key_heads]`."""
    results = empty_results(problem.q, problem.v, (2, *problem.k.shape[:2]), False)
    with _on(problem.q):
        _launch().run_decode(_launch().faded(problem)[0], results[0], results[1], results[3])
    return results


def _spans_shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the shape of what the forward notes of each block: see forward.py."""
    rows = shapes.span(q.shape[3], v.shape[3], q.dtype)
    return 6, q.shape[0], q.shape[1], (q.shape[2] + rows - 1) // rows


@functools.cache
def _launch() -> Any:
    """Return the module that needs Triton."""
    return importlib.import_module("lengthen.attention.backends.triton.launch")


_HERE: AbstractContextManager[Any] = nullcontext()


def _on(q: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which q's device is the current one: Triton launches there."""
    if not q.is_cuda or torch.cuda.current_device() == q.get_device():
        return _HERE
    return torch.cuda.device(q.get_device())


attend_op = Op("attend", attend, attend_backward, _spans_shape, ("CUDA", "CPU"))  # on a CPU, Triton's interpreter
decode_op = Op("decode", decode_few, None, lambda q, k, v: (2, *k.shape[:2]), ("CUDA", "CPU"))
