"""`lengthen train`, from words to a run's folder: what it writes, says and refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from lengthen.cli import train as verb
from lengthen.cli.main import main
from lengthen.data import prepare
from lengthen.model import load
from lengthen.training import config as configs
from lengthen.training import settings
from lengthen.training.config import Config, DataConfig
from lengthen.training.parallel import World

Capture = pytest.CaptureFixture[str]
SMALL = {
    "model.layers": "1",
    "model.width": "16",
    "model.heads": "2",
    "model.train_length": "16",
    "train.batch": "4",
    "evaluation.tokens": "128",
    "evaluation.lengths": "16,32",
    "evaluation.every": "2",
    "checkpoint.every": "2",
    "schedule.warmup": "2",
}
TINY = ["--device", "cpu", *(f"--{key}={value}" for key, value in SMALL.items())]


def records(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_from_words_to_a_model(data: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    words = ["train", "tiny", "--data", data, "--out", str(out), *TINY]
    assert main([*words, "--train.steps", "4"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("training: 0.0M parameters, alibi, at 16 tokens, on cpu, into ")
    assert "4 steps of 64 tokens: " in said.out
    assert re.search(r"^step 4/4  loss \d\.\d{4}  [\d,]+ tokens/s", said.out, flags=re.MULTILINE)
    assert re.search(r"^  validation at 32: loss \d\.\d{4}, perplexity \d+\.\d{3}$", said.out, flags=re.MULTILINE)
    last = out / "checkpoints" / "step-00000004"
    assert f"  saved {last}\n" in said.out
    assert said.out.endswith(f"done after 4 steps; the model is {last / 'model.safetensors'}\n")

    config = settings.build(Config, settings.read_toml(out / "config.toml", dict))
    assert (config.train.steps, config.model.width, config.model.vocab_size) == (4, 16, 258)
    assert config.evaluation_lengths == [16, 32]
    model = load(last)
    assert model.config == config.model
    assert model(torch.randint(258, (1, 50))).shape == (1, 50, 258)
    steps = [record for record in records(out) if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert [record["tokens"] for record in steps] == [64, 128, 192, 256]
    evaluated = [(r["step"], r["length"]) for r in records(out) if r["kind"] == "evaluation"]
    assert evaluated == [(step, length) for step in (0, 2, 4) for length in (16, 32)]

    assert main([*words, "--train.steps", "4"]) == 0  # there is nothing left to do
    said = capsys.readouterr()
    assert said.out.startswith("going on after step 4: ")
    assert said.out.endswith(f"done after 4 steps; the model is {last / 'model.safetensors'}\n")
    assert [record["step"] for record in records(out) if record["kind"] == "step"] == [1, 2, 3, 4]

    assert main([*words, "--train.steps", "6"]) == 0
    said = capsys.readouterr()
    assert "changed since step-00000004 was written: train.steps: 4 → 6\n" in said.out
    assert "going on after step 4: " in said.out
    assert [record["step"] for record in records(out) if record["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert load(out / "checkpoints" / "step-00000006").config == config.model

    assert main([*words, "--train.steps", "3"]) == 1
    assert "error: train.steps: expected at least the 6 steps" in capsys.readouterr().err
    assert main([*words, "--resume", "never"]) == 1
    assert "error: --resume never: " in capsys.readouterr().err


def test_tensorboards_files(data: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    assert main(["train", "tiny", "--data", data, "--out", str(out), *TINY, "--train.steps", "2", "--tensorboard"]) == 0
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/rate", "train/norm", "validation/16", "validation/32"} <= set(events.Tags()["scalars"])
    losses = {record["step"]: record["loss"] for record in records(out) if record["kind"] == "step"}
    seen = {event.step: event.value for event in events.Scalars("train/loss")}
    assert seen == pytest.approx(losses, rel=1e-6)
    assert [event.step for event in events.Scalars("validation/16")] == [0, 2]
    assert settings.read_toml(out / "config.toml", dict)["log"]["tensorboard"] is True


def test_a_file_of_ones_own(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(
        "[model]\nlayers = 1\nwidth = 16\nheads = 2\ntrain_length = 16\npositions = 'rotary'\nkind = 'encoder'\n"
        "[train]\nsteps = 2\nbatch = 4\n[evaluation]\nevery = 0\n"
    )
    assert main(["train", "mine.toml", "--data", data, "--device", "cpu"]) == 0
    assert Path("runs/mine/checkpoints/step-00000002/model.safetensors").is_file()
    assert "rotary, at 16 tokens, on cpu, into runs/mine\n" in capsys.readouterr().out
    assert {record["kind"] for record in records(Path("runs/mine"))} == {"step"}


def test_every_key_is_listed(capsys: Capture) -> None:
    assert main(["train", "--keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = dict(line.removeprefix("--").split(maxsplit=1) for line in lines)
    assert listed.keys() == settings.keys(Config).keys()
    assert listed["model.layers"] == "(none)"
    assert listed["model.positions"] == "alibi"
    assert listed["train.steps"] == "1000"
    assert listed["optimizer.betas"] == "[0.9, 0.95]"
    assert listed["model.position_options"] == "{}"
    for field in dataclasses.fields(DataConfig):
        assert listed[f"data.{field.name}"] == str(field.default)


def refused(words: list[str], capsys: Capture) -> str:
    assert main(["train", *words]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.out == ""
    return said.err.removeprefix("lengthen train: error: ").removesuffix("\n")


def test_what_is_wrong_is_said(data: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    presets = f"a TOML file or one of the presets {', '.join(configs.presets())}"
    assert refused([], capsys) == f"CONFIG: expected {presets}, got none"
    assert refused(["tinny"], capsys) == f"tinny: expected {presets}, got no such file; did you mean 'tiny'?"
    assert refused(["tiny", "--data", "nowhere"], capsys).startswith("nowhere/index.json: not there; expected a folder")
    said = refused(["tiny", "--data", data, "--model.layrs", "2"], capsys)
    assert said == "--model.layrs: unknown key; did you mean 'model.layers'?"
    said = refused(["tiny", "--data", data, "--model.layers", "two"], capsys)
    assert said == "--model.layers: expected a whole number, got 'two'"
    said = refused(["tiny", "--data", data, "--model.positions", "alibbi"], capsys)
    assert "model.positions = 'alibbi': " in said
    assert said.endswith("did you mean 'alibi'?")
    said = refused(["tiny", "--data", data, "--model.vocab_size", "100", *TINY, "--out", "a"], capsys)
    assert said == f"model.vocab_size: expected at least the 258 tokens of {data}, got 100"
    said = refused(["tiny", "--data", data, *TINY, "--evaluation.lengths", "100000", "--out", "b"], capsys)
    assert said.startswith(
        "evaluation.lengths: 100000 tokens and the one after them are more than the validation split"
    )
    said = refused(["tiny", "--data", data, *TINY, "--resume", "nowhere", "--out", "c"], capsys)
    assert "nowhere" in said
    Path("broken.toml").write_text("[model\n")
    assert refused(["broken.toml"], capsys).startswith("broken.toml: expected TOML, got something else: ")
    if not torch.cuda.is_available():
        said = refused(["tiny", "--data", data, "--device", "cuda"], capsys)
        assert said == "--device: expected one that is here, got 'cuda', and torch sees no CUDA device"
    assert not Path("data").exists(), "the default corpus was prepared before the words were checked"


def test_a_wrong_key_is_told_before_the_data_is_read(capsys: Capture) -> None:
    said = refused(["tiny", "--data", "nowhere", "--train.stepz", "2"], capsys)
    assert said == "--train.stepz: unknown key; did you mean 'train.steps'?"


def test_a_corpus_without_a_validation_split(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "t.txt").write_text("the sea, the ship, the whale. " * 100)
    prepare(tmp_path / "t.txt", tmp_path / "corpus", validation=0, processes=1)
    words = ["tiny", "--data", str(tmp_path / "corpus"), "--out", str(tmp_path / "run"), *TINY, "--train.steps", "2"]
    assert "prepare` makes it with validation=" in refused(words, capsys)
    assert main(["train", *words, "--evaluation.every", "0"]) == 0


def test_the_default_corpus_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """With a small text in place of the standard library."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("".join(f"the sea, the ship, whale {number}." for number in range(50)))
    calls = []

    def small(sources: None, out: Path, **options: object) -> object:
        assert sources is None
        calls.append(options | {"progress": None})
        return prepare(tmp_path / "t.txt", out, processes=1, separator=".")

    monkeypatch.setattr("lengthen.cli.corpus.prepare", small)
    here = World(0, 1, torch.device("cpu"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    first = verb._corpus(None, DataConfig(), here)
    assert first.directory == Path("data") / f"python-{version}-bytes"
    assert (
        "preparing the default corpus, the source of Python's standard library, into data/" in capsys.readouterr().out
    )
    again = verb._corpus(None, DataConfig(), here)
    assert again.fingerprint == first.fingerprint
    assert calls == [{"tokenizer": "bytes", "vocab_size": None, "progress": None}]


def test_who_watches(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert [type(watcher).__name__ for watcher in verb._watchers(False)] == ["Lines"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal())
        assert [type(watcher).__name__ for watcher in verb._watchers(False)] == ["Live"]
        assert [type(watcher).__name__ for watcher in verb._watchers(True)] == ["Lines"]
        patch.setitem(sys.modules, "lengthen.cli.live", None)
        assert [type(watcher).__name__ for watcher in verb._watchers(False)] == ["Lines"]
    assert capsys.readouterr().err == 'lengthen train: for a live view, pip install "lengthen[cli]"\n'
