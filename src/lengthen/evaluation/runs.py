"""A checkpoint on a text at many lengths, under one or several protocols: results as they come, none made twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from lengthen.checks import whole_number
from lengthen.data import Corpus, Tokens
from lengthen.evaluation import results
from lengthen.evaluation.measure import Tally, score
from lengthen.evaluation.protocols import Protocol
from lengthen.evaluation.results import Result
from lengthen.model import Transformer, load
from lengthen.training import checkpoint as checkpoints
from lengthen.training.checkpoint import Checkpoint

TOKENS = 131_072  # scored by default, the same ones at every length; more if a length asks for it


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a checkpoint's model, and the folder its results go to."""

    model: Transformer
    checkpoint: Checkpoint
    folder: Path

    @cached_property
    def weights(self) -> str:
        """The sha256 of the weights' file."""
        return self.checkpoint.weights


def open_run(path: str | Path, which: str = "last", device: str | torch.device = "cpu") -> Subject:
    """Return the model of a run's folder (its last or best checkpoint) or of one checkpoint's folder."""
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
    return Subject(load(chosen.path, device), chosen, folder)


def targets_for(tokens: Tokens, lengths: Iterable[int], limit: int | None) -> int:
    """Return how many targets are scored at every length: the limit, or more if a length needs it, or all there are."""
    if limit is not None:
        whole_number("tokens", limit, at_least=1)
    longest = max(lengths)
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
    tell: Callable[[Protocol, int, int], None] = lambda protocol, done, total: None,
    again: bool = False,
) -> list[Result]:
    """Score under each protocol, shortest first, and return all results; those that are there are not made again.

    Results are appended to `evaluation.jsonl` in the subject's folder as they come. A measurement that is interrupted
    goes on where it was.
    """
    chosen = sorted(protocols, key=lambda one: (one.length, one.name))
    if not chosen:
        raise ValueError("protocols: expected at least one, got none")
    if (kind := subject.model.config.kind) != "decoder":
        raise ValueError(f"run: expected a decoder, got an {kind}, which sees the tokens that it is scored on")
    refuse_other_tokens(subject, corpus)
    text = corpus[split]
    targets = targets_for(text, (one.length for one in chosen), tokens)
    known = {} if again else results.read(subject.folder)
    found = []
    for one in chosen:
        about = _about(subject, corpus, split, one, targets)
        result = known.get(results.key(about))
        if result is None:
            tally = score(
                subject.model,
                text,
                one,
                targets,
                tell=lambda done, total, one=one: tell(one, done, total),  # type: ignore[misc]
                partial=subject.folder / ".evaluation.partial.json",
                name=[*results.key(about)],
            )
            result = _result(about, subject, tally, text)
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


def _about(subject: Subject, corpus: Corpus, split: str, one: Protocol, targets: int) -> dict[str, object]:
    return {
        "positions": subject.model.config.positions,
        "train_length": subject.model.config.train_length,
        "checkpoint": subject.checkpoint.path.name,
        "step": subject.checkpoint.step,
        "weights": subject.weights,
        "data": corpus.fingerprint,
        "split": split,
        "protocol": one.name,
        "length": one.length,
        "stride": one.stride,
        "block": one.block,
        "tokens": targets,
    }


def _result(about: dict[str, object], subject: Subject, tally: Tally, text: Tokens) -> Result:
    words, size = tally.per(text, text.words), tally.per(text, text.bytes)
    return Result(
        **about,  # type: ignore[arg-type]
        documents=int((tally.counts > 0).sum()),
        loss=tally.loss,
        loss_se=tally.standard_error,
        perplexity_per_word=math.exp(words) if words < 700 else math.inf,
        bits_per_byte=size / math.log(2),
        tokens_per_second=float(tally.counts.sum()) / max(tally.seconds, 1e-9),
        seconds=tally.seconds,
        peak_bytes=tally.peak,
        device=str(next(subject.model.parameters()).device),
    )
