"""The backward: scores computed again from lse, over the keys that the forward read, in runs as there.

    p = exp(score − lse)      dv = pᵀ·do      dp = do·vᵀ      ds = p·(dp − delta)      dq = ds·k      dk = dsᵀ·q

with delta = Σ_j p·dp = do·out. Sums are in a fixed order without atomics, so two runs are equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen.attention.backends import reference
from lengthen.attention.backends.chunked.forward import batches, careful_parts, sequences
from lengthen.attention.backends.chunked.runs import Rows, Run, plan, together
from lengthen.attention.backends.chunked.scores import Scores
from lengthen.attention.backends.ops import Gradients, Results
from lengthen.attention.biases import Bias, Decay, Linear, Table
from lengthen.attention.problem import Problem

WINDOWS = 1 << 23  # scores of a call for each thread: it makes gradients of all its windows of keys, which overlap
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def backward(
    problem: Problem, results: Results, d_out: Tensor, d_lse: Tensor | None, of_bias: bool, of_rates: bool
) -> Gradients:
    """Return the gradients of q, k, v, the bias's two tensors and the decay's rates, each in its own dtype."""
    bias = problem.bias.tensors if problem.bias is not None else (None, None)
    leaves = (problem.q, problem.k, problem.v, *bias, None if problem.decay is None else problem.decay.rates)
    asked = (True, True, True, of_bias, of_bias, of_rates)
    totals = [
        torch.zeros_like(x, dtype=problem.compute if i < 3 else torch.float64) if x is not None and asked[i] else None
        for i, x in enumerate(leaves)
    ]
    each = sequences(problem) if isinstance(problem.q_start, Tensor) else [(slice(None), problem)]
    # An op runs where autograd records nothing; here autograd is asked for the gradients of some parts.
    recording = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.no_grad(), recording:
        for b, part in () if problem.empty else each:
            out, lse, residual, spans = results
            given = (out[b], lse[b], None if residual is None else residual[b], spans[:, b])
            own = [x if x is None or i > 2 else x[b] for i, x in enumerate(totals)]
            _Backward(part, given, d_out[b], None if d_lse is None else d_lse[b], own).run()
    return tuple(
        total.to(x.dtype) if x is not None and total is not None else None
        for x, total in zip(leaves, totals, strict=True)
    )


class _Backward:
    """A problem whose q_start is a number, its results, and the totals that its gradients are added to."""

    def __init__(
        self, problem: Problem, results: Results, d_out: Tensor, d_lse: Tensor | None, totals: list[Tensor | None]
    ) -> None:
        self.problem, self.spans, self.totals = problem, results[3], totals
        out, self.lse, residual = results[:3]
        self.out = out.to(problem.compute) + (0 if residual is None else residual.to(problem.compute))
        self.d_out, self.d_lse = d_out.to(problem.compute), d_lse
        if d_lse is not None:  # who saw nothing has a constant lse
            self.d_lse = d_lse = d_lse.masked_fill(self.lse == -torch.inf, 0)
        self.delta = (self.d_out * self.out).sum(dim=-1) - (0 if d_lse is None else d_lse)

    def run(self) -> None:
        """Add all gradients."""
        given = [x for x in (self.d_out, self.d_lse) if x is not None and x.numel()]
        if int(self.spans.flatten()[0]) < 0 or not all(bool(torch.stack(x.aminmax()).isfinite().all()) for x in given):
            self._carefully()
            return
        self.scores = scores = Scores(self.problem)
        of_bias = self.totals[3] is not None
        self.fused = scores.fused and not of_bias and self.d_lse is None
        self.d_along = torch.zeros_like(scores.along, dtype=torch.float64) if of_bias else None
        self.lse = self.lse.masked_fill(self.lse == -torch.inf, 0)  # who sees nothing has no weights: e^(−∞ − 0)
        if missing := scores.v.shape[3] - self.out.shape[3]:
            self.out, self.d_out = (F.pad(x, (0, missing)) for x in (self.out, self.d_out))
        self.rows = [Rows(x) for x in (self.d_out, self.lse, self.out, self.delta)]
        for batch in batches(scores):
            lows, highs = self.spans[:, batch.start].tolist()
            windows = [list(zip(lo, hi, strict=True)) for lo, hi in zip(lows, highs, strict=True)]
            for heads in together(windows, self.problem.group):
                many = heads.at.stop - heads.at.start
                for planned in plan(heads.windows, scores.queries, scores.keys, many, scores.q.shape[3]):
                    for run in planned.of(batch, heads.at, self.problem.group):
                        for part in run.split(WINDOWS * torch.get_num_threads()):
                            self._add(part)
        if self.d_along is not None:
            self._add_bias(self.d_along)

    def _add(self, run: Run) -> None:
        """Add what one run gives."""
        for call, bias, _ in self.scores.calls(run, self.fused):
            q, k, v = call.take(self.scores.rows), call.windows(self.scores.k), call.windows(self.scores.v)
            d_out, lse, out, delta = (call.take(x) for x in self.rows)
            if self.fused:
                mask = bias.expand(q.shape[0], -1, -1, -1)
                d_q, d_k, d_v = flash_backward(
                    *(d_out, q, k, v, out, lse, 0.0, False), attn_mask=mask, scale=self.problem.scale
                )
            else:
                d_q, d_k, d_v = self._plainly(call, bias, q, k, v, d_out, lse, delta)
            into_q, into_k, into_v = self.totals[:3]
            assert into_q is not None and into_k is not None and into_v is not None  # noqa: PT018
            into_q[call.at] = call.restore(d_q)[..., : into_q.shape[3]]
            call.add_windows(into_k, d_k[..., : into_k.shape[3]])
            call.add_windows(into_v, d_v[..., : into_v.shape[3]])

    def _plainly(
        self, run: Run, bias: Tensor, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of a run's q, k and v in plain torch, and add those of the bias and of the decay."""
        each, decay = q.shape[1] // k.shape[1], self.problem.decay
        k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))
        leaves = [q, k]
        if decay is not None:
            # Rates in float64, since large parts of their gradient cancel.
            leaves = [x.detach().requires_grad_() for x in (q, k, decay.rates.double())]
            decay = Decay(leaves[2], decay.floor)
        with torch.set_grad_enabled(decay is not None):
            product = self.scores.product(run, leaves[0], leaves[1], decay)
        scale = self.problem.scale
        p = (product.detach() * scale).add_(bias).sub_(lse.unsqueeze(-1)).exp_()
        d_v = p.mT @ d_out
        d_score = (d_out @ v.mT).sub_(delta.unsqueeze(-1)).mul_(p)
        if self.d_along is not None:
            self._add_along(run, d_score)
        d_score *= scale
        if decay is None:
            d_q, d_k = d_score @ k, d_score.mT @ q
        else:
            d_q, d_k, d_rates = torch.autograd.grad(product, leaves, d_score)
            if self.totals[5] is not None:
                self.totals[5] += d_rates
        d_k, d_v = (torch.unflatten(x, 1, (-1, each)).sum(dim=2) for x in (d_k, d_v))
        return d_q, d_k, d_v

    def _add_along(self, run: Run, d_score: Tensor) -> None:
        """Add the scores' gradient at each distance: the sums over row + column = 0, 1, …"""
        assert self.d_along is not None
        rows, columns = d_score.shape[2:]
        wide = columns + rows - 1
        # Each row gets as many zeros as there are rows. Read in rows that are one number shorter, row i begins at i.
        skewed = F.pad(d_score.sum(dim=0), (0, rows)).flatten(1)[:, : rows * wide].view(-1, rows, wide)
        skip = self.scores.skip(run)
        self.d_along[run.heads, skip : skip + wide] += skewed.sum(dim=1)

    def _add_bias(self, d_along: Tensor) -> None:
        """Add the gradients of the bias's tensors."""
        bias = self.problem.bias
        assert bias is not None
        leaves = [None if x is None else x.detach().requires_grad_() for x in bias.tensors]
        with torch.enable_grad():
            along = self.scores.bias_along(_with(bias, leaves), torch.float64)
        used = [x for x in leaves if x is not None]
        found = torch.autograd.grad(along, used, d_along, allow_unused=True, materialize_grads=True)
        for into, part in zip([x for x in self.totals[3:5] if x is not None], found, strict=True):
            into += part

    def _carefully(self) -> None:
        """Add all gradients as the reference has them, for what is not finite."""
        bias, decay = self.problem.bias, self.problem.decay
        given = (*(bias.tensors if bias is not None else (None, None)), None if decay is None else decay.rates)
        for rows, part in careful_parts(self.problem):
            leaves = [None if x is None else x.detach().requires_grad_() for x in (part.q, part.k, part.v, *given)]
            tensors: dict[str, Any] = dict(zip("qkv", leaves, strict=False))
            part = part._replace(**tensors)
            if bias is not None:
                part = part._replace(bias=_with(bias, leaves[3:5]))
            if leaves[5] is not None:
                part = part._replace(decay=Decay(leaves[5]))
            with torch.enable_grad():
                found = reference.run(part)
            upstream = (self.d_out[:, :, rows], None if self.d_lse is None else self.d_lse[:, :, rows])
            ys, gs = zip(*[(y, g) for y, g in zip(found, upstream, strict=True) if g is not None], strict=True)
            wanted = [
                (x, into) for x, into in zip(leaves, self.totals, strict=True) if x is not None and into is not None
            ]
            xs = [x for x, _ in wanted]
            grads = torch.autograd.grad(ys, xs, gs, allow_unused=True, materialize_grads=True)
            for (x, into), grad in zip(wanted, grads, strict=True):
                (into[:, :, rows] if x is leaves[0] else into).add_(grad)


def _with(bias: Bias, tensors: list[Tensor | None]) -> Bias:
    """Return the same bias over other tensors."""
    behind, ahead = tensors
    assert behind is not None
    return Linear(behind, ahead) if isinstance(bias, Linear) else Table(behind, ahead, bias.extended)
