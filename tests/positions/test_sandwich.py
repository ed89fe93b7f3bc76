import pytest
import torch
from torch import Tensor

from lengthen.positions import Sandwich, Sinusoidal
from lengthen.positions import sandwich as module

SIZES = {"head_dim": 8, "width": 32}


@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (5, 64), (12, 2)])
def test_is_the_product_of_two_sinusoidal_embeddings(heads: int, dim: int) -> None:
    sinusoids = Sinusoidal(heads=1, head_dim=1, width=dim, amplitude=1)
    p = sinusoids.embed(torch.zeros(1, 300, dim, dtype=torch.float64), torch.arange(300))[0]
    product = p @ p.mT  # p_m·p_n
    compression = (8 / heads) * torch.arange(1, heads + 1, dtype=torch.float64)
    expected = (product - dim / 2) / compression.view(-1, 1, 1)
    distance = torch.arange(300).unsqueeze(1) - torch.arange(300)
    bias = Sandwich(heads=heads, **SIZES, dim=dim).bias(299)
    assert bias.values.dtype == torch.float32
    torch.testing.assert_close(bias.at(distance).double(), expected, rtol=1e-6, atol=1e-5)


def test_is_zero_at_distance_zero_and_negative_after() -> None:
    values = Sandwich(heads=8, **SIZES).bias(5000).values
    assert not values[:, 0].any()
    assert bool((values[:, 1:] < 0).all())


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Sandwich(heads=3, **SIZES).bias(500).values
    monkeypatch.setattr(module, "CHUNK", 64 * 7)
    torch.testing.assert_close(Sandwich(heads=3, **SIZES).bias(500).values, whole, rtol=0, atol=1e-6)


def test_the_longest_table_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    compute = Sandwich._compute

    def counted(self: Sandwich, length: int) -> Tensor:
        lengths.append(length)
        return compute(self, length)

    monkeypatch.setattr(Sandwich, "_compute", counted)
    method = Sandwich(heads=2, **SIZES)
    short, long = method.bias(99).values, method.bias(1000).values
    for max_distance in range(1000):
        assert method.bias(max_distance).values.shape == (2, max_distance + 1)
    assert lengths == [128, 1024]
    assert torch.equal(short, long[:, :100])


def test_what_a_caller_changes_is_a_copy() -> None:
    method = Sandwich(heads=2, **SIZES)
    expected = method.bias(9).values.clone()
    method.bias(9).values.zero_()
    assert torch.equal(method.bias(9).values, expected)


def test_dim_is_checked() -> None:
    with pytest.raises(ValueError, match=r"sandwich\.dim: expected an even number .*, got 127"):
        Sandwich(heads=2, **SIZES, dim=127)
    with pytest.raises(ValueError, match=r"sandwich\.dim: expected at least 2, got 0"):
        Sandwich(heads=2, **SIZES, dim=0)
