"""The forward: each block of queries reads the keys near it, and farther ones as far as reach says that it must.

1. Blocks whose keys are few read all of them. The others read the keys beside their diagonal.
2. The log-sum-exp of those tells, for each head and block, how far back (or ahead) anything can still matter.
3. What lies between is read, and joined to what was read before.

Each step is a few runs (runs.py): large calls that fill all cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lengthen.attention.backends import reference
from lengthen.attention.backends.chunked import runs
from lengthen.attention.backends.chunked.runs import Run, Window, alike, plan
from lengthen.attention.backends.chunked.scores import Scores
from lengthen.attention.backends.ops import Results, empty_results
from lengthen.attention.masks import Listed, ListedBehind
from lengthen.attention.problem import Problem
from lengthen.attention.reach import Ball

NEAR = 128  # keys read beside the diagonal before reach is asked
FEW = 32  # for so few queries, the pass over all keys that reach needs costs what it saves
SHORT = 1024  # for so few keys, asking costs what it saves
USUAL = 28.0  # what a bias usually falls by until a head's reach ends: what is read first goes by it, results do not
TOGETHER = 512  # sequences of so few keys are read together, though they see different ones
CAREFUL = 1 << 16  # scores that the reference is given at once
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def spans_shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the shape of the spans of keys that blocks of queries read."""
    return 2, q.shape[0], q.shape[1], (q.shape[2] + runs.ROWS - 1) // runs.ROWS


def forward(problem: Problem, wanted: bool) -> Results:
    """Return out, lse in the dtype computed in, what was lost in rounding if it is wanted, and which keys were read."""
    shape = spans_shape(problem.q, problem.k, problem.v)
    out, lse, residual, spans = results = empty_results(problem.q, problem.v, shape, wanted)
    if problem.empty:
        for x, nothing in zip(results, (0, -torch.inf, 0, 0), strict=True):
            if x is not None:
                x.fill_(nothing)
        return results
    if isinstance(problem.q_start, Tensor):
        for b, alone in sequences(problem):
            for whole, part in zip(results, forward(alone, wanted), strict=True):
                if whole is not None and part is not None:
                    (whole[:, b] if whole is spans else whole[b]).copy_(part)
        return results
    wide = out if out.dtype == problem.compute else torch.empty_like(out, dtype=problem.compute)
    scores = Scores(problem)
    if scores.finite():
        reading = _Reading(scores, wide, lse, spans)
        for batch in batches(scores):
            for heads in alike(reading.usual, problem.group):
                reading.read(batch, heads)
    else:
        for rows, some in careful_parts(problem):
            wide[:, :, rows], lse[:, :, rows] = reference.run(some)
        spans.fill_(-1)
    if wide is not out:
        out.copy_(wide)
        if residual is not None:
            residual.copy_(wide.sub_(out))
    return results


def sequences(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    """Yield each sequence of a problem alone, with the number that its first query stands at."""
    assert isinstance(problem.q_start, Tensor)
    first, last = problem.interval()
    for b, start in enumerate(problem.q_start.expand(problem.q.shape[0]).tolist()):
        one, row, ball = slice(b, b + 1), slice(b, b + 1) if first.shape[0] > 1 else slice(None), problem.ball
        yield (
            one,
            replace(
                problem,
                **{name: getattr(problem, name)[one] for name in "qkv"},
                mask=_listed(problem, first[row], last[row]),
                q_start=start,
                ball=None if ball is None else Ball(ball.centre[one], ball.radius[one], ball.keys),
            ),
        )


def careful_parts(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    """Yield some rows at a time as problems for the reference, which knows what is not finite, in float32 at least."""
    assert isinstance(problem.q_start, int)
    first, last = problem.interval()
    q, k, v = (x.detach().to(problem.compute) for x in (problem.q, problem.k, problem.v))
    step = max(1, CAREFUL // (q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        rows = slice(start, min(start + step, q.shape[2]))
        mask = _listed(problem, first[:, rows], last[:, rows])
        yield rows, replace(problem, q=q[:, :, rows], k=k, v=v, mask=mask, q_start=problem.q_start + start)


def _listed(problem: Problem, first: Tensor, last: Tensor) -> Listed:
    return (Listed if problem.mask.two_sided else ListedBehind)(first=first, last=last)


def batches(scores: Scores) -> Iterator[slice]:
    """Yield sequences that are read together: all, unless they are long and see different keys."""
    count = scores.q.shape[0]
    together = scores.first.shape[0] == 1 or scores.keys <= TOGETHER
    yield from [slice(0, count)] if together else (slice(b, b + 1) for b in range(count))


class _Reading:
    """The state of a forward: out and lse of what has been read, and which keys that was."""

    def __init__(self, scores: Scores, out: Tensor, lse: Tensor, spans: Tensor) -> None:
        self.scores, self.out, self.lse, self.spans = scores, out, lse, spans
        problem = scores.problem
        self.highest: Tensor | None = None  # of each query's scores, before their bias; None: no reach
        self.usual: list[tuple[int, ...]] = [()] * scores.q.shape[1]  # how far each head usually looks, to each side
        many = problem.ball is not None or (scores.queries > FEW and scores.keys > SHORT)
        if problem.bias is not None and problem.tolerance > 0 and many:
            ball = problem.ball
            if ball is None or problem.decay is not None:
                ball = Ball.around(scores.k, centred=problem.decay is None)
            self.highest = ball.highest_score(scores.q, problem.scale)
            sides = [self._usual(ahead) for ahead in (False, True)[: 1 + scores.two_sided]]
            self.usual = list(zip(*sides, strict=True))
            self.log_tolerance = math.log(problem.tolerance / len(sides))  # each side may leave its part unread

    def _usual(self, ahead: bool) -> list[int]:
        """Return how far each head usually looks to a side: whole blocks, and no farther than there are keys."""
        bias = self.scores.problem.bias
        assert bias is not None
        farthest = self._farthest(ahead)
        top = bias.tail(torch.zeros((), dtype=torch.int64, device=self.lse.device), farthest, ahead)
        far = bias.reach((top - USUAL).to(self.lse.dtype).unsqueeze(-1), farthest, ahead).squeeze(-1)
        most = -(-self.scores.keys // runs.ROWS)
        return [int(x) * runs.ROWS for x in (far.nan_to_num(nan=torch.inf) / runs.ROWS).ceil().clamp(0, most).tolist()]

    def _farthest(self, ahead: bool) -> int:
        """Return the farthest distance of the call to a side."""
        return max(0, self.scores.keys - 1 - self.scores.q_start if ahead else self.scores.farthest)

    def read(self, batch: slice, heads: slice) -> None:
        """Read what these heads must of the keys that these sequences see."""
        visible = self._visible(batch)
        if any(lo >= hi for lo, hi in visible):  # what no run visits sees nothing
            self.out[batch, heads], self.lse[batch, heads] = 0, -torch.inf
        read = self._read([self._near(i, window, heads) for i, window in enumerate(visible)], batch, heads)
        if self.highest is not None:
            for ahead in (False, True)[: 1 + self.scores.two_sided]:
                needed = self._needed(visible, read, batch, heads, ahead)
                far = [(hi, need) if ahead else (need, lo) for (lo, hi), need in zip(read, needed, strict=True)]
                far = self._read(far, batch, heads, ends="lo" if ahead else "hi")
                read = [
                    (lo, max(hi, more[1])) if ahead else (min(lo, more[0]), hi)
                    for (lo, hi), more in zip(read, far, strict=True)
                ]
        for side, keys in zip(self.spans, zip(*read, strict=True), strict=True):
            side[batch, heads] = torch.tensor(keys, dtype=torch.int32, device=side.device)

    def _intervals(self, batch: slice) -> tuple[Tensor, Tensor]:
        """Return first and last of each query, `[batch or 1, blocks, ROWS]`."""
        first, last = self.scores.first, self.scores.last
        batch = batch if first.shape[0] > 1 else slice(None)
        return _blocks(first[batch]), _blocks(last[batch])

    def _visible(self, batch: slice) -> list[Window]:
        """Return the keys that one or more queries of each block see."""
        first, last = self._intervals(batch)
        blind = first > last
        lo = first.masked_fill(blind, self.scores.keys).amin(dim=(0, 2))
        hi = last.masked_fill(blind, -1).amax(dim=(0, 2)) + 1
        return list(zip(lo.tolist(), hi.tolist(), strict=True))

    def _near(self, block: int, window: Window, heads: slice) -> Window:
        """Return which keys a block reads first: all of its window, or those near it."""
        (lo, hi), start = window, self.scores.q_start + block * runs.ROWS
        end, usual = start + runs.ROWS, self.usual[heads.start]
        if not usual or lo >= hi or (start - lo <= usual[0] + NEAR and hi - end <= usual[-1] + NEAR):
            return window
        near_hi = min(hi, max(end, lo) + (NEAR if self.scores.two_sided else 0))
        return max(lo, min(start, near_hi) - NEAR), near_hi

    def _needed(self, visible: list[Window], read: list[Window], batch: slice, heads: slice, ahead: bool) -> list[int]:
        """Return the key that each block must read from; or to, exclusive, if ahead."""
        bias, done, ends = (
            self.scores.problem.bias,
            [window[ahead] for window in read],
            [window[ahead] for window in visible],
        )
        if done == ends:
            return done
        assert bias is not None
        assert self.highest is not None
        limit = self.lse[batch] + self.log_tolerance - self.highest[batch]
        far = _blocks(bias.reach(limit, self._farthest(ahead), ahead)[:, heads].amax(dim=1))
        place = _blocks(self.scores.position)
        first, last = self._intervals(batch)
        reached, end = torch.tensor([done, ends], device=far.device)
        done_with = first > last  # who sees nothing, or nothing more on this side
        done_with |= (last < reached[:, None]) if ahead else (first >= reached[:, None])
        # NaN is above nothing: then everything is read. One key more than needed makes up for rounding.
        if ahead:
            need = torch.minimum(place + far + 2, last + 1.0).masked_fill(done_with, -torch.inf)
            need = need.amax(dim=(0, 2)).ceil().nan_to_num(nan=torch.inf)
            return torch.minimum(torch.maximum(need, reached), end).long().tolist()
        need = torch.maximum(place - far, first + 0.0).masked_fill(done_with, torch.inf)
        need = need.amin(dim=(0, 2)).floor().nan_to_num(nan=-torch.inf)
        return torch.maximum(torch.minimum(need, reached), end).long().tolist()

    def _read(self, windows: list[Window], batch: slice, heads: slice, ends: str = "") -> list[Window]:
        """Read these windows, one for each block; return what was read, which may be a little more.

        With `ends` it is joined to what was read before.
        """
        scores, done = self.scores, list(windows)
        for planned in plan(windows, scores.queries, scores.keys, heads.stop - heads.start, scores.q.shape[3], ends):
            for run in planned.of(batch, heads, scores.problem.group):
                for call, bias, blind in scores.calls(run, held=not scores.fused):
                    out, lse = self._attend(call, bias, blind)
                    if ends:
                        self._join(call, out, lse)
                    else:
                        self.out[call.at], self.lse[call.at] = call.restore(out), call.restore(lse)
            first = planned.start // runs.ROWS
            for i in range(first, first - (-planned.blocks * planned.rows // runs.ROWS)):
                lo = planned.lo + (i - first) * planned.step
                done[i] = lo, lo + planned.width
        return done

    def _attend(self, run: Run, bias: Tensor, blind: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return out and lse over the keys of a run alone."""
        scores, scale = self.scores, self.scores.problem.scale
        q, k, v = run.take(scores.q), run.windows(scores.k), run.windows(scores.v)
        if scores.fused:
            out, lse = flash(q, k, v, attn_mask=bias.expand(q.shape[0], -1, -1, -1), scale=scale)
            if blind is not None:  # the kernel gives 0 for a row that sees nothing here
                lse = lse.masked_fill(blind, -torch.inf)
            return out[..., : scores.width], lse
        each = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))
        score = scores.product(run, q, k, scores.problem.decay).mul_(scale).add_(bias)
        lse = score.logsumexp(dim=-1)
        weight = score.sub_(lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()
        return weight @ v, lse

    def _join(self, run: Run, out: Tensor, lse: Tensor) -> None:
        """Join a run's result to that of the keys read before."""
        total, old, new = self.out[run.at], self.lse[run.at], run.restore(lse)
        both = torch.logaddexp(old, new)
        base = both.masked_fill(both == -torch.inf, 0)
        total *= (old - base).exp_().unsqueeze(-1)
        total.addcmul_(run.restore(out), (new - base).exp_().unsqueeze(-1))
        old.copy_(both)


def _blocks(x: Tensor) -> Tensor:
    """Return numbers of all queries, `[batch, queries]`, as `[batch, blocks, ROWS]`; the last number is repeated."""
    missing = -x.shape[1] % runs.ROWS
    return torch.cat((x, x[:, -1:].expand(-1, missing)), dim=1).view(x.shape[0], -1, runs.ROWS)
