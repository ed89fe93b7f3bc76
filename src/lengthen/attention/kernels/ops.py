"""The kernels as registered torch ops, so that torch.compile, autograd and opcheck know them.

    lengthen::attend           (q, k, v, …) → out, lse, spans, notes
    lengthen::attend_backward  (…, d_out, d_lse) → the gradients of q, k, v and of the bias
    lengthen::decode           (q, k, v, …) → out, lse, lows      for few queries, without gradients

spans and notes are what the backward wants to know of the forward: the keys that each block of queries read, and how
far the farthest of each head looked. (Defined by hand: `torch.library.custom_op` takes 12 µs more a call.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lengthen.attention.kernels.shapes import span

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? behind, Tensor? ahead, Tensor? first, Tensor? last, Tensor? rates, {}"
    "int mask, int size, bool linear, bool two_sided, float scale, SymInt q_start, float tolerance, int segment, "
    "int level"
)
_RESULTS = "Tensor out, Tensor lse, Tensor spans, Tensor notes, Tensor d_out, Tensor? d_lse, "
_library: Any = torch.library.Library("lengthen", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"attend({_CALL.format('Tensor? key_norm, ')}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"attend_backward({_CALL.format(_RESULTS)}, bool given, bool bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(f"decode({_CALL.format('Tensor? key_norm, ')}) -> (Tensor, Tensor, Tensor)")
attend = torch.ops.lengthen.attend.default
decode = torch.ops.lengthen.decode.default
attend_backward = torch.ops.lengthen.attend_backward.default


def run_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    behind: Tensor | None,
    ahead: Tensor | None,
    first: Tensor | None,
    last: Tensor | None,
    rates: Tensor | None,
    key_norm: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, what each block of queries read, and notes for the backward."""
    from lengthen.attention.kernels.launch import Call, run_forward

    q, k, v = _dense(q), _dense(k), _dense(v)
    out, lse, spans, notes = _results(q, k, v)
    with torch.cuda.device(q.get_device()):
        run_forward(Call(q, k, v, behind, ahead, first, last, rates, *numbers), out, lse, spans, notes, key_norm)
    return out, lse, spans, notes


def _dense(x: Tensor) -> Tensor:
    """Return x with features beside each other in memory."""
    return x if x.stride(3) == 1 else x.contiguous()


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return room for out, whose heads lie in memory as the queries' do, and lse."""
    batch, heads, queries, _ = q.shape
    if q.stride(1) < q.stride(2):
        out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
    else:
        out = q.new_empty(batch, heads, queries, v.shape[3])
    return out, q.new_empty(batch, heads, queries, dtype=torch.float32)


def _results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return room for the results."""
    batch, heads, queries, head_dim = q.shape
    out, lse = _outputs(q, v)
    rows = span(head_dim, v.shape[3], q.dtype)
    spans = q.new_empty(2, batch, heads, (queries + rows - 1) // rows, dtype=torch.int32)
    notes = q.new_zeros(batch * k.shape[1] + 2 * batch * heads + 1 + heads, dtype=torch.int32)
    return out, lse, spans, notes


def unwatched(*tensors: Tensor) -> bool:
    """Return whether nothing wants to see the ops, so that a call may leave out torch's dispatcher."""
    if torch.compiler.is_compiling() or any(type(x) is not Tensor for x in tensors):
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.maybe_current_level() is None


def _attend_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _results(_dense(q), _dense(k), _dense(v))


def run_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    behind: Tensor | None,
    ahead: Tensor | None,
    first: Tensor | None,
    last: Tensor | None,
    rates: Tensor | None,
    key_norm: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse, and the keys that each head of keys was read at."""
    from lengthen.attention.kernels import launch

    q, k, v = _dense(q), _dense(k), _dense(v)
    out, lse, lows = _decode_fake(q, k, v)
    with torch.cuda.device(q.get_device()):
        launch.run_decode(launch.Call(q, k, v, behind, ahead, first, last, rates, *numbers), out, lse, lows, key_norm)
    return out, lse, lows


def _decode_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *_outputs(_dense(q), v), q.new_empty(2, k.shape[0], k.shape[1], dtype=torch.int32)


def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    behind: Tensor | None,
    ahead: Tensor | None,
    first: Tensor | None,
    last: Tensor | None,
    rates: Tensor | None,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    notes: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the bias's two tensors (empty ones where they were not asked for)."""
    from lengthen.attention.kernels.launch import Call, run_backward

    *numbers, given, bias = numbers  # type: ignore[assignment]
    q, k, v, d_out = _dense(q), _dense(k), _dense(v), _dense(d_out)
    d_lse = None if d_lse is None else d_lse.contiguous()
    with torch.cuda.device(q.get_device()):
        call = Call(q, k, v, behind, ahead, first, last, rates, *numbers)
        d_q, d_k, d_v, d_behind, d_ahead = run_backward(call, out, lse, spans, notes, d_out, d_lse, given, bias)
    d_behind, d_ahead = (lse.new_empty(0) if x is None else x for x in (d_behind, d_ahead))
    return d_q, d_k, d_v, d_behind, d_ahead


def _attend_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, behind: Tensor | None, ahead: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    lse, bias = rest[4], rest[-1]
    d_q, d_k, d_v = (torch.empty_like(_dense(x)) for x in (q, k, v))
    d_behind, d_ahead = (x.new_empty(x.shape) if bias and x is not None else lse.new_empty(0) for x in (behind, ahead))
    return d_q, d_k, d_v, d_behind, d_ahead


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, behind, ahead, first, last, rates, key_norm, *numbers = inputs
    out, lse, spans, notes = output
    ctx.save_for_backward(q, k, v, behind, ahead, first, last, rates, out, lse, spans, notes)
    ctx.numbers, ctx.given = numbers, key_norm is not None
    ctx.mark_non_differentiable(spans, notes)
    ctx.set_materialize_grads(False)


def _pull(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, behind, ahead, first, last, rates, out, lse, spans, notes = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    wanted = ctx.needs_input_grad
    d_q, d_k, d_v, d_behind, d_ahead = attend_backward(
        *(q, k, v, behind, ahead, first, last, rates, out, lse, spans, notes, d_out, d_lse, *ctx.numbers, ctx.given),
        wanted[3] or wanted[4],
    )
    return d_q, d_k, d_v, d_behind if wanted[3] else None, d_ahead if wanted[4] else None, *[None] * 13


def _no_second(ctx: Any, *_: Any) -> None:
    raise RuntimeError("lengthen.attention: the kernels have no second derivative; backend='reference' has")


def _no_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError("lengthen::decode: expected inputs that need no gradient; lengthen.attention picks the op")


for _device in ("CUDA", "CPU"):  # on a CPU, Triton's interpreter
    _library.impl("attend", run_attend, _device)
    _library.impl("decode", run_decode, _device)
    _library.impl("attend_backward", _attend_backward, _device)
torch.library.register_fake("lengthen::attend", _attend_fake, lib=_library)
torch.library.register_fake("lengthen::decode", _decode_fake, lib=_library)
torch.library.register_fake("lengthen::attend_backward", _attend_backward_fake, lib=_library)
torch.library.register_autograd("lengthen::attend", _pull, setup_context=_keep, lib=_library)
torch.library.register_autograd("lengthen::attend_backward", _no_second, lib=_library)
torch.library.register_autograd("lengthen::decode", _no_derivative, lib=_library)
