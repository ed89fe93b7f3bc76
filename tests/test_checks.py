"""What came, in the words of an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lengthen.checks import describe


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3.5, "3.5 (float)"),
        (np.int64(3), "np.int64(3) (int64)"),
        (np.zeros((3, 2)), "a float64 array of shape [3, 2]"),
        (torch.zeros(2), "a torch.float32 tensor of shape [2] on cpu"),
    ],
)
def test_what_came_is_named(value: object, said: str) -> None:
    assert describe(value) == said
