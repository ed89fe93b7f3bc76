"""A folder of Hugging Face: config.json, tokenizer.json, weights in one safetensors file or in several.

Weights are read tensor by tensor, each checked by its name and shape before the first is read. Nothing is unpickled,
and no code of a folder is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lengthen import io
from lengthen.interop.architecture import Architecture, Place
from lengthen.model.weights import LISTED, NAMES, TensorFile, opened

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def is_one(path: Path) -> bool:
    """Whether a folder is one of Hugging Face."""
    return (path / CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json; refuse what no architecture here can mean."""
    path = folder / CONFIG
    table = io.read_json(path, dict)
    if table.get("quantization_config"):
        kind = table["quantization_config"]
        kind = kind.get("quant_method", kind) if isinstance(kind, Mapping) else kind
        raise ValueError(f"{path}: quantization_config: expected none (weights in floating point), got {kind!r}")
    return table


def files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights, in order."""
    if (folder / INDEX).is_file():
        listed = io.read_json(folder / INDEX, dict).get("weight_map")
        if not isinstance(listed, Mapping) or not listed or not all(isinstance(one, str) for one in listed.values()):
            raise ValueError(
                f"{folder / INDEX}: weight_map: expected a table of tensors and their files, got {listed!r}"
            )
        names = sorted(set(listed.values()))
        strange = [name for name in names if Path(name).name != name]
        missing = [name for name in names if not (folder / name).is_file()]
        if strange or missing:
            raise FileNotFoundError(
                f"{folder / INDEX}: expected files of this folder, {len(names)} in all, got no such file: "
                f"{(strange or missing)[0]}"
            )
        return [folder / name for name in names]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickled = [name for name in PICKLED if (folder / name).is_file()]
    if pickled:
        raise ValueError(
            f"{folder / pickled[0]}: expected safetensors, got a pickle, which may run any code and is not read; "
            f"with transformers, AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(…) converts it"
        )
    raise FileNotFoundError(f"{folder}: expected {WEIGHTS} or {INDEX}, got neither")


@contextmanager
def opened_tensors(folder: Path, device: str | torch.device = "cpu") -> Iterator[dict[str, TensorFile]]:
    """Open all files of weights; give the file that each tensor is in."""
    with ExitStack() as stack:
        where: dict[str, TensorFile] = {}
        for path in files(folder):
            file = stack.enter_context(opened(path, device))
            for name in file.names:
                if name in where:
                    raise ValueError(
                        f"{path}: {name}: expected each tensor once, got it in {where[name].path.name} too"
                    )
                where[name] = file
        yield where


def read_tensors(
    folder: Path, architecture: Architecture, places: list[Place], tied: bool, device: Any
) -> dict[str, Tensor]:
    """Return our tensors from the files of a folder, or say what is missing, of another shape, or too much."""
    with opened_tensors(folder, device) as where:
        names = _found(where, architecture, places)
        _refuse_others(folder, where, architecture, places, names, tied)
        return {
            place.ours: place.read([where[names[one]].read(names[one]) for one in place.theirs]) for place in places
        }


def _found(where: Mapping[str, TensorFile], architecture: Architecture, places: list[Place]) -> dict[str, str]:
    """Return the names that their tensors have in the files: some leave the first part out."""
    wanted = [name for place in places for name in place.theirs]
    found = {}
    for name in wanted:
        short = name.removeprefix(architecture.stem)
        found[name] = name if name in where or short not in where else short
    return found


def _refuse_others(
    folder: Path,
    where: Mapping[str, TensorFile],
    architecture: Architecture,
    places: list[Place],
    names: Mapping[str, str],
    tied: bool,
) -> None:
    wrong = []
    for place in places:
        for number, one in enumerate(place.theirs):
            name, shape = names[one], place.their_shape(number)
            if name not in where:
                wrong.append(f"{name} is missing")
            elif where[name].shape(name) != shape:
                wrong.append(f"{name}: expected shape {list(shape)}, got {list(where[name].shape(name))}")
            elif where[name].dtype(name) not in NAMES.values():
                wrong.append(f"{name}: expected {' or '.join(NAMES.values())}, got {where[name].dtype(name)}")
    rest = set(where) - set(names.values())
    copy = getattr(architecture, "outer", {}).get("output", "output") + ".weight"
    if tied and copy in rest and not wrong:  # some files hold what is tied twice
        rest.remove(copy)
        same = names[next(place.theirs[0] for place in places if place.ours == "embedding.weight")]
        if not torch.equal(where[copy].read(copy), where[same].read(same)):
            wrong.append(f"{copy}: expected the same as {same}, since tie_word_embeddings is true, got another")
    wrong += [f"{name} has no place in it" for name in sorted(rest) if not re.fullmatch(architecture.unused, name)]
    if wrong:
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise ValueError(
            f"{folder}: expected the tensors of the {architecture.name} that {CONFIG} says, got others: "
            f"{'; '.join(wrong[:LISTED])}{more}"
        )
