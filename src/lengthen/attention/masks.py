"""Which keys a query sees: an interval [first, last] for each query, and nothing else.

Each mask is written for a sequence that begins at position 0:

    Causal          [0, p]
    Window(n)       [p − n + 1, p]
    Blockwise(b)    [(p // b − 1)·b, p]      b is half the training length (Sun et al., 2022)
    Bidirectional   [0, end]

`.padded(key_start, key_end)` and `.packed(document_starts)` move the beginning: to the first key that is not padding,
or to the start of the query's own document. Positions are then counted from there, so a padded or packed sequence sees
exactly what it would see alone. The end of a sequence or document closes the interval too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lengthen.attention.checks import can_look, index_tensor, on_device
from lengthen.checks import describe, whole_number

EVERYTHING = 1 << 62  # behind a query: more than there are keys


@dataclass(frozen=True, eq=False, kw_only=True)
class Mask:
    """An interval of keys for each query; subclasses say which in `span`."""

    two_sided: ClassVar[bool] = True  # whether a query may see keys ahead of it; if False, intervals are cut at it

    key_start: Tensor | None = None
    key_end: Tensor | None = None
    document_starts: Tensor | None = None

    def padded(self, key_start: Tensor | None = None, key_end: Tensor | None = None) -> Self:
        """Hide padding: `key_start` is each sequence's first real key, `key_end` the one after its last, `[batch]`.

        A query that is padding itself sees nothing. Queries that stand before the first key or after the last, as in a
        part of a longer sequence, are not padding.
        """
        for name, value in (("key_start", key_start), ("key_end", key_end)):
            if value is not None and can_look(index_tensor(name, value, 1)) and bool((value.long() < 0).any()):
                raise ValueError(f"{name}: expected at least 0, got {value.long().min().item()}")
        return replace(self, key_start=key_start, key_end=key_end)

    def packed(self, document_starts: Tensor) -> Self:
        """Keep packed documents apart: `document_starts[b, p]` is where the document of position p begins."""
        starts = index_tensor("document_starts", document_starts, 2)
        if can_look(starts) and starts.shape[1]:
            starts, here = starts.long(), torch.arange(starts.shape[1])
            if bool((starts < 0).any()) or bool((starts > here).any()):
                raise ValueError("document_starts: expected 0 ≤ document_starts[b, p] ≤ p, got a start outside that")
            if bool((starts.diff(dim=1) < 0).any()):
                raise ValueError("document_starts: expected starts that never fall along a row, got one that does")
            if bool((starts.gather(1, starts) != starts).any()):
                raise ValueError("document_starts: expected a document to begin at its start, got one inside another")
        return replace(self, document_starts=document_starts)

    def span(self, position: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return first and last visible key for a query at `position` of a sequence; last None: to the end."""
        raise NotImplementedError(f"mask: expected a class with a `span`, got {type(self).__name__}, which has none")

    def _span(self, position: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the span, checked: a user's class may return anything."""
        found: Any = self.span(position)
        first, last = found if isinstance(found, tuple) and len(found) == 2 else (found, found)
        for one in (first, position if last is None else last):
            if not isinstance(one, Tensor) or one.is_floating_point() or one.shape != position.shape:
                name = type(self).__name__
                raise TypeError(
                    f"mask: expected {name}.span to return two integer tensors like position (the second may be None), "
                    f"got {describe(found)}"
                )
        return first, last

    def rows(self) -> dict[str, Tensor]:
        """Return what there is one row of for each sequence, by name."""
        names = ("key_start", "key_end", "document_starts") if self.moved else ()
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def moved(self) -> bool:
        """Whether padding or packing moves where sequences begin or end."""
        return self.key_start is not None or self.key_end is not None or self.document_starts is not None

    def formula(self) -> tuple[int, int] | None:
        """Return a `Band`'s shift and block, for kernels; None: intervals have to be listed for each query."""
        return None

    def start(self, length: int, device: torch.device) -> Tensor:
        """Return where the sequence of each of `length` keys begins, `[batch or 1, length]`: 0, a document, padding."""
        start = torch.zeros(1, length, dtype=torch.int64, device=device)
        if self.document_starts is not None:
            start = on_device("mask.document_starts", self.document_starts, device).long()
        if self.key_start is not None:
            start = torch.maximum(start, on_device("mask.key_start", self.key_start, device).long().unsqueeze(1))
        return start

    def interval(self, queries: int, keys: int, q_start: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `first` and `last`, int64 `[batch or 1, queries]`, inside [0, keys − 1]; first > last sees nothing."""
        position = positions(queries, q_start, device)
        start, end = torch.zeros_like(position), torch.full_like(position, keys - 1)
        padding = None
        if self.document_starts is not None:
            start, end = self._document(position, keys)
        if self.key_start is not None:
            key_start = on_device("mask.key_start", self.key_start, device).long().unsqueeze(1)
            start, padding = torch.maximum(start, key_start), (position >= 0) & (position < key_start)
        if self.key_end is not None:
            key_end = on_device("mask.key_end", self.key_end, device).long().unsqueeze(1)
            after = (position >= key_end) & (position < keys)
            end, padding = torch.minimum(end, key_end - 1), after if padding is None else padding | after
        first, last = self._span(position - start)
        first = first.clamp(min=0) + start
        last = end if last is None else torch.minimum(last + start, end)
        if not self.two_sided:
            last = torch.minimum(last, position)
        if padding is not None:
            last = torch.where(padding, first - 1, last)
        first, last = torch.broadcast_tensors(first, last)  # type: ignore[no-untyped-call]
        return first.clamp(max=keys), last.clamp(-1, keys - 1)  # already inside, except for queries that see no key

    def _document(self, position: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """Return the first and last position of each query's document."""
        assert self.document_starts is not None
        starts = on_device("mask.document_starts", self.document_starts, position.device).long().contiguous()
        outside = can_look(position) and bool(((position < 0) | (position >= keys)).any())
        if starts.shape[1] != keys or outside:
            raise ValueError(
                f"mask.document_starts: expected one start for each of the {keys} keys, and queries among them, got "
                f"{describe(self.document_starts)}"
                + (f" and queries at {int(position.min())} … {int(position.max())}" if outside else "")
            )
        batch = max(starts.shape[0], position.shape[0])
        own = starts.expand(batch, -1).gather(1, position.expand(batch, -1))
        # Starts never fall along a row, so a document ends just before the first start that is greater.
        return own, torch.searchsorted(starts.expand(batch, -1).contiguous(), own, right=True) - 1

    def listed(self, queries: int, keys: int, q_start: int | Tensor, device: torch.device) -> Listed:
        """Return the same mask with its intervals computed, for calls of these sizes: once for all layers."""
        first, last = self.interval(queries, keys, q_start, device)
        kind = Listed if self.two_sided else ListedBehind
        return kind(first.to(torch.int32).contiguous(), last.to(torch.int32).contiguous(), keys)


def positions(queries: int, q_start: int | Tensor, device: torch.device) -> Tensor:
    """Return where queries stand among the keys, int64 `[batch or 1, queries]`."""
    steps = torch.arange(queries, device=device).unsqueeze(0)
    return steps + (q_start.long().unsqueeze(1) if isinstance(q_start, Tensor) else q_start)


class Band(Mask):
    """Masks whose first key is max(0, ⌊(p − shift) / block⌋·block), and whose last is the query, or the end."""

    two_sided: ClassVar[bool] = False

    def band(self) -> tuple[int, int]:
        """Return shift and block."""
        raise NotImplementedError

    def span(self, position: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the interval."""
        shift, block = self.band()
        first = torch.div(position - shift, block, rounding_mode="floor") * block
        return first, None if self.two_sided else position

    def formula(self) -> tuple[int, int] | None:
        """Return shift and block, unless padding, packing or a subclass's own `span` makes the interval another."""
        return None if self.moved or type(self).span is not Band.span else self.band()


@dataclass(frozen=True, eq=False)
class Causal(Band):
    """Each query sees itself and every key behind it."""

    def band(self) -> tuple[int, int]:
        """Return what gives [0, p]."""
        return EVERYTHING, 1


@dataclass(frozen=True, eq=False)
class Window(Band):
    """Each query sees itself and the size − 1 keys behind it; a window longer than the sequence is the sequence."""

    size: int

    def __post_init__(self) -> None:
        whole_number("Window.size", self.size, at_least=1)

    def band(self) -> tuple[int, int]:
        """Return what gives [p − size + 1, p]."""
        return min(self.size - 1, EVERYTHING), 1


@dataclass(frozen=True, eq=False)
class Blockwise(Band):
    """Blockwise causal attention: a query sees its own block up to itself, and the whole block before."""

    block: int

    def __post_init__(self) -> None:
        whole_number("Blockwise.block", self.block, at_least=1)

    def band(self) -> tuple[int, int]:
        """Return what gives [(p // block − 1)·block, p]."""
        block = min(self.block, EVERYTHING)
        return block, block


@dataclass(frozen=True, eq=False)
class Bidirectional(Band):
    """Each query sees every key, ahead of it too."""

    two_sided: ClassVar[bool] = True

    def band(self) -> tuple[int, int]:
        """Return what gives [0, end]."""
        return EVERYTHING, 1


@dataclass(frozen=True, eq=False)
class BandOf(Band):
    """A band by its numbers, as an op takes it."""

    shift: int
    block: int

    def band(self) -> tuple[int, int]:
        """Return them."""
        return self.shift, self.block


class BandAheadOf(BandOf):
    """The same, to the end."""

    two_sided: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Listed(Mask):
    """Intervals that are computed already, int32 `[batch or 1, queries]`, among so many keys; made by `Mask.listed`."""

    first: Tensor
    last: Tensor
    keys: int

    def padded(self, key_start: Tensor | None = None, key_end: Tensor | None = None) -> Self:
        """Refuse: the intervals are there."""
        raise TypeError("mask: expected .padded(…) before .listed(…), got it after")

    def packed(self, document_starts: Tensor) -> Self:
        """Refuse: the intervals are there."""
        raise TypeError("mask: expected .packed(…) before .listed(…), got it after")

    def rows(self) -> dict[str, Tensor]:
        """Return the intervals, by name."""
        return {"first": self.first, "last": self.last}

    def interval(self, queries: int, keys: int, q_start: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the intervals, for a call of the sizes that they were made for."""
        if (self.first.shape[1], self.keys) != (queries, keys):
            made = f"{self.first.shape[1]} queries and {self.keys} keys"
            raise ValueError(f"mask: expected one listed for {queries} queries and {keys} keys, got one for {made}")
        return self.first.long(), self.last.long()

    def listed(self, queries: int, keys: int, q_start: int | Tensor, device: torch.device) -> Listed:
        """Return itself."""
        self.interval(queries, keys, q_start, device)
        return self


@dataclass(frozen=True, eq=False)
class ListedBehind(Listed):
    """Intervals that end at the query."""

    two_sided: ClassVar[bool] = False
