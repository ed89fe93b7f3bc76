"""Keys and values while decoding: a layer takes new ones, and returns the attention of new queries over what it kept.

    full      everything
    window    what a `Window` or `Blockwise` mask can still see
    reach     what each head can still reach under its bias (reach_cache.py): older keys in host memory (mode "exact"),
              or dropped, with a bound on what they could have weighed (mode "certified")

All sequences of a batch grow together, by the same number of slots at each step. One that is shorter begins at a later
slot (left padding, `starts`) and counts its positions from there, so it sees exactly what it would see alone. One that
has ended frees its row (`rows`); two caches are joined (`joined`).

>>> import torch, lengthen
>>> from lengthen.attention.cache import Cache
>>> q, k, v = torch.randn(3, 1, 8, 100, 64)
>>> bias, cache = lengthen.Linear(lengthen.alibi_slopes(8)), Cache(layers=1)
>>> parts = []
>>> for i in range(100):
...     one = slice(i, i + 1)
...     mask = cache.begin(1, q.device).mask
...     parts.append(cache.layers[0].attend(q[:, :, one], k[:, :, one], v[:, :, one], bias, None, mask))
>>> torch.testing.assert_close(torch.cat(parts, dim=2), lengthen.attention(q, k, v, bias=bias))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthen.attention.biases import Bias, Decay
from lengthen.attention.buffer import Buffer, seen_from
from lengthen.attention.masks import Band, Causal, Mask
from lengthen.attention.op import attention
from lengthen.attention.reach import default_tolerance
from lengthen.attention.reach_cache import ReachLayer
from lengthen.checks import choice, describe, number, whole_number

POLICIES = ("full", "window", "reach")
MODES = ("exact", "certified")
PAGE = 64  # keys that a head gives up at a time


class Layer:
    """One layer's keys and values: all that have not been forgotten."""

    def __init__(self, tolerance: float | None = None, room: int | None = None) -> None:
        self.tolerance, self.buffer, self.bound = tolerance, Buffer(room), 0.0

    @property
    def length(self) -> int:
        """How many slots there have been."""
        return self.buffer.end

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.buffer.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory: none."""
        return 0

    @property
    def kept(self) -> int:
        """How many slots are kept."""
        return len(self.buffer)

    def rows(self, index: Tensor) -> Layer:
        """Return the layer of these sequences, in memory of its own."""
        other = Layer(self.tolerance)
        other.buffer, other.bound = self.buffer.rows(index), self.bound
        return other

    def joined(self, other: Layer, lowered: int) -> Layer:
        """Return the layer of both's sequences, as `Buffer.joined` has them."""
        both = Layer(self.tolerance)
        both.buffer, both.bound = self.buffer.joined(other.buffer, lowered), max(self.bound, other.bound)
        return both

    def advance(self) -> None:
        """Count a slot that was written without `attend`."""
        self.buffer.advance()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, decay: Decay | None, mask: Mask, forget: int = 0
    ) -> Tensor:
        """Append keys and values; return the attention of the new queries over what is kept.

        Args:
            q: queries of the new slots `[batch, heads, new, head_dim]`.
            k: their keys `[batch, key_heads, new, head_dim]`.
            v: their values.
            bias: as for `attention`.
            decay: as for `attention`.
            mask: what queries see, counted in slots; no query looks ahead.
            forget: slots before this one are not looked at again, by any query after these.
        """
        self.buffer.append(k, v)
        ball = None
        if bias is not None:
            self.bound = default_tolerance(q.dtype) if self.tolerance is None else self.tolerance
            ball = self.buffer.ball(k, centred=True) if decay is None else None  # with a decay the op measures its own
        mask = seen_from(mask, q.shape[2], self.buffer.base, self.buffer.end, q.device)
        out = attention(q, self.buffer.k, self.buffer.v, bias, decay, mask, tolerance=self.tolerance, ball=ball)
        self.buffer.drop(forget)
        return out


CachedLayer = Layer | ReachLayer


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots of one step: where its tokens stand, and what the layers are told."""

    positions: Tensor  # of the tokens in their sequences, [new] or [batch, new]
    mask: Mask
    forget: int
    before: int  # slots that there were already


class Cache:
    """The keys and values of all layers.

    Args:
        layers: how many.
        policy: "full", "window" or "reach".
        mask: what tokens see: `Causal()`, `Window(n)`, `Blockwise(n)`.
        mode: of "reach": "exact" or "certified".
        starts: the slot that each sequence begins at, one for each; None: all at the first.
        tolerance: the fraction of a row's softmax mass that may stay unread, as for `attention`.
        room: the final length, where it is known: storage is then made once.
        highest: a number that no |scale·q·k| is above, one for each layer, where it is known.
        page: with "reach", keys that a head gives up at a time, and the fewest that it keeps.
    """

    def __init__(
        self,
        layers: int,
        policy: str = "full",
        mask: Mask | None = None,
        *,
        mode: str = "exact",
        starts: Sequence[int] | None = None,
        tolerance: float | None = None,
        room: int | None = None,
        highest: Sequence[float] | None = None,
        page: int = PAGE,
    ) -> None:
        whole_number("layers", layers, at_least=1)
        self.policy, self.mode = choice("cache", policy, POLICIES), choice("mode", mode, MODES)
        self.mask = Causal() if mask is None else mask
        if not isinstance(self.mask, Mask) or self.mask.two_sided or self.mask.moved:
            raise ValueError(f"mask: expected Causal(), Window(n) or Blockwise(n) for a cache, got {describe(mask)}")
        if policy == "window" and (not isinstance(self.mask, Band) or isinstance(self.mask, Causal)):
            raise ValueError(
                f"cache: 'window' keeps what a mask can still see; expected mask=Window(n) or Blockwise(n), got "
                f"{type(self.mask).__name__}, which sees everything: use 'full'"
            )
        if tolerance is not None and number("tolerance", tolerance, at_least=0) >= 1:
            raise ValueError(f"tolerance: expected a fraction from 0 to below 1, got {tolerance}")
        whole_number("page", page, at_least=1)
        self.starts = None if starts is None else torch.tensor(list(starts), dtype=torch.int64)
        bounds: Sequence[float | None] = [None] * layers if highest is None else highest
        self.layers: list[CachedLayer] = [
            ReachLayer(mode == "exact", tolerance, bounds[i], page)
            if policy == "reach"
            else Layer(tolerance, room if policy == "full" else None)
            for i in range(layers)
        ]

    @property
    def length(self) -> int:
        """How many slots there have been, dropped ones included."""
        return self.layers[-1].length

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(layer.host_nbytes for layer in self.layers)

    @property
    def bound(self) -> float:
        """Proven upper bound, over all rows and layers so far, of the fraction of softmax mass left unread."""
        return max(layer.bound for layer in self.layers)

    def begin(self, new: int, device: torch.device) -> Slots:
        """Return the slots of `new` tokens of each sequence: positions and mask for each layer's `attend`."""
        before, total = self.length, self.length + new
        if any(layer.length != before for layer in self.layers):
            raise RuntimeError("cache: expected layers of one length, got a forward that was stopped; make a new one")
        positions, mask, starts = torch.arange(before, total, device=device), self.mask, self.starts
        if starts is not None and bool((starts > 0).any()):
            here = starts.to(device, non_blocking=True)
            positions = (positions - here.unsqueeze(1)).clamp(min=0)
            mask = mask.padded(here).listed(new, total, before, device)
        elif mask.formula() is None:
            mask = mask.listed(new, total, before, device)
        return Slots(positions, mask, self._forgotten(total), before)

    def _forgotten(self, total: int) -> int:
        """Return the first slot that a query at slot `total` sees, or a later one: nobody looks at those before it."""
        if self.policy == "full" or not isinstance(self.mask, Band):
            return 0 if self.starts is None else int(self.starts.min())
        mask = self.mask if self.starts is None else self.mask.padded(self.starts)
        first, _ = mask.interval(1, total + 1, total, torch.device("cpu"))
        return int(first.min())

    def rows(self, index: Tensor | Sequence[int]) -> Cache:
        """Return a cache of these sequences, in memory of its own: fewer, more, in any order, some of them twice."""
        other = object.__new__(Cache)
        other.policy, other.mode, other.mask = self.policy, self.mode, self.mask
        rows = torch.as_tensor(index, dtype=torch.int64)
        other.starts = None if self.starts is None else self.starts[rows.cpu()]
        other.layers = [layer.rows(rows) for layer in self.layers]
        return other

    def joined(self, other: Cache) -> Cache:
        """Return a cache of this one's sequences and another's of the same kind, in memory of its own.

        The shorter ones begin at later slots. Not for "reach": what a head has given up differs.
        """
        pairs = [
            (a, b)
            for a, b in zip(self.layers, other.layers, strict=True)
            if isinstance(a, Layer) and isinstance(b, Layer)
        ]
        if len(pairs) < len(self.layers) or self.policy != other.policy:
            named = f"{self.policy!r} and {other.policy!r}"
            raise ValueError(f"other: expected two caches of one policy, 'full' or 'window', got {named}")
        end = max(self.length, other.length)
        starts = torch.cat([one.begins + end - one.length for one in (self, other)])
        lowered = min(int(starts.min()), end - max(self.kept, other.kept))  # slots need not count from long ago
        both = object.__new__(Cache)
        both.policy, both.mode, both.mask = self.policy, self.mode, self.mask
        both.starts = starts - lowered
        both.layers = [a.joined(b, lowered) for a, b in pairs]
        return both

    @property
    def begins(self) -> Tensor:
        """The slot that each sequence begins at, of a cache that has read something."""
        if self.starts is not None:
            return self.starts
        layer = self.layers[0]
        k = layer.buffer.k if isinstance(layer, Layer) else layer.groups[0].buffer.k
        return torch.zeros(k.shape[0], dtype=torch.int64)

    @property
    def kept(self) -> int:
        """How many slots a layer keeps on the device, at the most."""
        return max(layer.kept for layer in self.layers)
