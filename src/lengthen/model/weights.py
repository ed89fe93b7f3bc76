"""A model as one file: its weights and its config in safetensors. Nothing is unpickled to load it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lengthen import io
from lengthen.config import ModelConfig
from lengthen.model.transformer import Transformer

KEY = "lengthen"  # the config's name in the file's metadata


def save(model: Transformer, path: str | os.PathLike[str]) -> None:
    """Write the model to `path`, all of it or nothing: a file of that name is replaced once the new one is complete."""
    write(model.state_dict(), model.config, path)


def write(state: Mapping[str, Tensor], config: ModelConfig, path: str | os.PathLike[str]) -> None:
    """Write weights and config to `path`, as `save` does."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = Path(path)
    tensors = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    try:
        with io.whole(target) as partial:
            save_file(tensors, partial, metadata={KEY: json.dumps(asdict(config))})
    except SafetensorError as problem:  # what the library makes of a full disk
        raise OSError(f"{target}: could not be written: {problem}") from problem


def load(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    position_options: Mapping[str, Any] | None = None,
) -> Transformer:
    """Return the model in `path`, a file that `save` wrote or a checkpoint's folder, ready for use (`eval`).

    `position_options` go over those that the model was trained with, where its weights fit them: rotary's scaling, say.
    """
    config, state = read(path, device)
    if position_options:
        config = replace(config, position_options={**config.position_options, **position_options})
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device)
    try:
        model.load_state_dict(state, assign=True)  # in the dtype that the file has
    except RuntimeError as problem:  # tensors that are missing, too many, or of other shapes
        raise ValueError(
            f"{path}: expected the weights of the model that its config says, got others: {problem}"
        ) from None
    return model.eval()


def read(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the config and the weights in a file that `save` wrote."""
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    if file.is_dir():
        file = file / "model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: expected a model's weights, got no such file")
    try:
        with safe_open(file, framework="pt", device=str(device)) as opened:
            metadata = opened.metadata() or {}
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except SafetensorError as problem:
        raise ValueError(f"{file}: expected a whole safetensors file, got one that cannot be read: {problem}") from None
    if KEY not in metadata:
        raise ValueError(f"{file}: expected a model's config in the file's metadata (key {KEY!r}), got none")
    try:
        table = json.loads(metadata[KEY])
    except ValueError as problem:
        raise ValueError(f"{file}: expected JSON in the file's metadata (key {KEY!r}), got {problem}") from None
    return io.build(ModelConfig, table, str(file), "model."), state
