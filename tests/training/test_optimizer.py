"""AdamW: what is pulled to 0, what never is, and what it is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lengthen import positions
from lengthen.config import OptimizerConfig
from lengthen.model import ModelConfig, Transformer
from lengthen.training.optimizer import adamw, set_lr

SIZES: dict[str, Any] = {"vocab_size": 19, "layers": 2, "width": 24, "heads": 4, "train_length": 40}


def model(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**(SIZES | changes)))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((name, {}) for name in positions.names()),
        ("alibi", {"learned": True}),
        ("xpos", {"learned_gamma": True}),
        ("learned+t5", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_decay_and_nothing_else(method: str, options: dict[str, Any], tied: bool) -> None:
    made = model(positions=method, position_options=options, tied=tied)
    optimizer = adamw(made, OptimizerConfig(weight_decay=0.3))
    names = {id(parameter): name for name, parameter in made.named_parameters()}
    groups = optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, *[0.0] * (len(groups) - 1)]
    decayed, *others = ({names[id(p)] for p in group["params"]} for group in groups)
    free = set().union(*others)
    expected = {"embedding.weight"} | (set() if tied else {"output.weight"})
    for layer in range(2):
        for part in ("attention.qkv", "attention.out", "feed_forward.up", "feed_forward.down"):
            expected.add(f"blocks.{layer}.{part}.weight")
    assert decayed == expected
    assert decayed | free == set(names.values())
    assert not decayed & free
    assert all(name.startswith("method.") or name.endswith("bias") or "norm" in name for name in free)


def test_its_numbers_are_the_configs() -> None:
    optimizer = adamw(model(), OptimizerConfig(lr=0.02, betas=[0.8, 0.9], epsilon=1e-6, weight_decay=0.0))
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.02, (0.8, 0.9), 1e-6)
        assert group["fused"]


@pytest.mark.parametrize(("method", "options"), [("t5", {}), ("alibi", {"learned": True}), ("learned+t5", {})], ids=str)
def test_what_a_method_learns_takes_larger_steps_by_its_factor(method: str, options: dict[str, Any]) -> None:
    made = model(positions=method, position_options=options)
    before = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    optimizer = adamw(made, OptimizerConfig(lr=0.5, weight_decay=0.0, method_lr_factor=4.0))
    set_lr(optimizer, 0.01)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # AdamW's first moves every number by lr
    for name, parameter in made.named_parameters():
        step = 0.04 if name.startswith("method.") else 0.01
        torch.testing.assert_close(
            before[name] - parameter.detach(), torch.full_like(parameter, step), rtol=1e-4, atol=1e-5
        )


def test_a_method_that_learns_nothing_has_no_group() -> None:
    assert [group["lr_factor"] for group in adamw(model(), OptimizerConfig()).param_groups] == [1.0, 1.0]


def test_without_a_gradient_only_decay_moves_a_weight() -> None:
    made = model(positions="learned")
    optimizer = adamw(made, OptimizerConfig(lr=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in made.named_parameters():
        shrunk = parameter.dim() >= 2 and not name.startswith("method.")
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if shrunk else 1.0))


def test_a_step_is_that_of_the_paper() -> None:
    """Loshchilov & Hutter: θ ← θ − lr·(m̂ / (√v̂ + ε) + λθ), written out for two steps."""
    made = model().double()
    config = OptimizerConfig(lr=0.01, betas=[0.7, 0.8], epsilon=1e-3, weight_decay=0.2)
    optimizer = adamw(made, config)
    weight = made.blocks[0].attention.qkv.weight  # type: ignore[union-attr]
    theta, m, v = weight.detach().clone(), 0.0, 0.0
    for step in (1, 2):
        for parameter in made.parameters():
            parameter.grad = torch.randn_like(parameter)
        g = weight.grad
        m, v = 0.7 * m + 0.3 * g, 0.8 * v + 0.2 * g * g
        update = (m / (1 - 0.7**step)) / ((v / (1 - 0.8**step)).sqrt() + 1e-3)
        theta = theta - 0.01 * (update + 0.2 * theta)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), theta)
