"""Reach of a model's heads: the op's own bound, on the model's own queries and keys."""

from __future__ import annotations

import pytest
import torch

from lengthen import Causal, Decay, Linear, ModelConfig, Table, Transformer, reach
from lengthen.evaluation.analyses.reach import keys_read, of_model
from lengthen.evaluation.capture import Call, each_layer


def small(positions: str, heads: int = 8) -> Transformer:
    torch.manual_seed(0)
    options = {"kind": "power"} if positions == "kerple" else {}
    sizes = {"layers": 2, "width": 64, "heads": heads, "train_length": 16}
    return Transformer(ModelConfig(258, **sizes, positions=positions, position_options=options))


@pytest.mark.parametrize("positions", ["alibi", "rotary+alibi", "xpos+alibi", "kerple"])
def test_is_the_ops_reach(positions: str) -> None:
    model, ids = small(positions), torch.randint(258, (3, 200))
    calls: list[Call] = []
    each_layer(model, ids, calls.append)
    found = of_model(model, [ids[:1], ids[1:]])
    assert found.reach.shape == found.fraction.shape == (2, 8)
    for layer, call in enumerate(calls):
        assert isinstance(call.bias, Table if positions == "kerple" else Linear)
        far = reach(call.q, call.k, call.bias).double()
        torch.testing.assert_close(found.reach[layer], far.mean((0, 2)), rtol=0.02, atol=0)  # each batch has its ball
        matrix = 3 * 200 * 201 / 2
        torch.testing.assert_close(found.fraction[layer], far.sum((0, 2)) / matrix, rtol=0.02, atol=0)
    steep, flat = found.fraction[0, 0], found.fraction[0, -1]
    assert 0 < steep < 0.5
    assert flat == 1


def test_longer_texts_read_a_smaller_fraction() -> None:
    model = small("alibi")
    short, long = (of_model(model, [torch.randint(258, (1, length))]) for length in (64, 512))
    assert bool((long.fraction[:, 0] < short.fraction[:, 0] / 3).all())
    assert bool((long.reach <= 513 / 2).all())


def test_a_bias_that_does_not_fall_reaches_all_that_is_seen() -> None:
    found = of_model(small("t5", heads=2), [torch.randint(258, (1, 40))])  # a new model's buckets are all 0
    torch.testing.assert_close(found.fraction, torch.ones(2, 2).double())


@pytest.mark.parametrize("positions", ["rotary", "xpos", "none", "sinusoidal"])
def test_other_methods_are_refused(positions: str) -> None:
    with pytest.raises(ValueError, match=f"got '{positions}': nothing bounds how far its heads look"):
        of_model(small(positions, heads=2), [torch.zeros(1, 4, dtype=torch.int64)])


def test_calls_without_a_bound_are_refused() -> None:
    q = torch.zeros(1, 2, 4, 4)
    with pytest.raises(TypeError, match=r"bias: expected Linear or Table, .*got None"):
        keys_read(Call(0, q, q, q))
    with pytest.raises(ValueError, match="decay: expected none"):
        keys_read(Call(0, q, q, q, Linear(torch.ones(2)), Decay(torch.full((4,), 0.9)), Causal()))
    with pytest.raises(ValueError, match="at least one text"):
        of_model(small("alibi"), [])
