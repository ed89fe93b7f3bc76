"""Start a run from the weights of another (`--init`): new optimizer, step 0, perhaps another position method.

What the two methods learn may differ, and only that: a tensor that the new method does not have is dropped, one that
the old did not have, or that the new options give another start, is initialised, and both are reported. Everything else
must fit, by name and shape, and the models must be alike in what no tensor shows (heads, norms, activations).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lengthen.config import STRETCHES, ModelConfig, differences
from lengthen.data.checksums import sha256_of
from lengthen.model import Transformer
from lengthen.model.weights import FILE, TensorFile, opened, read_config
from lengthen.training import checkpoint as checkpoints
from lengthen.training.checkpoint import Checkpoint, Init, put

METHOD = "method."  # what a position method learns stands below this name
# In what a model may differ from the one before.
FREE = ("train_length", "positions", "position_options", "dropout", "activation_dropout")


def located(path: Path) -> Path:
    """Return the checkpoint or model file that a path names: of a run's folder its last checkpoint."""
    found = None if (path / FILE).is_file() else checkpoints.last(path / "checkpoints")
    return path if found is None else found.path


def identified(path: Path) -> Init:
    """Return which file a run begins with, verified if it is a checkpoint's."""
    if (path / checkpoints.STATE).is_file():
        return Init(str(path.resolve()), checkpoints.open_checkpoint(path).weights)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"--init: expected a run, a checkpoint or a model's file, got {path}, where there is none"
        )
    return Init(str(path.resolve()), sha256_of(file))


def refuse_another(init: Init, resumed: Checkpoint) -> None:
    """Refuse to begin with a model in the folder of a run that began otherwise."""
    begun = resumed.state.init
    if begun is None or begun.sha256 != init.sha256:
        other = "without --init" if begun is None else f"with {begun.path}"
        raise FileExistsError(
            f"--init: {resumed.path.parent} holds a run already, which began {other}, and it would resume from "
            f"{resumed.path.name}; choose another --out"
        )


def begin(model: Transformer, path: Path) -> list[str]:
    """Put the weights of a file into a model; return what was dropped, initialised and changed, a line each."""
    with opened(path) as file:
        old, new = read_config(file), model.config
        weights = model.state_dict()
        places = _carried(old, new, file)
        _refuse_unlike(file.path, old, new)
        _refuse_open_length(file.path, old, new)
        file.refuse_others(weights, but=METHOD)
        taken = {}
        for name, weight in weights.items():
            source = places.get(name, name)
            fits = source in file.names and file.shape(source) == tuple(weight.shape)
            if fits and (name in places or not name.startswith(METHOD)):
                put(file.read(source), weight)
                taken[source] = name
        dropped = [f"{name} of {old.positions}" for name in file.names if name not in taken]
        begun = [f"{name} of {new.positions}" for name in weights if name not in taken.values()]
    lines = [f"--init: {change}" for change in differences(old, new, "model.")]
    lines += [f"--init: {what}: dropped, as the new {new.positions} does not begin with it" for what in dropped]
    return lines + [f"--init: {what}: initialised, as {file.path} has none that fits" for what in begun]


def _carried(old: ModelConfig, new: ModelConfig, file: TensorFile) -> dict[str, str]:
    """Return where the tensors that both models' methods have stand in the file, by their names in the new model."""
    before, after = _parts(old), _parts(new)
    carried = {
        place + name.removeprefix(before[method]): name
        for method, place in after.items()
        if method in before
        for name in file.names
        if name.startswith(before[method])
    }
    first, then = _starts(old), _starts(new)
    return {name: source for name, source in carried.items() if _alike(first.get(source), then.get(name))}


def _starts(config: ModelConfig) -> dict[str, Tensor]:
    """Return what a model's position method learns, as it is initialised."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {METHOD + name: value for name, value in config.position_method().state_dict().items()}


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _parts(config: ModelConfig) -> dict[str, str]:
    """Return below which name the tensors of each method of a model stand."""
    names = config.positions.split("+")
    return {name: METHOD if len(names) == 1 else f"{METHOD}methods.{n}." for n, name in enumerate(names)}


def _refuse_unlike(path: Path, old: ModelConfig, new: ModelConfig) -> None:
    """Refuse a model that is of another shape, or does something else with tensors of the same shape."""
    found = [change for change in differences(old, new) if change.partition(":")[0] not in FREE]
    if found:
        more = "more than length and positions"
        raise ValueError(f"--init: {path} is of a model that differs in {more}: model.{'; model.'.join(found)}")


def _refuse_open_length(path: Path, old: ModelConfig, new: ModelConfig) -> None:
    """Refuse to guess what length a scaling stretches: by default it is the training length, which is another now."""
    options, here, there = new.position_options, new.train_length, old.train_length
    if options.get("scaling") in STRETCHES and "original_length" not in options and here != there:
        raise ValueError(
            f"--init: model.position_options.original_length: expected the length that {options['scaling']} "
            f"stretches, as {path} was trained at {there:,} tokens and model.train_length is {here:,}, got none"
        )
