"""A backend's forward and backward as registered torch ops, so that compilers, tracers and autograd know them.

    lengthen::<name>           (problem) → out, lse, residual, spans
    lengthen::<name>_backward  (problem, results, d_out, d_lse) → the gradients of q, k, v, the bias and the decay

`residual` is what rounding to 16 bits took from out (in wider dtypes it is empty), in the same dtype: the backward
needs Σ_j p·dp = d_out·out more precisely than out is. `spans` are the keys [lo, hi) that each block of queries read,
`[2, batch, heads, blocks]`: the backward reads the same. An op takes a problem as tensors and numbers; `flat` and
`problem_of` go from one form to the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from lengthen.attention.biases import Decay, Linear, Table
from lengthen.attention.masks import BandAheadOf, BandOf, Listed, ListedBehind, Mask
from lengthen.attention.problem import Problem
from lengthen.attention.reach import Ball

TENSORS = ("q", "k", "v", "behind", "ahead", "rates", "first", "last", "starts", "centre", "radius")
LEAVES = 6  # of these, gradients flow to
PROBLEM = (
    ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in TENSORS)
    + ", bool linear, bool extended, bool two_sided, int shift, int block, float scale, SymInt q_start"
    + ", float tolerance, float? floor"
)
_library: Any = torch.library.Library("lengthen", "FRAGMENT")  # type: ignore[no-untyped-call]

Results = tuple[Tensor, Tensor, Tensor | None, Tensor]  # no residual where none is wanted, or nothing is rounded
Gradients = tuple[Tensor | None, ...]


def flat(problem: Problem) -> tuple[Any, ...]:
    """Return a problem as an op takes it; a mask that has no formula is listed."""
    bias, ball, mask = problem.bias, problem.ball, problem.mask
    behind, ahead = bias.tensors if bias is not None else (None, None)
    first = last = None
    shift, block = mask.formula() or (-1, 1)
    if shift < 0:
        listed = mask.listed(problem.q.shape[2], problem.k.shape[2], problem.q_start, problem.q.device)
        first, last = listed.first, listed.last
    starts = problem.q_start if isinstance(problem.q_start, Tensor) else None
    return (
        *(problem.q, problem.k, problem.v, behind, ahead),
        None if problem.decay is None else problem.decay.rates,
        *(first, last, starts),
        *((None, None) if ball is None else (ball.centre, ball.radius)),
        *(isinstance(bias, Linear), isinstance(bias, Table) and bias.extended, mask.two_sided, shift, block),
        *(problem.scale, 0 if starts is not None else problem.q_start, problem.tolerance),
        None if problem.decay is None else problem.decay.floor,
    )


def problem_of(*arguments: Any) -> Problem:
    """Return the problem that an op was given."""
    q, k, v, behind, ahead, rates, first, last, starts, centre, radius, *numbers = arguments
    linear, extended, two_sided, shift, block, scale, q_start, tolerance, floor = numbers
    bias = None
    if behind is not None:
        bias = Linear(behind, ahead) if linear else Table(behind, ahead, extended)
    banded, listed = (BandAheadOf, Listed) if two_sided else (BandOf, ListedBehind)
    mask: Mask = banded(shift, block) if first is None else listed(first, last, k.shape[2])
    decay = None if rates is None else Decay(rates, floor)
    ball = None if centre is None else Ball(centre, radius, k.shape[2])
    return Problem(q, k, v, bias, decay, mask, scale, q_start if starts is None else starts, tolerance, ball)


def empty_results(q: Tensor, v: Tensor, spans: tuple[int, ...], wanted: bool) -> Results:
    """Return room for an op's results; the heads of out lie in memory as the queries' do. `wanted`: with a residual."""
    (batch, heads, queries, _), width, dtype = q.shape, v.shape[3], q.dtype
    if q.stride(1) < q.stride(2):
        out = q.new_empty(batch, queries, heads, width).transpose(1, 2)
    else:
        out = q.new_empty(batch, heads, queries, width)
    residual = torch.empty_like(out) if wanted and dtype.itemsize < 4 else None
    lse = q.new_empty(batch, heads, queries, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return out, lse, residual, q.new_empty(spans, dtype=torch.int32)


def _with_residual(results: Results) -> tuple[Tensor, ...]:
    """Return an op's results, which are all tensors, spans in one row."""
    out, lse, residual, spans = results
    return out, lse, out.new_empty(0) if residual is None else residual, spans.flatten()


def unwatched(*tensors: Tensor) -> bool:
    """Return whether nothing wants to see the op, so that a call without gradients may leave out the dispatcher."""
    if torch.compiler.is_compiling() or any(type(x) is not Tensor or x.is_meta or x.is_neg() for x in tensors):
        return False
    if forward_ad._current_level >= 0:
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.maybe_current_level() is None


class Op:
    """A backend as a pair of ops.

    Args:
        name: of the op.
        forward: from a problem, and whether a backward may follow, to out, lse, residual and spans.
        backward: from a problem, those results, d_out, d_lse (or None) and whether the bias and the decay want
            gradients, to those of q, k, v, behind, ahead and rates, or None for each; None: there is none.
        spans: the shape of the spans for q, k and v.
        keys: torch's dispatch keys that they are for.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[Problem, bool], Results],
        backward: Callable[..., Gradients] | None,
        spans: Callable[[Tensor, Tensor, Tensor], tuple[int, ...]],
        keys: tuple[str, ...],
    ) -> None:
        self.name, self.forward, self.backward, self.spans = name, forward, backward, spans
        _library.define(f"{name}({PROBLEM}) -> (Tensor, Tensor, Tensor, Tensor)")
        torch.library.register_fake(f"lengthen::{name}", self._fake, lib=_library)
        for key in keys:
            _library.impl(name, self._run, key)
        self.op: Any = getattr(torch.ops.lengthen, name).default
        if backward is None:
            torch.library.register_autograd(f"lengthen::{name}", self._no_derivative, lib=_library)
            return
        _library.define(
            f"{name}_backward({PROBLEM}, Tensor out, Tensor lse, Tensor residual, Tensor spans, Tensor d_out, "
            f"Tensor? d_lse, bool of_bias, bool of_rates) -> ({', '.join(['Tensor'] * LEAVES)})"
        )
        for key in keys:
            _library.impl(f"{name}_backward", self._run_backward, key)
        torch.library.register_fake(f"lengthen::{name}_backward", self._fake_backward, lib=_library)
        torch.library.register_autograd(f"lengthen::{name}", self._pull, setup_context=self._keep, lib=_library)
        torch.library.register_autograd(f"lengthen::{name}_backward", self._no_derivative, lib=_library)
        self.backward_op: Any = getattr(torch.ops.lengthen, f"{name}_backward").default

    @staticmethod
    def pulled(problem: Problem) -> bool:
        """Return whether a gradient may be asked for."""
        if not torch.is_grad_enabled():
            return False
        bias = problem.bias.tensors if problem.bias is not None else ()
        rates = () if problem.decay is None else (problem.decay.rates,)
        return any(x is not None and x.requires_grad for x in (problem.q, problem.k, problem.v, *bias, *rates))

    def __call__(self, problem: Problem) -> Results:
        """Return out, lse, residual and spans; past torch's dispatcher, where that records nothing."""
        if not self.pulled(problem) and unwatched(problem.q, problem.k, problem.v):
            return self.forward(problem, False)
        arguments = flat(problem)
        self._refuse_tangents(arguments[:LEAVES])
        return self.op(*arguments)  # type: ignore[no-any-return]

    def _refuse_tangents(self, leaves: tuple[Tensor | None, ...]) -> None:
        """Refuse forward-mode derivatives, which torch would take for 0, and those of torch.func, which it cannot."""
        if torch.compiler.is_compiling():
            return
        unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual
        inside = torch._C._functorch.get_interpreter_stack() or ()
        if any(one.key() in (TransformType.Grad, TransformType.Jvp) for one in inside):
            what = "derivative by torch.func (torch.autograd.grad takes it)"
        elif forward_ad._current_level >= 0 and any(x is not None and unpack(x).tangent is not None for x in leaves):
            what = "forward-mode derivative"
        else:
            return
        raise NotImplementedError(
            f"lengthen::{self.name}: there is no {what}; lengthen.attention(backend='reference') has one"
        )

    def _run(self, *arguments: Any) -> tuple[Tensor, ...]:
        with torch.autocast(arguments[0].device.type, enabled=False):
            return _with_residual(self.forward(problem_of(*arguments), True))

    def _fake(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
        spans = math.prod(self.spans(q, k, v))  # in one row: of a size that may be 1, a tracer would make a case
        return _with_residual(empty_results(q, v, (spans,), self.backward is not None))

    def _run_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        assert self.backward is not None
        *given, out, lse, residual, spans, d_out, d_lse, of_bias, of_rates = arguments
        with torch.autocast(out.device.type, enabled=False):
            results = (out, lse, residual if residual.numel() else None, spans.view(self.spans(*given[:3])))
            found = self.backward(problem_of(*given), results, d_out, d_lse, of_bias, of_rates)
        return tuple(lse.new_empty(0) if x is None else x for x in found)

    def _fake_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        leaves, lse, (of_bias, of_rates) = arguments[:LEAVES], arguments[-7], arguments[-2:]
        asked = (True, True, True, of_bias, of_bias, of_rates)
        return tuple(
            torch.empty_like(x) if x is not None and wanted else lse.new_empty(0)
            for x, wanted in zip(leaves, asked, strict=True)
        )

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[: len(TENSORS)], *output)
        ctx.numbers = inputs[len(TENSORS) :]
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    def _pull(self, ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad
        tensors, results = saved[: len(TENSORS)], saved[len(TENSORS) :]
        d_out = torch.zeros_like(results[0]) if d_out is None else d_out
        of_bias, of_rates = wanted[3] or wanted[4], wanted[5]
        found = self.backward_op(*tensors, *ctx.numbers, *results, d_out, d_lse, of_bias, of_rates)
        grads = [x if want else None for x, want in zip(found, wanted[:LEAVES], strict=True)]
        return *grads, *[None] * (len(wanted) - LEAVES)

    def _no_derivative(self, ctx: Any, *_: Any) -> None:
        what = "gradient of this op" if self.backward is None else "second derivative"
        raise RuntimeError(
            f"lengthen::{self.name}: there is no {what}; lengthen.attention(backend='reference') has one"
        )
