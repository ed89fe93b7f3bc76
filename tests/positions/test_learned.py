import pytest
import torch

from lengthen.positions import Learned

SIZES = {"heads": 2, "head_dim": 4, "width": 8}


def test_adds_the_row_of_each_position() -> None:
    method = Learned(**SIZES, max_length=16)
    x = torch.randn(2, 3, 8)
    positions = torch.tensor([[0, 5, 15], [1, 1, 2]], dtype=torch.int32)
    expected = torch.stack([x[b] + method.weight[positions[b].long()] for b in range(2)])
    assert torch.equal(method.embed(x, positions), expected)


def test_gradient_goes_to_the_rows_used() -> None:
    method = Learned(**SIZES, max_length=6)
    method.embed(torch.zeros(3, 2, 8), torch.tensor([1, 4])).sum().backward()
    assert method.weight.grad is not None
    assert method.weight.grad[:, 0].tolist() == [0, 3, 0, 0, 3, 0]


@pytest.mark.parametrize(("position", "named"), [(16, "16"), (700, "700"), (-1, "-1")])
def test_a_position_outside_the_table_is_refused(position: int, named: str) -> None:
    method = Learned(**SIZES, max_length=16)
    with pytest.raises(ValueError, match=rf"positions: expected 0 … 15, got {named}: .* cannot be stretched"):
        method.embed(torch.zeros(1, 2, 8), torch.tensor([3, position]))


def test_an_empty_sequence_is_let_through() -> None:
    assert Learned(**SIZES, max_length=4).embed(torch.zeros(1, 0, 8), torch.arange(0)).shape == (1, 0, 8)


def test_max_length_is_checked() -> None:
    with pytest.raises(ValueError, match=r"learned\.max_length: expected at least 1, got 0"):
        Learned(**SIZES, max_length=0)
    with pytest.raises(TypeError, match=r"learned\.max_length: expected a whole number, got '512'"):
        Learned(**SIZES, max_length="512")


def test_starts_small_and_can_be_drawn_anew() -> None:
    method = Learned(heads=2, head_dim=4, width=64, max_length=256)
    before = method.weight.detach().clone()
    assert 0.018 < before.std().item() < 0.022
    method.reset_parameters()
    assert not torch.equal(before, method.weight)
