"""Score a checkpoint at many lengths, under one or several protocols; existing results are not measured again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lengthen import __version__, io
from lengthen.checks import whole_number
from lengthen.config import Config
from lengthen.data import Corpus, Tokens
from lengthen.evaluation import results
from lengthen.evaluation.measure import Tally, measure, unigram_loss
from lengthen.evaluation.protocols import Protocol
from lengthen.evaluation.results import Measured, Result
from lengthen.model import Transformer, load
from lengthen.model.loss import perplexity
from lengthen.model.score import device_name, device_of, precision_named, precision_of
from lengthen.training import checkpoint as checkpoints
from lengthen.training.batches import scoring
from lengthen.training.checkpoint import Checkpoint

TOKENS = 131_072  # scored by default, the same ones at every length; more if a length asks for it


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a checkpoint's model, and the folder its results go to."""

    model: Transformer
    checkpoint: Checkpoint
    folder: Path
    config: Config  # of the run
    tokenizer: Path | None = None  # its tokenizer.json, of a model that was not trained here

    @cached_property
    def weights(self) -> str:
        """The sha256 of the weights' file."""
        return self.checkpoint.weights


def open_run(
    path: str | Path,
    which: str = "last",
    device: str | torch.device = "cpu",
    position_options: Mapping[str, Any] | None = None,
) -> Subject:
    """Return the model of a run's folder (its last or best checkpoint) or of one checkpoint's folder.

    `position_options` are read over those that the model was trained with: `{"scaling": "yarn", "factor": 8}`.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected a run's folder, got no such folder; `lengthen train` makes one")
    if (folder / "state.json").is_file():
        chosen: Checkpoint | None = checkpoints.open_checkpoint(folder)
        folder = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    else:
        if which not in ("last", "best"):
            raise ValueError(f"checkpoint: expected 'last' or 'best', got {which!r}")
        chosen = (checkpoints.last if which == "last" else checkpoints.best)(folder / "checkpoints")
    if chosen is None:
        why = "none with a validation loss" if which == "best" else "none"
        raise FileNotFoundError(f"{folder}: expected a run with a checkpoint, got {why}; `lengthen train` writes them")
    chosen.verify("model.safetensors")
    config = io.read_toml(chosen.path / "config.toml", Config)
    return Subject(load(chosen.path, device, position_options), chosen, folder, config)


def targets_for(tokens: Tokens, protocols: Iterable[Protocol], limit: int | None) -> int:
    """Return how many targets are scored at every length: the limit, or more if a length needs it, or all there are."""
    if limit is not None:
        whole_number("tokens", limit, at_least=1)
    longest = max(one.length for one in protocols)
    there = len(tokens) - 1
    if longest > there:
        raise ValueError(
            f"lengths: {longest:,} is longer than the text: split {tokens.name!r} of {tokens.directory} has "
            f"{there:,} tokens to predict"
        )
    return min(there, max(longest, TOKENS if limit is None else limit))


def evaluate(
    subject: Subject,
    corpus: Corpus,
    protocols: Iterable[Protocol],
    *,
    split: str = "validation",
    tokens: int | None = None,
    precision: str = "auto",
    tell: Callable[[Protocol, int, int], None] = lambda protocol, done, total: None,
    again: bool = False,
) -> list[Result]:
    """Score under each protocol, shortest first, and return all results; those that are there are not made again.

    Results are appended to `evaluation.jsonl` in the subject's folder as they come. A measurement that is interrupted
    resumes. `precision` is "auto", "float32" or "bfloat16", see `lengthen.model.score`.
    """
    chosen = sorted(protocols, key=lambda one: (one.length, one.name))
    if not chosen:
        raise ValueError("protocols: expected at least one, got none")
    refuse_other_tokens(subject, corpus)
    text, task = corpus[split], scoring(subject.config, corpus, split)
    limit, device = targets_for(text, chosen, tokens), device_of(subject.model)
    dtype = precision_named(precision, device)
    known = dict if again else functools.partial(results.read, subject.folder)
    found = []
    for one in chosen:
        stretches = one.stretches(text, limit)
        measured = Measured(
            weights=subject.weights,
            position_options=subject.model.config.position_options,
            data=corpus.fingerprint,
            split=split,
            document_mask=task.document_mask,
            protocol=one.name,
            length=one.length,
            stride=one.stride,
            block=one.block,
            per_document=one.per_document,
            targets=sum(count for _, count in stretches),
            precision=precision_of(subject.model, dtype),
        )
        result = known().get(measured.key)
        if result is None:
            told = functools.partial(tell, one)
            waits = functools.partial(told, 0, measured.targets)
            with results.alone(subject.folder, measured.key, waits) as partial:
                result = known().get(measured.key)  # from another process
                if result is None:
                    tally = measure(subject.model, text, task, one, stretches, dtype, told, partial)
                    unigram = unigram_loss(text, task, corpus.vocab_size, stretches)
                    result = _result(measured, subject, corpus, tally, text, unigram)
                    results.append(subject.folder, result)
        found.append(result)
    return found


def refuse_other_tokens(subject: Subject, corpus: Corpus) -> None:
    """Refuse a corpus whose tokens mean something else than those that the model was trained on."""
    config, state = subject.model.config, subject.checkpoint.state
    if corpus.vocab_size > config.vocabulary:
        raise ValueError(
            f"--data: {corpus.directory} has {corpus.vocab_size:,} tokens, more than the {config.vocabulary:,} of "
            f"{subject.checkpoint.path}: it was made with another tokenizer"
        )
    trained, here = state.tokenizer, corpus.tokenizer_name
    if trained is not None and trained != here:
        raise ValueError(
            f"--data: {corpus.directory} was made with another tokenizer ({here[:12]}) than the corpus that "
            f"{subject.checkpoint.path} was trained on ({trained[:12]}); prepare it with `--tokenizer` and that corpus"
        )


def _result(measured: Measured, subject: Subject, corpus: Corpus, tally: Tally, text: Tokens, unigram: float) -> Result:
    config = subject.model.config
    return Result(
        **vars(measured),
        positions=config.positions,
        train_length=config.train_length,
        task="next tokens" if config.kind == "decoder" else "masked tokens",
        checkpoint=subject.checkpoint.path.name,
        step=subject.checkpoint.step,
        corpus=str(corpus.directory),
        tokens=tally.tokens,
        documents=int((tally.counts > 0).sum()),
        loss=tally.loss,
        segment_losses=tally.segment_losses.tolist(),
        segment_counts=tally.segment_counts.tolist(),
        unigram=unigram,
        perplexity_per_word=perplexity(tally.per(text, text.words)),
        bits_per_byte=tally.per(text, text.bytes) / math.log(2),
        tokens_per_second=tally.tokens / max(tally.seconds, 1e-9),
        seconds=tally.seconds,
        peak_bytes=tally.peak,
        device=device_name(device_of(subject.model)),
        version=__version__,
    )
