"""A model as one file: its weights and its config in safetensors. Nothing is unpickled to load it.

Files of tensors are written and read one tensor at a time, so a sharded model, or an optimizer state of twice its
size, is never whole in one process's memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lengthen import io
from lengthen.config import ModelConfig
from lengthen.model.transformer import Transformer

FILE = "model.safetensors"
KEY = "lengthen"  # the config's name in the file's metadata
NAMES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}  # in safetensors
LISTED = 3  # names in an error, of those that are wrong


def save(model: Transformer, path: str | os.PathLike[str]) -> None:
    """Write the model to `path`, all of it or nothing: a file of that name is replaced once the new one is complete."""
    with io.whole(path) as partial:
        write_tensors(partial, model.state_dict(), described(model.config))


def described(config: ModelConfig) -> dict[str, str]:
    """Return a config as the metadata of the weights' file."""
    return {KEY: json.dumps(asdict(config))}


def load(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    position_options: Mapping[str, Any] | None = None,
) -> Transformer:
    """Return the model in `path`, a file that `save` wrote or a checkpoint's folder, ready for use (`eval`).

    `position_options` go over those that the model was trained with, where its weights fit them: rotary's scaling, say.
    """
    with opened(path, device) as file:
        config = read_config(file)
        if position_options:
            config = replace(config, position_options={**config.position_options, **position_options})
        if config.layers > len(file.names):  # before a model is built that is larger than any file
            raise ValueError(
                f"{file.path}: expected the tensors of {config.layers:,} layers, as its config says, "
                f"got {len(file.names)} tensors"
            )
        with torch.device("meta"):
            model = Transformer(config)
        file.refuse_others(model.state_dict())
        state = {name: file.read(name) for name in file.names}
    model.to_empty(device=device)
    model.load_state_dict(state, assign=True)  # in the dtype that the file has
    return model.eval()


def read_config(file: TensorFile) -> ModelConfig:
    """Return the config in a model's file."""
    if KEY not in file.metadata:
        raise ValueError(f"{file.path}: expected a model's config in the file's metadata (key {KEY!r}), got none")
    return io.parse_json(file.metadata[KEY].encode(), ModelConfig, str(file.path), "model.")


# Files of tensors.


def write_tensors(path: Path | None, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to a safetensors file, one in memory at a time.

    A tensor that is cut over processes is gathered, which all of them do together: those that write no file pass None.
    """
    order = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so that each starts aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in order.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    gathered = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in order.values())
    try:
        if path is not None:
            with path.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for tensor in gathered:
                    file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    finally:
        for _ in gathered:  # with the process that writes, also if it could not
            pass


class TensorFile:
    """A safetensors file that is open: its metadata, and its tensors by name."""

    def __init__(self, path: Path, inner: Any) -> None:
        self.path, self._inner = path, inner
        self.metadata: dict[str, str] = inner.metadata() or {}
        self.names: list[str] = list(inner.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read."""
        return tuple(self._inner.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, as safetensors call it."""
        return str(self._inner.get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        """Return a tensor, copied: one that is mapped would change, or end the process, if the file did."""
        found: Tensor = self._inner.get_tensor(name)
        return found.clone() if found.device.type == "cpu" else found

    def refuse_others(self, expected: Mapping[str, Tensor], dtypes: bool = False, but: str | None = None) -> None:
        """Refuse a file whose tensors have other names or shapes than these, or are no floats (`dtypes`: other floats).

        Those whose names start with `but` are not looked at.
        """
        looked_at = [name for name in (*expected, *self.names) if but is None or not name.startswith(but)]
        wrong = [f"{name} is missing" for name in looked_at if name not in self.names]
        wrong += [f"{name} has no place in it" for name in looked_at if name not in expected]
        for name in (name for name in expected if name in self.names and name in looked_at):
            shape, dtype = tuple(expected[name].shape), NAMES[expected[name].dtype]
            if self.shape(name) != shape:
                wrong.append(f"{name}: expected shape {list(shape)}, got {list(self.shape(name))}")
            elif self.dtype(name) not in ((dtype,) if dtypes else NAMES.values()):
                wrong.append(f"{name}: expected {dtype}, got {self.dtype(name)}")
        if wrong:
            more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
            others = f"got others: {'; '.join(wrong[:LISTED])}{more}"
            raise ValueError(f"{self.path}: expected the tensors of the model that its config says, {others}")


@contextmanager
def opened(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Iterator[TensorFile]:
    """Open a safetensors file, or that of a checkpoint's weights; tensors are read to a device."""
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    name = "cpu" if torch.device(device).type == "cpu" else str(device)  # safetensors know no cpu:0
    if file.is_dir():
        file = file / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{file}: expected a model's weights, got no such file")
    try:
        with safe_open(file, framework="pt", device=name) as inner:
            yield TensorFile(file, inner)
    except SafetensorError as problem:
        raise ValueError(f"{file}: expected a whole safetensors file, got one that cannot be read: {problem}") from None
