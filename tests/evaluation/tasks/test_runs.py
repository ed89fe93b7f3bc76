"""A run on the tasks: results kept with how they were made and not made twice; documents to learn a task from."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lengthen import io
from lengthen.cli.main import main
from lengthen.config import from_table
from lengthen.data import Corpus
from lengthen.evaluation import Subject, open_run
from lengthen.evaluation.tasks import TASKS, Haystack, TaskResult, answered, evaluate, results
from lengthen.evaluation.tasks.training import documents, least, make_corpus
from lengthen.training import World, train


@pytest.fixture(scope="session")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def run(**model: Any) -> Path:
        key = json.dumps(model)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("run") / "run"
            size = {"vocab_size": corpus.vocab_size, "layers": 1, "width": 16, "heads": 2, "train_length": 64}
            table = {"model": {**size, **model}, "train": {"steps": 2, "batch": 2}, "evaluation": {"every": 0}}
            train(from_table(table, "test"), corpus, made[key], World(0, 1, torch.device("cpu")))
        return made[key]

    return run


@pytest.fixture
def subject(trained: Callable[..., Path], tmp_path: Path) -> Subject:
    return dataclasses.replace(open_run(trained()), folder=tmp_path)


def test_results_say_how_they_were_made(subject: Subject, corpus: Corpus) -> None:
    found = evaluate(subject, corpus, ["passkey", "variables"], [320, 256], samples=7, depths=[0, 0.5, 1], seed=2)
    assert [(one.task, one.length) for one in found] == [
        ("passkey", 256),
        ("passkey", 320),
        ("variables", 256),
        ("variables", 320),
    ]
    kept = list(io.read_lines(subject.folder / "tasks.jsonl", dict))
    assert kept == [json.loads(json.dumps(one.record())) for one in found]
    for one in found:
        assert one.weights == subject.weights
        assert (one.data, one.split, one.samples, one.seed) == (corpus.fingerprint, "validation", 7, 2)
        assert one.counts == ([3, 2, 2] if one.task == "passkey" else [7])
        assert one.depths == ([0, 0.5, 1] if one.task == "passkey" else [None])
        assert one.chance == pytest.approx(1e-5 if one.task == "passkey" else 0.5)
        samples = TASKS[one.task].samples(Haystack.of(corpus), one.length, [0, 0.5, 1], 7, 2)
        right = answered(subject.model, samples)
        assert sum(one.right) == sum(map(all, right))
        assert one.token_accuracy == sum(map(sum, right)) / sum(map(len, right))


def test_a_result_that_is_there_is_not_made_again(
    subject: Subject, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate(subject, corpus, ["passkey"], [200], samples=5)
    with monkeypatch.context() as patch:
        patch.setattr("lengthen.evaluation.tasks.runner.answered", None)
        assert evaluate(subject, corpus, ["passkey"], [200], samples=5) == first
        with pytest.raises(TypeError):
            evaluate(subject, corpus, ["passkey"], [200], samples=5, seed=1)
    again = evaluate(subject, corpus, ["passkey"], [200], samples=5, again=True)
    assert again[0].right == first[0].right
    assert results.read(subject.folder) == {again[0].key: again[0]}


def test_blockwise_is_another_measurement(subject: Subject, corpus: Corpus) -> None:
    found = [*evaluate(subject, corpus, ["passkey"], [200], samples=5, how="blockwise")]
    found += evaluate(subject, corpus, ["passkey"], [200], samples=5, how="window", block=16)
    assert [(one.protocol, one.block) for one in found] == [("blockwise", 32), ("window", 16)]
    assert len(results.read(subject.folder)) == 2


def test_standard_error() -> None:
    values: dict[str, Any] = {field.name: None for field in dataclasses.fields(TaskResult)}
    one = TaskResult(**values | {"right": [3, 1], "counts": [5, 5]})
    assert one.accuracy == 0.4
    assert one.standard_error == math.sqrt(0.4 * 0.6 / 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depths": [0.5, 1.5]}, r"^depths: expected numbers from 0 .* got \[0.5, 1.5\]"),
        ({"samples": 2}, r"^samples: expected at least 5, got 2"),
        ({"how": "sliding"}, r"^protocol: expected one of nonoverlapping, blockwise, window for a task, got 'sliding'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str, subject: Subject, corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(subject, corpus, ["passkey"], [200], **{"samples": 5} | change)
    with pytest.raises(ValueError, match=r"^task: expected .* got 'passkeys'.*passkey"):
        evaluate(subject, corpus, ["passkeys"], [200])


@pytest.mark.parametrize("name", [name for name in TASKS if name != "recall"])
def test_documents_to_learn_from(name: str, corpus: Corpus, tmp_path: Path) -> None:
    text = Haystack.of(corpus, "train")
    found = list(documents(TASKS[name], text, 400, 20))
    assert found == list(documents(TASKS[name], text, 400, 20))
    sizes = [len(corpus.tokenizer.encode(one)) for one in found]
    assert max(sizes) <= 405
    assert min(sizes) < 380
    assert least(TASKS[name], text, 400) < 320
    sentence = TASKS[name].sentence
    assert sentence is None or all(sentence in one for one in found)


def test_a_corpus_to_learn_from(corpus: Corpus, tmp_path: Path) -> None:
    """It has the text's tokenizer, and is refused as the text around a task."""
    made = make_corpus("passkey", tmp_path / "passkey", corpus, length=150, count=40)
    assert made.tokenizer_name == corpus.tokenizer_name
    with pytest.raises(ValueError, match=r"^--data: expected a text without the sentences of the task 'passkey'"):
        TASKS["passkey"].samples(Haystack.of(made), 150, [0.5], 1, 0)
    with pytest.raises(ValueError, match=r"^text: expected the corpus whose text stands around 'passkey', got none"):
        make_corpus("passkey", tmp_path / "other")


def test_the_command(
    trained: Callable[..., Path], corpus: Corpus, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = str(trained())
    words = ["eval", run, "--device", "cpu", "--samples", "4", "--depths", "0,1", "--precision", "float32"]
    assert (
        main([*words, "--task", "passkey,variables", "--lengths", "256,300", "--protocol", "nonoverlapping,window"])
        == 0
    )
    said = capsys.readouterr().out
    assert said.count("passkey: a number that stands once in the text") == 2
    assert "passkey: a number that stands once in the text, window 64; 4 samples per length, chance 1e-03 %" in said
    assert "length    accuracy           ±      tokens     depth 0     depth 1" in said
    assert len(results.read(Path(run))) == 8
    assert main([*words, "--task", "frequent_words"]) == 0
    said = capsys.readouterr().out
    assert "left out: frequent_words at 64, which its own words do not fit into" in said
    assert main([*words, "--task", "passkey", "--lengths", "8"]) == 1
    assert re_error(capsys) == "--lengths: passkey: expected at"
    assert main([*words, "--task", "passkey", "--tokens", "8"]) == 1
    assert re_error(capsys) == "--tokens: is not for"


def re_error(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.removeprefix("lengthen eval: error: ").split()[:4])


def test_learned_positions_are_not_read_beyond(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained(positions="learned", train_length=200))
    words = ["eval", run, "--device", "cpu", "--samples", "5", "--task", "passkey", "--lengths", "200,400"]
    assert main(words) == 0
    assert "left out: 400" in capsys.readouterr().out
