"""The settings of a run: model, data and training loop, as in a TOML file.

A config is checked where it is made, whether from a file, the command line or Python: types by the annotations, the
rest by each class. The comment after a field is its help on the command line. A run saves the config that it was
resolved to: `model.vocab_size`, where none was given, and the tokenizer are the data's.

`model.train_length` is the number of tokens that a model is trained on at once. The lengths that it is used at
afterwards are no property of the model, and are never called by that name.

All sections stand in this one file, so that there is one place to look a key up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lengthen import io
from lengthen.checks import nearest

if TYPE_CHECKING:
    from lengthen.positions.method import PositionMethod

MOST = (1 << 63) - 1  # of any whole number: what torch can count to
Bias = Literal["qkv", "out", "feed_forward", "norm"]
BIASES: tuple[Bias, ...] = get_args(Bias)  # the places that may have one
GATED = ("swiglu", "geglu")  # activations with a third matrix
STRETCHES = ("yarn", "llama3", "dynamic")  # scalings of rotary that are told the length which they stretch


def _check(section: str, config: Any, **least: float) -> None:
    """Refuse what is not of its field's type, not finite, beyond torch, or below the least value given here."""
    for name, hint in io.fields(type(config)).items():
        key, value = f"{section}.{name}", io.checked("", f"{section}.{name}", getattr(config, name), hint)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}: expected a finite number, got {value}")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and number > MOST:
                raise ValueError(f"{key}: expected at most {MOST}, got {number}")
        if name in least and value is not None and value < least[name]:
            raise ValueError(f"{key}: expected at least {least[name]:g}, got {value}")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a transformer."""

    vocab_size: int | None  # tokens in the vocabulary; none: as many as the data has
    layers: int  # blocks of attention and feed-forward
    width: int  # features of a token between layers
    heads: int  # attention heads of each layer
    train_length: int  # tokens of a training window
    positions: str = "alibi"  # a position method (docs/methods.md), or several joined by '+'
    position_options: dict[str, Any] = field(default_factory=dict)  # of the method: --model.position_options.NAME
    kind: Literal["decoder", "encoder"] = "decoder"  # an encoder sees both ways, and predicts masked tokens
    key_heads: int | None = None  # heads of keys and values, fewer than heads: grouped queries; none: as many
    head_dim: int | None = None  # features of a head; none: width / heads
    feed_forward: int | None = None  # hidden features; none: 4·width, or 8/3·width with the third matrix of a gate
    block: Literal["pre", "post", "parallel", "shared"] = "pre"
    """Where a block normalises: before each part, after it, or before two parts that read the same, with one norm each
    or one shared."""
    norm: Literal["layer", "rms"] = "layer"  # LayerNorm or RMSNorm
    norm_epsilon: float = 1e-5  # added to the variance
    embedding_norm: bool = False  # a norm after the embedding (BLOOM)
    qk_norm: bool = False  # RMSNorm of each head's queries and keys before they are rotated: bounds every score
    clip_qkv: float | None = None  # queries, keys and values are clamped to ± this; none: not at all
    score_scale: float | None = None  # what products of queries and keys are multiplied by; none: 1/√head_dim
    window: int | None = None  # tokens that each token sees, itself included, unless a mask is given; none: all before
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu"] = "gelu_tanh"  # of the feed-forward layers
    biases: bool | list[Bias] = True  # everywhere, nowhere, or in these places; norm: of LayerNorm
    tied: bool = True  # the output shares the embedding's weights
    scale_embeddings: bool = True  # by √width; false for weights of models without (GPT-2, MPT, Llama)
    dropout: float = 0.0  # fraction of features zeroed while training, of embeddings and of each layer's output
    activation_dropout: float = 0.0  # the same inside feed-forward layers, after the activation

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("vocab_size", "layers", "width", "heads", "train_length"), 1)
        _check("model", self, **sizes, key_heads=1, head_dim=1, feed_forward=1, window=1)
        if self.norm_epsilon <= 0:
            raise ValueError(f"model.norm_epsilon: expected more than 0, got {self.norm_epsilon}")
        for name in ("clip_qkv", "score_scale"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"model.{name}: expected more than 0, got {getattr(self, name)}")
        if self.window is not None and self.kind == "encoder":
            raise ValueError(f"model.window: expected none for an encoder, which sees both ways, got {self.window}")
        if isinstance(self.biases, list):  # written in one way alone
            there = [place for place in BIASES if place in self.biases]
            object.__setattr__(self, "biases", there if 0 < len(there) < len(BIASES) else bool(there))
        for name in ("dropout", "activation_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"model.{name}: expected a fraction from 0 to below 1, got {getattr(self, name)}")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"model.heads: expected a number that divides width={self.width} (or give head_dim), got {self.heads}"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"model.key_heads: expected a number that divides heads={self.heads}, got {self.key_value_heads}"
            )
        from lengthen.positions.registry import canonical  # here: only a model needs torch

        given = {name: value for name, value in self.position_options.items() if value is not None}
        object.__setattr__(self, "position_options", given)  # none leaves an option to its default
        try:
            object.__setattr__(self, "positions", canonical(self.positions))
            self._blueprint()
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"model.positions = {self.positions!r}: {problem}") from None
        except RuntimeError as problem:  # of torch, about a tensor with more numbers than it can count
            raise ValueError(f"model.positions = {self.positions!r}: cannot be built: {problem}") from None

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows, once that is known."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size: expected a number, got none; `train` takes the data's")
        return self.vocab_size

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.head_dim if self.head_dim is not None else self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and of values."""
        return self.key_heads if self.key_heads is not None else self.heads

    @property
    def hidden_width(self) -> int:
        """Features between the two matrices of a feed-forward layer."""
        if self.feed_forward is not None:
            return self.feed_forward
        # A multiple of 64 keeps matrix units busy.
        return -(-8 * self.width // (3 * 64)) * 64 if self.activation in GATED else 4 * self.width

    def has_bias(self, place: Bias) -> bool:
        """Whether the layers of a place have biases."""
        return place in self.biases if isinstance(self.biases, list) else self.biases

    @property
    def longest(self) -> int | None:
        """How many positions the model can tell apart, if it learns a vector for each; None: any number."""
        if "learned" not in self.positions.split("+"):
            return None
        found: int = self.position_options.get("max_length", self.train_length)
        return found

    def position_method(self) -> PositionMethod:
        """Return the position method, new; an encoder's tells left from right, unless the options say otherwise."""
        from lengthen.positions.registry import build, two_sided

        sides = two_sided(self.positions) if self.kind == "encoder" else {}
        sizes = {"heads": self.heads, "head_dim": self.head_width, "width": self.width}
        options = {**sides, **self.position_options}
        if self.longest is not None:
            options["max_length"] = self.longest
        if options.get("scaling") in STRETCHES:
            options.setdefault("original_length", self.train_length)
        return build(self.positions, **sizes, **options)

    def _blueprint(self) -> PositionMethod:
        """Return the position method without memory: to ask it something, with no random number drawn."""
        import torch

        with torch.device("meta"):
            return self.position_method()

    @property
    def parameters(self) -> int:
        """How many numbers the model learns, those of its position method among them.

        >>> ModelConfig(vocab_size=258, layers=2, width=64, heads=4, train_length=32, positions="rotary").parameters
        116608
        """
        count = self.layers * (1 if self.block == "shared" else 2) + (self.block != "post") + self.embedding_norm
        norms = count * self.width * (2 if self.norm == "layer" and self.has_bias("norm") else 1)
        norms += 2 * self.layers * self.head_width if self.qk_norm else 0
        tables = self.vocabulary * self.width * (1 if self.tied else 2)
        return tables + self.layers * (self._matrices + self._biases) + norms + self.method_parameters

    @property
    def method_parameters(self) -> int:
        """How many numbers the position method learns."""
        return sum(parameter.numel() for parameter in self._blueprint().parameters())

    @property
    def _matrices(self) -> int:
        """Parameters of one layer's matrices."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.key_value_heads)
        return attention + self.width * self.hidden_width * (3 if self.activation in GATED else 2)

    @property
    def _biases(self) -> int:
        """Numbers that one layer's matrices add."""
        sizes: dict[Bias, int] = {
            "qkv": self.head_width * (self.heads + 2 * self.key_value_heads),
            "out": self.width,
            "feed_forward": self.hidden_width * (2 if self.activation in GATED else 1) + self.width,
        }
        return sum(size for place, size in sizes.items() if self.has_bias(place))

    def flops_per_token(self, length: int) -> float:
        """Return the floating-point operations that one token of training needs, forward and backward.

        Six for each parameter of a matrix product (a multiplication and an addition, once forward and twice backward),
        and the two products of attention over the keys that a token sees: half of them on average in a decoder, or as
        many as its window has, all in an encoder. Nothing is counted twice, whatever a program recomputes.
        """
        window = min(self.window or length, length)
        seen = window - window * (window - 1) / (2 * length) if self.kind == "decoder" else length
        scores = 2 * self.heads * self.head_width * seen
        return 6 * (self.layers * (self._matrices + scores) + self.vocabulary * self.width)


@dataclass(frozen=True)
class DataConfig:
    """How windows are drawn, and how the default corpus is prepared when no data is given."""

    order: Literal["pack", "sample"] = "pack"  # every window once per epoch, or windows anywhere, with replacement
    document_mask: bool = False  # documents in one window do not see each other
    tokenizer: Literal["bytes", "bpe", "json"] = "bytes"  # of the default corpus; a run records its own corpus'
    vocab_size: int | None = None  # ids of a BPE for the default corpus; none: 4096

    def __post_init__(self) -> None:
        _check("data", self, vocab_size=1)


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000  # updates of the weights
    batch: int = 32  # windows per step, over all processes
    micro_batch: int | None = None  # windows per forward pass; none: all windows of a process
    seed: int = 0  # of weights, data and dropout
    clip: float = 1.0  # gradients are clipped to this norm; 0: not clipped
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 autocast on a GPU, float32 elsewhere
    compile: bool | None = None  # torch.compile each block; none: only on a GPU
    checkpoint_activations: bool = False  # recompute blocks in the backward pass: slower, in less memory
    mask_fraction: float = 0.15  # fraction of an encoder's tokens that are masked, and predicted

    def __post_init__(self) -> None:
        _check("train", self, steps=1, batch=1, micro_batch=1, seed=0, clip=0)
        if not 0 < self.mask_fraction < 1:
            raise ValueError(f"train.mask_fraction: expected a fraction between 0 and 1, got {self.mask_fraction}")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; weight decay on matrices alone."""

    lr: float = 1e-3  # the highest learning rate
    method_lr_factor: float = 10.0  # factor on lr for the parameters of a position method
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # decay rates of the two moments
    epsilon: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # of matrices

    def __post_init__(self) -> None:
        _check("optimizer", self, weight_decay=0)
        for name in ("lr", "method_lr_factor", "epsilon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"optimizer.{name}: expected more than 0, got {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas: expected two numbers from 0 to below 1, got {self.betas}")


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps, as a fraction of optimizer.lr."""

    shape: Literal["cosine", "trapezoid", "constant"] = "cosine"  # after warmup; a trapezoid is flat, then linear
    warmup: int = 100  # steps of linear warmup
    decay_fraction: float = 0.2  # fraction of all steps that the trapezoid's decay takes
    floor: float = 0.1  # fraction of lr that it ends at

    def __post_init__(self) -> None:
        _check("schedule", self, warmup=0)
        for name in ("decay_fraction", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name}: expected a fraction from 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation loss while training, at the training length and beyond it, so that one sees extrapolation grow."""

    every: int = 250  # steps between validations; 0: never
    lengths: list[int] | None = None  # in tokens; none: 1, 2 and 4 times the training length
    tokens: int = 65536  # of the validation split, the same for every length

    def __post_init__(self) -> None:
        _check("evaluation", self, every=0, tokens=1)
        for length in self.lengths or []:
            if length < 1:
                raise ValueError(f"evaluation.lengths: expected at least 1, got {length}")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved, and what is kept: the last few, and the one with the lowest validation loss."""

    every: int = 250  # steps between checkpoints; 0: only at the end
    keep: int = 2  # how many of the last checkpoints are kept

    def __post_init__(self) -> None:
        _check("checkpoint", self, every=0, keep=1)


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes, as torchrun starts them."""

    mode: Literal["auto", "replicate", "shard", "hybrid"] = "auto"  # DDP, FSDP2, FSDP2 within a node and DDP over nodes

    def __post_init__(self) -> None:
        _check("distributed", self)


@dataclass(frozen=True)
class LogConfig:
    """What is written down: JSON lines always."""

    every: int = 10  # steps between lines on the screen, and between waits for the GPU
    tensorboard: bool = False  # write for TensorBoard too

    def __post_init__(self) -> None:
        _check("log", self, every=1)


@dataclass(frozen=True)
class Config:
    """One training run."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    log: LogConfig = LogConfig()

    @property
    def evaluation_lengths(self) -> list[int]:
        """The lengths that validation loss is measured at, the training length first."""
        base = self.model.train_length
        chosen = [base * factor for factor in (1, 2, 4)] if self.evaluation.lengths is None else self.evaluation.lengths
        return [base, *(length for length in sorted(set(chosen)) if length != base)]


def presets() -> dict[str, Path]:
    """Return the presets that come with the package, by name."""
    installed = Path(__file__).parent / "configs"
    source = Path(__file__).parents[2] / "configs"  # where they stand in a source tree
    folder = installed if installed.is_dir() else source
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find(given: str | Path) -> Path:
    """Return the file of a config: a path, or a preset's name."""
    path = Path(given)
    if path.is_file():
        return path
    known = presets()
    name = path.stem
    if name in known and path in (Path(name), Path(f"{name}.toml"), Path("configs") / f"{name}.toml"):
        return known[name]
    raise FileNotFoundError(
        f"{path}: expected a TOML file or one of the presets {', '.join(known)}, got no such file"
        f"{nearest(path.stem, known)}"
    )


def load(name: str | Path, overrides: Mapping[str, Any] | None = None, vocab_size: int | None = None) -> Config:
    """Return the config in a file, or of a preset's name; `vocab_size` fills a gap, which `train` does else.

    >>> load("tiny", {"train.steps": 500, "model.positions": "rope"}).model.positions
    'rotary'
    """
    path = find(name)
    table = io.read_toml(path, dict)
    for key, value in (overrides or {}).items():
        *sections, last = str(key).split(".")
        here: Any = table
        for section in sections:
            here = here.setdefault(section, {}) if isinstance(here, dict) else None
        if not isinstance(here, dict):
            raise ValueError(f"overrides: unknown key {key!r}{nearest(str(key), io.keys(Config))}")
        here[last] = value
    return from_table(table, str(path), vocab_size)


def from_table(table: Mapping[str, Any], where: str, vocab_size: int | None = None) -> Config:
    """Return the config that a table of tables holds."""
    model = table.get("model", {})
    if isinstance(model, dict):
        table = {**table, "model": {"vocab_size": vocab_size, **model}}
    return io.build(Config, table, where)


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Return 'key: old → new' for every key in which two configs differ."""
    found = []
    for item in dataclasses.fields(old):
        before, after = getattr(old, item.name), getattr(new, item.name)
        key = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(before):
            found += differences(before, after, f"{key}.")
        elif before != after:
            found.append(f"{key}: {before!r} → {after!r}")
    return found
