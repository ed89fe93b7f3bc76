"""The loop: what it writes, how it stops and goes on, and what it refuses."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make, make_corpus

from lengthen.data import Corpus, prepare
from lengthen.io import read_toml
from lengthen.model import load as load_model
from lengthen.training import Config, Outcome, Watcher, World, load, log, loop, train
from lengthen.training import checkpoint as checkpoints
from lengthen.training.log import Record


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in log.read(out / "metrics.jsonl") if record["kind"] == "step"]


def evaluations(out: Path) -> list[tuple[int, int, float]]:
    records = [record for record in log.read(out / "metrics.jsonl") if record["kind"] == "evaluation"]
    return [(record["step"], record["length"], record["loss"]) for record in records]


class StopAt(Watcher):
    """Sends this process a signal after a step, as a person or a scheduler would."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def stepped(self, record: Record) -> None:
        if record["step"] == self.step:
            os.kill(os.getpid(), self.number)


class Said(Watcher):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def said(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_leaves_its_config_its_log_and_a_model_that_loads(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path
) -> None:
    outcome = train(make(), corpus, tmp_path, alone)
    assert (outcome.step, outcome.finished) == (12, True)
    assert [record["step"] for record in log.read(tmp_path / "metrics.jsonl") if record["kind"] == "step"] == [
        *range(1, 13)
    ]
    assert [(step, length) for step, length, _ in evaluations(tmp_path)] == [
        (step, length) for step in (0, 6, 12) for length in (16, 48)
    ]
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    model = load_model(outcome.checkpoint)
    tokens = torch.from_numpy(corpus["validation"].read(0, 16 * 32 + 1))
    mean = model(tokens[:-1].view(32, 16), tokens[1:].view(32, 16))
    assert mean.item() == pytest.approx(evaluations(tmp_path)[-2][2], rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"model__positions": "xpos", "data__order": "sample"},
        {"model__positions": "t5", "data__document_mask": True, "train__micro_batch": 3},
        {"model__positions": "sinusoidal", "model__dropout": 0.2, "train__seed": 2**63 - 1},
        {"model__kind": "encoder", "model__positions": "alibi"},
        {"model__positions": "rotary", "train__checkpoint_activations": True, "train__precision": "bfloat16"},
        {"model__positions": "learned", "model__norm": "rms", "model__activation": "swiglu", "model__tied": False},
    ],
    ids=str,
)
def test_stopped_and_resumed_it_takes_the_same_steps(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = make(**changes)
    train(config, corpus, tmp_path / "whole", alone)
    outcome = train(config, corpus, tmp_path / "parts", alone, watchers=[StopAt(5)])
    assert (outcome.step, outcome.finished, outcome.checkpoint.name) == (6, False, "step-00000006")
    assert train(config, corpus, tmp_path / "parts", alone).finished
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert evaluations(tmp_path / "parts") == evaluations(tmp_path / "whole")


def test_a_second_signal_stops_at_once(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    class Twice(Watcher):
        def stepped(self, record: Record) -> None:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(make(), corpus, tmp_path, alone, watchers=[Twice()])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_step_a_signal_is_as_it_was(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Building a large model takes a while, in which there is nothing to save."""
    seen = []
    build = loop.adamw

    def adamw(*arguments: Any) -> Any:
        seen.append(signal.getsignal(number))
        return build(*arguments)

    monkeypatch.setattr(loop, "adamw", adamw)
    before = signal.getsignal(number)
    assert train(make(train__steps=1), corpus, tmp_path, alone).finished
    assert seen == [before]


def test_passes_of_any_size_give_the_same_steps_to_rounding(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path
) -> None:
    for rows in (1, 3, 4):
        train(make(train__micro_batch=rows), corpus, tmp_path / str(rows), alone)
        torch.testing.assert_close(losses(tmp_path / str(rows)), losses(tmp_path / "1"), rtol=1e-5, atol=0)


def test_the_last_few_checkpoints_and_the_best_are_kept(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path
) -> None:
    # A rate that is far too high after its first steps: the validation loss is lowest early.
    config = make(
        train__steps=24, evaluation__every=3, optimizer__lr=0.3, schedule__shape="constant", schedule__warmup=24
    )
    train(config, corpus, tmp_path, alone)
    measured = {step: loss for step, length, loss in evaluations(tmp_path) if length == 16 and step}
    best = min(measured, key=lambda step: measured[step])
    assert best < 21
    assert [step for step, _ in checkpoints.folders(tmp_path / "checkpoints")] == [best, 21, 24]
    leader = checkpoints.best(tmp_path / "checkpoints")
    assert leader is not None
    assert leader.step == best


def test_resume_never_auto_and_from_a_path(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    train(make(train__steps=6), corpus, tmp_path / "first", alone, resume="never")
    with pytest.raises(FileExistsError, match=r"--resume never: .*checkpoints holds a run already .*step-00000006"):
        train(make(), corpus, tmp_path / "first", alone, resume="never")
    train(make(), corpus, tmp_path / "whole", alone)
    start = tmp_path / "first" / "checkpoints" / "step-00000006"
    outcome = train(make(), corpus, tmp_path / "second", alone, resume=str(start))
    assert outcome.step == 12
    assert losses(tmp_path / "second") == losses(tmp_path / "whole")[6:]
    with pytest.raises(FileNotFoundError, match=r"nowhere: expected a checkpoint, got no such folder"):
        train(make(), corpus, tmp_path / "third", alone, resume=str(tmp_path / "nowhere"))
    done = train(make(), corpus, tmp_path / "second", alone)  # nothing is left to do
    assert (done.step, done.finished, done.loss) == (12, True, None)


def test_going_back_sets_later_checkpoints_aside(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    config = make(checkpoint__every=3, checkpoint__keep=9)
    train(config, corpus, tmp_path, alone)
    whole, said = losses(tmp_path), Said()
    start = tmp_path / "checkpoints" / "step-00000003"
    outcome = train(config, corpus, tmp_path, alone, resume=str(start), watchers=[StopAt(4), said])
    assert outcome.step == 5
    names = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    later = [f"aside-1-step-{step:08d}" for step in (6, 9, 12)]
    assert names == [*later, "step-00000003", "step-00000005"]
    assert [line.rpartition("/")[2] for line in said.lines if "later step" in line] == later
    assert train(config, corpus, tmp_path, alone).finished  # from step 5 on, and not from 12
    assert losses(tmp_path) == whole


def test_another_model_is_refused_by_the_keys_that_differ(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path
) -> None:
    train(make(train__steps=3), corpus, tmp_path, alone)
    before = contents(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"another model.*model.layers: 2 → 3; model.positions: 'alibi' → 'rotary'"):
        train(make(model__layers=3, model__positions="rotary"), corpus, tmp_path, alone)
    assert contents(tmp_path / "checkpoints") == before


def test_another_corpus_is_refused(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    train(make(train__steps=3), corpus, tmp_path / "run", alone)
    other = make_corpus(tmp_path, seed=1)
    with pytest.raises(ValueError, match=r"--data: .*corpus-1 is not the corpus that .*step-00000003 was trained on"):
        train(make(), other, tmp_path / "run", alone)


def test_what_does_not_fit_is_refused_before_anything_is_written(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"model.vocab_size: expected at least the 258 tokens of .*, got 200"):
        train(make(model__vocab_size=200), corpus, tmp_path, alone)
    with pytest.raises(ValueError, match=r"evaluation.lengths: 999999 tokens .* more than the validation split"):
        train(make(evaluation__lengths=[999_999]), corpus, tmp_path, alone)
    with pytest.raises(ValueError, match=r"length: a window of 9999999 tokens"):
        train(make(model__train_length=9_999_999, evaluation__every=0), corpus, tmp_path, alone)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_changed_setting_is_told_and_used(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    said = []

    class Ear(Watcher):
        def said(self, text: str) -> None:
            said.append(text)

    train(make(train__steps=6), corpus, tmp_path, alone)
    train(make(train__steps=12, optimizer__lr=1e-5), corpus, tmp_path, alone, watchers=[Ear()])
    assert said == [
        "changed since step-00000006 was written: train.steps: 6 → 12",
        "changed since step-00000006 was written: optimizer.lr: 0.003 → 1e-05",
    ]
    rates = [record["lr"] for record in log.read(tmp_path / "metrics.jsonl") if record["kind"] == "step"]
    assert rates[-1] == 1e-5


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_last_checkpoint(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path
) -> None:
    config = make(train__steps=100, optimizer__lr=1e-3, checkpoint__keep=1)
    train(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=6)), corpus, tmp_path, alone)
    before = contents(tmp_path / "checkpoints")
    wild = make(train__steps=100, optimizer__lr=1e38, checkpoint__keep=1, train__clip=0.0)
    with pytest.raises(
        FloatingPointError, match=r"step \d+: expected a finite loss and gradient, got loss .*step-00000006"
    ):
        train(wild, corpus, tmp_path, alone)
    assert contents(tmp_path / "checkpoints") == before
    assert not math.isfinite(losses(tmp_path)[-1]) or len(losses(tmp_path)) == 7
    assert train(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=9)), corpus, tmp_path, alone)
    assert all(map(math.isfinite, losses(tmp_path)))


def reads_late(monkeypatch: pytest.MonkeyPatch, before: Callable[[Any, int], None]) -> None:
    """Have losses read a while after their step, as on a GPU; `before` is called with the run before each step."""
    go, take = loop._Run.go, loop._Run._take

    def later(run: Any) -> Outcome:
        run.late = True
        return go(run)

    def taken(run: Any, step: int, work: Any) -> None:
        before(run, step)
        take(run, step, work)

    monkeypatch.setattr(loop._Run, "go", later)
    monkeypatch.setattr(loop._Run, "_take", taken)


LATE: dict[str, Any] = {"log__every": 4, "checkpoint__every": 0, "evaluation__every": 0, "train__steps": 20}


def test_a_signal_that_is_seen_late_saves_what_was_looked_at(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make(**LATE), corpus, tmp_path / "whole", alone)

    def ask(run: Any, step: int) -> None:
        run.stop.asked = run.stop.asked or step == 1

    reads_late(monkeypatch, ask)
    outcome = train(make(**LATE), corpus, tmp_path / "parts", alone)
    assert (outcome.step, outcome.finished) == (8, False)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")[:8], "not every step that was saved was read"
    assert outcome.loss == losses(tmp_path / "whole")[7]
    monkeypatch.undo()
    assert train(make(**LATE), corpus, tmp_path / "parts", alone).finished
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_signal_saves_no_step_whose_loss_was_not_finite(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_and_spoil(run: Any, step: int) -> None:
        run.stop.asked = run.stop.asked or step == 1
        if step == 5:
            with torch.no_grad():
                run.core.norm.weight.fill_(math.nan)

    reads_late(monkeypatch, ask_and_spoil)
    with pytest.raises(FloatingPointError, match=r"step 6: expected a finite loss and gradient, got loss nan"):
        train(make(**LATE), corpus, tmp_path, alone)
    assert not checkpoints.folders(tmp_path / "checkpoints")
    assert len(losses(tmp_path)) == 6


def test_weights_that_are_not_finite_are_not_saved(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    """The loss of a step says nothing of what its update made of the weights."""
    wild = make(checkpoint__every=1, optimizer__lr=3e38, schedule__warmup=0, train__clip=0.0, evaluation__every=0)
    with pytest.raises(FloatingPointError, match=r"step 1: expected finite weights, .*; there is no checkpoint"):
        train(wild, corpus, tmp_path, alone)
    assert len(losses(tmp_path)) == 1


def test_without_a_world_it_is_this_process_alone(corpus: Corpus, tmp_path: Path) -> None:
    """And a preset needs no vocabulary: it is the corpus'."""
    small = {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.train_length": 16, "train.batch": 4}
    config = load("tiny", small | {"train.steps": 20, "evaluation.every": 0, "optimizer.lr": 1e-3})
    outcome = train(config, corpus, tmp_path)
    assert (outcome.step, outcome.finished) == (20, True)
    assert load_model(outcome.checkpoint).config.vocab_size == corpus.vocab_size == 258
    wrong: Any = "tiny"
    with pytest.raises(TypeError, match="config: expected a Config, got 'tiny'"):
        train(wrong, corpus, tmp_path)
    with pytest.raises(TypeError, match="corpus: expected a Corpus, got 'tiny'"):
        train(config, wrong, tmp_path)


@pytest.mark.parametrize(("tokenizer", "size"), [("bytes", None), ("bpe", 300)])
def test_the_config_that_is_recorded_is_what_was_used(
    make: Make, alone: World, tmp_path: Path, tokenizer: str, size: int | None
) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"the ship, the sea, whale number {number}" for number in range(400)))
    corpus = prepare(
        tmp_path / "text.txt", tmp_path / "corpus", tokenizer=tokenizer, vocab_size=size, validation=0, workers=1
    )
    config = make(model__vocab_size=None, train__steps=2, evaluation__every=0)
    said = Said()
    for steps in (2, 3):
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
        outcome = train(config, corpus, tmp_path / "run", alone, watchers=[said])
        for path in (tmp_path / "run", outcome.checkpoint):
            recorded = read_toml(path / "config.toml", Config)
            assert (recorded.data.tokenizer, recorded.data.vocab_size) == (tokenizer, size)
            assert recorded.model.vocab_size == corpus.vocab_size
    assert said.lines == ["changed since step-00000002 was written: train.steps: 2 → 3"]


@pytest.mark.parametrize("fails", ["model.safetensors", "optimizer.safetensors", "rename"])
def test_a_disk_that_is_full_leaves_the_last_checkpoint(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    train(make(train__steps=3), corpus, tmp_path, alone)
    before = contents(tmp_path / "checkpoints")
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise full

    write = checkpoints.write_tensors

    def refuse_one(path: Path, *arguments: Any) -> None:
        return refuse() if path.name == fails else write(path, *arguments)

    monkeypatch.setattr(
        *((Path, "rename", refuse) if fails == "rename" else (checkpoints, "write_tensors", refuse_one))
    )
    with pytest.raises(OSError, match=r"step-00000006: could not be written, with .* MB free.*No space left on device"):
        train(make(), corpus, tmp_path, alone)
    assert contents(tmp_path / "checkpoints") == before
    monkeypatch.undo()
    assert train(make(), corpus, tmp_path, alone).finished


def test_a_disk_that_is_really_full_leaves_the_last_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    """A tmpfs of a few megabytes: checkpoints fit at first, and then no longer."""
    space = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=1500k none {small}"
    if shutil.which("unshare") is None or subprocess.run([*space, mount], capture_output=True, check=False).returncode:
        pytest.skip("this system lets us mount nothing")
    keys = "--model.layers 2 --model.width 32 --model.heads 2 --model.train_length 16 --evaluation.every 0"
    keys += " --train.batch 4 --checkpoint.keep 50 --checkpoint.every 2 --train.steps 200"
    command = f"{sys.executable} -m lengthen train tiny --data {corpus.directory} --out {small}/run {keys} --device cpu"
    done = subprocess.run(
        [*space, f"{mount} && {command}; status=$?; cp -r {small}/run {tmp_path}/kept; exit $status"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert re.fullmatch(r"lengthen train: error: .*(could not be written, with 0\.\d MB free|No space left).*", line)
    left, passed = checkpoints.newest_whole(tmp_path / "kept" / "checkpoints")
    assert left is not None
    assert passed == []
    load_model(left.path)


def test_two_runs_do_not_share_a_folder(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    class Intruder(Watcher):
        def stepped(self, record: Record) -> None:
            with pytest.raises(OSError, match="another process is training into this folder"):
                train(make(), corpus, tmp_path, alone)

    train(make(train__steps=1), corpus, tmp_path, alone, watchers=[Intruder()])


def test_a_model_that_cannot_be_stretched_is_measured_at_its_own_length_alone(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path
) -> None:
    train(make(model__positions="learned", train__steps=1), corpus, tmp_path, alone)
    assert {length for _, length, _ in evaluations(tmp_path)} == {16}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_compiled_blocks_train_the_same(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lengthen.model import Transformer

    def eagerly(self: Transformer) -> None:  # the graphs of torch.compile without its C++ compiler
        for block in self.blocks:
            block.compile(backend="aot_eager", dynamic=False)

    monkeypatch.setattr(Transformer, "compile_parts", eagerly)
    for name, compiled in (("plain", False), ("compiled", True)):
        train(make(train__compile=compiled, model__positions="rotary"), corpus, tmp_path / name, alone)
    torch.testing.assert_close(losses(tmp_path / "compiled"), losses(tmp_path / "plain"), rtol=1e-5, atol=0)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_state_is_readable_without_us(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> None:
    outcome = train(make(train__steps=6), corpus, tmp_path, alone)
    state = json.loads((outcome.checkpoint / "state.json").read_text())
    assert state["step"] == 6
    assert state["data"] == corpus.fingerprint
    assert state["validation"] == evaluations(tmp_path)[-2][2]
