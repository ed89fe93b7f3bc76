"""What cannot fit is refused at once, by its key; what is said to be needed is never more than what is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make

from lengthen.config import Config
from lengthen.data import Corpus
from lengthen.model import Transformer
from lengthen.training import World, memory, train


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("train.batch", {"train__batch": 10**12}),
        ("train.batch", {"train__batch": 10**12, "train__micro_batch": 1}),
        ("train.micro_batch", {"train__batch": 10**7, "train__micro_batch": 10**7}),
        ("model.layers", {"model__layers": 10**9}),
        ("model.heads", {"model__heads": 10**12, "model__head_dim": 2, "model__positions": "rotary"}),
        ("model.width", {"model__width": 10**9}),
        ("model.vocab_size", {"model__vocab_size": 10**12}),
        ("model.feed_forward", {"model__feed_forward": 10**12}),
        (
            "model.positions",
            {"model__positions": "learned", "model__position_options": {"max_length": 10**12}},
        ),
    ],
    ids=str,
)
def test_what_cannot_fit_is_refused_by_its_key(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path, key: str, changes: dict[str, Any]
) -> None:
    began = time.perf_counter()
    with pytest.raises(
        ValueError, match=rf"^{key}: expected a (model|batch) that fits into memory, .* takes? .* [GT]B.*, and cpu has"
    ):
        train(make(**changes), corpus, tmp_path, alone)
    assert time.perf_counter() - began < 5
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model__heads": 10**12, "model__head_dim": 2}, r"model.positions = 'alibi': heads: expected at most 65536"),
        (
            {"model__positions": "t5", "model__position_options": {"buckets": 10**6, "max_distance": 10**7}},
            r"model.positions = 't5': t5.buckets: expected at most 1024, got 1000000",
        ),
        (
            {"model__positions": "t5", "model__position_options": {"max_distance": 10**12}},
            r"model.positions = 't5': t5.max_distance: expected at most 16777216, got 1000000000000",
        ),
    ],
    ids=str,
)
def test_what_takes_forever_to_describe_is_refused(make: Make, changes: dict[str, Any], problem: str) -> None:
    began = time.perf_counter()
    with pytest.raises(ValueError, match=problem):
        make(**changes)
    assert time.perf_counter() - began < 5


def test_by_force_it_is_tried(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda here: 1000)
    with pytest.raises(ValueError, match=r"model\.\w+: expected a model that fits into memory.*force=True tries it"):
        train(make(train__steps=1), corpus, tmp_path, alone)
    assert train(make(train__steps=1), corpus, tmp_path, alone, force=True).finished


@pytest.mark.parametrize("method", ["alibi", "rotary", "xpos", "t5"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__activation": "relu", "model__biases": False},
        {"model__activation": "swiglu", "model__norm": "rms", "model__key_heads": 1},
        {"model__activation": "geglu", "model__block": "shared"},
        {"model__block": "parallel"},
        {"model__block": "post"},
        {"train__checkpoint_activations": True},
    ],
    ids=str,
)
def test_activations_are_no_more_than_a_pass_keeps(make: Make, method: str, changes: dict[str, Any]) -> None:
    config = make(**changes, model__positions=method, model__width=64, model__train_length=64)
    model, rows = Transformer(config.model), config.train.batch
    model.checkpoint_activations = config.train.checkpoint_activations
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, tuple[int, Any]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), storage  # held, so that no other gets its place
        return tensor

    ids = torch.randint(258, (rows, 64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids, ids)
    least, there = (
        memory.needed_by_activations(config, World(0, 1, torch.device("cpu"))),
        sum(n for n, _ in kept.values()),
    )
    loss.backward()
    assert least <= there < 4 * least


def test_the_models_part_is_what_adamw_holds(make: Make) -> None:
    config = make()
    assert memory.needed_by_model(config, World(0, 1, torch.device("cpu"))) == 16 * config.model.parameters


@pytest.mark.parametrize(
    ("mode", "device", "fraction"),
    [
        ("replicate", "cpu", 4),
        ("shard", "cpu", 1),
        ("replicate", "cuda", 1),
        ("shard", "cuda", 1 / 4),
        ("auto", "cuda", 1),
    ],
)
def test_processes_share_it(make: Make, mode: str, device: str, fraction: float) -> None:
    """The processes of one machine have one memory, and each GPU its own."""
    config: Config = make(distributed__mode=mode)
    here = World(0, 4, torch.device(device))
    assert memory.needed_by_model(config, here) == fraction * 16 * config.model.parameters
    assert memory.needed_by_inputs(config, here) == 16 * 4 * 16 * (1 if device == "cpu" else 1 / 4)
