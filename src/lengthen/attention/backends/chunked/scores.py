"""The scores of a run, and what all runs of a call share: wide tensors, the bias along all distances, intervals.

Shapes: a run's call has n blocks (or sequences) of h heads with r rows and w keys each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen.attention.backends.chunked.runs import Rows, Run
from lengthen.attention.biases import Bias, Decay, Table
from lengthen.attention.masks import EVERYTHING, positions
from lengthen.attention.problem import Problem

TILE = 1 << 22  # scores, or entries of a mask, held at once: 16 MB in float32
QUIET = 4.0  # by how much what is taken for nothing is below the dtype's rounding, as a logarithm
SAFE_EXPONENT = 20.0  # keys of a segment are multiplied by up to e^20 of a decay's inverse powers: far inside float32


class Scores:
    """What the runs of one problem share; its q_start is a number."""

    def __init__(self, problem: Problem) -> None:
        assert isinstance(problem.q_start, int)
        self.problem, self.q_start, self.two_sided = problem, problem.q_start, problem.mask.two_sided
        self.q, self.k, self.v = (x.detach().to(problem.compute) for x in (problem.q, problem.k, problem.v))
        self.queries, self.keys, self.width = self.q.shape[2], self.k.shape[2], self.v.shape[3]
        self.first, self.last = problem.interval()
        self.position = positions(self.queries, self.q_start, self.q.device)
        self.places = [Rows(x[:, None]) for x in (self.first, self.last, self.position)]
        self.farthest = self.q_start + self.queries - 1
        self.distance = torch.arange(self.farthest, self.q_start - self.keys, -1, device=self.q.device)
        self.along = self.bias_along(problem.bias, self.q.dtype)
        # Torch's fused kernels read these runs; they ask for features beside each other, and for as many in values.
        tables = [x for x in self._biases() if isinstance(problem.bias, Table)]
        self.hides = any(bool((x == -torch.inf).any()) for x in tables)
        self.fused = self.q.device.type == "cpu" and problem.decay is None and not self.hides
        if self.fused:
            widest = max(self.q.shape[3], self.width)
            self.q, self.k, self.v = (
                (x if x.stride(3) == 1 else x.contiguous())
                if x.shape[3] == widest
                else F.pad(x, (0, widest - x.shape[3]))
                for x in (self.q, self.k, self.v)
            )
        self.rows = Rows(self.q)
        lengths = [float(torch.linalg.vector_norm(x, dim=-1).amax()) for x in (self.q, self.k)]
        self.largest = abs(problem.scale) * lengths[0] * lengths[1]  # no score is farther from 0, before its bias
        self.quiet = self._quiet() if self.fused and problem.bias is not None else self.along

    def _quiet(self) -> Tensor:
        """Return the bias along all distances, −∞ where keys weigh nothing beside the query's own, all taken together.

        That changes no result, but some CPUs take a hundred times as long over numbers as small as those weights.
        """
        here = self.farthest
        if self.problem.mask.formula() is None or not 0 <= here < self.along.shape[1]:
            return self.along  # a query may not see its own key, or none stands at one
        nothing = 2 * self.largest + math.log(self.keys / torch.finfo(self.q.dtype).eps) + QUIET
        return self.along.masked_fill(self.along < self.along[:, here, None] - nothing, -torch.inf)

    def _biases(self) -> list[Tensor]:
        bias = self.problem.bias
        return [] if bias is None else [x.detach() for x in bias.tensors if x is not None]

    def finite(self) -> bool:
        """Return whether no input, bias or score is NaN or infinite (a bias may be −∞), nor any sum of values."""
        value = max(abs(float(end)) for end in self.v.aminmax()) if self.width else 0.0
        biases = [abs(float(x.amax())) for x in self._biases() if x.numel()]
        most = torch.finfo(self.q.dtype).max / 4
        return self.largest + sum(biases) < most and value * self.keys < most

    def bias_along(self, bias: Bias | None, dtype: torch.dtype) -> Tensor:
        """Return the bias at every distance of the call, falling, `[heads or 1, distances]`.

        Where no query looks ahead, keys ahead get −∞ in it: then the diagonal needs no other mask.
        """
        distance = self.distance
        if bias is None:
            along = self.q.new_zeros(1, len(distance), dtype=dtype)
        else:
            if isinstance(bias, Table):  # past a table's ends lies only what no query sees
                ends = [x.shape[1] - 1 for x in bias.tensors if x is not None]
                distance = distance if bias.extended else distance.clamp(-ends[-1], ends[0])
            along = bias.at(distance, dtype)
        return along if self.two_sided else along.masked_fill(self.distance < 0, -torch.inf)

    def skip(self, run: Run) -> int:
        """Return where the distance of a run's first row and column stands along all distances."""
        return self.farthest - (self.q_start + run.last - run.lo)

    def bias(self, run: Run) -> Tensor:
        """Return the bias of a run, `[n or 1, h or 1, r, w]`: a view of the vector along all distances."""
        first, last = self.q_start + run.start, self.q_start + run.last
        own = run.lo <= first and last < run.lo + run.width  # each row reads its query's own key
        along = (self.quiet if own else self.along)[run.heads if self.along.shape[0] > 1 else slice(None)]
        calls, stride = (1, 0) if run.step or run.blocks == 1 else (run.blocks, run.rows)
        shape, strides = (calls, along.shape[0], run.rows, run.width), (stride, along.stride(0), 1, 1)
        return along.as_strided(shape, strides, along.storage_offset() + self.skip(run))

    def edges(self, run: Run) -> tuple[Tensor, Tensor] | None:
        """Return the first and last column that each row sees, `[n or 1, 1, r]`; None: all that the bias shows."""
        everybody = self.two_sided or self.q_start + run.start >= run.lo  # sees a key of the run, if a mask lets it
        if self.problem.mask.formula() == (EVERYTHING, 1) and everybody:
            return None
        lo = run.lo + run.step * torch.arange(run.blocks, device=self.q.device).view(-1, 1, 1)
        first, last, position = (run.take(x) - lo for x in self.places)
        end = position.clamp(max=run.width - 1) if not self.two_sided else run.width - 1
        if everybody and bool(((first <= 0) & (last >= end)).all()):
            return None
        first, last = first.clamp(0, run.width), last.clamp(-1, run.width - 1)
        if run.step and bool((first == first[:1]).all() and (last == last[:1]).all()):
            return first[:1], last[:1]
        return first, last

    def calls(self, run: Run, fused: bool) -> Iterator[tuple[Run, Tensor, Tensor | None]]:
        """Yield a run as it is called: for fused kernels with a block for each thread, for others a part at a time.

        A part's mask, and its scores where they are held, are not too large. Each comes with its bias, −∞ where hidden,
        `[n or 1, h or 1, r, w]`, and the rows that see nothing, `[n, 1, r]`.
        """
        run = run.spread(torch.get_num_threads()) if fused else run
        edges = self.edges(run)
        tile = 0 if edges is None else edges[0].shape[0] * run.count * run.rows * run.width
        if max(tile, 0 if fused else run.scores) > TILE:
            smaller = list(run.split(TILE))
            if len(smaller) > 1:
                for part in smaller:
                    yield from self.calls(part, fused)
                return
        bias = self.bias(run)
        if edges is None:
            yield run, bias, None
            return
        j = torch.arange(run.width, device=self.q.device)
        first, last = (x.unsqueeze(-1) for x in edges)
        hidden = (j < first) | (j > last)
        shape = (max(hidden.shape[0], bias.shape[0]), bias.shape[1], *hidden.shape[2:])
        yield run, bias.expand(shape).masked_fill(hidden, -torch.inf), edges[0] > edges[1]

    def product(self, run: Run, q: Tensor, k: Tensor, decay: Decay | None) -> Tensor:
        """Return Σ_f q·k·rates[f]^|i − j| of a run, `[n, h, r, w]`, from its q and k, one k for each head.

        With a decay, keys behind the query are scaled by rate^−(j − s) and queries by rate^(i − s), s the start of the
        keys' segment, which is short enough for that; keys ahead from the segment's other end.
        """
        if decay is None:
            return q @ k.mT
        steepest = -float(decay.rates.detach().double().log().min())
        longest = max(1, int(SAFE_EXPONENT / max(steepest, 1e-9)))
        heads = run.heads if decay.rates.dim() > 1 else slice(None)
        row = self.q_start + run.last - run.lo - torch.arange(run.rows, device=q.device)  # where rows stand, by columns
        parts = []
        for lo in range(0, run.width, longest):
            hi = min(lo + longest, run.width)
            column = torch.arange(lo, hi, device=q.device)

            def side(i: Tensor, j: Tensor, part: Tensor) -> Tensor:
                return (q * decay.power(i.clamp(min=0), q.dtype)[heads]) @ (part * decay.power(-j, q.dtype)[heads]).mT

            behind = side(row - lo, column - lo, k[:, :, lo:hi])
            if self.two_sided:
                ahead = side(hi - 1 - row, hi - 1 - column, k[:, :, lo:hi])
                behind = torch.where(column <= row.unsqueeze(-1), behind, ahead)
            parts.append(behind)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
