"""A small corpus, and the smallest runs that have everything in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lengthen.config import from_table
from lengthen.data import Corpus, prepare
from lengthen.training import Config, World

Make = Callable[..., Config]


def make_corpus(folder: Path, seed: int = 0) -> Corpus:
    """Prepare a few documents of words that follow one another with some regularity."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("etaoinshr", k=draw.randint(2, 7))) for _ in range(60)]
    sources = folder / f"texts-{seed}"
    sources.mkdir(parents=True)
    for number in range(24):
        here = draw.randrange(60)
        said = []
        for _ in range(300):
            here = (here * 7 + draw.choice((1, 2, 5))) % 60
            said.append(words[here])
        (sources / f"{number:02d}.txt").write_text(" ".join(said), encoding="utf-8")
    return prepare([sources], folder / f"corpus-{seed}", validation=0.2, workers=1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def make() -> Make:
    return make_config


@pytest.fixture
def alone() -> World:
    return World(0, 1, torch.device("cpu"))


def make_config(**changes: Any) -> Config:
    """Return a config of a tiny model and few steps; changes by dotted key, '__' for the dot."""
    table: dict[str, dict[str, Any]] = {
        "model": {"vocab_size": 258, "layers": 2, "width": 16, "heads": 2, "train_length": 16, "positions": "alibi"},
        "train": {"steps": 12, "batch": 4},
        "optimizer": {"lr": 3e-3},
        "schedule": {"shape": "constant", "warmup": 3},
        "evaluation": {"every": 6, "lengths": [16, 48], "tokens": 512},
        "checkpoint": {"every": 3, "keep": 2},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        table.setdefault(section, {})[name] = value
    return from_table(table, "test")
