"""Any model by its path: a run, a checkpoint, a file of weights, a folder of Hugging Face, a name on its hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lengthen.config import ModelConfig
from lengthen.interop import folder as folders
from lengthen.interop.architectures import find
from lengthen.model import Transformer
from lengthen.model import load as load_file

HUB = re.compile(r"[\w.-]+/[\w.-]+")  # OWNER/NAME


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    position_options: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    pickled: bool = False,
) -> Transformer:
    """Return the model in a path, ready for use (`eval`).

    >>> model = lengthen.load("runs/tiny")  # doctest: +SKIP
    >>> model = lengthen.load("mosaicml/mpt-7b-storywriter", device="cuda")  # doctest: +SKIP

    Args:
        path: a run's folder (its last checkpoint), a checkpoint's, a file of weights, a folder of Hugging Face with
            safetensors (docs/huggingface.md lists the architectures), or OWNER/NAME on its hub, which is downloaded.
        device: where its tensors go.
        position_options: over those that the model was trained with, where its weights fit them: rotary's scaling, say.
        dtype: of its weights; None: that of the file.
        pickled: whether weights of Hugging Face may be a pickle (pytorch_model.bin), where there are no safetensors;
            torch's loader of tensors reads it, which runs no code of the file.
    """
    place = local(path, pickled)
    if place.is_file():
        model = load_file(place, device, position_options)
    elif folders.is_one(place):
        model = load_folder(place, device, position_options, pickled)
    else:
        from lengthen.evaluation import open_run  # here, since it needs numpy, and `import lengthen` torch alone

        model = open_run(place, device=device, position_options=position_options).model
    return model if dtype is None else model.to(dtype)


def local(path: str | Path, pickled: bool = False) -> Path:
    """Return a path on this machine: the path itself, or where a model of the hub was downloaded to."""
    place, name = Path(path), str(path)
    if place.exists() or not HUB.fullmatch(name) or Path(name.partition("/")[0]).exists():
        return place
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return place
    patterns = ["*.safetensors", "*.json", *(["pytorch_model*.bin"] if pickled else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as problem:
        first = str(problem).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{name}: expected a folder, or the name of a model on the Hugging Face hub, got neither: {first}"
        ) from None


def load_folder(
    folder: Path,
    device: str | torch.device = "cpu",
    position_options: Mapping[str, Any] | None = None,
    pickled: bool = False,
) -> Transformer:
    """Return the model in a folder of Hugging Face, in the dtype that its files have."""
    table, where = folders.read_config(folder), str(folder / folders.CONFIG)
    architecture = find(table, where)
    config: ModelConfig = architecture.read(table, where, position_options)
    state = folders.read_tensors(folder, architecture, architecture.places(config), config.tied, device, pickled)
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(state, assign=True)
    _materialise(model, device)
    return model.eval()


def _materialise(model: nn.Module, device: str | torch.device) -> None:
    """Put what no file holds on a device: the empty buffers by which methods know where they are."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module.register_buffer(name, torch.empty_like(buffer, device=device), persistent=False)
