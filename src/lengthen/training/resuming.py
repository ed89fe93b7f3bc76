"""Which checkpoint a run resumes from, and whether the config and corpus allow it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from lengthen import io
from lengthen.config import Config, differences
from lengthen.data import Corpus
from lengthen.training import checkpoint as checkpoints
from lengthen.training.checkpoint import Checkpoint
from lengthen.training.parallel import World


def chosen(folder: Path, resume: str, here: World) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to resume from, verified by the first process, and why newer ones are not whole."""
    found, wrong = here.all_or_none(lambda: _decided(folder, resume) if here.first else (None, []))
    step = torch.tensor(-1 if found is None else found.step, dtype=torch.float64, device=here.device)
    number = int(here.sum(step if here.first else torch.zeros_like(step)).item())
    if number < 0:
        return None, wrong
    path = place(folder, f"step-{number}" if resume == "auto" else resume)
    return here.all_or_none(lambda: found or checkpoints.open_checkpoint(path)), wrong


def place(folder: Path, resume: str) -> Path:
    """Return the folder of a checkpoint: a path, or step-15 for that of a step in the run's own folder of them."""
    step = re.fullmatch(r"step-(\d+)", resume)
    return Path(resume) if step is None else folder / f"step-{int(step[1]):08d}"


def _decided(folder: Path, resume: str) -> tuple[Checkpoint | None, list[str]]:
    there = checkpoints.folders(folder)
    if resume == "auto":
        return checkpoints.newest_whole(folder)
    last = there[-1][1].name if there else ""
    holds = f"--resume {resume}: {folder} holds a run already (its last checkpoint is {last})"
    if resume == "never":
        if there:
            raise FileExistsError(f"{holds}; choose another --out, or resume with --resume auto")
        return None, []
    path = place(folder, resume)
    if there and path.resolve().parent != folder.resolve():
        raise FileExistsError(f"{holds}, which would be written over; choose another --out, or leave --resume out")
    one = checkpoints.open_checkpoint(path)
    one.verify_all()
    return one, []


def refuse_other_run(resumed: Checkpoint, config: Config, corpus: Corpus) -> list[str]:
    """Refuse to resume with another model, another corpus or fewer steps; return what else was changed."""
    saved = io.read_toml(resumed.path / checkpoints.CONFIG, Config)
    checkpoints.refuse_other_model(resumed.path, saved.model, config.model)
    if resumed.state.data != corpus.fingerprint:
        raise ValueError(
            f"--data: {corpus.directory} is not the corpus that {resumed.path} was trained on (its fingerprint is "
            f"{corpus.fingerprint}, expected {resumed.state.data}); give that one, or train into another --out"
        )
    if resumed.step > config.train.steps:
        raise ValueError(
            f"train.steps: expected at least the {resumed.step} steps that {resumed.path} has taken, "
            f"got {config.train.steps}"
        )
    changes = differences(replace(saved, model=config.model), config)
    return [f"changed since {resumed.path.name} was written: {change}" for change in changes]
