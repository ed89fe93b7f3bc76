"""Training on a GPU: compiled, in bfloat16, resumed; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Make
from test_loop import StopAt, evaluations, losses

from lengthen.data import Corpus
from lengthen.training import World, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch.compile's, which differ from version to version
]


@pytest.fixture
def gpu() -> World:
    return World(0, 1, torch.device("cuda", 0))


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "rotary", "xpos", "alibi", "t5"])
def test_a_gpu_takes_the_steps_of_a_cpu(
    corpus: Corpus, make: Make, alone: World, gpu: World, tmp_path: Path, positions: str
) -> None:
    shape = {"model__positions": positions, "model__width": 64, "model__heads": 4, "evaluation__lengths": [16, 64]}
    train(make(**shape), corpus, tmp_path / "cpu", alone)
    train(make(**shape, train__precision="float32"), corpus, tmp_path / "float32", gpu)
    train(make(**shape), corpus, tmp_path / "bfloat16", gpu)
    for name, tolerance in (("float32", 1e-3), ("bfloat16", 2e-2)):
        torch.testing.assert_close(losses(tmp_path / name), losses(tmp_path / "cpu"), rtol=tolerance, atol=0)
        ours, theirs = evaluations(tmp_path / name), evaluations(tmp_path / "cpu")
        torch.testing.assert_close([one[2] for one in ours], [one[2] for one in theirs], rtol=tolerance, atol=0)


def test_stopped_and_resumed_on_a_gpu(corpus: Corpus, make: Make, gpu: World, tmp_path: Path) -> None:
    config = make(model__positions="rotary", model__width=64, model__heads=4, train__micro_batch=2, log__every=2)
    train(config, corpus, tmp_path / "whole", gpu)
    assert not train(config, corpus, tmp_path / "parts", gpu, watchers=[StopAt(2)]).finished
    assert train(config, corpus, tmp_path / "parts", gpu).finished
    torch.testing.assert_close(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-3, atol=0)


def test_more_tokens_than_logits_could_be_held_of() -> None:
    """131,072 tokens with a vocabulary of 50,304, forward and backward: all logits in float32 would be 26 GB."""
    from lengthen.model import linear_cross_entropy

    hidden = torch.randn(131_072, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50_304, 64, device="cuda", requires_grad=True)
    targets = torch.randint(50_304, (131_072,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total, _ = linear_cross_entropy(hidden, weight, targets)
    total.backward()
    assert torch.isfinite(total)
    share = torch.cuda.get_device_properties(0).total_memory / 16
    assert torch.cuda.max_memory_allocated() - before < 2.5 * share
