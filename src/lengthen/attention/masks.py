"""Which keys a query sees: an interval [first, last] for each query, and nothing else.

Each mask is written for a sequence that begins at position 0:

    Causal          [0, p]
    Window(n)       [p − n + 1, p]
    Blockwise(b)    [(p // b − 1)·b, p]      b is half the training length (Sun et al., 2022)
    Bidirectional   [0, end]

`.padded(key_start)` and `.packed(document_starts)` move that beginning: to the first key that is not padding, or to the
start of the query's own document. Positions are then counted from there, so a padded or packed sequence
sees exactly what it would see alone. For a two-sided mask a document's end closes the interval too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lengthen.attention.checks import can_look, describe, index_tensor, whole_number


@dataclass(frozen=True, eq=False, kw_only=True)
class Mask:
    """An interval of keys for each query; subclasses say which in `span`."""

    key_start: Tensor | None = None
    document_starts: Tensor | None = None

    def padded(self, key_start: Tensor) -> Self:
        """Hide each sequence's left padding: `key_start` is `[batch]`, the first key that is real."""
        index_tensor("key_start", key_start, 1)
        if can_look(key_start) and bool((key_start < 0).any()):
            raise ValueError(f"key_start: expected at least 0, got {key_start.min().item()}")
        return replace(self, key_start=key_start)

    def packed(self, document_starts: Tensor) -> Self:
        """Keep packed documents apart: `document_starts[b, p]` is where the document of position p begins."""
        starts = index_tensor("document_starts", document_starts, 2)
        if can_look(starts) and starts.shape[1]:
            here = torch.arange(starts.shape[1])
            if bool((starts < 0).any()) or bool((starts > here).any()):
                raise ValueError("document_starts: expected 0 ≤ document_starts[b, p] ≤ p, got a start outside that")
            if bool((starts.diff(dim=1) < 0).any()):
                raise ValueError("document_starts: expected starts that never fall along a row, got one that does")
        return replace(self, document_starts=document_starts)

    def span(self, position: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return first and last visible key for a query at `position` of a sequence; last None: to the end."""
        raise NotImplementedError

    def interval(self, queries: int, keys: int, q_start: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `first` and `last`, int64 `[batch or 1, queries]`, inside [0, keys − 1]; first > last sees nothing."""
        position = torch.arange(q_start, q_start + queries, device=device).unsqueeze(0)
        start = torch.zeros_like(position)
        end = torch.full_like(position, keys - 1)
        if self.document_starts is not None:
            start, end = self._document(position, keys, q_start, device)
        if self.key_start is not None:
            _same_device("mask.key_start", self.key_start, device)
            start = torch.maximum(start, self.key_start.long().unsqueeze(1))
        first, last = self.span(position - start)
        first = first.clamp(min=0) + start
        last = end if last is None else torch.minimum(last + start, end)
        if self.key_start is not None:  # a query that is padding itself sees nothing, ahead of it neither
            last = torch.where(position < self.key_start.long().unsqueeze(1), first - 1, last)
        first, last = torch.broadcast_tensors(first, last)  # type: ignore[no-untyped-call]
        return first, last

    def _document(self, position: Tensor, keys: int, q_start: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first and last position of each query's document."""
        assert self.document_starts is not None
        _same_device("mask.document_starts", self.document_starts, device)
        queries = position.shape[1]
        if self.document_starts.shape[1] != keys or q_start < 0 or q_start + queries > keys:
            raise ValueError(
                f"mask.document_starts: expected one start for each of the {keys} keys, and queries at "
                f"{q_start} … {q_start + queries - 1} among them, got {describe(self.document_starts)}"
            )
        starts = self.document_starts.long().contiguous()
        here = slice(q_start, q_start + queries)
        # Starts never fall along a row, so a document ends just before the first start that is greater.
        end = torch.searchsorted(starts, starts[:, here].contiguous(), right=True) - 1
        return starts[:, here], end


def _same_device(name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(f"{name}: expected a tensor on {device} like q, got {describe(value)}")


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Each query sees itself and every key behind it."""

    def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return [0, p]."""
        return torch.zeros_like(position), position


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Each query sees itself and the size − 1 keys behind it."""

    size: int

    def __post_init__(self) -> None:
        whole_number("Window.size", self.size, at_least=1)

    def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return [p − size + 1, p]."""
        return position - self.size + 1, position


@dataclass(frozen=True, eq=False)
class Blockwise(Mask):
    """Blockwise causal attention: a query sees its own block up to itself, and the whole block before."""

    block: int

    def __post_init__(self) -> None:
        whole_number("Blockwise.block", self.block, at_least=1)

    def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return [(p // block − 1)·block, p]."""
        return (torch.div(position, self.block, rounding_mode="floor") - 1) * self.block, position


@dataclass(frozen=True, eq=False)
class Bidirectional(Mask):
    """Each query sees every key, ahead of it too."""

    def span(self, position: Tensor) -> tuple[Tensor, None]:
        """Return [0, end]."""
        return torch.zeros_like(position), None
