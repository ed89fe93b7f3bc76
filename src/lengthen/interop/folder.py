"""A folder of Hugging Face: config.json, tokenizer.json, weights in one safetensors file or in several.

Weights are read tensor by tensor, each checked by its name and shape before the first is read. Pickled ones
(pytorch_model.bin) are read on request alone, by torch's loader of tensors, which runs no code of a file
(`weights_only`). No code of a folder is run.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lengthen import io
from lengthen.checks import describe
from lengthen.interop.architecture import Architecture, Place
from lengthen.model.weights import LISTED, NAMES, TensorFile, opened

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


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
    if not table.get("is_causal", True):
        raise ValueError(
            f"{path}: is_causal: expected True, got {table['is_causal']}: each token would see those after it"
        )
    return table


def files(folder: Path, pickled: bool = False) -> list[Path]:
    """Return the files of a folder's weights, in order; pickled ones only where they may be, and nothing else is."""
    if (folder / INDEX).is_file():
        return _listed(folder, INDEX)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    there = [name for name in (PICKLED_INDEX, PICKLED) if (folder / name).is_file()]
    if there and not pickled:
        raise ValueError(
            f"{folder / there[0]}: expected safetensors, got a pickle, which is read on request alone: "
            f"lengthen.load({str(folder)!r}, pickled=True), or `lengthen export {folder} DIR --pickled` to convert it"
        )
    if there:
        return [folder / PICKLED] if there[0] == PICKLED else _listed(folder, PICKLED_INDEX)
    raise FileNotFoundError(f"{folder}: expected {WEIGHTS} or {INDEX}, got neither")


def _listed(folder: Path, index: str) -> list[Path]:
    """Return the files that an index names."""
    listed = io.read_json(folder / index, dict).get("weight_map")
    if not isinstance(listed, Mapping) or not listed or not all(isinstance(one, str) for one in listed.values()):
        raise ValueError(f"{folder / index}: weight_map: expected a table of tensors and their files, got {listed!r}")
    names = sorted(set(listed.values()))
    strange = [name for name in names if Path(name).name != name]
    missing = [name for name in names if not (folder / name).is_file()]
    if strange or missing:
        raise FileNotFoundError(
            f"{folder / index}: expected files of this folder, {len(names)} in all, got no such file: "
            f"{(strange or missing)[0]}"
        )
    return [folder / name for name in names]


class PickledFile:
    """A file of pickled tensors, with what a `TensorFile` has: mapped into memory, copied where it is read."""

    def __init__(self, path: Path, device: str | torch.device) -> None:
        self.path, self._device = path, device
        mapped = zipfile.is_zipfile(path)  # not in the format of torch before 1.6
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as problem:  # whatever a damaged or hostile file leads to
            first = str(problem).strip().partition("\n")[0]
            raise ValueError(f"{path}: expected tensors, and nothing else that is pickled, got: {first}") from None
        if not isinstance(found, Mapping) or not all(isinstance(one, Tensor) for one in found.values()):
            raise ValueError(f"{path}: expected a table of tensors, got {describe(found)}")
        self._tensors: dict[str, Tensor] = dict(found)
        self.names = list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, as safetensors call it where it is one of floats."""
        dtype = self._tensors[name].dtype
        return NAMES.get(dtype, str(dtype).removeprefix("torch."))

    def read(self, name: str) -> Tensor:
        """Return a tensor, copied to the device."""
        return self._tensors[name].to(self._device, copy=True)


AnyFile = TensorFile | PickledFile


@contextmanager
def opened_tensors(
    folder: Path, device: str | torch.device = "cpu", pickled: bool = False
) -> Iterator[dict[str, AnyFile]]:
    """Open all files of weights; give the file that each tensor is in."""
    with ExitStack() as stack:
        where: dict[str, AnyFile] = {}
        for path in files(folder, pickled):
            safe = path.suffix == ".safetensors"
            file = stack.enter_context(opened(path, device)) if safe else PickledFile(path, device)
            for name in file.names:
                if name in where:
                    raise ValueError(
                        f"{path}: {name}: expected each tensor once, got it in {where[name].path.name} too"
                    )
                where[name] = file
        yield where


def read_tensors(
    folder: Path, architecture: Architecture, places: list[Place], tied: bool, device: Any, pickled: bool = False
) -> dict[str, Tensor]:
    """Return our tensors from the files of a folder, or say what is missing, of another shape, or too much."""
    with opened_tensors(folder, device, pickled) as where:
        names = _found(where, architecture, places)
        _refuse_others(folder, where, architecture, places, names, tied)
        dtype = _widest(where[name].dtype(name) for name in names.values())
        return {
            place.ours: place.read([where[names[one]].read(names[one]).to(dtype) for one in place.theirs])
            for place in places
        }


def _widest(dtypes: Iterable[str]) -> torch.dtype:
    """Return the dtype that holds all of these: a model has one, or some parts would round what others keep."""
    by_name = {name: dtype for dtype, name in NAMES.items()}
    return reduce(torch.promote_types, {by_name[name] for name in dtypes})


def _found(where: Mapping[str, AnyFile], architecture: Architecture, places: list[Place]) -> dict[str, str]:
    """Return the names that their tensors have in the files: some leave the first part out."""
    wanted = [name for place in places for name in place.theirs]
    found = {}
    for name in wanted:
        short = name.removeprefix(architecture.stem)
        found[name] = name if name in where or short not in where else short
    return found


def _refuse_others(
    folder: Path,
    where: Mapping[str, AnyFile],
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
