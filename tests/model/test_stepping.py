"""On a GPU, a step that a CUDA graph replays gives what a step without one gives."""

from typing import Any

import pytest
import torch

from lengthen import ModelConfig, Transformer
from lengthen.attention.static import StaticCache
from lengthen.model.stepping import Stepper, read, repeats

CASES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "room": {"policy": "full", "room": 160},
    "padded": {"policy": "full", "starts": [0, 7, 30]},
    "certified": {"policy": "reach", "mode": "certified", "tolerance": 1e-4, "page": 16},
}


def model_of(positions: str = "alibi", **options: Any) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=50, layers=2, width=32, heads=4, train_length=32, positions=positions, **options)
    return Transformer(config).eval()


@pytest.mark.parametrize("case", CASES)
def test_a_model_in_steps_of_fixed_shapes(case: str) -> None:
    model, ids = model_of(qk_norm=case == "certified").double(), torch.randint(50, (3, 160))
    caches = [model.cache(**CASES[case]) for _ in range(2)]
    for cache in caches:
        read(model, ids[:, :40], cache)
    static = StaticCache(caches[1], ids.device)
    for i in range(40, 160):
        expected = read(model, ids[:, i : i + 1], caches[0])
        static.prepare()
        got = read(model, ids[:, i : i + 1], static)
        static.advance()
        torch.testing.assert_close(got, expected, rtol=1e-3 if case == "certified" else 1e-10, atol=1e-9)


def test_which_models_repeat_a_step() -> None:
    ids = torch.randint(50, (1, 20))
    for name, expected in (("alibi", True), ("rotary+alibi", False), ("t5", False), ("xpos", False), ("none", False)):
        model = model_of(name)
        cache = model.cache()
        assert not repeats(model, cache)  # nothing was read
        read(model, ids, cache)
        assert repeats(model, cache) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("case", CASES)
def test_a_cuda_graph_replays_a_step(case: str, device: str) -> None:
    if int(device[-1]) >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    model, ids = model_of(qk_norm=case == "certified").to(device), torch.randint(50, (3, 160)).to(device)
    caches = [model.cache(**CASES[case]) for _ in range(2)]
    for cache in caches:
        read(model, ids[:, :40], cache)
    stepper, replayed = Stepper(model, caches[1]), 0
    for i in range(40, 160):
        expected = read(model, ids[:, i : i + 1], caches[0])
        got = stepper(ids[:, i])
        replayed += stepper.graph is not None
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)
    assert replayed > 80
    assert caches[1].bound <= max(1.01 * caches[0].bound, 1e-4)
