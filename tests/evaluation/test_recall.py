"""Recall: the text from a seed, questions at the distance that was asked for, and who can answer them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lengthen import ModelConfig, Transformer
from lengthen.data import Corpus
from lengthen.evaluation.recall import (
    BESIDE,
    FILLER,
    KEYS,
    NEAREST,
    VALUES,
    Draws,
    accuracy,
    document,
    main,
    make_corpus,
    question,
)
from lengthen.model import load as load_model
from lengthen.training import World, load, presets, train


def check(text: str) -> dict[str, str]:
    """Return what a text tells: nothing is asked for before it was told, or answered otherwise."""
    told: dict[str, str] = {}
    for key, value in re.findall(r"([^\w.]?)(\w)", text):
        owner = next(name for name, values in VALUES.items() if value in values)
        assert key == (owner if owner in told else "")
        assert told.setdefault(owner, value) == value
    assert re.fullmatch(r"([.]|[^\w.]?\w)*", text)
    return told


@given(st.integers(0, 2**32), st.integers(NEAREST, 300))
def test_a_question(seed: int, distance: int) -> None:
    text, value = question(Draws(seed), distance)
    key = text[-1]
    assert value in VALUES[key]
    assert text[-1 - distance] == value
    assert len(text) + 1 == distance + BESIDE  # with <|end|>
    assert check(text[:-1])[key] == value
    assert text.count(key) == 1
    assert sum(text.count(other) for other in VALUES[key]) == 1, "the value is named between"


@given(st.integers(0, 2**32))
def test_a_document(seed: int) -> None:
    text = document(Draws(seed), count=30)
    assert 1 <= len(check(text)) <= len(KEYS)
    assert sum(symbol.isalnum() for symbol in text) == 30


def test_the_same_seed_is_the_same_text_for_ever() -> None:
    assert document(Draws(0), count=8) == "....5..............?5....Q....J............#J....%Q..............%Q.......o"
    assert question(Draws(0), 20) == ("R.E...e..p.$p..!e...%", "R")
    assert question(Draws(1), 20) != question(Draws(0), 20)


def test_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make_corpus(tmp_path / "one", documents=60)
    assert make_corpus(tmp_path / "again", documents=60).fingerprint == one.fingerprint
    assert make_corpus(tmp_path / "two", seed=1, documents=60).fingerprint != one.fingerprint
    assert sum(one.index.splits[name].documents for name in one.splits) == 60
    assert len(one["validation"]) > 0
    start = one.tokenizer.decode(one["train"].read(0, 40))
    assert set(start) <= {*KEYS, *"".join(VALUES.values()), FILLER}
    main([str(tmp_path / "three"), "--documents", "60"])
    assert Corpus.open(tmp_path / "three").fingerprint == one.fingerprint
    assert f"Next: lengthen train recall --data {tmp_path / 'three'}\n" in capsys.readouterr().out


class Oracle(nn.Module):
    """Answers from what it finds no farther back than `sight`."""

    def __init__(self, sight: int) -> None:
        super().__init__()
        self.sight, self.config = sight, SimpleNamespace(vocabulary=258)
        self.output_weight = nn.Parameter(torch.eye(258))

    def hidden(self, ids: Tensor, mask: Any = None) -> Tensor:
        out = torch.zeros(*ids.shape, 258)
        for row, line in enumerate(ids.tolist()):
            for token in line[-1 - self.sight : -1]:
                if token < 256 and chr(token) in VALUES[chr(line[-1])]:
                    out[row, -1, token] = 1
        return out


@pytest.mark.parametrize("distance", [1, 2, 17, 64])
def test_only_who_looks_far_enough_can_answer(distance: int) -> None:
    assert accuracy(Oracle(distance), distance, trials=50) == 1  # type: ignore[arg-type]
    assert accuracy(Oracle(distance - 1), distance, trials=50) == 0  # type: ignore[arg-type]


def test_an_untrained_model_and_its_state() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(258, layers=1, width=16, heads=2, train_length=16)).train()
    assert accuracy(model, 40, trials=20) <= 0.3
    assert model.training
    assert accuracy(model, 40, trials=7, seed=3) == accuracy(model, 40, trials=7, seed=3)


def test_what_is_wrong_is_said() -> None:
    model = Transformer(ModelConfig(100, layers=1, width=16, heads=2, train_length=16))
    with pytest.raises(ValueError, match="needs a vocabulary of 258, got 100"):
        accuracy(model, 10)
    with pytest.raises(ValueError, match="distance: expected"):
        question(Draws(0), 0)


def test_the_preset() -> None:
    assert "recall" in presets()
    config = load("recall", vocab_size=258)
    assert config.model.train_length <= 128


@pytest.mark.slow
def test_the_preset_learns(tmp_path: Path) -> None:
    """In a third of its steps it is far above chance, one in ten, over half its training length."""
    overrides = {"train.steps": 500, "schedule.shape": "constant", "evaluation.every": 0}
    config = load("recall", overrides, vocab_size=258)
    corpus = make_corpus(tmp_path / "data", documents=4000)
    outcome = train(config, corpus, tmp_path / "run", World(0, 1, torch.device("cpu")))
    model = load_model(outcome.checkpoint)
    assert accuracy(model, 32, trials=100) > 0.4
