"""Blocks through torch.compile: the same loss and gradients, and one graph for all blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lengthen.model import Transformer

# Dynamo looks whether a block's input has a gradient, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
Make = Callable[..., Transformer]
METHODS = ("none", "sinusoidal", "rotary", "xpos", "alibi", "t5", "kerple", "rotary+alibi")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Let no test see what another compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def losses(model: Transformer, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    total = model(ids[:, :-1], targets=ids[:, 1:])
    model.zero_grad()
    total.backward()
    return total.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("method", "again"), [*((method, False) for method in METHODS), ("xpos", True), ("alibi", True)]
)
def test_compiled_blocks_give_the_same(make: Make, method: str, again: bool) -> None:
    model, ids = make(positions=method, layers=3, key_heads=2), torch.randint(19, (2, 13))
    model.checkpoint_activations = again
    total, expected = losses(model, ids)
    graphs = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=graphs, fullgraph=True, dynamic=False)
    got_total, got = losses(model, ids)
    torch.testing.assert_close(got_total, total, rtol=1e-11, atol=1e-11)
    assert got.keys() == expected.keys()
    for name, theirs in expected.items():
        torch.testing.assert_close(
            got[name], theirs, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert graphs.frame_count == 1, "each block was compiled for itself"


def test_a_second_step_compiles_nothing(make: Make) -> None:
    model = make(positions="rotary", layers=2)
    graphs = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=graphs, fullgraph=True, dynamic=False)
    for _ in range(3):
        losses(model, torch.randint(19, (2, 13)))
    assert graphs.frame_count == 1


def test_blocks_and_what_follows_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile_parts` with another backend than its own, which would need a C++ compiler."""
    model, ids = make(positions="rotary", layers=3), torch.randint(19, (2, 13))
    total, expected = losses(model, ids)
    graphs, real = CompileCounterWithBackend("aot_eager"), torch.compile

    def compiled(what: Any, **options: Any) -> Any:
        return real(what, backend=graphs, **options)

    monkeypatch.setattr(torch, "compile", compiled)
    model.compile_parts()
    got_total, got = losses(model, ids)
    assert graphs.frame_count == 2
    torch.testing.assert_close(got_total, total, rtol=1e-11, atol=1e-11)
    for name, theirs in expected.items():
        torch.testing.assert_close(got[name], theirs, rtol=1e-9, atol=1e-10)
