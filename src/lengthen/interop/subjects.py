"""What a verb works with, from any path: a run, or a folder of Hugging Face as if it were one.

Of a folder, results go into it; of a model of the hub, into `runs/OWNER--NAME` of the working folder. A causal model
whose architecture is not read here is evaluated by `transformers`, through its own forward (`Other`): no code of its
folder is run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lengthen import io
from lengthen.config import Config, DataConfig, ModelConfig
from lengthen.data import Corpus
from lengthen.data.checksums import sha256_of
from lengthen.data.tokenizer import Tokenizer
from lengthen.evaluation import Subject, open_run
from lengthen.interop import folder as folders
from lengthen.interop.architectures import find
from lengthen.interop.models import load_folder, local
from lengthen.model import Transformer
from lengthen.training.checkpoint import Checkpoint, State

TOKENIZER = "tokenizer.json"
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")
USUAL_LENGTH = 2048  # trained at, where no key says it


@dataclass(frozen=True)
class Pretrained(Checkpoint):
    """A folder of Hugging Face in a checkpoint's place."""

    pickled: bool = False  # whether its weights may be

    @property
    def weights(self) -> str:
        """A sha256 of the config and of all files of weights: what was measured is of these."""
        sums = [sha256_of(path) for path in (self.path / folders.CONFIG, *folders.files(self.path, self.pickled))]
        return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def open_model(
    path: str | Path,
    which: str = "last",
    device: str | torch.device = "cpu",
    position_options: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
    pickled: bool = False,
) -> Subject:
    """Return the model of a run, a checkpoint, a folder of Hugging Face, or OWNER/NAME on its hub.

    With `tell`, a causal model of any other architecture is one too, read by `transformers`: `tell` is told why. With
    `pickled`, weights of Hugging Face may be a pickle, as for `load`.
    """
    place = local(path, pickled)
    if not folders.is_one(place):
        return open_run(place, which, device, position_options)
    table, where = folders.read_config(place), str(place / folders.CONFIG)
    try:
        find(table, where).read(table, where, position_options)
    except ValueError as problem:
        if tell is None or position_options:
            raise
        model: nn.Module = _other(place, table, device, problem)
        tell(f"read by transformers itself: {problem}")
    else:
        model = load_folder(place, device, position_options, pickled)
    tokenizer = place / TOKENIZER if (place / TOKENIZER).is_file() else None
    state = State(step=0, data="", tokenizer=None if tokenizer is None else sha256_of(tokenizer))
    results = place if place == Path(path) else Path("runs") / str(path).replace("/", "--")
    results.mkdir(parents=True, exist_ok=True)
    config = Config(cast(ModelConfig, model.config), DataConfig(tokenizer="json"))
    return Subject(cast(Transformer, model), Pretrained(place, state, {}, pickled), results, config, tokenizer)


def special_token(tokenizer: Path, name: str) -> str | None:
    """Return a special token, `eos_token` say, as the folder of a tokenizer.json names it; None: it does not."""
    path = tokenizer.with_name("tokenizer_config.json")
    said = io.read_json(path, dict).get(name) if path.is_file() else None
    said = said.get("content") if isinstance(said, Mapping) else said
    return said if isinstance(said, str) else None


def tokenizer_of(subject: Subject, data: Path | None = None) -> Tokenizer | None:
    """Return a model's tokenizer: of its folder, of the corpus that was named, or of the one that it was trained on."""
    state = subject.checkpoint.state
    if data is None and subject.tokenizer is not None:
        return Tokenizer(subject.tokenizer, "json", special_token(subject.tokenizer, "eos_token"))
    if data is None and state.tokenizer in (None, "bytes"):
        return None if state.tokenizer is None else Tokenizer()
    place = data or Path(state.folder or "")
    if not (place / "index.json").is_file():
        raise FileNotFoundError(f"--data: expected the corpus with the model's tokenizer, got {place}; name it")
    corpus = Corpus.open(place)
    if state.tokenizer not in (None, corpus.tokenizer_name):
        raise ValueError(
            f"--data: {place} was made with another tokenizer ({corpus.tokenizer_name[:12]}) than the corpus that "
            f"{subject.checkpoint.path} was trained on ({(state.tokenizer or '')[:12]})"
        )
    return corpus.tokenizer


# Other architectures.


@dataclass(frozen=True)
class OtherConfig:
    """What is asked of a model's config here, for a model of `transformers`."""

    positions: str
    train_length: int
    vocabulary: int
    kind: str = "decoder"
    longest: int | None = None
    position_options: dict[str, Any] = field(default_factory=dict)


class Other(nn.Module):
    """A causal model of `transformers`: ids to logits."""

    def __init__(self, inner: nn.Module, config: OtherConfig) -> None:
        super().__init__()
        self.inner, self.config = inner, config

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits; say so if it cannot read as many tokens."""
        try:
            return cast(Tensor, self.inner(ids, use_cache=False).logits)
        except (IndexError, RuntimeError) as problem:
            if ids.shape[1] <= self.config.train_length or "memory" in str(problem):
                raise
            raise ValueError(
                f"lengths: {self.config.positions} fails at {ids.shape[1]:,} tokens, beyond the "
                f"{self.config.train_length:,} that its config says: {problem}"
            ) from None


def _other(folder: Path, table: Mapping[str, Any], device: str | torch.device, problem: ValueError) -> Other:
    """Return the model as `transformers` makes it, or raise the problem for which it is not read here."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise problem from None
    try:
        inner: Any = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=False, use_safetensors=True, local_files_only=True, dtype="auto"
        )
    except Exception as theirs:
        first = str(theirs).strip().partition("\n")[0]
        raise ValueError(f"{problem}; and transformers itself says: {first}") from None
    said = [table[name] for name in LENGTHS if isinstance(table.get(name), int)]
    config = OtherConfig(
        positions=f"{table.get('model_type')} (transformers)",
        train_length=said[0] if said else USUAL_LENGTH,
        vocabulary=int(inner.get_input_embeddings().weight.shape[0]),
    )
    return Other(inner.to(device).eval(), config)
