"""`lengthen train`, from words to a run's folder: what it writes, says and refuses."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from lengthen import config as configs
from lengthen.cli import train as verb
from lengthen.cli.main import main
from lengthen.config import Config, DataConfig, ModelConfig
from lengthen.data import prepare
from lengthen.io import keys, read_toml
from lengthen.model import load
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
    end = f"done after 4 steps; the model is {last / 'model.safetensors'}\n\nNext: lengthen eval {out}\n"
    assert said.out.endswith(end)

    config = read_toml(out / "config.toml", Config)
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
    assert said.out.startswith("resuming after step 4: ")
    assert said.out.endswith(end)
    assert [record["step"] for record in records(out) if record["kind"] == "step"] == [1, 2, 3, 4]

    assert main([*words, "--train.steps", "6"]) == 0
    said = capsys.readouterr()
    assert "changed since step-00000004 was written: train.steps: 4 → 6\n" in said.out
    assert "resuming after step 4: " in said.out
    assert [record["step"] for record in records(out) if record["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert load(out / "checkpoints" / "step-00000006").config == config.model

    assert main([*words, "--train.steps", "3"]) == 1
    assert "error: --train.steps: expected at least the 6 steps" in capsys.readouterr().err
    assert main([*words, "--resume", "never"]) == 1
    assert "error: --resume never: " in capsys.readouterr().err


def test_tensorboards_files(data: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    assert main(["train", "tiny", "--data", data, "--out", str(out), *TINY, "--train.steps", "2", "--tensorboard"]) == 0
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    expected = {"train/loss", "train/lr", "train/grad_norm", "validation/16", "validation/32"}
    assert expected <= set(events.Tags()["scalars"])
    losses = {record["step"]: record["loss"] for record in records(out) if record["kind"] == "step"}
    seen = {event.step: event.value for event in events.Scalars("train/loss")}
    assert seen == pytest.approx(losses, rel=1e-6)
    assert [event.step for event in events.Scalars("validation/16")] == [0, 2]
    again = ["train", "tiny", "--data", data, "--out", str(out), *TINY, "--train.steps", "4", "--tensorboard"]
    assert main(again) == main([*again, "--resume", "step-2", "--optimizer.lr", "0.5"]) == 0
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [
        (record["step"], pytest.approx(record["loss"], rel=1e-6)) for record in records(out) if "lr" in record
    ], "of the run that went back, each step once"
    assert read_toml(out / "config.toml", dict)["log"]["tensorboard"] is True


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


def test_help_has_every_key(capsys: Capture) -> None:
    """With a description, what it may be, and its default or what the file has."""
    with pytest.raises(SystemExit) as left:
        main(["train", "--help"])
    assert left.value.code == 0
    said = re.sub(r"[│─╭╮╰╯\s]+", " ", capsys.readouterr().out)
    for key in keys(Config):
        if key != "model.position_options":
            assert re.search(rf" --{re.escape(key)} \S+ \w[^(]* .*?\((default: \S+|required)\)", said), key
    assert "--model.layers N blocks of attention and feed-forward (required)" in said
    assert "--train.precision auto|float32|bfloat16 auto: bfloat16 autocast on a GPU, float32 elsewhere (def" in said
    assert "--optimizer.betas X,… decay rates of the two moments (default: 0.9,0.95)" in said
    assert "--model.position_options.NAME VALUE" in said
    with pytest.raises(SystemExit):
        main(["train", "tiny", "--help"])
    said = capsys.readouterr().out
    assert "(default: 64,128,256,512,1024)" in re.sub(r"[│\s]+", " ", said)


def test_words_come_over_the_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        "[model]\nwidth = 16\nheads = 2\ntrain_length = 8\npositions = 'rope'\n"
        "[model.position_options]\nbase = 500.0\n[train]\nsteps = 3\n[optimizer]\nlr = 0.5\n"
    )
    words = ["--model.layers", "2", "--model.position_options.factor=4", "--model.position_options.scaling", "linear"]
    words += [
        "--evaluation.lengths",
        "none",
        "--train.compile",
        "false",
        "--optimizer.betas",
        "0.5,0.6",
        "--tensorboard",
    ]
    config = verb.parse([str(mine), *words]).resolved()
    model = ModelConfig(None, 2, 16, 2, 8, "rotary", {"base": 500.0, "factor": 4, "scaling": "linear"})
    assert config.model == model
    assert (config.train.steps, config.train.compile, config.evaluation.lengths) == (3, False, None)
    assert (config.optimizer.lr, config.optimizer.betas, config.log.tensorboard) == (0.5, [0.5, 0.6], True)
    again = verb.parse(["--train.steps", "5", "--out", "x", str(mine), "--model.layers=1", "--plain"])
    assert (again.keys.train.steps, again.keys.model.layers, again.config) == (5, 1, str(mine))


def test_options_of_a_method_are_of_any_shape(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.toml"
    mixed.write_text(
        "[model]\nlayers = 1\nwidth = 8\nheads = 2\ntrain_length = 8\nposition_options.slopes = [1, 0.5]\n"
    )
    assert verb.parse([str(mixed)]).resolved().model.position_options == {"slopes": [1, 0.5]}
    given = verb.parse([str(mixed), "--model.position_options.slopes", "[2, 0.25]"])
    assert given.resolved().model.position_options == {"slopes": [2, 0.25]}
    for word, options in (("2,0.25", {"slopes": [2, 0.25]}), ("none", {})):  # as other keys are given
        given = verb.parse([str(mixed), f"--model.position_options.slopes={word}"])
        assert given.resolved().model.position_options == options
    learned = verb.parse([str(mixed), "--model.position_options.learned", "True"])
    assert learned.resolved().model.position_options == {"slopes": [1, 0.5], "learned": True}
    nested = verb.parse([str(mixed), "--model.position_options.other", "[[1, 'x'], {a = true}, []]"])
    assert nested.keys.model.position_options["other"] == [[1, "x"], {"a": True}, []]


def test_a_size_that_nobody_gives_is_named(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine.toml").write_text("[model]\nwidth = 16\nheads = 2\ntrain_length = 8\n")
    with pytest.raises(SystemExit) as left:
        main(["train", str(tmp_path / "mine.toml")])
    assert left.value.code == 2
    assert "--model.layers N" in capsys.readouterr().err


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
    said = refused(["tiny", "--data", data, "--model.layers", "0"], capsys)
    assert said == "--model.layers: expected at least 1, got 0"
    said = refused(["tiny", "--data", data, "--model.position_options.slope", "2"], capsys)
    assert said.startswith("--model.positions = 'alibi': alibi: unknown option 'slope'; did you mean 'slopes'?")
    said = refused(["tiny", "--data", data, "--model.position_options.slope"], capsys)
    assert said == "--model.position_options.slope: expected a value, got none"
    said = refused(["tiny", "--data", data, "--model.positions", "alibbi"], capsys)
    assert "model.positions = 'alibbi': " in said
    assert said.endswith("did you mean 'alibi'?")
    said = refused(["tiny", "--data", data, "--model.vocab_size", "100", *TINY, "--out", "a"], capsys)
    assert said == f"--model.vocab_size: expected at least the 258 tokens of {data}, got 100"
    said = refused(["tiny", "--data", data, *TINY, "--evaluation.lengths", "100000", "--out", "b"], capsys)
    assert said.startswith(
        "--evaluation.lengths: 100000 tokens and the one after them are more than the validation split"
    )
    said = refused(["tiny", "--data", data, *TINY, "--resume", "nowhere", "--out", "c"], capsys)
    assert "nowhere" in said
    Path("broken.toml").write_text("[model\n")
    assert refused(["broken.toml"], capsys).startswith("broken.toml: expected TOML, got something else: ")
    for device in ("foo", "meta", "mps:7", "hpu", "xla", "cpu:7", "cuda:99"):
        said = refused(["tiny", "--data", data, "--device", device], capsys)
        assert said.startswith(f"--device: expected cpu, cuda or cuda:1, and one that is here, got {device!r}: ")
        assert len(said) < 400  # of some devices torch lists all of its own backends
    assert not Path("data").exists(), "the default corpus was prepared before the words were checked"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[model]\nwidht = 2\n", "unknown key 'model.widht'; did you mean 'model.width'?"),
        ("[model]\nwidth = '2'\n", "model.width: expected a whole number, got '2' (str)"),
        ("model = 3\n", "model: expected a table, got 3 (int)"),
        ("[train]\nsteps = 0\n", "train.steps: expected at least 1, got 0"),
        (f"[train]\nseed = {2**64 - 1}\n", f"train.seed: expected at most {2**63 - 1}, got {2**64 - 1}"),
        ("[trian]\nsteps = 1\n", "unknown key 'trian'; did you mean 'train'?"),
    ],
)
def test_a_wrong_file_is_named(text: str, problem: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "f.toml").write_text(text)
    assert refused([str(tmp_path / "f.toml")], capsys) == f"{tmp_path / 'f.toml'}: {problem}"


def test_resumed_by_its_step_and_begun_with_its_weights(data: str, tmp_path: Path, capsys: Capture) -> None:
    out, new = tmp_path / "run", tmp_path / "new"
    words = ["tiny", "--data", data, *TINY, "--train.steps", "6", "--checkpoint.keep", "9"]
    assert main(["train", *words, "--out", str(out)]) == 0
    first = (out / "metrics.jsonl").read_text()
    assert main(["train", *words, "--out", str(out), "--resume", "step-4"]) == 0
    assert f"a checkpoint of a later step is now {out}/checkpoints/aside-1-step-00000006\n" in capsys.readouterr().out
    assert [record["loss"] for record in records(out)] == [json.loads(line)["loss"] for line in first.splitlines()]
    weights = out / "checkpoints" / "step-00000004" / "model.safetensors"
    more = ["--model.positions", "t5", "--model.train_length", "8", "--evaluation.lengths", "none"]
    assert main(["train", *words, *more, "--out", str(new), "--init", str(weights)]) == 0
    said = capsys.readouterr().out
    for line in (
        "--init: model.train_length: 16 → 8\n",
        "--init: model.positions: 'alibi' → 't5'\n",
        "--init: method.weight of t5: initialised, as ",
    ):
        assert line in said
    state = json.loads((new / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert state["init"]["path"] == str(weights)
    assert (new / "checkpoints" / "step-00000006" / "SHA256SUMS").is_file()
    assert "--init: " in refused([*words, "--out", str(out), "--init", str(weights)], capsys)


def test_a_corpus_without_a_validation_split(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "t.txt").write_text("the sea, the ship, the whale. " * 100)
    prepare(tmp_path / "t.txt", tmp_path / "corpus", validation=0, workers=1)
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
        return prepare(tmp_path / "t.txt", out, workers=1, separator=".")

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


def test_who_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert type(verb._watcher(False)).__name__ == "Lines"
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert type(verb._watcher(False)).__name__ == "Live"
    assert type(verb._watcher(True)).__name__ == "Lines"
