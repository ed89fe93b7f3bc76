"""An architecture of `transformers`, described once and read both ways: configs and weights, in and out.

    keys        what they call a number or word ↔ what `ModelConfig` calls it
    fixed       what all models of the architecture have
    read_more   what takes more than a name: biases, angles, slopes; `write_more` is its inverse
    outer       our modules ↔ theirs: the embedding, the last norm, the output
    inner       the same inside a block
    grouped     queries, keys and values are one matrix, by key head: [its queries, key, value], …

A config goes out if what is written, when read again, is the same model: so nothing can be written that is not read,
and what an architecture cannot say is found by name. A tensor of ours is the rows of some of theirs, one below the
other, in another order perhaps (`Place`); out is the inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lengthen import io
from lengthen.config import ModelConfig
from lengthen.interop import rope
from lengthen.interop.asked import REQUIRED, Asked
from lengthen.model import Transformer

TRAINING = ("dropout", "activation_dropout", "train_length")  # what a model may differ in and be the same


@dataclass(frozen=True)
class Key:
    """One key: its names in their configs, of which the first is written, ours, and what a missing one means."""

    theirs: tuple[str, ...]
    ours: str
    default: Any = REQUIRED
    words: Mapping[Any, Any] = field(default_factory=dict)  # theirs → ours, where they differ

    def read(self, asked: Asked) -> Any:
        """Return our value."""
        if self.words:
            return asked.word(*self.theirs, words=self.words, default=self.default)
        return asked.take(*self.theirs, default=self.default, hint=io.fields(ModelConfig)[self.ours])

    def write(self, config: ModelConfig) -> Any:
        """Return their value; None if they have no word for ours."""
        value = getattr(resolved(config), self.ours)
        return next((word for word, ours in self.words.items() if ours == value), None) if self.words else value


@dataclass(frozen=True)
class Place:
    """Where a tensor of ours stands in theirs: ours = their tensors, one below the other, in the order of `rows`."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    sizes: tuple[int, ...]  # rows of each of theirs
    rows: Tensor | None = None
    transposed: bool = False

    def their_shape(self, number: int) -> tuple[int, ...]:
        """Return the shape of one of theirs."""
        shape = (self.sizes[number], *self.shape[1:])
        return shape[::-1] if self.transposed else shape

    def read(self, theirs: list[Tensor]) -> Tensor:
        """Return our tensor."""
        parts = [tensor.T if self.transposed else tensor for tensor in theirs]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (whole if self.rows is None else whole[self.rows]).contiguous()

    def write(self, ours: Tensor) -> list[Tensor]:
        """Return their tensors."""
        whole = ours if self.rows is None else ours[torch.argsort(self.rows)]
        return [(part.T if self.transposed else part).contiguous() for part in torch.split(whole, list(self.sizes))]


class Architecture:
    """What an architecture is; one subclass each."""

    name: ClassVar[str]  # as `architectures` in config.json has it
    aliases: ClassVar[tuple[str, ...]] = ()  # other names of it
    model_type: ClassVar[str]
    keys: ClassVar[tuple[Key, ...]]
    fixed: ClassVar[Mapping[str, Any]]
    ignored: ClassVar[tuple[str, ...]] = ()  # keys that change nothing
    stem: ClassVar[str]  # what names of tensors may begin with, or not
    block: ClassVar[str]  # the name of a block, with {} for its number
    outer: ClassVar[Mapping[str, str]]
    unused: ClassVar[str] = r"$^"  # a pattern of tensors that old files hold and nobody needs
    grouped: ClassVar[bool] = False
    transposed: ClassVar[bool] = False  # matrices inside blocks are [in, out]

    def inner(self, config: ModelConfig) -> Mapping[str, str | tuple[str, ...]]:
        """Return their names of our modules inside a block."""
        raise NotImplementedError

    def read_more(self, asked: Asked, found: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `ModelConfig` that take more than a name; `over` are position options of the caller."""
        return {}

    def write_more(self, config: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that do."""
        return {}

    # Configs.

    def read(self, table: Mapping[str, Any], where: str, over: Mapping[str, Any] | None = None) -> ModelConfig:
        """Return the config of a model from its config.json, or say which key asks for what is not done here."""
        asked, over = Asked(table, where), over or {}
        found = {**self.fixed, **{key.ours: key.read(asked) for key in self.keys}}
        found |= self.read_more(asked, found, over)
        found["position_options"] = {**found.get("position_options", {}), **over}
        found["train_length"] = asked.take("train_length", default=found["train_length"], hint=int)
        asked.finish(self.ignored)
        try:
            return ModelConfig(**found)
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"{where}: {problem}") from None

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return config.json for a model; `lacks` says whether it is the same model."""
        table: dict[str, Any] = {"architectures": [self.name], "model_type": self.model_type}
        table |= {key.theirs[0]: key.write(config) for key in self.keys} | self.write_more(config)
        if table.get(self._length_key) != config.train_length:
            table["train_length"] = config.train_length
        return table

    @property
    def _length_key(self) -> str:
        return next((key.theirs[0] for key in self.keys if key.ours == "train_length"), "")

    def lacks(self, config: ModelConfig) -> list[str]:
        """Return 'key: wanted → got' for what the architecture cannot say of a model; nothing: it can hold it."""
        try:
            again = self.read(self.write(config), self.name)
        except (TypeError, ValueError) as problem:
            return [str(problem)]
        wanted, got = described(config), described(again)
        return [f"{key}: {wanted[key]!r} → {got.get(key)!r}" for key in wanted if wanted[key] != got.get(key)]

    # Weights.

    def places(self, config: ModelConfig) -> list[Place]:
        """Return where each tensor of a model stands in their files."""
        with torch.device("meta"):
            shapes = {name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()}
        found, inner = [], self.inner(config)
        for name, shape in shapes.items():
            module, _, kind = name.rpartition(".")
            if not module.startswith("blocks."):
                found.append(Place(name, shape, (f"{self.outer[module]}.{kind}",), shape[:1]))
                continue
            _, number, part = module.split(".", 2)
            start, theirs = self.block.format(number), inner[part]
            names = tuple(f"{start}.{one}.{kind}" for one in ((theirs,) if isinstance(theirs, str) else theirs))
            turn = self.transposed and len(shape) == 2
            found.append(
                Place(name, shape, names, self._sizes(part, shape, names, config), self._rows(part, config), turn)
            )
        return found

    def _sizes(self, part: str, shape: tuple[int, ...], names: tuple[str, ...], config: ModelConfig) -> tuple[int, ...]:
        if len(names) == 1:
            return shape[:1]
        if part == "attention.qkv":
            return tuple(config.head_width * n for n in (config.heads, *[config.key_value_heads] * 2))
        return (shape[0] // len(names),) * len(names)

    def _rows(self, part: str, config: ModelConfig) -> Tensor | None:
        """Return which of their rows each of ours is: by key heads, and by the pairs that are rotated together."""
        size, order = config.head_width, rope.head_order(config)
        if part in ("attention.q_norm", "attention.k_norm"):
            return order
        if part != "attention.qkv":
            return None
        q, k = config.heads, config.key_value_heads
        heads = torch.arange(q + 2 * k)
        if self.grouped:
            by_group = heads.view(k, q // k + 2)
            heads = torch.cat((by_group[:, :-2].flatten(), by_group[:, -2], by_group[:, -1]))
        rows = heads[:, None] * size + torch.arange(size)
        if order is not None:
            rows[: q + k] = heads[: q + k, None] * size + order
        rows = rows.flatten()
        return None if torch.equal(rows, torch.arange(len(rows))) else rows


def resolved(config: ModelConfig) -> ModelConfig:
    """Return a config with the sizes written out that follow from others."""
    heads = {"head_dim": config.head_width, "key_heads": config.key_value_heads}
    return replace(config, feed_forward=config.hidden_width, **heads)  # type: ignore[arg-type]


def described(config: ModelConfig) -> dict[str, Any]:
    """Return what makes a model the one that it is: two that are described alike compute the same."""
    found = asdict(resolved(config))
    for key in (*TRAINING, "position_options"):
        del found[key]
    if config.norm == "rms" and isinstance(config.biases, list):  # which has none anyway
        found["biases"] = [place for place in config.biases if place != "norm"]
    elif config.norm == "rms" and config.biases is True:
        found["biases"] = ["qkv", "out", "feed_forward"]
    found["biases"] = found["biases"] or False
    with torch.device("meta"):
        method = config.position_method()
    for name, part in method.named_modules():
        for key, value in vars(part).items():
            plain = isinstance(value, str | int | float | tuple) or value is None
            if plain and not key.startswith("_") and key not in ("training", "pairs"):  # pairs: the order of rows
                found[f"positions.{name}{key}"] = _rounded(value)
    return found


def _rounded(value: Any) -> Any:
    """Return numbers as float32 has them."""
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    return torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value
