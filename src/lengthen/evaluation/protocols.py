"""How a text is read to score it: which windows, which of their tokens count, and what each token sees.

    nonoverlapping   pieces of `length` tokens, every token scored once, with what stands before it in its piece
    sliding          windows of `length` tokens, each `stride` on from the last; the new tokens are scored, the others
                     are context. stride = length is nonoverlapping; stride = 1 gives every token all its context
    blockwise        pieces of `length` tokens, read with blockwise causal attention: a token sees its own block of
                     `block` tokens up to itself, and the whole block before (the LEX paper: half the training length)
    window           pieces of `length` tokens; a token sees itself and the `block` − 1 before it

The text is read as it stands, one document after the other; or, with `per_document`, each document from its own start
and only its first `per_document` tokens (the LEX paper: the first 4,096 of arXiv articles).

Tokens are counted as targets: a text of N + 1 tokens has N, since the first token is never predicted. Every protocol
scores every target exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from lengthen.attention import Blockwise, Mask, Window
from lengthen.checks import choice, whole_number
from lengthen.data import Tokens
from lengthen.model.score import Reading

NAMES = ("nonoverlapping", "sliding", "blockwise", "window")

Stretch = tuple[int, int]  # where it begins in the text, and how many targets it has


@dataclass(frozen=True)
class Protocol:
    """A way to read a text; made by `protocol`, which fills in and checks."""

    name: str
    length: int
    stride: int
    block: int | None = None
    per_document: int | None = None

    @property
    def mask(self) -> Mask | None:
        """What a token sees; None: what the model was trained with."""
        if self.block is None:
            return None
        return Blockwise(self.block) if self.name == "blockwise" else Window(self.block)

    def stretches(self, tokens: Tokens, limit: int | None = None) -> list[Stretch]:
        """Return the parts of a text that are read apart from each other, of `limit` targets together at most."""
        if self.per_document is None:
            there = len(tokens) - 1
            return [(0, there if limit is None else min(limit, there))]
        found, left = [], len(tokens) if limit is None else limit
        starts = tokens.documents.tolist()
        for start, end in pairwise(starts):
            count = min(end - start - 1, self.per_document, left)
            if count > 0:
                found.append((start, count))
                left -= count
        return found

    def readings(self, stretches: Iterable[Stretch]) -> Iterator[Reading]:
        """Yield the windows over the stretches, each target scored in one of them, in order."""
        for begin, targets in stretches:
            start, end = begin, begin + targets
            while True:
                stop = min(start + self.length, end)
                yield Reading(start, stop, 0 if start == begin else self.length - self.stride)
                if stop == end:
                    break
                start += self.stride

    def __str__(self) -> str:
        words = [self.name]
        if self.name == "sliding":
            words.append(f"stride {self.stride:,}")
        if self.block is not None:
            words.append(f"{self.block:,}")
        if self.per_document is not None:
            words.append(f"first {self.per_document:,} of each document")
        return ", ".join(words)


def protocol(
    name: str,
    length: int,
    train_length: int,
    stride: int | None = None,
    block: int | None = None,
    per_document: int | None = None,
) -> Protocol:
    """Return a protocol by name.

    `stride` is for sliding (none: half the length); `block` is for blockwise (none: half the training length) and for
    window (none: the training length). `per_document` is for any: each document from its start, its first tokens.
    """
    choice("protocol", name, NAMES)
    whole_number("length", length, at_least=1)
    if name == "sliding":
        stride = max(1, length // 2) if stride is None else whole_number("stride", stride, at_least=1)
        if stride > length:
            raise ValueError(f"stride: expected at most the length {length}, or tokens would be left out, got {stride}")
    elif stride is not None:
        raise ValueError(f"stride: expected only with the protocol 'sliding', got {stride} with {name!r}")
    if name in ("blockwise", "window"):
        usual = max(1, train_length // 2) if name == "blockwise" else train_length
        block = usual if block is None else whole_number("block", block, at_least=1)
    elif block is not None:
        raise ValueError(f"block: expected only with the protocols 'blockwise' and 'window', got {block} with {name!r}")
    if per_document is not None:
        whole_number("per_document", per_document, at_least=1)
    return Protocol(name, length, stride or length, block, per_document)
