import math

import pytest
import torch

from lengthen.positions import Sinusoidal

SIZES = {"heads": 2, "head_dim": 4}


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_is_the_paper_s_formula(base: float) -> None:
    method = Sinusoidal(**SIZES, width=6, base=base, amplitude=1)
    positions = torch.tensor([0, 1, 17, 1_000_003])
    got = method.embed(torch.zeros(1, 4, 6, dtype=torch.float64), positions)[0]
    for row, p in enumerate(positions.tolist()):
        for i in range(3):
            angle = p / base ** (2 * i / 6)
            assert got[row, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-9)
            assert got[row, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-9)


def test_is_added_to_x_and_right_far_out_in_float32() -> None:
    method = Sinusoidal(**SIZES, width=16)
    x = torch.randn(2, 3, 16)
    positions = torch.tensor([10**6, 10**6 + 1, 10**7])
    exact = method.embed(torch.zeros(1, 3, 16, dtype=torch.float64), positions)
    torch.testing.assert_close(method.embed(x, positions), x + exact.float(), rtol=0, atol=1e-6)


def test_amplitude_is_half_unless_told() -> None:
    x, positions = torch.randn(1, 3, 16), torch.arange(3)
    unit = Sinusoidal(**SIZES, width=16, amplitude=1.0).embed(torch.zeros_like(x), positions)
    torch.testing.assert_close(Sinusoidal(**SIZES, width=16).embed(x, positions), x + unit / 2)
    torch.testing.assert_close(Sinusoidal(**SIZES, width=16, amplitude=3.0).embed(x, positions), x + unit * 3)
    with pytest.raises(ValueError, match=r"sinusoidal\.amplitude: expected more than 0, got 0"):
        Sinusoidal(**SIZES, width=8, amplitude=0)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width: expected an even number .*, got 7"):
        Sinusoidal(**SIZES, width=7)


def test_base_is_checked() -> None:
    with pytest.raises(ValueError, match=r"sinusoidal\.base: expected more than 1, got 1"):
        Sinusoidal(**SIZES, width=8, base=1)
