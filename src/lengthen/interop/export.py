"""A model as a folder that `transformers` opens: an architecture that it knows, where one can hold the model.

    config.json, model.safetensors, generation_config.json
    tokenizer.json, tokenizer_config.json       bytes too, as a byte-level tokenizer
    README.md                                   a model card, with what was measured

Architectures are tried in the order of `ARCHITECTURES`; a model that none can hold keeps our own (`Own`), which
`transformers` opens after `import lengthen.interop.huggingface`. Embeddings that are scaled by √width where they are
read are written scaled; a tied output, which is not scaled, is written beside them then.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lengthen import io
from lengthen.checks import nearest
from lengthen.config import ModelConfig
from lengthen.data.tokenizer import END, MASK, Tokenizer
from lengthen.evaluation import Subject, results
from lengthen.interop import folder as folders
from lengthen.interop.architecture import Architecture
from lengthen.interop.architectures import ARCHITECTURES
from lengthen.interop.byte_tokenizer import write as write_bytes_tokenizer
from lengthen.interop.card import card
from lengthen.interop.own import Own
from lengthen.interop.subjects import tokenizer_of
from lengthen.model import Transformer
from lengthen.model.weights import FILE, write_tensors

GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # beside tokenizer.json


@dataclass(frozen=True)
class Exported:
    """What was written, and why it is not what one may have expected."""

    folder: Path
    architecture: str
    reasons: dict[str, list[str]]  # by architecture: what it cannot say of the model
    notes: list[str]


def export(
    subject: Subject, out: str | Path, *, architecture: str | None = None, data: Path | None = None, force: bool = False
) -> Exported:
    """Write a model's folder, all of it or nothing.

    Args:
        subject: as `open_run` or `open_model` returns it.
        out: the folder to make; one that holds something is replaced with `force` alone.
        architecture: one of `ARCHITECTURES` by its `model_type`; None: the first that can hold the model.
        data: a corpus with the model's tokenizer; None: that which it was trained on.
        force: replace a folder that holds something.
    """
    target = Path(out)
    _refuse_others(target, subject, force)
    if subject.model.config.kind != "decoder":
        raise ValueError(f"model: expected a decoder, got an {subject.model.config.kind}, which is no causal model")
    chosen, reasons = choose(subject.model.config, architecture)
    tokenizer = tokenizer_of(subject, data)
    with _folder(target) as partial:
        _write_model(subject.model, chosen, partial, *_endings(subject.checkpoint.path, tokenizer))
        notes = _write_tokenizer(tokenizer, subject, partial)
        model = (subject.weights, subject.model.config.position_options)
        measured = results.read(subject.folder).values()
        known = [one for one in measured if (one.weights, one.position_options) == model]
        io.write_text(partial / "README.md", card(subject, chosen, known, target.name))
    return Exported(target, chosen.name, reasons, notes)


def _refuse_others(target: Path, subject: Subject, force: bool) -> None:
    """Refuse a folder that holds something, unless it is a model's and may be replaced; and the model's own always."""
    place, own = target.resolve(), subject.checkpoint.path.resolve()
    if place == own or place in own.parents or place == subject.folder.resolve():
        raise ValueError(f"out: expected another folder than the model's own, got {target}")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise ValueError(f"out: expected a new folder, or an empty one, got {target}; force=True replaces it")
    if not folders.is_one(target):
        raise ValueError(f"out: expected a folder with {folders.CONFIG}, which alone is replaced, got {target}")


def choose(config: ModelConfig, wanted: str | None = None) -> tuple[Architecture, dict[str, list[str]]]:
    """Return the architecture to write, and what those that were passed over lack."""
    names = [one.model_type for one in ARCHITECTURES]
    if wanted is not None and wanted not in names:
        raise ValueError(f"architecture: expected one of {', '.join(names)}, got {wanted!r}{nearest(wanted, names)}")
    reasons: dict[str, list[str]] = {}
    for one in ARCHITECTURES:
        if wanted in (None, one.model_type):
            lacking = [] if isinstance(one, Own) else one.lacks(unscaled(config))
            if not lacking:
                return one, reasons
            reasons[one.model_type] = lacking
    raise ValueError(f"architecture: {wanted} cannot hold this model: {'; '.join(reasons[str(wanted)])}")


def unscaled(config: ModelConfig) -> ModelConfig:
    """Return the config of the same model with embeddings that are not scaled where they are read."""
    return replace(config, scale_embeddings=False, tied=False) if config.scale_embeddings else config


def unscaled_state(model: Transformer) -> dict[str, Tensor]:
    """Return its weights."""
    state = dict(model.state_dict())
    if model.config.scale_embeddings:
        state["output.weight"] = model.output_weight
        state["embedding.weight"] = state["embedding.weight"] * math.sqrt(model.config.width)
    return state


def _endings(source: Path, tokenizer: Tokenizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ids of special tokens for config.json, and generation_config.json: of a folder of theirs, its own."""
    ids = {"bos_token_id": None, "eos_token_id": None if tokenizer is None else tokenizer.end_id}
    if not folders.is_one(source):
        return ids, ids
    table, path = folders.read_config(source), source / GENERATION
    ids |= {name: table[name] for name in (*ids, "pad_token_id") if table.get(name) is not None}
    return ids, io.read_json(path, dict) if path.is_file() else ids


def _write_model(
    model: Transformer, chosen: Architecture, folder: Path, ids: dict[str, Any], generation: dict[str, Any]
) -> None:
    own = isinstance(chosen, Own)
    config = model.config if own else unscaled(model.config)
    state = dict(model.state_dict()) if own else unscaled_state(model)
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for place in chosen.places(config):
            tensors |= zip(place.theirs, place.write(state.pop(place.ours).detach().cpu()), strict=True)
    write_tensors(folder / FILE, tensors, {"format": "pt"})
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    io.write_json(folder / "config.json", {**chosen.write(config), **ids, "dtype": dtype})
    io.write_json(folder / GENERATION, generation)


def _write_tokenizer(tokenizer: Tokenizer | None, subject: Subject, folder: Path) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json; return what there is to say about it."""
    if tokenizer is None:
        return ["no tokenizer: the model has none that is known here"]
    said: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    said["model_max_length"] = int(1e30)  # as transformers writes "no limit"
    if tokenizer.path is None:
        write_bytes_tokenizer(folder / "tokenizer.json")
        said |= {"eos_token": END, "mask_token": MASK}
    else:
        io.write_bytes(folder / "tokenizer.json", tokenizer.path.read_bytes())
        beside = [path for name in TOKENIZER_FILES if (path := tokenizer.path.with_name(name)).is_file()]
        if subject.tokenizer is not None and beside:
            for path in beside:
                io.write_bytes(folder / path.name, path.read_bytes())
            return []
        for key, number in (("eos_token", tokenizer.end_id), ("mask_token", tokenizer.mask_id)):
            if number is not None:
                said[key] = tokenizer.decode([number])
    io.write_json(folder / "tokenizer_config.json", said)
    return []


@contextmanager
def _folder(target: Path) -> Iterator[Path]:
    """Give a folder to write to, which takes its name once it is complete; what has that name goes then."""
    partial, old = (target.with_name(f".{target.name}.{word}") for word in ("partial", "old"))
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        io.sync_folder(partial)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        io.sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
