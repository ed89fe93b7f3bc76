"""The kernels as two registered torch ops, so that torch.compile, autograd and opcheck know them.

    lengthen::attend           (q, k, v, …) → out, lse, spans, notes
    lengthen::attend_backward  (…, d_out, d_lse) → the gradients of q, k, v and of the bias

spans and notes are what the backward wants to know of the forward: the keys that each block of queries read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lengthen.attention.kernels.shapes import span


@torch.library.custom_op("lengthen::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    behind: Tensor | None,
    ahead: Tensor | None,
    first: Tensor | None,
    last: Tensor | None,
    key_norm: Tensor | None,
    mask: int,
    size: int,
    linear: bool,
    two_sided: bool,
    scale: float,
    q_start: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, what each block of queries read, and notes for the backward."""
    from lengthen.attention.kernels.launch import Call, run_forward

    q, k, v = (_dense(x) for x in (q, k, v))
    call = Call(
        q, k, v, behind, ahead, first, last, key_norm, mask, size, linear, two_sided, scale, q_start, tolerance
    )
    out, lse, spans, notes = _results(q, k, v)
    notes.zero_()
    run_forward(call, out, lse, spans, notes)
    return out, lse, spans, notes


def _dense(x: Tensor) -> Tensor:
    """Return x with features beside each other in memory."""
    return x if x.stride(3) == 1 else x.contiguous()


def _results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return room for the results: out's heads lie in memory as the queries' do."""
    batch, heads, queries, head_dim = q.shape
    if q.stride(1) < q.stride(2):
        out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
    else:
        out = q.new_empty(batch, heads, queries, v.shape[3])
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    rows = span(head_dim, v.shape[3], q.dtype)
    spans = q.new_empty(2, batch, heads, (queries + rows - 1) // rows, dtype=torch.int32)
    notes = q.new_empty(batch * k.shape[1] + 2 * batch * heads + 1 + heads, dtype=torch.int32)
    return out, lse, spans, notes


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _results(q, k, v)


@torch.library.custom_op("lengthen::attend_backward", mutates_args=())
def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    behind: Tensor | None,
    ahead: Tensor | None,
    first: Tensor | None,
    last: Tensor | None,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    notes: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    mask: int,
    size: int,
    linear: bool,
    two_sided: bool,
    scale: float,
    q_start: int,
    tolerance: float,
    given: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the bias's two tensors (empty ones where they were not asked for)."""
    from lengthen.attention.kernels.launch import Call, run_backward

    q, k, v, d_out = (_dense(x) for x in (q, k, v, d_out))
    key_norm = lse if given else None  # its values are not read again
    call = Call(
        q, k, v, behind, ahead, first, last, key_norm, mask, size, linear, two_sided, scale, q_start, tolerance
    )
    d_lse = None if d_lse is None else d_lse.contiguous()
    d_q, d_k, d_v, d_behind, d_ahead = run_backward(call, out, lse, spans, notes, d_out, d_lse, bias)
    none = lse.new_empty(0)
    return d_q, d_k, d_v, none if d_behind is None else d_behind, none.clone() if d_ahead is None else d_ahead


@attend_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, behind: Tensor | None, ahead: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    bias, lse = rest[-1], rest[3]
    d_q, d_k, d_v = (torch.empty_like(_dense(x)) for x in (q, k, v))
    d_behind, d_ahead = (
        x.new_empty(x.shape) if bias and x is not None else lse.new_empty(0) for x in (behind, ahead)
    )
    return d_q, d_k, d_v, d_behind, d_ahead


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, behind, ahead, first, last, key_norm, *numbers = inputs
    out, lse, spans, notes = output
    ctx.save_for_backward(q, k, v, behind, ahead, first, last, out, lse, spans, notes)
    ctx.numbers, ctx.given = numbers, key_norm is not None
    ctx.mark_non_differentiable(spans, notes)
    ctx.set_materialize_grads(False)


def _pull(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, behind, ahead, first, last, out, lse, spans, notes = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    bias = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    d_q, d_k, d_v, d_behind, d_ahead = attend_backward(
        q, k, v, behind, ahead, first, last, out, lse, spans, notes, d_out, d_lse, *ctx.numbers, ctx.given, bias
    )
    wanted = ctx.needs_input_grad
    return d_q, d_k, d_v, d_behind if wanted[3] else None, d_ahead if wanted[4] else None, *[None] * 10


attend.register_autograd(_pull, setup_context=_keep)
