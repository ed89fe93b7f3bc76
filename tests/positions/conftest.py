"""What the tests of several methods share."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same random numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture
def finite_difference() -> Callable[[nn.Parameter, Callable[[], Tensor]], Tensor]:
    """Return a function that gives the slope of a loss in each entry of a float64 parameter."""

    def slope(parameter: nn.Parameter, loss: Callable[[], Tensor], step: float = 1e-6) -> Tensor:
        assert parameter.dtype == torch.float64
        flat = parameter.data.view(-1)
        slopes = torch.empty_like(flat)
        for n in range(flat.numel()):
            value = flat[n].item()
            sides = []
            for moved in (value + step, value - step):
                flat[n] = moved
                sides.append(loss().item())
            flat[n] = value
            slopes[n] = (sides[0] - sides[1]) / (2 * step)
        return slopes.view_as(parameter)

    return slope


@pytest.fixture(scope="session")
def x_transformers() -> ModuleType:
    """Return the package of that name; importing it calls `torch.jit.script`, which torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("x_transformers.x_transformers")
