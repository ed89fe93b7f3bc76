"""The forward: each block of queries reads the keys near it, and farther ones as far as reach says that it must.

1. Each block reads the keys that a head with such a bias usually needs.
2. The log-sum-exp of those tells, for each head and block, how far back (or ahead) anything can still matter.
3. What is missing, mostly nothing, is read and joined to what was read before.

Each step is a few runs (runs.py): large calls that fill all cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lengthen.attention.backends import reference
from lengthen.attention.backends.chunked import runs
from lengthen.attention.backends.chunked.runs import Heads, Run, Window, plan, together, width
from lengthen.attention.backends.chunked.scores import Scores
from lengthen.attention.backends.ops import Results, empty_results
from lengthen.attention.biases import Bias
from lengthen.attention.masks import Listed, ListedBehind
from lengthen.attention.problem import Problem
from lengthen.attention.reach import Ball

FEW = 32  # for so few queries, the pass over all keys that reach needs costs what it saves
SHORT = 1024  # for so few keys, asking costs what it saves
USUAL = 11.0  # what a bias usually falls by until a head's reach ends, beside −log tolerance: for what is read first
UNIT = 64  # keys that a head's usual reach is counted in
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
            reading.read(batch)
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
            problem._replace(
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
        yield rows, problem._replace(q=q[:, :, rows], k=k, v=v, mask=mask, q_start=problem.q_start + start)


def _listed(problem: Problem, first: Tensor, last: Tensor) -> Listed:
    return (Listed if problem.mask.two_sided else ListedBehind)(first=first, last=last, keys=problem.k.shape[2])


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
        self.sides = (False, True)[: 1 + scores.two_sided]  # behind, and ahead
        self.usual = [[scores.keys] * scores.q.shape[1]] * len(self.sides)  # how far each head usually looks
        many = problem.ball is not None or (scores.queries > FEW and scores.keys > SHORT)
        if problem.bias is not None and problem.tolerance > 0 and many:
            ball = problem.ball
            if ball is None or problem.decay is not None:
                ball = Ball.around(problem.k, centred=problem.decay is None)
            self.highest = ball.highest_score(problem.q, problem.scale)
            # Each side may leave its part unread.
            self.log_tolerance = math.log(problem.tolerance) - math.log(len(self.sides))
            self.usual = [self._usual(problem.bias, ahead) for ahead in self.sides]

    def _usual(self, bias: Bias, ahead: bool) -> list[int]:
        """Return how far each head usually looks to a side, and no farther than there are keys."""
        farthest = self._farthest(ahead)
        top = bias.tail(torch.zeros((), dtype=torch.int64, device=self.lse.device), farthest, ahead)
        limit = (top + self.log_tolerance - USUAL).to(self.lse.dtype).unsqueeze(-1)
        units = (bias.reach(limit, farthest, ahead).squeeze(-1) / UNIT).nan_to_num(nan=torch.inf)
        return [int(x) * UNIT for x in units.ceil().clamp(1, -(-self.scores.keys // UNIT)).tolist()]

    def _farthest(self, ahead: bool) -> int:
        """Return the farthest distance of the call to a side."""
        return max(0, self.scores.keys - 1 - self.scores.q_start if ahead else self.scores.farthest)

    def read(self, batch: slice) -> None:
        """Read what these sequences must of the keys that they see."""
        visible, heads = self._visible(batch), self.scores.q.shape[1]
        if any(lo >= hi for lo, hi in visible):  # what no run visits sees nothing
            self.out[batch], self.lse[batch] = 0, -torch.inf
        near = [[self._near(i, window, head) for i, window in enumerate(visible)] for head in range(heads)]
        read: list[list[Window]] = []
        for group in together(near, self.scores.problem.group):
            read += [self._read(group, batch)] * (group.at.stop - group.at.start)
        for ahead in self.sides if self.highest is not None else ():
            needed = self._needed(visible, read, batch, ahead)
            missing = [
                [(hi, need) if ahead else (need, lo) for (lo, hi), need in zip(*pair, strict=True)]
                for pair in zip(read, needed, strict=True)
            ]
            for at in same(read):  # only these end alike
                for group in together(missing[at], self.scores.problem.group, at.start):
                    more = self._read(group, batch, "lo" if ahead else "hi", read[at.start])
                    joined = [
                        (lo, max(hi, far[1])) if ahead else (min(lo, far[0]), hi)
                        for (lo, hi), far in zip(read[group.at.start], more, strict=True)
                    ]
                    read[group.at] = [joined] * (group.at.stop - group.at.start)
        self.spans[:, batch] = torch.tensor(read, dtype=torch.int32, device=self.spans.device).permute(2, 0, 1)[:, None]

    def _intervals(self, batch: slice) -> tuple[Tensor, Tensor]:
        """Return first and last of each query, `[batch or 1, 1, blocks, ROWS]`."""
        first, last = self.scores.first, self.scores.last
        batch = batch if first.shape[0] > 1 else slice(None)
        return _blocks(first[batch, None]), _blocks(last[batch, None])

    def _visible(self, batch: slice) -> list[Window]:
        """Return the keys that one or more queries of each block see."""
        first, last = self._intervals(batch)
        blind = first > last
        lo = first.masked_fill(blind, self.scores.keys).amin(dim=(0, 1, 3))
        hi = last.masked_fill(blind, -1).amax(dim=(0, 1, 3)) + 1
        return list(zip(lo.tolist(), hi.tolist(), strict=True))

    def _near(self, block: int, window: Window, head: int) -> Window:
        """Return which keys a block reads first: those of its window no farther than the head usually looks."""
        (lo, hi), start = window, self.scores.q_start + block * runs.ROWS
        near_hi = min(hi, max(start + runs.ROWS, lo) + (self.usual[1][head] if self.scores.two_sided else 0))
        return max(lo, min(start, near_hi) - self.usual[0][head]), near_hi

    def _needed(self, visible: list[Window], read: list[list[Window]], batch: slice, ahead: bool) -> list[list[int]]:
        """Return the key that each block of each head must read from; or to, exclusive, if ahead."""
        bias, done = self.scores.problem.bias, [[window[ahead] for window in own] for own in read]
        end = [window[ahead] for window in visible]
        if all(own == end for own in done):
            return done
        assert bias is not None
        assert self.highest is not None
        limit = self.lse[batch] + self.log_tolerance - self.highest[batch]
        far = _blocks(bias.reach(limit, self._farthest(ahead), ahead))
        place = _blocks(self.scores.position)
        first, last = self._intervals(batch)
        reached, most = torch.tensor(done, device=far.device), torch.tensor(end, device=far.device)
        done_with = first > last  # who sees nothing, or nothing more on this side
        done_with = done_with | ((last < reached[..., None]) if ahead else (first >= reached[..., None]))
        # NaN is above nothing: then everything is read. One key more than needed makes up for rounding.
        if ahead:
            need = torch.minimum(place + far + 2, last + 1.0).masked_fill(done_with, -torch.inf)
            need = need.amax(dim=(0, 3)).ceil().nan_to_num(nan=torch.inf)
            return torch.minimum(torch.maximum(need, reached), most).long().tolist()
        need = torch.maximum(place - far, first + 0.0).masked_fill(done_with, torch.inf)
        need = need.amin(dim=(0, 3)).floor().nan_to_num(nan=-torch.inf)
        return torch.maximum(torch.minimum(need, reached), most).long().tolist()

    def _read(self, group: Heads, batch: slice, ends: str = "", before: Sequence[Window] = ()) -> list[Window]:
        """Read the windows of some heads, one for each block; return what was read, which may be a little more.

        With `ends` it is joined to what was read before.
        """
        scores, windows, heads = self.scores, group.windows, group.at
        sizes = (scores.queries, scores.keys, heads.stop - heads.start, scores.q.shape[3])
        done = list(windows)
        for planned in plan(windows, *sizes, ends, width(before) // len(windows)):
            for run in planned.of(batch, heads, scores.problem.group):
                for call, bias, blind in scores.calls(run, scores.fused):
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
        q, k, v = run.take(scores.rows), run.windows(scores.k), run.windows(scores.v)
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
    """Return numbers of all queries, `[…, queries]`, as `[…, blocks, ROWS]`; the last number is repeated."""
    missing = -x.shape[-1] % runs.ROWS
    x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1) if missing else x
    return torch.unflatten(x, -1, (-1, runs.ROWS))


def same(heads: Sequence[object]) -> Iterator[slice]:
    """Yield neighbouring heads that are equal."""
    start = 0
    for head in range(1, len(heads) + 1):
        if head == len(heads) or heads[head] != heads[start]:
            yield slice(start, head)
            start = head
