"""The learning rate's course: its ends, its middle, and no jumps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthen.config import ScheduleConfig
from lengthen.training.schedule import lr_fraction

SHAPES = ("cosine", "trapezoid", "constant")


def test_warmup_is_a_line_to_the_peak() -> None:
    for shape in SHAPES:
        config = ScheduleConfig(shape=shape, warmup=4)
        assert [lr_fraction(config, step, 1000) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine() -> None:
    config = ScheduleConfig(shape="cosine", warmup=100, floor=0.1)
    assert lr_fraction(config, 100, 1100) == 1.0
    assert lr_fraction(config, 600, 1100) == pytest.approx(0.55)  # half way down
    assert lr_fraction(config, 350, 1100) == pytest.approx(0.1 + 0.9 * (1 + 0.5**0.5) / 2)  # cos 45°
    assert lr_fraction(config, 1099, 1100) == pytest.approx(0.1, abs=1e-5)
    assert lr_fraction(config, 1100, 1100) == pytest.approx(0.1)
    assert lr_fraction(config, 5000, 1100) == pytest.approx(0.1)


def test_trapezoid() -> None:
    config = ScheduleConfig(shape="trapezoid", warmup=10, decay_fraction=0.2, floor=0.1)
    assert [lr_fraction(config, step, 1000) for step in (10, 500, 800)] == [1.0, 1.0, 1.0]
    assert lr_fraction(config, 900, 1000) == pytest.approx(0.55)
    assert lr_fraction(config, 999, 1000) == pytest.approx(0.1 + 0.9 / 200)
    no_floor = ScheduleConfig(shape="trapezoid", warmup=0, decay_fraction=1.0, floor=0.0)
    assert [lr_fraction(no_floor, step, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert [
        lr_fraction(ScheduleConfig(shape="trapezoid", warmup=0, decay_fraction=0.0), step, 4) for step in range(4)
    ] == [1.0] * 4


def test_constant() -> None:
    config = ScheduleConfig(shape="constant", warmup=0, floor=0.3)
    assert {lr_fraction(config, step, 10) for step in range(10)} == {1.0}


@given(
    shape=st.sampled_from(SHAPES),
    warmup=st.integers(0, 60),
    steps=st.integers(1, 400),
    decay_fraction=st.floats(0.1, 1),
    floor=st.floats(0, 1),
)
def test_it_stays_in_bounds_and_never_jumps(
    shape: str, warmup: int, steps: int, decay_fraction: float, floor: float
) -> None:
    config = ScheduleConfig(shape=shape, warmup=warmup, decay_fraction=decay_fraction, floor=floor)
    course = [lr_fraction(config, step, steps) for step in range(steps)]
    low = min(floor, 1 / max(1, warmup))
    assert all(low - 1e-12 <= value <= 1 for value in course)
    after = course[warmup:]
    assert all(b <= a + 1e-12 for a, b in pairwise(after)), "it rises again after warmup"
    # The steepest slopes: the cosine's middle, π/2 over its steps, and the trapezoid's 1 over its own.
    left = max(1, steps - warmup)
    steepest = max(1.6 / left, 1 / max(1.0, decay_fraction * steps))
    assert all(a - b <= steepest + 1e-12 for a, b in pairwise(after))
