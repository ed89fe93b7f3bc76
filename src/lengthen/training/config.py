"""Everything a training run is told: the model, the data, and the loop, as one file of presets has it.

A run saves the config it was resolved to; `vocab_size` is the one key that comes from the data when it is not given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthen.checks import choice, nearest, number, whole_number
from lengthen.model import ModelConfig
from lengthen.training import settings


@dataclass(frozen=True)
class DataConfig:
    """How windows are drawn, and how the default corpus is prepared when no data is given."""

    order: str = "pack"  # every window once an epoch, or "sample": windows anywhere, with replacement
    apart: bool = False  # documents in one window do not see each other
    tokenizer: str = "bytes"  # for the default corpus: "bytes" or "bpe"
    vocab_size: int = 4096  # for the default corpus with "bpe"

    def __post_init__(self) -> None:
        choice("data.order", self.order, ("pack", "sample"))
        choice("data.tokenizer", self.tokenizer, ("bytes", "bpe"))


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    batch: int = 32  # windows a step, over all processes
    micro_batch: int | None = None  # windows in one pass of one process; None: all of its share
    seed: int = 0
    clip: float = 1.0  # of the gradient's norm; 0: none
    precision: str = "auto"  # "bfloat16" is autocast; auto: that on a GPU, "float32" elsewhere
    compile: bool | None = None  # torch.compile for each block; none: on a GPU
    checkpoint_activations: bool = False  # recompute blocks in the backward pass: slower, in less memory
    mask_share: float = 0.15  # of an encoder's tokens: hidden, and predicted

    def __post_init__(self) -> None:
        whole_number("train.steps", self.steps, at_least=1)
        whole_number("train.batch", self.batch, at_least=1)
        if self.micro_batch is not None:
            whole_number("train.micro_batch", self.micro_batch, at_least=1)
        whole_number("train.seed", self.seed, at_least=0)
        number("train.clip", self.clip, at_least=0)
        choice("train.precision", self.precision, ("auto", "float32", "bfloat16"))
        if not 0 < number("train.mask_share", self.mask_share) < 1:
            raise ValueError(f"train.mask_share: expected a share between 0 and 1, got {self.mask_share}")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; weight decay on matrices alone."""

    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        number("optimizer.lr", self.lr, above=0)
        number("optimizer.epsilon", self.epsilon, above=0)
        number("optimizer.weight_decay", self.weight_decay, at_least=0)
        if len(self.betas) != 2 or not all(0 <= number("optimizer.betas", beta) < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas: expected two numbers from 0 to below 1, got {self.betas}")


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps, as a share of `optimizer.lr`."""

    shape: str = "cosine"  # or "trapezoid": flat, then down in a line; or "constant"
    warmup: int = 100  # steps, up in a line
    decay_share: float = 0.2  # of all steps: the trapezoid's way down
    floor: float = 0.1  # what the rate ends at

    def __post_init__(self) -> None:
        choice("schedule.shape", self.shape, ("cosine", "trapezoid", "constant"))
        whole_number("schedule.warmup", self.warmup, at_least=0)
        for name in ("decay_share", "floor"):
            if not 0 <= number(f"schedule.{name}", getattr(self, name)) <= 1:
                raise ValueError(f"schedule.{name}: expected a share from 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation loss while training, at the training length and beyond it, so that one sees extrapolation grow."""

    every: int = 250  # steps; 0: never
    lengths: list[int] | None = None  # none: the training length, twice and four times it
    tokens: int = 65536  # of the validation split, the same for every length

    def __post_init__(self) -> None:
        whole_number("evaluation.every", self.every, at_least=0)
        whole_number("evaluation.tokens", self.tokens, at_least=1)
        for length in self.lengths or []:
            whole_number("evaluation.lengths", length, at_least=1)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved, and what is kept: the last few, and the one with the lowest validation loss."""

    every: int = 250  # steps; 0: at the end alone
    keep: int = 2

    def __post_init__(self) -> None:
        whole_number("checkpoint.every", self.every, at_least=0)
        whole_number("checkpoint.keep", self.keep, at_least=1)


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes, as torchrun starts them."""

    mode: str = "auto"  # "replicate" (DDP), "shard" (FSDP2), "hybrid" (sharded in a node, replicated over nodes)

    def __post_init__(self) -> None:
        choice("distributed.mode", self.mode, ("auto", "replicate", "shard", "hybrid"))


@dataclass(frozen=True)
class LogConfig:
    """What is written down: JSON lines always."""

    every: int = 10  # steps between lines on the screen, and between waits for the GPU
    tensorboard: bool = False

    def __post_init__(self) -> None:
        whole_number("log.every", self.every, at_least=1)


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
    installed = Path(__file__).parents[1] / "configs"
    source = Path(__file__).parents[3] / "configs"  # where they stand in a source tree
    folder = installed if installed.is_dir() else source
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find(given: str | Path) -> Path:
    """Return the file of a config: a path, or a preset's name."""
    path = Path(given)
    if path.is_file():
        return path
    known = presets()
    if (
        path in (Path(path.stem), Path(f"{path.stem}.toml"), Path("configs") / f"{path.stem}.toml")
        and path.stem in known
    ):
        return known[path.stem]
    raise FileNotFoundError(
        f"{path}: expected a TOML file or one of the presets {', '.join(known)}, got no such file"
        f"{nearest(path.stem, known)}"
    )


def load(name: str | Path, words: Iterable[tuple[str, str]] = (), vocab_size: int | None = None) -> Config:
    """Return the config in a file, or of a preset's name, with dotted overrides; `vocab_size` fills a gap."""
    path = find(name)
    table = settings.apply(settings.read_toml(path, dict), words, Config)
    return from_table(table, str(path), vocab_size)


def from_table(table: dict[str, Any], where: str, vocab_size: int | None = None) -> Config:
    """Return the config that a table of tables holds."""
    model = table.get("model", {})
    if isinstance(model, dict) and vocab_size is not None:
        table = {**table, "model": {"vocab_size": vocab_size, **model}}
    return settings.build(Config, table, where)


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
