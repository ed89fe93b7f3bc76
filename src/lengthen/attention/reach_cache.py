"""The cache policy "reach": each head keeps the keys within its reach, so device memory does not grow with length.

A bias that falls with distance makes far keys negligible (reach.py has the inequality). A head keeps the keys in its
reach and evicts older ones page by page. Of each page a ball is kept, centre and radius. With s from the ball, D the
distance of the page's nearest key, T the tail of the bias and ℓ the log-sum-exp of what was read, the page weighs at
most

    e^(s + T(D) − ℓ)

of what was read. With a `Linear` bias only the page's own n keys are summed, e^T(D) − e^T(D + n), so that the pages
together have no more than one tail. The mode says what happens to an evicted page:

    exact       it goes to host memory. Where the pages that are not read could weigh more than the tolerance together,
                the heaviest are fetched, read and merged.
    certified   it is dropped. The sum of the pages' possible weights is the row's error bound, and the cache reports
                the largest over all rows. Balls of old pages are merged, so that their number grows like log(length).

Bounds and reaches are not needed to compute an output, so queries are logged with their ℓ, and a page of them is looked
at together. What is kept is read whole.

Where no |scale·q·k| can be above U, as in a model with qk_norm, ℓ ≥ −U and s ≤ U before anything is read. A head with
slope m that keeps D = (2U − log τ − log(1 − e^−m)) / m keys then has a bound of τ, promised in advance; where a ball
says more than U, U is taken.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from lengthen.attention.biases import Bias, Decay, Linear
from lengthen.attention.buffer import listed, seen_from
from lengthen.attention.masks import Mask
from lengthen.attention.merge import Partial, merge
from lengthen.attention.op import attention
from lengthen.attention.reach import Ball, default_tolerance
from lengthen.attention.reach_group import Group, Page, kept_for

FEW = 4  # pages: heads that keep so many or fewer are read together
USUAL = 11.0  # what a bias usually falls by until reach ends, beside −log tolerance: which heads go together at first


class Log:
    """The last queries of a layer, their log-sum-exps, and the first slot that each sees."""

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 0
        self.q, self.lse, self.first = (torch.empty(0) for _ in range(3))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(x.numel() * x.element_size() for x in (self.q, self.lse, self.first))

    def reserve(self, q: Tensor) -> None:
        """Make room for a page of queries like these, whatever their number."""
        batch, heads, _, width = q.shape
        if self.q.shape != (batch, heads, self.size, width):
            self.q = q.new_zeros(batch, heads, self.size, width)
            self.lse = q.new_zeros(batch, heads, self.size, dtype=torch.promote_types(q.dtype, torch.float32))
            self.first = torch.zeros(batch, self.size, dtype=torch.int64, device=q.device)

    def add(self, q: Tensor, lse: Tensor, first: Tensor) -> None:
        """Add queries, no more than there is room for."""
        self.reserve(q)
        at = slice(self.count, self.count + q.shape[2])
        self.q[:, :, at], self.lse[:, :, at], self.first[:, at] = q, lse, first
        self.count += q.shape[2]

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what was added, and begin anew."""
        count, self.count = self.count, 0
        return self.q[:, :, :count], self.lse[:, :, :count], self.first[:, :count]


class ReachLayer:
    """One layer's keys and values, of which each head keeps what it can still reach on the device."""

    def __init__(self, exact: bool, tolerance: float | None, highest: float | None, page: int) -> None:
        self.exact, self.tolerance, self.highest, self.page = exact, tolerance, highest, page
        self.groups: list[Group] = []
        self.q_order = self.k_order = self.back = torch.empty(0, dtype=torch.int64)  # of heads, by group; and back
        self.log, self.length, self.due = Log(page), 0, page  # due: the length at which pages are given up next
        self.unread: Tensor | None = None  # the largest weight of what was not read beside what was, as a logarithm

    @property
    def bound(self) -> float:
        """What fraction of its softmax mass no row has left unread more of."""
        self.settle()
        return 0.0 if self.unread is None else float(self.unread.exp())

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.log.nbytes + sum(group.nbytes for group in self.groups)

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(group.host_nbytes for group in self.groups)

    @property
    def kept(self) -> int:
        """How many slots a head keeps on the device, at the most."""
        return max((len(group.buffer) for group in self.groups), default=0)

    def rows(self, index: Tensor) -> ReachLayer:
        """Return the layer of these sequences, in memory of its own; nothing is logged of them."""
        self.settle()
        other = ReachLayer(self.exact, self.tolerance, self.highest, self.page)
        other.groups = [group.rows(index) for group in self.groups]
        other.q_order, other.k_order, other.back = self.q_order, self.k_order, self.back
        other.length, other.due, other.unread = self.length, self.due, self.unread
        return other

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, decay: Decay | None, mask: Mask, forget: int = 0
    ) -> Tensor:
        """Return the attention of new queries over what is kept and, in exact mode, over what must be fetched."""
        if bias is None:
            raise ValueError(
                "cache: 'reach' keeps what a bias lets each head still see; expected a position method with a bias "
                "(alibi, t5, kerple, sandwich), got none: use 'full'"
            )
        if self.tolerance is None:
            self.tolerance = default_tolerance(q.dtype)
        if not self.groups:
            self.groups = self._grouped(bias, k.shape[1], k.device)
        fits = self.log.count + q.shape[2] <= self.log.size
        if not fits:
            self.settle()
        self.length += k.shape[2]
        first, last = mask.interval(q.shape[2], self.length, self.length - q.shape[2], q.device)
        q, k, v = self.ordered(q, k, v)
        parts = []
        for group in self.groups:
            group.bias, own = _of_heads(bias, decay, self.q_order[group.q])
            group.centred = decay is None
            heads = q[:, group.q], k[:, group.k], v[:, group.k]
            parts.append(self._attend(group, *heads, own, mask, first, last))
        out, lse = self.together(parts)
        if fits:
            self.log.add(q, lse, first)
        else:
            self._look(q, lse, first)
        self._give_up(forget)
        return out

    def ordered(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return heads in the layer's order, in which each group's stand together."""
        return q[:, self.q_order], k[:, self.k_order], v[:, self.k_order]

    def together(self, parts: list[Partial]) -> Partial:
        """Return the groups' outputs in the heads' usual order, and their ℓ in the layer's."""
        return torch.cat([out for out, _ in parts], dim=1)[:, self.back], torch.cat([lse for _, lse in parts], dim=1)

    def _attend(
        self,
        group: Group,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Decay | None,
        mask: Mask,
        first: Tensor,
        last: Tensor,
    ) -> Partial:
        buffer = group.buffer
        buffer.append(k, v)
        seen = seen_from(mask, q.shape[2], buffer.base, buffer.end, q.device)
        near = attention(q, buffer.k, buffer.v, group.bias, decay, mask=seen, tolerance=0, return_lse=True)
        return self._with_pages(group, near, q, decay, first, last) if self.exact and group.pages else near

    def _with_pages(
        self, group: Group, near: Partial, q: Tensor, decay: Decay | None, first: Tensor, last: Tensor
    ) -> Partial:
        """Return the attention over what is kept and the pages that the tolerance asks for: the heaviest."""
        weight = group.weights(q, near[1], first)
        heaviest = weight.amax(dim=(0, 1, 2))
        order = heaviest.argsort()
        left = heaviest[order].logcumsumexp(0)
        needed = (~(left <= self.limit)).tolist()  # the lightest stay unread, as many as the tolerance allows
        chosen = sorted(at for at, fetch in zip(order.tolist(), needed, strict=True) if fetch)
        if chosen:
            weight = weight.index_fill(3, torch.tensor(chosen, device=q.device), -torch.inf)
        self._left(weight)
        return reduce(merge, self._fetch(group, chosen, q, decay, first, last), near)

    def _left(self, weight: Tensor) -> None:
        """Take note of what was left unread, by query and page."""
        most = weight.logsumexp(dim=3).amax()
        self.unread = most if self.unread is None else torch.maximum(self.unread, most)

    def advance(self) -> None:
        """Count a slot that was written and logged without `attend`; with a page of them, look at the queries."""
        self.length += 1
        self.log.count += 1
        for group in self.groups:
            group.buffer.advance()
        self._give_up(0)

    def _give_up(self, forget: int) -> None:
        """Once per page of slots, whenever the bound was read: look at the queries, and give up what is too far."""
        if self.length < self.due:
            return
        self.settle()
        self.due = self.length + self.page
        for group in self.groups:
            group.give_up(self.page, forget, self.exact)

    @property
    def limit(self) -> float:
        """The logarithm of the tolerance."""
        return math.log(self.tolerance) if self.tolerance else -math.inf

    def settle(self) -> None:
        """Look at all queries that are logged."""
        if self.log.count:
            self._look(*self.log.take())

    def _look(self, q: Tensor, lse: Tensor, first: Tensor) -> None:
        """Bound what the last queries left unread, and measure how far they reach."""
        for group in self.groups:
            assert group.bias is not None
            own, own_lse = q[:, group.q], lse[:, group.q]
            if group.pages and not self.exact:
                self._left(group.weights(own, own_lse, first))
            if group.keep is None or group.promised:
                continue
            # In exact mode what lies farther back can be fetched: a few keys of a large norm keep no others here.
            k = group.buffer.k[:, :, -self.page :] if self.exact else group.buffer.k
            highest = Ball.around(k, group.centred).highest_score(own, 1 / math.sqrt(q.shape[3]))
            far = group.bias.reach(own_lse + self.limit - highest, self.length - 1)
            far = far.double().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(own_lse == -torch.inf, 0)
            group.need = torch.maximum(group.need, far.amax())

    def _fetch(
        self,
        group: Group,
        chosen: list[int],
        q: Tensor,
        decay: Decay | None,
        first: Tensor,
        last: Tensor,
    ) -> list[Partial]:
        """Return the attention over pages from host memory, neighbouring ones together."""
        runs: list[list[Page]] = []
        for at in chosen:
            page = group.pages[at]
            if runs and runs[-1][-1].end == page.base:
                runs[-1].append(page)
            else:
                runs.append([page])
        parts = []
        for run in runs:
            pairs = [page.kv for page in run if page.kv is not None]
            k, v = (torch.cat([pair[i].to(q.device, non_blocking=True) for pair in pairs], dim=2) for i in (0, 1))
            base, end = run[0].base, run[-1].end
            parts.append(
                attention(
                    *(q, k, v, group.bias, decay),
                    mask=listed(first, last, base, end),
                    q_start=self.length - q.shape[2] - base,
                    tolerance=0,
                    return_lse=True,
                )
            )
        return parts

    def _grouped(self, bias: Bias, key_heads: int, device: torch.device) -> list[Group]:
        """Return heads in groups that usually reach alike, or that are promised to."""
        assert self.tolerance is not None
        promised = self.highest is not None and isinstance(bias, Linear) and self.tolerance > 0
        limit = self.limit
        limit -= 2 * self.highest if promised and self.highest is not None else USUAL
        # For a table: up to a distance that it has, or about where its tail would be felt.
        farthest = 0 if isinstance(bias, Linear) else max(bias.values.shape[1] - 1, 1 << 12)
        far = bias.reach(torch.full((bias.heads, 1), limit, dtype=torch.float64, device=device), farthest)
        each = bias.heads // key_heads
        heads: dict[int, dict[int, int | None]] = {}
        for head, needed in enumerate(far.view(key_heads, each).nan_to_num(nan=math.inf).amax(1).tolist()):
            keep = kept_for(needed if isinstance(bias, Linear) or needed <= farthest else math.inf, FEW * self.page)
            # Up to a factor of two apart: a call for each power of two would take longer than reading the more keys.
            heads.setdefault(0 if keep is None else (keep.bit_length() + 1) // 2, {})[head] = keep
        groups, order = [], [head for members in heads.values() for head in members]
        at = 0
        for members in heads.values():
            end, keep = at + len(members), max(members.values(), key=lambda keep: keep or 0)
            # What is not promised is measured; a head that usually reaches everything may turn out not to.
            least = keep if promised or self.tolerance == 0 else self.page
            groups.append(Group(slice(at * each, end * each), slice(at, end), least, promised, self.highest, device))
            at = end
        self.k_order = torch.tensor(order, device=device)
        self.q_order = (self.k_order.unsqueeze(1) * each + torch.arange(each, device=device)).flatten()
        self.back = self.q_order.argsort()
        return groups


def _of_heads(bias: Bias, decay: Decay | None, index: Tensor) -> tuple[Bias, Decay | None]:
    """Return the bias and decay of some heads."""
    if decay is not None and decay.rates.dim() == 2:
        decay = Decay(decay.rates[index], decay.floor)
    if isinstance(bias, Linear):
        return Linear(bias.slopes[index]), decay
    return replace(bias, values=bias.values[index], ahead=None), decay
