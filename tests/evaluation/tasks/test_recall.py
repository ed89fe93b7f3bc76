"""Recall: the text from a seed, a value told once at the depth that was asked for, and a preset that learns it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lengthen.data import Corpus
from lengthen.evaluation.tasks import TASKS, Draws, Haystack, answered
from lengthen.evaluation.tasks.recall import FILLER, KEYS, VALUES, document, question
from lengthen.evaluation.tasks.training import main, make_corpus
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


@given(st.integers(0, 2**32), st.integers(0, 300), st.floats(0, 1))
def test_a_question(seed: int, room: int, depth: float) -> None:
    text, value = question(Draws(seed), room, depth)
    key = text[-1]
    assert value in VALUES[key]
    assert text[round(depth * room)] == value
    assert len(text) == room + 2
    assert check(text[:-1])[key] == value
    assert text.count(key) == 1
    assert sum(text.count(other) for other in VALUES[key]) == 1, "the value is named elsewhere too"


@given(st.integers(0, 2**32))
def test_a_document(seed: int) -> None:
    text = document(Draws(seed), count=30)
    assert 1 <= len(check(text)) <= len(KEYS)
    assert sum(symbol.isalnum() for symbol in text) == 30


def test_the_same_seed_is_the_same_text_for_ever() -> None:
    assert document(Draws(0), count=8) == "....5..............?5....Q....J............#J....%Q..............%Q.......o"
    assert question(Draws(0), 19, 0) == ("R.E...e..p.$p..!e...%", "R")
    assert question(Draws(1), 19, 0) != question(Draws(0), 19, 0)


def test_a_tokenizer_of_characters(text: Haystack) -> None:
    recall = TASKS["recall"]
    if text.tokenizer.name == "bytes":
        assert [len(one.ids) for one in recall.samples(text, 50, [0.5], 3, 0)] == [50, 50, 50]
        with pytest.raises(ValueError, match=r"^lengths: recall: expected at least 4 tokens"):
            recall.samples(text, 3, [0.5], 1, 0)
    else:
        with pytest.raises(ValueError, match=r"^task: recall needs a tokenizer that has a token for each character"):
            recall.samples(text, 50, [0.5], 9, 0)


def test_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make_corpus("recall", tmp_path / "one", count=60)
    assert make_corpus("recall", tmp_path / "again", count=60).fingerprint == one.fingerprint
    assert make_corpus("recall", tmp_path / "two", seed=1, count=60).fingerprint != one.fingerprint
    assert sum(one.index.splits[name].documents for name in one.splits) == 60
    assert set(one.tokenizer.decode(one["train"].read(0, 40))) <= {*KEYS, *"".join(VALUES.values()), FILLER}
    main(["recall", str(tmp_path / "three"), "--documents", "60"])
    assert Corpus.open(tmp_path / "three").fingerprint == one.fingerprint
    assert f"Next: lengthen train recall --data {tmp_path / 'three'}\n" in capsys.readouterr().out


def test_the_preset() -> None:
    assert "recall" in presets()
    config = load("recall", vocab_size=258)
    assert config.model.train_length <= 128


@pytest.mark.slow
def test_the_preset_learns(tmp_path: Path) -> None:
    """In a third of its steps it is far above chance, one in ten, over half its training length."""
    overrides = {"train.steps": 500, "schedule.shape": "constant", "evaluation.every": 0}
    config = load("recall", overrides, vocab_size=258)
    corpus = make_corpus("recall", tmp_path / "data", count=4000)
    outcome = train(config, corpus, tmp_path / "run", World(0, 1, torch.device("cpu")))
    samples = TASKS["recall"].samples(Haystack.of(corpus), 35, [0.0], 100, seed=0)
    assert sum(map(all, answered(load_model(outcome.checkpoint), samples))) > 40
