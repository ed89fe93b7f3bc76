"""Checkpoints: a folder a step, whole or not there at all.

    checkpoints/step-00000500/
        model.safetensors     the weights and the model's config: all that is needed to use the model
        optimizer/            AdamW's state, by torch.distributed.checkpoint: for any number of processes
        state.json            the step, the validation losses, the data's fingerprint and folder
        config.toml           the run's config

A checkpoint is written under a hidden name, forced to the disk, and renamed: what has its proper name is complete,
whenever the process is killed. One is removed the other way round. Nothing of a run but weights and AdamW's state needs
saving: data, learning rate and random numbers are functions of the step.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from lengthen import io
from lengthen.checks import describe, whole_number
from lengthen.config import Config, ModelConfig, differences
from lengthen.model import Transformer
from lengthen.model.weights import read, write
from lengthen.training.parallel import World

PREFIX, PARTIAL, GOING, ASIDE = "step-", ".partial-", ".going-", "aside-"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on the disk."""

    path: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Steps taken before it was written."""
        return int(self.state["step"])

    @property
    def weights(self) -> str:
        """The sha256 of the weights' file: what was measured of a model is of these weights."""
        with (self.path / "model.safetensors").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @property
    def validation(self) -> float | None:
        """The validation loss at the training length, if it was measured at this step."""
        value = self.state.get("validation")
        return None if value is None else float(value)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint in a folder, or say why it is none."""
    folder = Path(path)
    try:
        state: Mapping[str, Any] = io.read_json(folder / "state.json", dict)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: expected a checkpoint, got a folder without state.json") from None
    whole_number(f"{folder / 'state.json'}: step", state.get("step"), at_least=0)
    if not isinstance(state.get("data"), str):
        raise TypeError(f"{folder / 'state.json'}: data: expected a fingerprint, got {describe(state.get('data'))}")
    return Checkpoint(folder, state)


def listed(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a run's folder of them, oldest first."""
    return [open_checkpoint(path) for path in sorted(folder.glob(f"{PREFIX}*"))]


def best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the one with the lowest validation loss, of those that have one."""
    measured = [one for one in checkpoints if one.validation is not None]
    return min(measured, key=lambda one: one.validation or 0.0, default=None)


def save(
    folder: Path,
    state: Mapping[str, Any],
    config: Config,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    here: World,
) -> Checkpoint:
    """Write a checkpoint with all processes; if it fails, nothing of it is left and earlier ones are as they were."""
    name = f"{PREFIX}{state['step']:08d}"
    partial, final = folder / f"{PARTIAL}{name}", folder / name
    problem: BaseException | None = None
    try:
        if here.first:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
    except OSError as found:
        problem = found
    here.agree(problem)
    try:
        _write_all(partial, state, config, model, optimizer, here)
        if here.first:
            _force(partial)
            if final.exists():  # a run that went back to an older checkpoint comes here again
                _remove(final)
            partial.rename(final)
            io.sync_folder(folder)
    except (Exception, CheckpointException) as found:  # (DCP's own is no Exception)
        problem = found
    try:
        here.agree(problem)
    except (Exception, CheckpointException) as found:
        if here.first:
            shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(folder).free / 1e6
        raise OSError(
            f"{final}: could not be written, with {free:,.1f} MB free on its disk now: {_cause(found)}; earlier "
            "checkpoints are whole, and the same command goes on from the last of them"
        ) from found
    return Checkpoint(final, dict(state))


def _write_all(
    partial: Path,
    state: Mapping[str, Any],
    config: Config,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    here: World,
) -> None:
    sharded = isinstance(model, FSDPModule)
    weights: Any = get_model_state_dict(model, options=WHOLE) if sharded else model.state_dict()
    problem: Exception | None = None
    try:
        if here.first:
            write(weights, model.config, partial / "model.safetensors")
            io.write_json(partial / "state.json", state)
            io.write_text(partial / "config.toml", io.to_toml(config))
    except Exception as found:
        problem = found
    here.agree(problem)
    adam: dict[str, Any] = cast(Any, get_optimizer_state_dict(model, optimizer))["state"]
    with _quietly():
        state_dict_saver.save(adam, checkpoint_id=partial / "optimizer", no_dist=here.size == 1)


def load(checkpoint: Checkpoint, model: Transformer, optimizer: torch.optim.Optimizer, here: World) -> None:
    """Put weights and AdamW's state into a model and an optimizer, over however many processes they are spread."""
    config, weights = read(checkpoint.path)
    refuse_other_model(checkpoint.path, config, model.config)
    if isinstance(model, FSDPModule):
        set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(weights)
    adam: dict[str, Any] = cast(Any, get_optimizer_state_dict(model, optimizer))  # with the settings of this run
    with _quietly():
        state_dict_loader.load(adam["state"], checkpoint_id=checkpoint.path / "optimizer", no_dist=here.size == 1)
    set_optimizer_state_dict(model, optimizer, adam)


def refuse_other_model(path: Path, saved: ModelConfig, wanted: ModelConfig) -> None:
    """Raise an error that names the keys in which a checkpoint's model differs from the config's."""
    found = differences(saved, wanted, "model.")
    if found:
        raise ValueError(
            f"{path}: this checkpoint is of another model than the config asks for ({'; '.join(found)}); "
            "train it into another folder (--out), or give the same model"
        )


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the last `keep` checkpoints and the best; return those that went."""
    checkpoints = listed(folder)
    kept = {one.path for one in checkpoints[-keep:]}
    leader = best(checkpoints)
    if leader is not None:
        kept.add(leader.path)
    going = [one.path for one in checkpoints if one.path not in kept]
    for path in going:
        _remove(path)
    return going


def set_aside(folder: Path, after: int) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that went back will take again; return their new places."""
    moved = []
    for one in listed(folder):
        if one.step > after:
            names = (folder / f"{ASIDE}{number}-{one.path.name}" for number in itertools.count(1))
            moved.append(one.path.rename(next(path for path in names if not path.exists())))
    return moved


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-written or half-removed."""
    for pattern in (PARTIAL, GOING):
        for path in folder.glob(f"{pattern}*"):
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    hidden = path.with_name(f"{GOING}{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def _quietly() -> Iterator[None]:
    """Leave out DCP's warning that there is one process, which it was told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def _force(folder: Path) -> None:
    """Have the system write everything below a folder to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            io.sync_folder(path)
    io.sync_folder(folder)


def _cause(problem: BaseException) -> str:
    """Return the innermost reason in a line: what fails on the disk comes wrapped by those who met it."""
    seen: BaseException | None = problem
    while seen is not None:
        failures = getattr(seen, "failures", None)  # of CheckpointException: by rank, each with its traceback
        if failures:
            seen = next(iter(failures.values()))[0]
        problem, seen = seen, seen.__cause__ or seen.__context__
    return (str(problem) or type(problem).__name__).strip().splitlines()[0]
