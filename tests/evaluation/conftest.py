"""A text of a few documents, and a model that has seen none of it: arithmetic needs no training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lengthen import ModelConfig, Transformer
from lengthen.data import Corpus, prepare


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("text")
    for name, sizes in (("train", (3, 1, 9, 2)), ("validation", (5, 14))):
        texts = [f"a fox and {n} crows " * n for n in sizes]
        (folder / f"{name}.txt").write_text("\0".join(texts), encoding="utf-8")
    return prepare(
        folder / "train.txt", folder / "corpus", separator="\0", validation=[folder / "validation.txt"], workers=1
    )


def make(positions: str = "alibi", train_length: int = 16, **more: Any) -> Transformer:
    torch.manual_seed(1)
    config = ModelConfig(258, layers=2, width=32, heads=2, train_length=train_length, positions=positions, **more)
    model = Transformer(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at a start, so that what is read matters
            parameter.mul_(4)
    return model


@pytest.fixture
def make_model() -> Callable[..., Transformer]:
    return make


@pytest.fixture
def model() -> Transformer:
    return make()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
