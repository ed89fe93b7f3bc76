"""Small models for the tests of the model layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lengthen.model import ModelConfig, Transformer

SIZES: dict[str, Any] = {"vocab_size": 19, "layers": 2, "width": 24, "heads": 4, "train_length": 40}


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same random numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def make() -> Callable[..., Transformer]:
    """Return a function that makes a small model, in float64, with every weight drawn: no bias 0, no scale 1."""

    def made(dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
        torch.manual_seed(1)
        model = Transformer(ModelConfig(**(SIZES | changes))).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
        return model

    return made
