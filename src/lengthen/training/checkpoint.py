"""Checkpoints: a folder per step, whole or not there at all. Nothing in it is pickled.

    checkpoints/step-00000500/
        model.safetensors       the weights and the model's config: all that is needed to use the model
        optimizer.safetensors   AdamW's state: step.NAME, exp_avg.NAME and exp_avg_sq.NAME of each weight
        state.json              the step, the losses, the data's fingerprint and folder (`State`)
        config.toml             the run's config
        SHA256SUMS              of those four, as `sha256sum --check` reads them

A checkpoint is written under a hidden name, forced to the disk, and renamed: what has its proper name is complete,
whenever the process is killed. One is removed the other way round. What has another name than step-00000500, or does
not hold these files, is not ours and is not removed. Only weights and AdamW's state need saving: data, lr and random
numbers are functions of the step.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lengthen import io
from lengthen.checks import whole_number
from lengthen.config import Config, ModelConfig, differences
from lengthen.data.checksums import sha256_of
from lengthen.model import Transformer
from lengthen.model.weights import FILE, described, opened, read_config, write_tensors
from lengthen.training.parallel import World

PARTIAL, GOING, ASIDE = ".partial-", ".going-", "aside-"
NAME = re.compile(r"step-(\d{8,})")
SUMS, STATE, CONFIG, ADAM = "SHA256SUMS", "state.json", "config.toml", "optimizer.safetensors"
FILES = (FILE, ADAM, STATE, CONFIG)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a weight


@dataclass(frozen=True)
class Init:
    """The model that a run began with."""

    path: str
    sha256: str  # of its file


@dataclass(frozen=True)
class State:
    """What state.json says of a checkpoint."""

    step: int  # taken before it was written
    data: str  # the corpus' fingerprint
    folder: str | None = None  # the corpus'
    tokenizer: str | None = None  # what tells the corpus' tokenizer from others
    loss: float | None = None  # of the last step
    validation: float | None = None  # the loss at the training length, if it was measured at this step
    processes: int = 1
    init: Init | None = None

    def __post_init__(self) -> None:
        whole_number("step", self.step, at_least=0)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on the disk, whose state was read; the rest is verified when it is needed."""

    path: Path
    state: State
    sums: Mapping[str, str]  # by file; none of a checkpoint from before there were any

    @property
    def step(self) -> int:
        """Steps taken before it was written."""
        return self.state.step

    @property
    def weights(self) -> str:
        """The sha256 of the weights' file: what was measured of a model is of these weights."""
        return self.verify(FILE)

    def verify(self, name: str) -> str:
        """Return the sha256 of a file; refuse one that has changed since the checkpoint was written."""
        file = self.path / name
        if not file.is_file():
            raise FileNotFoundError(f"{file}: expected a file of the checkpoint, got no such file")
        found = sha256_of(file)
        if self.sums and found != self.sums[name]:
            raise ValueError(
                f"{file}: expected the sha256 that {SUMS} says, {self.sums[name][:12]}…, got {found[:12]}…: "
                "the file was damaged or altered since it was written"
            )
        return found

    def verify_all(self) -> None:
        """Refuse a checkpoint of which anything is missing or has changed."""
        if not self.sums:
            raise ValueError(
                f"{self.path}: expected {ADAM}, got AdamW's state as a pickle, as earlier versions wrote it, which may "
                f"run any code and is not read; its weights can begin a run of their own: --init {self.path}"
            )
        for name in FILES:
            self.verify(name)


# Finding and reading.


def folders(folder: Path) -> list[tuple[int, Path]]:
    """Return the step and the path of everything with a checkpoint's name in a run's folder of them, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    named = [(NAME.fullmatch(path.name), path) for path in found if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in named if match)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint in a folder, or say why it is none; weights and optimizer are not read yet."""
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected a checkpoint, got no such folder")
    if not (folder / STATE).is_file():
        raise FileNotFoundError(f"{folder}: expected a checkpoint, got a folder without {STATE}")
    state = io.read_json(folder / STATE, State)
    name = NAME.fullmatch(folder.name)
    if name and int(name[1]) != state.step:
        raise ValueError(f"{folder / STATE}: step: expected {int(name[1])}, as the folder is called, got {state.step}")
    one = Checkpoint(folder, state, _sums(folder))
    if one.sums:
        one.verify(STATE)
        one.verify(CONFIG)
    return one


def newest_whole(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that is whole, every file verified, and why newer ones are not."""
    wrong: list[str] = []
    for _, path in reversed(folders(folder)):
        try:
            one = open_checkpoint(path)
            one.verify_all()
        except (OSError, TypeError, ValueError) as problem:
            wrong.append(str(problem))
        else:
            return one, wrong
    if wrong:
        raise ValueError(f"{folder}: expected a whole checkpoint to resume from, got none: {'; '.join(wrong)}")
    return None, []


def last(folder: Path) -> Checkpoint | None:
    """Return the checkpoint of the latest step; no other is looked at."""
    there = folders(folder)
    return open_checkpoint(there[-1][1]) if there else None


def best(folder: Path) -> Checkpoint | None:
    """Return the checkpoint with the lowest validation loss, of those that have one."""
    return _best([open_checkpoint(path) for _, path in folders(folder)])


def _best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    measured = [(one.state.validation, one.step, one) for one in checkpoints if one.state.validation is not None]
    return min((found for found in measured if math.isfinite(found[0])), default=(0, 0, None))[2]


def _sums(folder: Path) -> dict[str, str]:
    """Return what SHA256SUMS says of each file."""
    path = folder / SUMS
    if not path.is_file() and (folder / "optimizer").is_dir():
        return {}  # from before there were any: its weights can be used
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected the checkpoint's checksums, got no such file")
    lines = re.findall(rb"^([0-9a-f]{64})  (\S+)$", path.read_bytes(), flags=re.MULTILINE)
    found = {name.decode(errors="replace"): said.decode() for said, name in lines}
    if set(found) != set(FILES):
        raise ValueError(f"{path}: expected the sha256 of {', '.join(FILES)}, got {', '.join(found) or 'none'}")
    return found


def load(checkpoint: Checkpoint, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
    """Put weights and AdamW's state into a model and an optimizer, over however many processes they are spread."""
    with opened(checkpoint.path / FILE) as file:
        refuse_other_model(checkpoint.path, read_config(file), model.config)
        weights = model.state_dict()
        file.refuse_others(weights, dtypes=True)
        for name, weight in weights.items():
            put(file.read(name), weight)
    state: dict[Tensor, dict[str, Tensor]] = {parameter: _fresh(parameter) for parameter in model.parameters()}
    with opened(checkpoint.path / ADAM) as file:
        moments = _moments(model, state)
        file.refuse_others(moments, dtypes=True)
        for name, moment in moments.items():
            put(file.read(name), moment)
    optimizer.state.update(state)


@torch.no_grad()
def put(value: Tensor, into: Tensor) -> None:
    """Copy a tensor into one of its shape, or this process's part of it into one that is cut over processes."""
    if isinstance(into, DTensor):
        value = distribute_tensor(value.to(into.device), into.device_mesh, into.placements, src_data_rank=None)
    into.copy_(value)


def refuse_other_model(path: Path, saved: ModelConfig, wanted: ModelConfig) -> None:
    """Raise an error that names the keys in which a checkpoint's model differs from the config's."""
    found = differences(saved, wanted, "model.")
    if found:
        raise ValueError(
            f"{path}: this checkpoint is of another model than the config asks for ({'; '.join(found)}); "
            "train it into another folder (--out), or give the same model"
        )


# Writing and removing.


def save(
    folder: Path, state: State, config: Config, model: Transformer, optimizer: torch.optim.Optimizer, here: World
) -> Checkpoint:
    """Write a checkpoint with all processes; if it fails, nothing of it is left and earlier ones are as they were."""
    name = f"step-{state.step:08d}"
    partial, final = folder / f"{PARTIAL}{name}", folder / name

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    def end() -> None:
        io.write_json(partial / STATE, state)
        io.write_text(partial / CONFIG, io.to_toml(config))
        seal(partial)
        _force(partial)
        if final.exists():  # damaged, or somebody's own: what a run that went back left there is aside already
            _set_aside(final)
        partial.rename(final)
        io.sync_folder(folder)

    try:
        here.all_or_none(begin if here.first else _nothing)
        weights = model.state_dict()  # (which also has FSDP cut them again, if they are together)
        _write(partial / FILE, weights, described(model.config), here)
        _write(partial / ADAM, _moments(model, optimizer.state), {}, here)
        here.all_or_none(end if here.first else _nothing)
    except Exception as problem:  # on every process
        if here.first:
            shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free / 1e6
        raise OSError(
            f"{final}: could not be written, with {free:,.1f} MB free on its disk now: {problem}; earlier "
            "checkpoints are whole, and the same command resumes from the last of them"
        ) from problem
    return Checkpoint(final, state, _sums(final))


def _nothing() -> None:
    """Leave it to the first process."""


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], here: World) -> None:
    """Write tensors with all processes; all of them know if it failed."""
    here.all_or_none(lambda: write_tensors(path if here.first else None, tensors, metadata))


def seal(folder: Path) -> None:
    """Write down the sha256 of each file of a checkpoint."""
    io.write_text(folder / SUMS, "".join(f"{sha256_of(folder / name)}  {name}\n" for name in FILES))


def _moments(model: Transformer, state: Mapping[Tensor, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return AdamW's state by name; zeros for a weight that has had no gradient yet, as AdamW itself begins with."""
    kept = {name: state.get(parameter) or _fresh(parameter) for name, parameter in model.named_parameters()}
    return {f"{moment}.{name}": one[moment] for name, one in kept.items() for moment in MOMENTS}


def _fresh(parameter: Tensor) -> dict[str, Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def prune(folder: Path, keep: int, saved: Checkpoint, known: dict[Path, Checkpoint | None]) -> list[Path]:
    """Remove all but the last `keep` checkpoints up to the one just saved, and the best; return those that went.

    One that is damaged counts for nothing and stays. `known` remembers those that were found whole, and None of others.
    """
    known[saved.path] = saved
    for step, path in folders(folder):
        if step < saved.step and path not in known:
            known[path] = None if path.is_symlink() else _whole(path)
    there = [known.get(path) for _, path in folders(folder)]
    whole = [one for one in there if one is not None and one.step <= saved.step]
    leader = _best(whole)
    going = [one.path for one in whole[:-keep] if one is not leader]
    for path in going:
        _remove(path)
    return going


def _whole(path: Path) -> Checkpoint | None:
    try:
        one = open_checkpoint(path)
        one.verify_all()
    except (OSError, TypeError, ValueError):
        return None
    return one


def set_aside(folder: Path, after: int) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that went back will take again; return their new places."""
    return [_set_aside(path) for step, path in folders(folder) if step > after]


def _set_aside(path: Path) -> Path:
    names = (path.with_name(f"{ASIDE}{number}-{path.name}") for number in itertools.count(1))
    return path.rename(next(place for place in names if not place.exists()))


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-written or half-removed."""
    for start in (PARTIAL, GOING):
        for path in folder.glob(f"{start}*"):
            if NAME.fullmatch(path.name.removeprefix(start)):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    hidden = path.with_name(f"{GOING}{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _force(folder: Path) -> None:
    """Have the system write everything in a folder to the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    io.sync_folder(folder)
