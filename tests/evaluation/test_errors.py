"""Standard errors against the formula, and against repeated draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lengthen.evaluation.errors import Difference, difference, perplexity, standard_error


def test_the_standard_error_is_that_of_a_ratio_of_sums() -> None:
    losses, counts = [10.0, 0.0, 30.0, 5.0], [5, 0, 12, 4]
    mean = 45 / 21
    off = [10 - mean * 5, 30 - mean * 12, 5 - mean * 4]
    assert standard_error(losses, counts) == pytest.approx(math.sqrt(1.5 * sum(x * x for x in off)) / 21)
    assert standard_error([3.0], [2]) is None
    assert standard_error([3.0, 0.0], [2, 0]) is None


def test_it_is_the_spread_of_the_mean_over_draws() -> None:
    """2,000 texts of 64 segments: the spread of their means, and of paired differences, is what each text estimates."""
    random = np.random.default_rng(0)
    hard, noise = random.normal(3, 1, (2000, 64)), random.normal(0, 0.05, (2, 2000, 64))
    one, other = 100 * (hard + noise[0]), 100 * (hard + 0.02 + noise[1])
    counts = [100] * 64
    for draws, tolerance in ((one, 0.05), (other - one, 0.05)):
        spread = float((draws.sum(1) / 6400).std())
        told = [standard_error(row.tolist(), counts) or 0.0 for row in draws[:200]]
        assert np.mean(told) == pytest.approx(spread, rel=tolerance)
    paired = difference(other[0].tolist(), counts, one[0].tolist(), counts)
    assert paired is not None
    assert paired.error is not None
    assert paired.error < 0.1 * (standard_error(one[0].tolist(), counts) or 0.0)
    assert abs(paired.loss - 0.02) < 4 * paired.error


def test_only_the_same_tokens_are_paired() -> None:
    assert difference([1.0, 2.0], [3, 3], [1.0, 2.0], [3, 4]) is None
    assert difference([], [], [], []) is None


def test_a_difference_is_told_as_a_ratio_of_perplexities() -> None:
    assert str(Difference(math.log(1.013), 0.002)) == "+1.3 % ± 0.2"
    assert str(Difference(math.log(0.98), None)) == "−2 %"
    assert str(Difference(math.log(30), 0.1)) == "+2,900 % ± 300"
    assert str(Difference(math.nan, None)) == str(Difference(1e4, None)) == "not finite"
    assert (perplexity(1e4), perplexity(0.0)) == (math.inf, 1.0)
    assert math.isnan(perplexity(math.nan))
