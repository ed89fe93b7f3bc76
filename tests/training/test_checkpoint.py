"""A checkpoint is ours, whole and unaltered, or it is not used; and nothing in it is ever run."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import Make
from test_loop import Said, StopAt, contents, losses

import lengthen
from lengthen.data import Corpus
from lengthen.evaluation import open_run
from lengthen.model import Transformer
from lengthen.training import Watcher, World, train
from lengthen.training import checkpoint as checkpoints
from lengthen.training.checkpoint import FILES, SUMS, open_checkpoint, seal
from lengthen.training.optimizer import adamw

MODULES = sorted(Path(lengthen.__file__).parent.rglob("*.py"))
UNSAFE = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch.distributed.checkpoint")


@pytest.fixture
def trained(corpus: Corpus, make: Make, alone: World, tmp_path: Path) -> Path:
    """Return a run of 12 steps with the checkpoints 3, 6, 9 and 12."""
    train(make(checkpoint__keep=9), corpus, tmp_path / "run", alone)
    return tmp_path / "run"


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def flip(path: Path, place: float = 0.9) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)


# Nothing is run.


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(MODULES[0].parents[0])))
def test_no_module_can_unpickle(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            called, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert called != "torch.load" or given.get("weights_only") == "True"
            assert given.get("allow_pickle", "False") == "False"
            assert not called.endswith(("_object_list", "gather_object", "exec", "eval_frame"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # what import_module may be told
            names += [node.value] if re.fullmatch(r"[\w.]+", node.value) else []
    assert [name for name in names if name.startswith((*UNSAFE, "torch.load"))] == []


class Malice:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_an_old_checkpoint_whose_pickle_would_run_code_runs_none(
    corpus: Corpus, make: Make, alone: World, trained: Path, tmp_path: Path
) -> None:
    """Its weights are used; its optimizer's state is not, and a line says how to go on."""
    made, old = tmp_path / "made", folder(trained, 12)
    pickle.loads(pickle.dumps(Malice(made)))
    assert made.exists(), "it would"
    made.unlink()
    (old / "optimizer").mkdir()
    for name in (".metadata", "__0_0.distcp", "data.pkl"):
        (old / "optimizer" / name).write_bytes(pickle.dumps(Malice(made)))
    for name in (SUMS, "optimizer.safetensors"):
        (old / name).unlink()
    assert open_run(trained).checkpoint.step == 12
    with pytest.raises(
        ValueError, match=r"step-00000012: expected optimizer.safetensors, got .* --init .*step-00000012"
    ):
        train(make(), corpus, trained, alone, resume="step-12")
    train(make(train__steps=3), corpus, tmp_path / "new", alone, init=old)
    for name in FILES:  # pickles in place of every file
        for sealed in (False, True):
            shutil.copytree(folder(trained, 9), tmp_path / "bad")
            (tmp_path / "bad" / name).write_bytes(pickle.dumps(Malice(made)))
            if sealed:
                seal(tmp_path / "bad")
            with pytest.raises((ValueError, TypeError), match=name):
                train(make(), corpus, tmp_path / "other", alone, resume=str(tmp_path / "bad"))
            shutil.rmtree(tmp_path / "bad")
    assert not made.exists()


# What is ours.


def test_folders_with_other_names_are_neither_read_nor_removed(
    corpus: Corpus, make: Make, alone: World, trained: Path
) -> None:
    others = ["step-00000003.bak", "step-00000006-good", "step-old", "step-7", "Step-00000009", "step-9999999x"]
    for name in others:
        shutil.copytree(folder(trained, 3), trained / "checkpoints" / name)
    (trained / "checkpoints" / "step-00000099").touch()  # no folder
    before = {name: contents(trained / "checkpoints" / name) for name in others}
    outcome = train(make(train__steps=24, checkpoint__keep=1, evaluation__every=0), corpus, trained, alone)
    assert outcome.step == 24
    assert [name for name in others if contents(trained / "checkpoints" / name) == before[name]] == others
    assert {step for step, _ in checkpoints.folders(trained / "checkpoints")} == {12, 24}  # 12 is the best


def test_a_folder_of_our_name_that_is_not_ours_is_not_removed(
    corpus: Corpus, make: Make, alone: World, tmp_path: Path
) -> None:
    mine = folder(tmp_path, 3)
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("my own")
    with pytest.raises(ValueError, match=r"expected a whole checkpoint .*step-00000003: .* without state.json"):
        train(make(), corpus, tmp_path, alone)
    shutil.rmtree(mine)

    class Late(Watcher):
        def stepped(self, record: dict[str, Any]) -> None:
            for step in (1, 9, 12) if record["step"] == 7 else ():
                folder(tmp_path, step).mkdir()
                (folder(tmp_path, step) / "notes.txt").write_text("my own")

    train(make(checkpoint__keep=1, evaluation__every=0), corpus, tmp_path, alone, watchers=[Late()])
    assert [path.read_text() for path in tmp_path.rglob("notes.txt")] == ["my own"] * 3
    assert open_checkpoint(folder(tmp_path, 12)).step == 12


def test_going_back_in_a_folder_that_gets_later_checkpoints_keeps_what_it_saves(
    corpus: Corpus, make: Make, alone: World, trained: Path, tmp_path: Path
) -> None:
    """Whoever puts later ones there meanwhile: what is told to be saved is there."""
    shutil.copytree(trained / "checkpoints", tmp_path / "copies")
    missing: list[Path] = []

    class Meddler(Watcher):
        def stepped(self, record: dict[str, Any]) -> None:
            for step in (9, 12):
                if not folder(trained, step).exists() and record["step"] == 4:
                    shutil.copytree(tmp_path / "copies" / f"step-{step:08d}", folder(trained, step))

        def saved(self, path: Path, step: int) -> None:
            missing.extend([] if path.is_dir() else [path])

    config = make(checkpoint__keep=1, checkpoint__every=1, train__steps=8)
    outcome = train(config, corpus, trained, alone, resume="step-3", watchers=[Meddler()])
    assert missing == []
    assert outcome.checkpoint.is_dir()


def test_a_checkpoint_of_another_run_does_not_write_over_one(
    corpus: Corpus, make: Make, alone: World, trained: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    train(make(train__steps=6, train__seed=1), corpus, other, alone)
    before = contents(other)
    with pytest.raises(FileExistsError, match=r"--resume .*step-00000003: .*other/checkpoints holds a run already"):
        train(make(), corpus, other, alone, resume=str(folder(trained, 3)))
    assert contents(other) == before
    shutil.rmtree(other / "checkpoints")  # a run that was killed before it saved anything
    train(make(), corpus, other, alone, resume=str(folder(trained, 9)))
    assert losses(other) == losses(trained)[9:], "the log of another run was gone on with"


def test_by_its_step(corpus: Corpus, make: Make, alone: World, trained: Path) -> None:
    whole, said = losses(trained), Said()
    outcome = train(make(checkpoint__keep=9), corpus, trained, alone, resume="step-6", watchers=[StopAt(7), said])
    assert outcome.step == 8
    assert train(make(), corpus, trained, alone, resume="step-00000008").finished
    assert losses(trained) == whole
    with pytest.raises(FileNotFoundError, match=r"step-00000005: expected a checkpoint, got no such folder"):
        train(make(), corpus, trained, alone, resume="step-5")


# What is whole.


@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_a_flipped_bit_is_found_and_the_one_before_is_taken(
    corpus: Corpus, make: Make, alone: World, trained: Path, name: str
) -> None:
    whole, said = losses(trained), Said()
    flip(folder(trained, 12) / name)
    with pytest.raises(ValueError, match=rf"step-00000012/({SUMS}|{'.+' if name == SUMS else name})"):
        train(make(), corpus, trained, alone, resume="step-12")
    assert train(make(checkpoint__keep=9), corpus, trained, alone, watchers=[said]).finished
    assert losses(trained) == whole
    (line,) = [line for line in said.lines if "passed over" in line]
    assert "step-00000012" in line
    assert "step-00000012" in next(line for line in said.lines if "is now" in line)
    assert open_checkpoint(folder(trained, 12)).weights


@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_a_missing_file_is_found(corpus: Corpus, make: Make, alone: World, trained: Path, name: str) -> None:
    (folder(trained, 12) / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"step-00000012.*{name}"):
        train(make(), corpus, trained, alone, resume="step-12")
    for step in (3, 6, 9):
        flip(folder(trained, step) / "model.safetensors")
    before = contents(trained / "checkpoints")
    with pytest.raises(ValueError, match=r"expected a whole checkpoint to resume from, got none: .*step-00000012.*; "):
        train(make(), corpus, trained, alone)  # and does not start anew
    assert contents(trained / "checkpoints") == before


def test_damaged_ones_do_not_push_out_whole_ones(corpus: Corpus, make: Make, alone: World, trained: Path) -> None:
    for step in (6, 9):
        flip(folder(trained, step) / "optimizer.safetensors")
    train(make(train__steps=15, checkpoint__keep=3, evaluation__every=0), corpus, trained, alone)
    assert [step for step, _ in checkpoints.folders(trained / "checkpoints")] == [3, 6, 9, 12, 15]
    train(make(train__steps=18, checkpoint__keep=2, evaluation__every=0), corpus, trained, alone)
    assert [step for step, _ in checkpoints.folders(trained / "checkpoints")] == [6, 9, 12, 15, 18]


def test_eval_looks_at_the_checkpoint_that_it_needs_alone(corpus: Corpus, trained: Path) -> None:
    for name in FILES:
        flip(folder(trained, 6) / name)
    assert open_run(trained).checkpoint.step == 12
    (folder(trained, 12) / "optimizer.safetensors").unlink()  # as one would share it
    assert open_run(trained).checkpoint.step == 12
    flip(folder(trained, 12) / "model.safetensors")
    with pytest.raises(ValueError, match=r"step-00000012/model.safetensors: expected the sha256 that SHA256SUMS says"):
        open_run(trained)
    with pytest.raises(ValueError, match=r"step-00000006/"):  # whose validation loss could be the lowest
        open_run(trained, "best")


def test_sums_are_those_of_coreutils(trained: Path) -> None:
    import hashlib

    lines = (folder(trained, 12) / SUMS).read_text().splitlines()
    expected = {name: hashlib.sha256((folder(trained, 12) / name).read_bytes()).hexdigest() for name in FILES}
    assert lines == [f"{digest}  {name}" for name, digest in expected.items()]


# What is read against a schema, whatever its checksum says.


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (b"", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"step": 12', "expected JSON"),
        (b"[1, 2]", "the file: expected a table"),
        (b"{}", "step: expected a value, got none"),
        (b'{"step": "12", "data": "d"}', "step: expected a whole number"),
        (b'{"step": -1, "data": "d"}', "step: expected at least 0, got -1"),
        (b'{"step": 12, "data": 5}', "data: expected a word, got 5"),
        (b'{"step": 12, "data": "d", "stepp": 5}', "unknown key 'stepp'; did you mean 'step'"),
        (b'{"step": 13, "data": "d"}', "step: expected 12, as the folder is called, got 13"),
        (b'{"step": 12, "data": "d", "init": {"path": 3}}', "init.path: expected a word"),
    ],
    ids=range(12),
)
def test_a_wrong_state_is_named(trained: Path, state: bytes, problem: str) -> None:
    path = folder(trained, 12) / "state.json"
    path.write_bytes(state)
    seal(path.parent)
    with pytest.raises((TypeError, ValueError), match=rf"step-00000012/state\.json: {problem}"):
        open_checkpoint(path.parent)


def test_a_wrong_optimizer_is_named(corpus: Corpus, make: Make, alone: World, trained: Path) -> None:
    path = folder(trained, 12) / "optimizer.safetensors"
    good = {
        name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()
    }  # not mapped to the file
    name = "exp_avg.norm.weight"

    def refused(problem: str) -> None:
        seal(path.parent)
        with pytest.raises(ValueError, match=rf"step-00000012/optimizer\.safetensors: {problem}"):
            train(make(), corpus, trained, alone, resume="step-12")

    for data in (b"", b"\0" * 100, path.read_bytes()[:-8], path.read_bytes()[:100], b"\xff" * 8 + b"{}"):
        path.write_bytes(data)
        refused("expected a whole safetensors file, got one that cannot be read")
    shutil.copy(folder(trained, 12) / "model.safetensors", path)  # swapped
    refused("expected the tensors .* step.embedding.weight is missing")
    for tensors, problem in (
        ({key: value for key, value in good.items() if key != name}, f"{name} is missing"),
        (good | {"exp_avg.spare": torch.zeros(2)}, "exp_avg.spare has no place in it"),
        (good | {name: torch.zeros(3)}, rf"{name}: expected shape \[16\], got \[3\]"),
        (good | {name: torch.zeros(16).double()}, f"{name}: expected F32, got F64"),
        ({f"x{key}": value for key, value in good.items()}, "step.embedding.weight is missing; .* and .* more"),
    ):
        safetensors.torch.save_file(tensors, path)
        refused(f".*: {problem}")


def test_a_wrong_config_is_named(corpus: Corpus, make: Make, alone: World, trained: Path) -> None:
    path = folder(trained, 12) / "config.toml"
    good = path.read_bytes()
    for data, problem in (
        (b"\xff\xfe\x00", "expected TOML"),
        (good.replace(b"[train]", b"[train"), "expected TOML"),
        (good.replace(b"steps = 12", b"stepz = 12"), "unknown key 'train.stepz'"),
        (good.replace(b"layers = 2", b"layers = 'two'"), "model.layers: expected a whole number"),
        (b"", "model.vocab_size: expected a value"),
    ):
        path.write_bytes(data)
        seal(path.parent)
        with pytest.raises((TypeError, ValueError), match=rf"step-00000012/config\.toml: {problem}"):
            train(make(), corpus, trained, alone, resume="step-12")


# How it is written.


def test_what_adamw_has_not_begun_with_is_zeros_and_goes_on_the_same(make: Make, alone: World, tmp_path: Path) -> None:
    """A weight that has had no gradient has no state in AdamW."""
    config = make()

    def stepped(model: Transformer, optimizer: torch.optim.Optimizer, *names: str) -> None:
        for name, weight in model.named_parameters():
            weight.grad = torch.ones_like(weight) if name in names else None
        optimizer.step()

    model = Transformer(config.model)
    optimizer = adamw(model, config.optimizer)
    stepped(model, optimizer, "norm.weight")
    state = checkpoints.State(step=1, data="d")
    saved = checkpoints.save(tmp_path, state, config, model, optimizer, alone)
    kept = safetensors.torch.load_file(saved.path / "optimizer.safetensors")
    assert {name: float(step) for name, step in kept.items() if name.startswith("step.") and step} == {
        "step.norm.weight": 1.0
    }
    again = Transformer(config.model)
    other = adamw(again, config.optimizer)
    checkpoints.load(saved, again, other)
    for _ in range(2):
        for one in ((model, optimizer), (again, other)):
            stepped(*one, "norm.weight", "embedding.weight")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_only_one_tensor_at_a_time_is_gathered(tmp_path: Path) -> None:
    from lengthen.model.weights import write_tensors

    alive: list[str] = []

    class Cut:
        """Stands for a tensor that is cut over processes."""

        shape, dtype = (4,), torch.float32

        def __init__(self, name: str) -> None:
            self.name = name

        def numel(self) -> int:
            return 4

        def element_size(self) -> int:
            return 4

        def full_tensor(self) -> torch.Tensor:
            alive.append(self.name)
            return torch.full((4,), float(len(alive)))

    cut: Any = {name: Cut(name) for name in ("a", "b", "c")}
    write_tensors(tmp_path / "x", cut, {})
    write_tensors(None, cut, {})  # a process that does not write takes part
    with pytest.raises(FileNotFoundError):
        write_tensors(tmp_path / "nowhere" / "x", cut, {})  # and one that cannot
    assert "".join(alive) == "abcabcabc"
    assert safetensors.torch.load_file(tmp_path / "x")["b"].tolist() == [2.0] * 4


def test_a_state_is_plain_json(trained: Path) -> None:
    state = json.loads((folder(trained, 12) / "state.json").read_text())
    assert list(state) == ["step", "data", "folder", "tokenizer", "loss", "validation", "processes", "init"]
    assert sorted(os.listdir(folder(trained, 12))) == sorted([*FILES, SUMS])
