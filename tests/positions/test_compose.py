from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen.attention import Decay, Linear, Table
from lengthen.positions import PositionMethod, build, compose, names

SIZES = {"heads": 4, "head_dim": 8, "width": 32}


def make(name: str, **options: Any) -> PositionMethod:
    return build(name, **SIZES, **({"max_length": 64} if "learned" in name else {}), **options)


@pytest.mark.parametrize(("a", "b"), [*combinations(names(), 2), *((name, name) for name in names())])
def test_methods_go_together_when_they_take_different_places(a: str, b: str) -> None:
    first, second = make(a), make(b)
    if "none" in (a, b) or set(first.places) & set(second.places):
        with pytest.raises(ValueError, match="compose: "):
            compose(first, second)
        return
    both = compose(first, second)
    assert set(both.places) == set(first.places) | set(second.places)


@pytest.mark.parametrize(("a", "b"), list(product(["sinusoidal", "rotary", "xpos"], ["alibi", "t5"])))
def test_a_composed_method_does_what_its_parts_do(a: str, b: str) -> None:
    first, second = make(a), make(b)
    both = compose(first, second)
    x, q, positions = torch.randn(2, 5, 32), torch.randn(2, 4, 5, 8), torch.arange(5)
    assert torch.equal(both.embed(x, positions), first.embed(x, positions))
    assert torch.equal(both.rotate(q, positions), first.rotate(q, positions))
    ours, theirs = both.bias(9), second.bias(9)
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours.at(torch.arange(10)), theirs.at(torch.arange(10)))
    if a == "xpos":
        decay, expected = both.decay(), first.decay()
        assert decay is not None
        assert expected is not None
        assert torch.equal(decay.rates, expected.rates)
    else:
        assert both.decay() is None


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("rotary", "xpos", "rotary and xpos both rotate queries and keys: the angles would add up"),
        ("alibi", "t5", "alibi and t5 both add a bias to the scores: the bias would be added twice"),
        (
            "learned",
            "sinusoidal",
            "learned and sinusoidal both add to the embeddings: positions would be added twice",
        ),
        ("none", "alibi", "none says that there is no position information"),
        ("rotary", "none", "none says that there is no position information"),
        ("none", "none", "none says that there is no position information"),
    ],
)
def test_refusals_give_the_reason(a: str, b: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(make(a), make(b))


def test_three_places_and_nesting() -> None:
    nested = compose(compose(make("sinusoidal"), make("xpos")), make("alibi"))
    assert nested.places == ("embed", "rotate", "decay", "bias")
    with pytest.raises(ValueError, match="alibi and kerple both add a bias"):
        compose(nested, make("kerple"))


def test_a_method_of_ones_own_is_composed_by_what_it_overrides() -> None:
    class Mine(PositionMethod):
        def bias(self, max_distance: int) -> Table:
            return Table(torch.zeros(self.heads, max_distance + 1))

    assert compose(Mine(**SIZES), make("rotary")).places == ("rotate", "bias")
    with pytest.raises(ValueError, match="Mine and alibi both add a bias"):
        compose(Mine(**SIZES), make("alibi"))


def test_a_rotation_and_a_decay_of_different_methods_go_together() -> None:
    class Fading(PositionMethod):
        def decay(self) -> Decay:
            return Decay(torch.full((self.head_dim,), 0.5))

    for parts in ((make("rotary"), Fading(**SIZES)), (Fading(**SIZES), make("rotary"))):
        both = compose(*parts, make("alibi"))
        placed = both.at(torch.arange(5), torch.float32, False)
        assert placed.decay is not None
        assert placed.decay.rates.tolist() == [0.5] * 8
        assert isinstance(placed.bias, Linear)


def test_one_method_is_itself() -> None:
    method = make("none")
    assert compose(method) is method


def test_what_is_not_a_method_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least one method, got none"):
        compose()
    with pytest.raises(TypeError, match="expected position methods, as `build` returns, got 'alibi'"):
        compose("alibi")


def test_unlike_sizes_are_refused() -> None:
    other = build("alibi", heads=8, head_dim=8, width=32)
    with pytest.raises(ValueError, match=r"heads: expected the same for every method composed, got \[4, 8\]"):
        compose(make("rotary"), other)


def test_parameters_are_found_saved_and_moved() -> None:
    method = make("rotary+t5")
    assert [name for name, _ in method.named_parameters()] == ["methods.1.weight"]
    torch.nn.init.normal_(method.get_parameter("methods.1.weight"))
    other = make("rotary+t5")
    other.load_state_dict(method.state_dict())

    def values(composed: PositionMethod) -> Tensor:
        bias = composed.bias(50)
        assert isinstance(bias, Table)
        return bias.values

    assert torch.equal(values(method), values(other))
    assert values(method.to("meta")).device.type == "meta"
    fixed = make("sinusoidal+alibi").to("meta").bias(3)
    assert isinstance(fixed, Linear)
    assert fixed.slopes.device.type == "meta"
