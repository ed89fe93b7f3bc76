"""How far a model extrapolates, from its perplexities at several lengths under one protocol.

It holds to N tokens if no length from the training length up to N has a perplexity more than 2 % above that at the
training length. If that was not measured, there is no verdict. Differences are paired over the same tokens and given
with their standard errors. A model whose perplexity at the training length is not below that of the text's unigram
distribution may be flat at any length, but has learned nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lengthen.evaluation.errors import Difference, difference
from lengthen.evaluation.results import Result
from lengthen.model.loss import perplexity

P = TypeVar("P", bound="Point")

WITHIN = 0.02  # of the perplexity at the training length: what still counts as holding


class Point(Protocol):
    """What is judged: a measurement at one length. `Result` is one."""

    @property
    def length(self) -> int:
        """Tokens that were read at once."""

    @property
    def loss(self) -> float | None:
        """Nats per token."""

    @property
    def segment_losses(self) -> Sequence[float]:
        """The sum of the losses in each segment of the text."""

    @property
    def segment_counts(self) -> Sequence[int]:
        """The tokens scored in each."""

    @property
    def unigram(self) -> float | None:
        """The loss of the text's unigram distribution."""


@dataclass(frozen=True)
class Verdict(Generic[P]):
    """How far a model holds under one protocol."""

    reference: P  # at the training length
    length: int  # the longest that holds
    longest: int  # that was measured
    train_length: int
    change: Difference | None  # from the reference to the first length that fails, or to the longest
    at: int  # that length

    @property
    def times(self) -> float:
        """The longest length that holds, in training lengths."""
        return self.length / self.train_length

    @property
    def holds(self) -> bool:
        """Whether it holds at every length that was measured."""
        return self.length == self.longest

    @property
    def learned(self) -> bool:
        """Whether it is better than predicting tokens by their frequency, as far as that is known."""
        unigram, loss = self.reference.unigram, self.reference.loss
        return unigram is None or loss is None or loss < unigram

    def __str__(self) -> str:
        beyond = " (the longest tried)" if self.holds else ""
        change = "" if self.at == self.reference.length else f", {self.change} at {self.at:,}"
        return (
            f"holds to {self.length:,} tokens, {self.times:g}× the training length{beyond}: perplexity "
            f"{perplexity(self.reference.loss or 0):.4g} at {self.reference.length:,}{change}{self._nothing()}"
        )

    def _nothing(self) -> str:
        if self.learned:
            return ""
        return (
            f"; but it has learned nothing: predicting tokens by their frequency in the text gives "
            f"{perplexity(self.reference.unigram or 0):.4g}"
        )


def judge(points: Sequence[P], train_length: int) -> Verdict[P] | None:
    """Return the verdict over measurements of the same tokens under one protocol.

    None if that at the training length is not there, or not finite.
    """
    points = sorted(points, key=lambda one: one.length)
    reference = next((one for one in points if one.length == train_length), None)
    if reference is None or reference.loss is None or not math.isfinite(reference.loss):
        return None
    longer = [one for one in points if one.length > reference.length]
    holds, at, change = reference.length, reference.length, None
    for one in longer:
        change, at = change_between(one, reference), one.length
        if not change.ratio <= 1 + WITHIN:
            break
        holds = one.length
    return Verdict(reference, holds, points[-1].length, train_length, change, at)


def change_between(one: Point, reference: Point) -> Difference:
    """Return how much higher one measurement's loss is than another's, paired where they are of the same tokens."""
    paired = difference(one.segment_losses, one.segment_counts, reference.segment_losses, reference.segment_counts)
    if paired is not None:
        return paired
    if one.loss is None or reference.loss is None:
        return Difference(math.nan, None)
    return Difference(one.loss - reference.loss, None)


def changes(results: Sequence[Result]) -> dict[str, str]:
    """Return how much each perplexity differs from that at the training length, paired, by the result's key.

    That one itself has no entry.
    """
    found: dict[str, str] = {}
    for group in grouped(results).values():
        if judged := judge(group, group[0].train_length):
            others = (one for one in group if one is not judged.reference)
            found |= {one.key: str(change_between(one, judged.reference)) for one in others}
    return found


def verdicts(results: Sequence[Result]) -> dict[str, Verdict[Result]]:
    """Return the verdict under each protocol, where there is one."""
    judged = {name: judge(group, group[0].train_length) for name, group in grouped(results).items()}
    return {name: verdict for name, verdict in judged.items() if verdict is not None}


def grouped(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results under each protocol, by its name and what else makes it another."""
    groups: dict[str, list[Result]] = {}
    sliding = [one for one in results if one.protocol == "sliding"]
    given = {one.stride for one in sliding if 2 * one.stride != one.length}  # others are half the length, as by default
    for one in results:
        words = [one.protocol, *([] if one.block is None else [f"{one.block:,}"])]
        words += [f"stride {one.stride:,}"] if one in sliding and one.stride in given else []
        words += [] if one.per_document is None else [f"first {one.per_document:,} of each document"]
        groups.setdefault(", ".join(words), []).append(one)
    return groups
