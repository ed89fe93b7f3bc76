"""What a group of heads keeps, and what remains of the keys that it gave up: pages with a ball (reach_cache.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthen.attention.biases import Bias, Linear
from lengthen.attention.buffer import Buffer
from lengthen.attention.reach import Ball


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


class Group:
    """Heads that keep alike many keys, and are read in one call: slices of a layer's heads in its own order."""

    def __init__(
        self, q: slice, k: slice, keep: int | None, promised: bool, highest: float | None, device: torch.device
    ) -> None:
        self.q, self.k, self.keep, self.promised = q, k, keep, promised
        self.highest = highest  # what no score is above, where that is known
        self.buffer = Buffer()
        self.bias: Bias | None = None  # of these heads, at the last call
        self.centred = True  # whether a ball may have any centre: not with a decay
        self.pages: list[Page] = []
        self.need = torch.zeros((), dtype=torch.float64, device=device)  # the farthest reach so far
        self.before, self.due = 0.0, 0  # in exact mode, the farthest reach of the page before; when to look again
        self._stacked: tuple[Tensor, ...] | None = None

    def rows(self, index: Tensor) -> Group:
        """Return the group with these sequences."""
        other = Group(self.q, self.k, self.keep, self.promised, self.highest, self.need.device)
        other.buffer, other.need = self.buffer.rows(index), self.need
        other.bias, other.centred = self.bias, self.centred
        other.before, other.due = self.before, self.due
        other.pages = [page.rows(index) for page in self.pages]
        return other

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        balls = sum(x.numel() * x.element_size() for p in self.pages for x in (p.ball.centre, p.ball.radius))
        return self.buffer.nbytes + balls

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
            ends, sizes = torch.tensor([[page.end, page.size] for page in self.pages], device=q.device).T
            centres, radii = ([getattr(ball, name) for ball in balls] for name in ("centre", "radius"))
            self._stacked = torch.stack(centres, 2), torch.stack(radii, 2), ends, sizes
        centre, radius, ends, sizes = self._stacked
        each = q.shape[1] // centre.shape[1]
        wide = q.to(radius.dtype)
        dot = wide @ centre.to(radius.dtype).repeat_interleave(each, dim=1).mT
        spread = wide.norm(dim=-1, keepdim=True) * radius.repeat_interleave(each, dim=1).unsqueeze(2)
        place = torch.arange(self.buffer.end - q.shape[2], self.buffer.end, device=q.device)
        bias = Linear(bias.slopes.double()) if isinstance(bias, Linear) else bias
        tail = bias.tail(place.unsqueeze(1) - ends + 1, self.buffer.end - 1)  # [heads, queries, pages]
        if isinstance(bias, Linear):  # of the page's keys alone: tails of many pages would add up to more than one tail
            tail = tail + torch.log(-torch.expm1(-bias.slopes.unsqueeze(1) * sizes)).unsqueeze(1)
        score = (scale * dot + abs(scale) * spread).double()
        if self.highest is not None:  # a ball holds more than its keys; ∞ is of keys that are not finite
            score = score.where(score.isinf(), score.clamp(max=self.highest))
        weight: Tensor = score + tail - lse.double().unsqueeze(-1)
        # NaN is no bound. Who does not see a page, or sees nothing, leaves none of it out.
        weight = weight.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        blind = (first.unsqueeze(-1) >= ends).unsqueeze(1) | (lse == -torch.inf).unsqueeze(-1)
        return weight.masked_fill(blind, -torch.inf)

    def give_up(self, page: int, forget: int, exact: bool) -> None:
        """Give up pages that are beyond what the group keeps; forget what nobody looks at again."""
        buffer = self.buffer
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


def kept_for(need: float, least: int) -> int | None:
    """Return how many keys are kept for a reach: the next power of two, with one for rounding; None: all."""
    return 1 << (max(least, math.ceil(need) + 1) - 1).bit_length() if need < 1 << 40 else None


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
