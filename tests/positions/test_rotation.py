"""What rotary and xPos share: the rotation itself, and the tables remembered for it."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from lengthen.positions import Rotary, XPos
from lengthen.positions.rotation import Rotation

SIZES = {"heads": 2, "head_dim": 64, "width": 128}
BOTH = pytest.mark.parametrize("kind", [Rotary, XPos])
LAYOUTS = pytest.mark.parametrize("pairs", ["halves", "neighbours"])


def scores(method: Rotation, q: Tensor, k: Tensor, shift: int) -> Tensor:
    positions = torch.arange(q.shape[2]) + shift
    return method.rotate(q, positions).double() @ method.rotate(k, positions).double().mT


@BOTH
@LAYOUTS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_scores_depend_on_distance_alone(
    kind: type[Rotation], pairs: str, dtype: torch.dtype, tolerance: float
) -> None:
    method = kind(**SIZES, pairs=pairs)
    q, k = torch.randn(2, 2, 2, 9, 64, dtype=dtype).unbind()
    norms = q.double().norm(dim=-1).unsqueeze(-1) * k.double().norm(dim=-1).unsqueeze(-2)
    moved = scores(method, q, k, 10**6) - scores(method, q, k, 0)
    assert (moved / norms).abs().max().item() < tolerance
    other = scores(method, q, k.roll(1, dims=2), 0) - scores(method, q, k, 0)
    assert (other / norms).abs().max().item() > 0.05  # and the scores do change when the distance does


@BOTH
@LAYOUTS
def test_norms_are_unchanged(kind: type[Rotation], pairs: str) -> None:
    method = kind(**SIZES, pairs=pairs)
    q = torch.randn(2, 2, 5, 64, dtype=torch.float64)
    rotated = method.rotate(q, torch.tensor([0, 1, 77, 10**6, 10**9]))
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1), rtol=1e-12, atol=0)
    assert torch.equal(rotated[:, :, 0], q[:, :, 0])  # position 0 is not rotated at all
    assert not torch.allclose(rotated[:, :, 1], q[:, :, 1], atol=0.1)


@LAYOUTS
def test_a_pair_is_rotated_by_its_angle(pairs: str) -> None:
    method = Rotary(heads=1, head_dim=4, width=4, base=100.0, pairs=pairs)
    q = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 4)
    got = method.rotate(q, torch.tensor([5])).flatten()
    layout = [(0, 2), (1, 3)] if pairs == "halves" else [(0, 1), (2, 3)]
    for n, (a, b) in enumerate(layout):
        number = complex(q.flatten()[a].item(), q.flatten()[b].item())
        turn = torch.polar(torch.tensor(1.0).double(), torch.tensor(5 * 100.0 ** (-2 * n / 4)).double())
        expected = number * complex(turn.item())
        assert got[a].item() == pytest.approx(expected.real, abs=1e-12)
        assert got[b].item() == pytest.approx(expected.imag, abs=1e-12)


def test_the_layouts_are_one_method_on_permuted_features() -> None:
    halves, neighbours = Rotary(**SIZES), Rotary(**SIZES, pairs="neighbours")
    q, positions = torch.randn(1, 2, 7, 64), torch.arange(7)
    order = torch.arange(64).view(2, 32).mT.flatten()  # 0, 32, 1, 33, …
    assert torch.equal(halves.rotate(q, positions)[..., order], neighbours.rotate(q[..., order], positions))


def test_half_precision_is_rounded_once() -> None:
    method, positions = Rotary(**SIZES), torch.arange(1_000_000, 1_000_016)
    q = torch.randn(1, 2, 16, 64).bfloat16()
    exact = method.rotate(q.double(), positions)
    assert torch.equal(method.rotate(q, positions), method.rotate(q.float(), positions).bfloat16())
    assert (method.rotate(q, positions).double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_gradients_are_rotated_back() -> None:
    method, positions = XPos(**SIZES), torch.arange(5)
    q = torch.randn(1, 2, 5, 64, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 2, 5, 64, dtype=torch.float64)
    (method.rotate(q, positions) * weight).sum().backward()
    torch.testing.assert_close(q.grad, method.rotate(weight, -positions), rtol=1e-12, atol=1e-12)


class Counting(Rotary):
    computed = 0

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        self.computed += 1
        return super()._compute(positions, dtype)


@pytest.fixture
def method() -> Counting:
    return Counting(heads=2, head_dim=8, width=16)


def right(method: Rotary, q: Tensor, positions: Tensor) -> bool:
    fresh = Rotary(heads=2, head_dim=8, width=16)
    return torch.equal(method.rotate(q, positions), fresh.rotate(q, positions.clone()))


def test_tables_are_computed_once_for_all_layers(method: Counting) -> None:
    q, positions = torch.randn(1, 2, 4, 8), torch.arange(4)
    for _ in range(5):
        assert right(method, q, positions)
    assert method.computed == 1


def test_positions_changed_in_place_are_noticed(method: Counting) -> None:
    q, positions = torch.randn(1, 2, 4, 8), torch.arange(4)
    assert right(method, q, positions)
    positions += 100
    assert right(method, q, positions)
    assert method.computed == 2


def test_equal_looking_but_other_positions_are_not_confused(method: Counting) -> None:
    q = torch.randn(1, 2, 4, 8)
    for start in range(6):  # a new tensor each time, often at the address of the last
        assert right(method, q, torch.arange(start, start + 4))


def test_dtypes_have_tables_of_their_own(method: Counting) -> None:
    q, positions = torch.randn(1, 2, 4, 8), torch.arange(4)
    assert right(method, q, positions)
    assert right(method, q.double(), positions)
    assert method.rotate(q.double(), positions).dtype == torch.float64


def test_positions_made_in_inference_mode(method: Counting) -> None:
    q = torch.randn(1, 2, 4, 8)
    with torch.inference_mode():
        positions = torch.arange(4)
        assert right(method, q, positions)
        assert right(method, q, positions)
        assert method.computed == 1
        positions += 7  # such a tensor counts no versions
        assert right(method, q, positions)
    q.requires_grad_()
    method.rotate(q, positions).sum().backward()
    assert q.grad is not None


def test_tables_made_in_inference_mode_serve_training(method: Counting) -> None:
    q, positions = torch.randn(1, 2, 4, 8, requires_grad=True), torch.arange(4)
    with torch.inference_mode():
        method.rotate(q, positions)
    method.rotate(q, positions).square().sum().backward()
    assert method.computed == 1
    assert q.grad is not None


def test_tables_go_when_their_positions_go(method: Counting) -> None:
    positions = torch.arange(4)
    method.rotate(torch.randn(1, 2, 4, 8), positions)
    table = weakref.ref(method._kept.tables[0])
    del positions
    gc.collect()
    assert table() is None


@BOTH
def test_options_are_checked(kind: type[Rotation]) -> None:
    sizes = {"heads": 2, "width": 128}
    with pytest.raises(ValueError, match=r"head_dim: expected an even number .*, got 7"):
        kind(**sizes, head_dim=7)
    with pytest.raises(ValueError, match=rf"{kind.name}\.base: expected more than 1, got 1"):
        kind(**sizes, head_dim=8, base=1)
    with pytest.raises(ValueError, match=rf"{kind.name}\.pairs: expected 'halves' or 'neighbours', got 'neighbors'"):
        kind(**sizes, head_dim=8, pairs="neighbors")


@BOTH
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_only_floating_point_is_rotated(kind: type[Rotation], dtype: torch.dtype) -> None:
    x = torch.ones(1, 2, 5, 64).to(dtype)
    with pytest.raises(TypeError, match=rf"^x: expected a floating-point tensor, got a {dtype} tensor"):
        kind(**SIZES).rotate(x, torch.arange(5))
