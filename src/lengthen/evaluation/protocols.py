"""How a text is read to score it: which windows, which of their tokens count, and what each token sees.

    nonoverlapping   pieces of `length` tokens, every token scored once, with what stands before it in its piece
    sliding          windows of `length` tokens, each `stride` on from the last; the new tokens are scored, the others
                     are context. stride = length is nonoverlapping; stride = 1 gives every token all its context
    blockwise        pieces of `length` tokens, read with blockwise causal attention: a token sees its own block of
                     `block` tokens up to itself, and the whole block before (the LEX paper: half the training length)
    window           pieces of `length` tokens; a token sees itself and the `block` − 1 before it

Tokens are counted as targets: a text of N + 1 tokens has N, the first being nobody's target. Whatever the protocol,
every target is scored exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lengthen.attention import Blockwise, Mask, Window
from lengthen.checks import choice, whole_number
from lengthen.model.score import Reading

NAMES = ("nonoverlapping", "sliding", "blockwise", "window")


@dataclass(frozen=True)
class Protocol:
    """A way to read a text; made by `protocol`, which fills in and checks."""

    name: str
    length: int
    stride: int
    block: int | None = None

    @property
    def mask(self) -> Mask | None:
        """What a token sees; None: what the model was trained with."""
        if self.block is None:
            return None
        return Blockwise(self.block) if self.name == "blockwise" else Window(self.block)

    def readings(self, targets: int) -> Iterator[Reading]:
        """Yield the windows over a text of this many targets."""
        start = 0
        while True:
            stop = min(start + self.length, targets)
            yield Reading(start, stop, 0 if start == 0 else self.length - self.stride)
            if stop == targets:
                return
            start += self.stride

    def count(self, targets: int) -> int:
        """Return how many windows there are."""
        return 1 + max(0, -(-(targets - self.length) // self.stride))

    def __str__(self) -> str:
        if self.name == "sliding":
            return f"sliding, stride {self.stride:,}"
        return self.name if self.block is None else f"{self.name}, {self.block:,}"


def protocol(
    name: str, length: int, train_length: int, stride: int | None = None, block: int | None = None
) -> Protocol:
    """Return a protocol by name.

    `stride` is for sliding (none: half the length); `block` is for blockwise (none: half the training length) and for
    window (none: the training length).
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
    return Protocol(name, length, stride or length, block)
