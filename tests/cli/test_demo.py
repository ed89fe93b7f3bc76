"""The demo: what it leaves, and that its result has the papers' shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lengthen import io
from lengthen.cli import demo
from lengthen.cli.main import main
from lengthen.data import Corpus, prepare
from lengthen.evaluation import Result, results
from lengthen.training import load

# A smaller model at a shorter length than the demo's: the shape shows after some ten seconds a method. (With 8 heads of
# 8 features, rotary and xPos degrade alike at 16 times this length, where xPos's decay has hardly begun.)
SHORT: dict[str, Any] = {
    "model.layers": 2,
    "model.width": 64,
    "model.heads": 4,
    "model.train_length": 32,
    "train.steps": 180,
    "optimizer.lr": 4e-3,
    "schedule.warmup": 20,
    "evaluation.every": 0,
    "checkpoint.every": 0,
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare(None, tmp_path_factory.mktemp("library"))


def silent(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.mark.slow
def test_the_result_has_the_papers_shape(library: Corpus, tmp_path: Path) -> None:
    found: dict[tuple[str, str], dict[int, Result]] = {}
    for method in ("alibi", "sinusoidal", "rotary", "xpos"):
        config = load("tiny", {"model.positions": method} | SHORT, library.vocab_size)
        demo.train_one(config, library, tmp_path / method, silent)
        for one in demo.evaluate_one(tmp_path / method, library, 8192, silent):
            found.setdefault((method, one.protocol), {})[one.length // 32] = one
    plain = {method: group for (method, protocol), group in found.items() if protocol == "nonoverlapping"}
    grows = {method: group[16].perplexity / group[1].perplexity for method, group in plain.items()}
    assert grows["alibi"] < 1  # trained short, it reads long, and better
    assert grows["sinusoidal"] > 1.2
    assert grows["rotary"] > 1.2
    assert grows["xpos"] < grows["rotary"]  # it degrades less
    for method in ("rotary", "xpos"):  # and blockwise attention repairs both
        repaired = found[method, "blockwise"]
        assert repaired[16].perplexity < repaired[1].perplexity
    assert all(set(group) == {1, 2, 4, 8, 16, 32} for group in found.values())


def test_a_demo_leaves_runs_and_a_page_and_the_same_numbers_for_the_same_seed(
    library: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ANALYSED", 1024)
    words = ["--steps", "2", "--tokens", "2048", "--data", str(library.directory)]
    assert main(["demo", "--out", str(tmp_path / "one"), "--methods", "alibi,xpos", *words]) == 0
    said = capsys.readouterr().out
    assert "xpos, blockwise" in said
    assert "report.html in a browser" in said
    assert "alibi" in (tmp_path / "one" / "report.html").read_text(encoding="utf-8")
    found = [results.read(tmp_path / "one" / method) for method in ("alibi", "xpos")]
    assert [len(group) for group in found] == [6, 12]
    assert main(["demo", "--out", str(tmp_path / "two"), "--methods", "xpos", *words]) == 0
    losses = [one.loss for one in found[1].values()]
    assert [one.loss for one in results.read(tmp_path / "two" / "xpos").values()] == losses
    file = tmp_path / "one" / "xpos" / "analysis" / "distance.json"
    analysed = io.read_json(file, dict)
    io.write_json(file, analysed | {"weights": "of another model", "rows": []})
    assert main(["demo", "--out", str(tmp_path / "one"), "--methods", "xpos", *words]) == 0  # nothing is done twice
    assert results.read(tmp_path / "one" / "xpos") == found[1]
    assert io.read_json(file, dict) == analysed  # but what is of other weights is not what was asked for
    assert main(["demo", "--out", str(tmp_path / "one"), "--methods", "xpos", "--steps", "3", *words[2:]]) == 1
    assert "holds a run with other settings (train.steps: 2 → 3); choose another --out" in capsys.readouterr().err


def test_an_unknown_method_ends_it_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--methods", "alibi,rotari"]) == 1
    assert "got 'rotari'; did you mean 'rotary'?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
