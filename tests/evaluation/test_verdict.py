"""How far a model holds: against the training length, in perplexity, over the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from lengthen.evaluation import judge


@dataclass
class One:
    length: int
    perplexity: float
    unigram: float | None = None
    segment_losses: list[float] = field(default_factory=list)
    segment_counts: list[int] = field(default_factory=lambda: [50, 50])

    def __post_init__(self) -> None:
        self.loss = math.log(self.perplexity) if self.perplexity > 0 else math.nan
        self.segment_losses = [49 * self.loss, 51 * self.loss]


def points(values: dict[int, float], unigram: float | None = None) -> list[One]:
    return [One(length, value, unigram) for length, value in values.items()]


def test_it_holds_up_to_the_first_length_that_is_two_per_cent_above() -> None:
    found = judge(points({16: 20, 64: 10, 128: 10.1, 256: 10.19, 512: 10.21, 1024: 9}), 64)
    assert found is not None
    assert (found.length, found.times, found.longest, found.holds, found.at) == (256, 4, 1024, False, 512)
    assert str(found).startswith("holds to 256 tokens, 4× the training length: perplexity 10 at 64, +2.1 % ± ")
    assert str(found).endswith(" at 512")


def test_a_gain_is_no_failure() -> None:
    """The best value is not what counts: a curve that falls and comes back holds."""
    found = judge(points({64: 10, 128: 8, 256: 10}), 64)
    assert found is not None
    assert (found.length, found.holds) == (256, True)
    assert str(found).startswith(
        "holds to 256 tokens, 4× the training length (the longest tried): perplexity 10 at 64, "
    )


def test_what_is_not_finite_does_not_hold() -> None:
    found = judge(points({64: 10, 128: -1}), 64)
    assert found is not None
    assert (found.length, found.at) == (64, 128)
    assert "not finite at 128" in str(found)
    assert judge(points({64: -1}), 64) is None
    assert judge(points({}), 64) is None


@pytest.mark.parametrize("lengths", [[16, 32, 128], [128, 256]])
def test_without_the_training_length_there_is_none(lengths: list[int]) -> None:
    """What is flat from 128 on may be far above 64, where the model was trained."""
    assert judge(points(dict.fromkeys(lengths, 10.0)), 64) is None


@pytest.mark.parametrize(("unigram", "learned"), [(12.0, True), (10.0, False), (None, True)])
def test_flat_and_nothing_learned_is_named(unigram: float | None, learned: bool) -> None:
    value = None if unigram is None else math.log(unigram)
    found = judge(points({64: 10.0, 128: 10.0}, value), 64)
    assert found is not None
    assert found.learned is learned
    nothing = "; but it has learned nothing: predicting tokens by their frequency in the text gives 10"
    assert str(found).endswith(nothing) is not learned
