"""A run that begins with another's weights: what is taken, dropped, initialised and said; and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make
from test_checkpoint import flip, folder
from test_loop import Said, StopAt, losses

from lengthen.data import Corpus
from lengthen.model import Transformer, load, save
from lengthen.training import World, initial, train
from lengthen.training.checkpoint import open_checkpoint

STRETCHED = {
    "model__positions": "rotary",
    "model__position_options": {"scaling": "yarn", "factor": 8, "original_length": 16},
}
LEARNED = {"model__positions": "alibi", "model__position_options": {"learned": True}}


def begun(make: Make, path: Path, old: dict[str, Any], **new: Any) -> tuple[Transformer, Transformer, list[str]]:
    """Return a saved model, another that began with its weights, and what was said."""
    before = Transformer(make(**old).model)
    with torch.no_grad():
        for weight in before.parameters():
            weight.normal_()
    save(before, path)
    after = Transformer(make(**new).model)
    return before, after, initial.begin(after, path)


def test_a_run_begins_with_the_weights_and_step_0(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    first = train(make(), corpus, tmp_path / "first", alone).checkpoint
    said = Said()
    config = make(
        model__train_length=32, model__positions="rotary+alibi", model__activation_dropout=0.1, train__steps=6
    )
    outcome = train(config, corpus, tmp_path / "second", alone, init=first, watchers=[said])
    assert outcome.step == 6
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[3]
    assert said.lines == [
        "--init: model.train_length: 16 → 32",
        "--init: model.positions: 'alibi' → 'rotary+alibi'",
        "--init: model.activation_dropout: 0.0 → 0.1",
    ]
    state = open_checkpoint(outcome.checkpoint).state
    assert state.init is not None
    assert (state.init.path, state.init.sha256) == (str(first), open_checkpoint(first).weights)
    # Without an update of its own, the new model is the old one.
    still = train(make(optimizer__lr=1e-30, train__steps=1), corpus, tmp_path / "still", alone, init=first).checkpoint
    old, new = load(first), load(still)
    assert all(torch.equal(old.state_dict()[name], weight) for name, weight in new.state_dict().items())


def test_stopped_it_goes_on_and_does_not_begin_again(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    first = train(make(train__seed=1), corpus, tmp_path / "first", alone).checkpoint
    train(make(), corpus, tmp_path / "whole", alone, init=first)
    train(make(), corpus, tmp_path / "parts", alone, init=first, watchers=[StopAt(4)])
    again = train(make(), corpus, tmp_path / "parts", alone, init=first)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert open_checkpoint(again.checkpoint).state.init == open_checkpoint(folder(tmp_path / "whole", 12)).state.init
    train(make(train__steps=15), corpus, tmp_path / "parts", alone)  # nor need it be said again
    state = open_checkpoint(folder(tmp_path / "parts", 15)).state
    assert state.init is not None
    for init, resume, message in (
        (
            folder(tmp_path / "first", 9),
            "auto",
            r"--init: .*parts/checkpoints holds a run already, which began with /.*",
        ),
        (first, "step-12", r"--init: expected none beside --resume step-12"),
        (first, "never", r"--resume never: .* holds a run already"),
    ):
        with pytest.raises((FileExistsError, ValueError), match=message):
            train(make(train__steps=20), corpus, tmp_path / "parts", alone, resume, init=init)
    with pytest.raises(FileExistsError, match=r"--init: .*first/checkpoints holds a run already, which began without"):
        train(make(train__seed=1), corpus, tmp_path / "first", alone, init=again.checkpoint)


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"model__positions": "rotary"}, {}, []),
        ({"model__positions": "rotary"}, {"model__train_length": 64, **STRETCHED}, []),
        ({}, {"model__positions": "xpos"}, []),
        ({}, {"model__position_options": {"slopes": [0.5, 0.25]}}, []),
        ({}, {"model__positions": "t5"}, ["method.weight of t5: initialised, as .*a.safetensors has none that fits"]),
        (
            {"model__positions": "t5"},
            {"model__positions": "learned", "model__train_length": 32},  # a table of the same shape as T5's, and no kin
            [
                "method.weight of t5: dropped, as the new learned does not begin with it",
                "method.weight of learned: initialised, .*",
            ],
        ),
        (
            {"model__positions": "learned"},
            {"model__positions": "learned", "model__train_length": 40},
            ["method.weight of learned: dropped, .*", "method.weight of learned: initialised, .*"],
        ),
        (
            {"model__positions": "kerple"},
            {},
            [f"method.raw_r{n} of kerple: dropped, as the new alibi does not begin with it" for n in (1, 2)],
        ),
    ],
    ids=range(8),
)
def test_what_the_methods_do_not_share_is_said(
    make: Make, tmp_path: Path, old: dict[str, Any], new: dict[str, Any], lines: list[str]
) -> None:
    before, after, said = begun(make, tmp_path / "a.safetensors", old, **new)
    about = [line for line in said if "method." in line]
    assert len(about) == len(lines)
    assert all(re.fullmatch(f"--init: {line}", found) for line, found in zip(lines, about, strict=True))
    known = before.state_dict()
    for name, weight in after.state_dict().items():
        assert name.startswith("method.") or torch.equal(weight, known[name]), name
        if name.startswith("method.") and name in known:  # of another method, or of other size: not taken
            assert weight.shape != known[name].shape or not torch.equal(weight, known[name])


def test_what_a_method_learned_stays_when_another_joins_it_or_leaves(make: Make, tmp_path: Path) -> None:
    together = {"model__positions": "rotary+alibi", "model__position_options": {"learned": True}}
    alone, joined, said = begun(make, tmp_path / "a.safetensors", LEARNED, **together)
    assert torch.equal(joined.state_dict()["method.methods.1.log_slopes"], alone.state_dict()["method.log_slopes"])
    assert not [line for line in said if "method." in line]
    joined, alone, said = begun(make, tmp_path / "b.safetensors", together, **LEARNED)
    assert torch.equal(joined.state_dict()["method.methods.1.log_slopes"], alone.state_dict()["method.log_slopes"])
    assert not [line for line in said if "method." in line]


def test_slopes_that_are_given_are_those_that_it_begins_with(make: Make, tmp_path: Path) -> None:
    given = {**LEARNED, "model__position_options": {"learned": True, "slopes": [0.75, 0.125]}}
    _, after, said = begun(make, tmp_path / "a.safetensors", LEARNED, **given)
    torch.testing.assert_close(after.state_dict()["method.log_slopes"].exp(), torch.tensor([0.75, 0.125]))
    assert [line.split(", as ")[0] for line in said[1:]] == [
        "--init: method.log_slopes of alibi: dropped",
        "--init: method.log_slopes of alibi: initialised",
    ]


def test_a_run_stands_for_its_last_checkpoint(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    first = train(make(), corpus, tmp_path / "first", alone).checkpoint
    outcome = train(make(train__steps=1), corpus, tmp_path / "second", alone, init=tmp_path / "first")
    state = open_checkpoint(outcome.checkpoint).state
    assert state.init is not None
    assert state.init.path == str(first)
    with pytest.raises(
        FileNotFoundError, match=r"--init: expected a run, a checkpoint or a model's file, got .*nothing"
    ):
        train(make(), corpus, tmp_path / "third", alone, init=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({"model__layers": 1}, {}, r"differs in more than length and positions: model.layers: 1 → 2"),
        ({"model__width": 32}, {}, r"differs in more than length and positions: model.width: 32 → 16"),
        ({"model__vocab_size": 300}, {}, r"model.vocab_size: 300 → 258"),
        ({"model__tied": False}, {}, r"model.tied: False → True"),
        (
            {"model__positions": "rotary"},
            {
                "model__positions": "rotary",
                "model__train_length": 64,
                "model__position_options": {"scaling": "yarn", "factor": 8},
            },
            r"was trained at \d+ tokens and model.train_length is 64, got none",
        ),
        ({"model__heads": 4}, {}, r"differs in more than length and positions: model.heads: 4 → 2"),
        ({"model__activation": "relu"}, {}, r"model.activation: 'relu' → 'gelu_tanh'"),
        ({"model__kind": "encoder"}, {}, r"model.kind: 'encoder' → 'decoder'"),
        ({"model__norm_epsilon": 1e-3}, {}, r"model.norm_epsilon: 0.001 → 1e-05"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(
    make: Make, tmp_path: Path, old: dict[str, Any], new: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"a\.safetensors.*{message}"):
        begun(make, tmp_path / "a.safetensors", old, **new)


def test_what_is_no_model_is_refused(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"--init: expected a run, a checkpoint or a model's file, got .*nowhere"
    ):
        train(make(), corpus, tmp_path / "new", alone, init=tmp_path / "nowhere")
    first = train(make(), corpus, tmp_path / "first", alone).checkpoint
    flip(first / "model.safetensors")
    with pytest.raises(ValueError, match=r"step-00000012/model.safetensors: expected the sha256 that SHA256SUMS says"):
        train(make(), corpus, tmp_path / "new", alone, init=first)
