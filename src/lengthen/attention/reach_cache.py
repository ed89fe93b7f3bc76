"""The cache policy "reach": each head keeps the keys within its reach, so device memory does not grow with length.

A bias that falls with distance makes far keys negligible (reach.py has the inequality). A head keeps the keys in its
reach and evicts older ones page by page. Of each page a ball is kept, centre and radius. With s from the ball, D the
distance of the page's nearest key, T the tail of the bias and ℓ the log-sum-exp of what was read, the page weighs at
most

    e^(s + T(D) − ℓ)

of what was read. The mode says what happens to an evicted page:

    exact       it goes to host memory. Where the pages that are not read could weigh more than the tolerance together,
                the heaviest are fetched, read and merged.
    certified   it is dropped. The sum of the pages' possible weights is the row's error bound, and the cache reports
                the largest over all rows. Balls of old pages are merged, so that their number grows like log(length).

Bounds and reaches are not needed to compute an output, so queries are logged with their ℓ, and a page of them is looked
at together. What is kept is read whole.

Where no |scale·q·k| can be above U, as in a model with qk_norm, ℓ ≥ −U and s ≤ U before anything is read. A head with
slope m that keeps D = (2U − log τ − log(1 − e^−m)) / m keys then has a bound of τ, promised in advance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from lengthen.attention.biases import Bias, Decay, Linear
from lengthen.attention.buffer import Buffer, listed, seen_from
from lengthen.attention.masks import Mask
from lengthen.attention.merge import Partial, merge
from lengthen.attention.op import attention
from lengthen.attention.reach import Ball, default_tolerance

FEW = 4  # pages: heads that keep so many or fewer are read together
USUAL = 11.0  # what a bias usually falls by until reach ends, beside −log tolerance: which heads go together at first


@dataclass
class Page:
    """Keys that were given up, of the slots from `base` to `end`: a ball of them, and in exact mode they themselves."""

    base: int
    end: int
    ball: Ball
    kv: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """How many keys it is of."""
        return self.end - self.base

    def rows(self, index: Tensor) -> Page:
        """Return the page of these sequences."""
        ball = Ball(self.ball.centre[index], self.ball.radius[index], self.ball.keys)
        kv = None if self.kv is None else (self.kv[0][index.cpu()], self.kv[1][index.cpu()])
        return Page(self.base, self.end, ball, kv)

    def joined(self, later: Page) -> Page:
        """Return this page and the one after it as one: a ball that holds both balls."""
        a, b = self.ball, later.ball
        wide = a.radius.dtype
        centre = ((a.centre.to(wide) * a.keys + b.centre.to(wide) * b.keys) / (a.keys + b.keys)).to(a.centre.dtype)
        far = [(x.centre.to(wide) - centre.to(wide)).norm(dim=-1) + x.radius for x in (a, b)]
        slack = 1 + 8 * centre.shape[-1] * torch.finfo(wide).eps  # of rounding, as a Ball has it
        return Page(self.base, later.end, Ball(centre, torch.maximum(*far) * slack, a.keys + b.keys))


class Log:
    """The last queries of a group, their log-sum-exps, and the first slot that each sees."""

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


class Group:
    """Heads that keep alike many keys, and are read in one call."""

    def __init__(self, q_heads: Tensor, k_heads: Tensor, keep: int | None, promised: bool, page: int) -> None:
        self.q_heads, self.k_heads, self.keep, self.promised = q_heads, k_heads, keep, promised
        self.buffer, self.log = Buffer(), Log(page)
        self.bias: Bias | None = None  # of these heads, at the last call
        self.centred = True  # whether a ball may have any centre: not with a decay
        self.pages: list[Page] = []
        self.need = torch.zeros((), dtype=torch.float64, device=q_heads.device)  # the farthest reach so far
        self.before, self.due = 0.0, 0  # in exact mode, the farthest reach of the page before; when to look again
        self._stacked: tuple[Tensor, Tensor, Tensor] | None = None

    def rows(self, index: Tensor) -> Group:
        """Return the group with these sequences, of which nothing is logged."""
        other = Group(self.q_heads, self.k_heads, self.keep, self.promised, self.log.size)
        other.buffer, other.need = self.buffer.rows(index), self.need
        other.bias, other.centred = self.bias, self.centred
        other.before, other.due = self.before, self.due
        other.pages = [page.rows(index) for page in self.pages]
        return other

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        balls = sum(x.numel() * x.element_size() for p in self.pages for x in (p.ball.centre, p.ball.radius))
        return self.buffer.nbytes + self.log.nbytes + balls

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(x.numel() * x.element_size() for p in self.pages if p.kv is not None for x in p.kv)

    def weights(self, q: Tensor, lse: Tensor, first: Tensor) -> Tensor:
        """Return the logarithm of what each page could weigh beside what was read, `[batch, heads, queries, pages]`.

        The queries are those of the last slots.
        """
        assert self.bias is not None
        scale, bias = 1 / math.sqrt(q.shape[3]), self.bias
        if self._stacked is None:
            balls = [page.ball for page in self.pages]
            ends = torch.tensor([page.end for page in self.pages], device=q.device)
            self._stacked = torch.stack([b.centre for b in balls], 2), torch.stack([b.radius for b in balls], 2), ends
        centre, radius, ends = self._stacked
        each = q.shape[1] // centre.shape[1]
        wide = q.to(radius.dtype)
        dot = wide @ centre.to(radius.dtype).repeat_interleave(each, dim=1).mT
        spread = wide.norm(dim=-1, keepdim=True) * radius.repeat_interleave(each, dim=1).unsqueeze(2)
        place = torch.arange(self.buffer.end - q.shape[2], self.buffer.end, device=q.device)
        bias = Linear(bias.slopes.double()) if isinstance(bias, Linear) else bias
        tail = bias.tail(place.unsqueeze(1) - ends + 1, self.buffer.end - 1)  # [heads, queries, pages]
        weight: Tensor = (scale * dot + abs(scale) * spread).double() + tail - lse.double().unsqueeze(-1)
        # NaN is no bound. Who does not see a page, or sees nothing, leaves none of it out.
        weight = weight.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        blind = (first.unsqueeze(-1) >= ends).unsqueeze(1) | (lse == -torch.inf).unsqueeze(-1)
        return weight.masked_fill(blind, -torch.inf)

    def give_up(self, forget: int, exact: bool) -> None:
        """Give up pages that are beyond what the group keeps; forget what nobody looks at again."""
        buffer, page = self.buffer, self.log.size
        if self.keep is not None and not self.promised and buffer.end >= self.due:
            need = float(self.need)  # read once per page: the CPU waits for it
            self.keep, self.due = kept_for(max(need, self.before), page), buffer.end + page
            if exact:  # a far query is past soon; certified, one like it may come again
                self.before, self.need = need, torch.zeros_like(self.need)
        full = (len(buffer) - self.keep) // page if self.keep is not None else 0
        if full > 0:
            self._stacked, keys = None, full * page
            k, v = buffer.k[:, :, :keys], buffer.v[:, :, :keys]
            if exact:
                self.pages += in_pages(buffer.base, k, v, page, self.centred)
            else:
                self.pages.append(Page(buffer.base, buffer.base + keys, Ball.around(k, self.centred)))
                self._merge()
            buffer.drop(buffer.base + keys)
        buffer.drop(forget)
        if self.pages and self.pages[0].end <= forget:
            self.pages, self._stacked = [one for one in self.pages if one.end > forget], None

    def _merge(self) -> None:
        """Make each page at least twice as large as the second one after it: their number grows like log(length)."""
        for at in range(len(self.pages) - 3, -1, -1):
            if self.pages[at].size < 2 * self.pages[at + 2].size:
                self.pages[at : at + 2] = [self.pages[at].joined(self.pages[at + 1])]


class ReachLayer:
    """One layer's keys and values, of which each head keeps what it can still reach on the device."""

    def __init__(self, exact: bool, tolerance: float | None, highest: float | None, page: int) -> None:
        self.exact, self.tolerance, self.highest, self.page = exact, tolerance, highest, page
        self.groups: list[Group] = []
        self.length = 0
        self.unread: Tensor | None = None  # the largest weight of what was not read beside what was, as a logarithm

    @property
    def bound(self) -> float:
        """What fraction of its softmax mass no row has left unread more of."""
        self.settle()
        return 0.0 if self.unread is None else float(self.unread.exp())

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(group.nbytes for group in self.groups)

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(group.host_nbytes for group in self.groups)

    @property
    def kept(self) -> int:
        """How many slots a head keeps on the device, at the most."""
        return max((len(group.buffer) for group in self.groups), default=0)

    def rows(self, index: Tensor) -> ReachLayer:
        """Return the layer of these sequences, in memory of its own."""
        self.settle()
        other = ReachLayer(self.exact, self.tolerance, self.highest, self.page)
        other.groups = [group.rows(index) for group in self.groups]
        other.length, other.unread = self.length, self.unread
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
        self.length += k.shape[2]
        first, last = mask.interval(q.shape[2], self.length, self.length - q.shape[2], q.device)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for group in self.groups:
            group.bias, own = _of_heads(bias, decay, group)
            group.centred = decay is None
            out[:, group.q_heads] = self._attend(
                group, q[:, group.q_heads], k[:, group.k_heads], v[:, group.k_heads], own, mask, first, last, forget
            )
        return out

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
        forget: int,
    ) -> Tensor:
        buffer, log = group.buffer, group.log
        fits = log.count + q.shape[2] <= log.size
        if not fits:
            self._settle_log(group)
        buffer.append(k, v)
        seen = seen_from(mask, q.shape[2], buffer.base, buffer.end, q.device)
        near = attention(q, buffer.k, buffer.v, group.bias, decay, mask=seen, tolerance=0, return_lse=True)
        lse = near[1]
        if self.exact and group.pages:
            near = self._with_pages(group, near, q, decay, first, last)
        if fits:
            log.add(q, lse, first)
        else:
            self._settle(group, q, lse, first)
        if not fits or log.count == log.size:
            self._settle_log(group)
            group.give_up(forget, self.exact)
        return near[0]

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

    def reserve(self) -> None:
        """Make room to log a page of queries."""
        for group in self.groups:
            keys = group.buffer.k
            group.log.reserve(keys.new_empty(keys.shape[0], len(group.q_heads), 0, keys.shape[3]))

    def advance(self) -> None:
        """Count a slot that was written and logged without `attend`; with a page of them, look at the queries."""
        self.length += 1
        for group in self.groups:
            group.buffer.advance()
            group.log.count += 1
            if group.log.count == group.log.size:
                self._settle_log(group)
                group.give_up(0, self.exact)

    @property
    def limit(self) -> float:
        """The logarithm of the tolerance."""
        return math.log(self.tolerance) if self.tolerance else -math.inf

    def settle(self) -> None:
        """Look at all queries that are logged."""
        for group in self.groups:
            self._settle_log(group)

    def _settle_log(self, group: Group) -> None:
        if group.log.count:
            self._settle(group, *group.log.take())

    def _settle(self, group: Group, q: Tensor, lse: Tensor, first: Tensor) -> None:
        """Bound what the last queries left unread, and measure how far they reach."""
        assert group.bias is not None
        if group.pages and not self.exact:
            self._left(group.weights(q, lse, first))
        if group.keep is not None and not group.promised:
            # In exact mode what lies farther back can be fetched: a few keys of a large norm keep no others here.
            k = group.buffer.k[:, :, -group.log.size :] if self.exact else group.buffer.k
            highest = Ball.around(k, group.centred).highest_score(q, 1 / math.sqrt(q.shape[3]))
            far = group.bias.reach(lse + self.limit - highest, self.length - 1)
            far = far.double().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(lse == -torch.inf, 0)
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
        heads: dict[int | None, list[int]] = {}
        for head, needed in enumerate(far.view(key_heads, each).nan_to_num(nan=math.inf).amax(1).tolist()):
            keep = kept_for(needed if isinstance(bias, Linear) or needed <= farthest else math.inf, FEW * self.page)
            heads.setdefault(keep, []).append(head)
        groups = []
        for keep, members in heads.items():
            k_heads = torch.tensor(members, device=device)
            q_heads = (k_heads.unsqueeze(1) * each + torch.arange(each, device=device)).flatten()
            # What is not promised is measured; a head that usually reaches everything may turn out not to.
            least = keep if promised or self.tolerance == 0 else self.page
            groups.append(Group(q_heads, k_heads, least, promised, self.page))
        return groups


def kept_for(need: float, least: int) -> int | None:
    """Return how many keys are kept for a reach: the next power of two, with one for rounding; None: all."""
    return 1 << (max(least, math.ceil(need) + 1) - 1).bit_length() if need < 1 << 40 else None


def _of_heads(bias: Bias, decay: Decay | None, group: Group) -> tuple[Bias, Decay | None]:
    """Return the bias and decay of a group's heads."""
    index = group.q_heads
    if decay is not None and decay.rates.dim() == 2:
        decay = Decay(decay.rates[index], decay.floor)
    if isinstance(bias, Linear):
        return Linear(bias.slopes[index]), decay
    return replace(bias, values=bias.values[index], ahead=None), decay


def in_pages(base: int, k: Tensor, v: Tensor, page: int, centred: bool) -> list[Page]:
    """Return keys and values `[batch, key_heads, keys, width]` of the slots from `base` as pages in host memory."""
    batch, heads, _, width = k.shape
    ball = Ball.around(k.reshape(batch, -1, page, width), centred)  # of all pages at once
    centres, radii = ball.centre.view(batch, heads, -1, width), ball.radius.view(batch, heads, -1)
    parts = zip(*(torch.split(_to_host(x), page, dim=2) for x in (k, v)), strict=True)
    return [
        Page(base + i * page, base + (i + 1) * page, Ball(centres[:, :, i], radii[:, :, i], page), kv)
        for i, kv in enumerate(parts)
    ]


def _to_host(x: Tensor) -> Tensor:
    """Return a copy in host memory, pinned where a GPU fetches from it."""
    if not x.is_cuda:
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
