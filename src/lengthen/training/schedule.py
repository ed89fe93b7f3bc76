"""The learning rate as a function of the step alone, so that a resumed run has the same one."""

from __future__ import annotations

import math

from lengthen.config import ScheduleConfig


def lr_fraction(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the fraction of the highest lr that step `step` of 0 … steps − 1 is taken with.

    Up in a line over `warmup` steps; then `cosine` falls to the floor over the rest, `trapezoid` stays and falls in a
    line over the last `decay_fraction` of all steps, `constant` stays.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.shape == "cosine":
        done = (step - config.warmup) / max(1, steps - config.warmup)
        return config.floor + (1 - config.floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2
    if config.shape == "trapezoid":
        left = (steps - step) / max(1.0, config.decay_fraction * steps)
        return config.floor + (1 - config.floor) * max(0.0, min(1.0, left))
    return 1.0
