"""The keys and values of consecutive slots: appended at the end, dropped at the front, always one contiguous view.

A slot is an index in the order in which tokens came; position 0 of a sequence may be at any slot. Storage doubles
its size when it is full, or moves what is kept to its front when that is at most half of it. So a token costs a
constant number of copies, however long the sequence; with `room` for the final length there are none.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lengthen.attention.masks import Band, ListedBehind, Mask
from lengthen.attention.reach import Ball

LEAST = 64  # keys that there is room for at first


class Buffer:
    """Keys and values of the slots from `base` to `end`, and the ball of the keys."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.base, self.end = 0, 0
        self._at = 0  # where `base` is in storage
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._ball: Ball | None = None
        self._fresh = 0  # keys that the ball was centred on

    def __len__(self) -> int:
        return self.end - self.base

    @property
    def k(self) -> Tensor:
        """The keys, a view `[batch, key_heads, kept, head_dim]`."""
        assert self._k is not None
        return self._k[:, :, self._at : self._at + len(self)]

    @property
    def v(self) -> Tensor:
        """The values, a view."""
        assert self._v is not None
        return self._v[:, :, self._at : self._at + len(self)]

    @property
    def nbytes(self) -> int:
        """Bytes of storage, unused room included."""
        return sum(x.numel() * x.element_size() for x in (self._k, self._v) if x is not None)

    @property
    def storage(self) -> tuple[Tensor, Tensor]:
        """Keys and values with all the room that there is; what is not kept is finite."""
        assert self._k is not None
        assert self._v is not None
        return self._k, self._v

    @property
    def place(self) -> int:
        """Where in storage the next slot goes."""
        return self._at + len(self)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the keys and values of the next slots, `[batch, key_heads, new, width]`."""
        new = k.shape[2]
        if self._k is None or self._v is None:
            size = max(LEAST, new, self.room or 0)
            self._k, self._v = (x.new_zeros(*x.shape[:2], size, x.shape[3]) for x in (k, v))
        self.reserve(new)
        at = slice(self.place, self.place + new)
        self._k[:, :, at] = k
        self._v[:, :, at] = v
        self.end += new

    def reserve(self, new: int) -> None:
        """Make room for so many slots."""
        assert self._k is not None
        needed = len(self) + new
        if self.place + new > self._k.shape[2]:
            self._move(2 * needed if 2 * needed > self._k.shape[2] else self._k.shape[2])

    def advance(self) -> None:
        """Count a slot that was written at its place in storage; centre the ball anew when `ball` would."""
        self.end += 1
        self._fresh -= 1
        if self._ball is not None and self._fresh <= 0:
            fresh, self._fresh = Ball.around(self.k), len(self)
            self._ball.centre.copy_(fresh.centre)
            self._ball.radius.copy_(fresh.radius)

    def drop(self, before: int) -> None:
        """Forget the slots before this one; give memory back where three quarters of it are not needed."""
        if before <= self.base or self._k is None:
            return
        self._at += min(before, self.end) - self.base
        self.base = min(before, self.end)
        if self.room is None and self._k.shape[2] > 4 * max(len(self), LEAST):
            self._move(2 * max(len(self), LEAST))

    def _move(self, size: int) -> None:
        """Put what is kept at the front, of storage of another size or the same."""
        assert self._k is not None
        assert self._v is not None
        kept = len(self)
        for name in ("_k", "_v"):
            old: Tensor = getattr(self, name)
            live = old[:, :, self._at : self._at + kept]
            if size != old.shape[2]:
                setattr(self, name, old.new_zeros(*old.shape[:2], size, old.shape[3]))
            elif kept > self._at:  # the two would overlap
                live = live.clone()
            getattr(self, name)[:, :, :kept] = live
        self._at = 0

    def ball(self, new: Tensor, centred: bool) -> Ball:
        """Return a ball of the keys kept, the `new` ones just appended among them.

        It is centred anew as their number doubles; in a window, whenever it has taken as many new keys as it holds.
        """
        self._fresh -= new.shape[2]
        if self._ball is None or self._fresh <= 0:
            self._ball, self._fresh = Ball.around(self.k, centred), len(self)
        else:
            self._ball = self._ball.replaced(new)
        return replace(self._ball, keys=len(self))

    def grown(self, new: Tensor) -> Ball | None:
        """Return the ball, if there is one, grown in place to hold these keys too."""
        if self._ball is not None:
            self._ball.radius.copy_(self._ball.replaced(new).radius)
        return self._ball

    def rows(self, index: Tensor) -> Buffer:
        """Return a buffer of these sequences, in memory of its own."""
        other = Buffer(self.room)
        other.base, other.end, other._at, other._fresh = self.base, self.end, self._at, self._fresh
        if self._k is not None and self._v is not None:
            other._k, other._v = self._k[index], self._v[index]
        if self._ball is not None:
            other._ball = Ball(self._ball.centre[index], self._ball.radius[index], self._ball.keys)
        return other

    def joined(self, other: Buffer, lowered: int) -> Buffer:
        """Return a buffer of both's sequences, whose last slots are the same; slots are renumbered from `lowered` on.

        The one that keeps fewer is filled with zeros at the front: slots that its sequences do not see.
        """
        both, end, kept = Buffer(), max(self.end, other.end) - lowered, max(len(self), len(other))
        both.base, both.end = end - kept, end
        for name, parts in (("_k", (self.k, other.k)), ("_v", (self.v, other.v))):
            rows, (_, heads, _, width) = sum(part.shape[0] for part in parts), parts[0].shape
            storage = parts[0].new_zeros(rows, heads, max(LEAST, 2 * kept), width)
            first = 0
            for part in parts:
                storage[first : first + part.shape[0], :, kept - part.shape[2] : kept] = part
                first += part.shape[0]
            setattr(both, name, storage)
        return both


def seen_from(mask: Mask, queries: int, base: int, end: int, device: torch.device) -> Mask:
    """Return a mask of slots, for the last `queries` of them, as one of the keys of the slots from `base` to `end`."""
    band = mask.band() if isinstance(mask, Band) and mask.formula() is not None else None
    if not base or (band is not None and base % band[1] == 0):
        return mask  # counted from there, it says the same of the keys that there are
    first, last = mask.interval(queries, end, end - queries, device)
    return listed(first, last, base, end)


def listed(first: Tensor, last: Tensor, base: int, end: int) -> ListedBehind:
    """Return the intervals of slots as those of the keys from `base` to `end`."""
    first, last = (first - base).clamp(min=0), (last - base).clamp(-1, end - base - 1)
    return ListedBehind(first.to(torch.int32), last.to(torch.int32), end - base)
