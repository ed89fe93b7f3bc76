"""Scoring a text with a model under a protocol: losses summed by document and by segment of the text.

A text's targets, in the order in which they stand, are cut into up to 64 segments of one size. Every measurement of the
same targets has the same segments, whatever its length, protocol or model: so two of them can be compared segment by
segment, and a difference has a standard error of its own (`errors.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lengthen import io
from lengthen.checks import describe, whole_number
from lengthen.data import Corpus, Tokens
from lengthen.data.masking import Masking
from lengthen.evaluation.errors import standard_error
from lengthen.evaluation.memory import Peak
from lengthen.evaluation.protocols import Protocol, Stretch, protocol
from lengthen.model import IGNORED
from lengthen.model.loss import perplexity
from lengthen.model.score import Hide, Model, Reading, Task, device_of, window_losses

SAVE_SECONDS = 10.0
SEGMENTS = 64
MASK_FRACTION = 0.15  # of an encoder's tokens, where no run says another
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)  # that a pass can be told to use
UNIGRAM_TOKENS, READ = 1 << 24, 1 << 20  # of the text that are counted for its unigram distribution, and at once

Tell = Callable[[int, int], None]  # targets scored, and how many there are
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass
class Tally:
    """Sums of losses and counts of targets, by document and by segment."""

    losses: Floats
    counts: Ints
    segment_losses: Floats = field(default_factory=lambda: np.zeros(SEGMENTS))
    segment_counts: Ints = field(default_factory=lambda: np.zeros(SEGMENTS, dtype=np.int64))
    read: int = 0  # targets that were come to; of an encoder, few of them are scored
    windows: int = 0
    seconds: float = 0.0
    peak: int | None = None

    @property
    def loss(self) -> float:
        """The mean loss per token, in nats."""
        return float(self.losses.sum() / self.counts.sum()) if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """e^loss, per token."""
        return perplexity(self.loss)

    @property
    def tokens(self) -> int:
        """How many were scored."""
        return int(self.counts.sum())

    @property
    def standard_error(self) -> float | None:
        """The mean loss's standard error over segments."""
        return standard_error(self.segment_losses.tolist(), self.segment_counts.tolist())

    def add(
        self, tokens: Tokens, one: Reading, shift: int, scored: npt.NDArray[np.bool_], losses: Floats, targets: int
    ) -> None:
        """Add what one window scored: `scored` and `losses` of its tokens, whose targets stand `shift` further on."""
        places = np.arange(one.start + one.context, one.stop) + shift  # where the targets stand in the text
        segments = np.arange(self.read, self.read + len(places)) * SEGMENTS // targets
        documents = np.searchsorted(tokens.documents, places, side="right") - 1
        scored, losses = scored[one.context :], losses[one.context :]
        np.add.at(self.losses, documents[scored], losses[scored])
        np.add.at(self.counts, documents[scored], 1)
        np.add.at(self.segment_losses, segments[scored], losses[scored])
        np.add.at(self.segment_counts, segments[scored], 1)
        self.read += len(places)
        self.windows += 1

    def per(self, tokens: Tokens, units: Ints) -> float:
        """Return nats per unit (bytes, words); a document that was scored in part counts with that fraction of them."""
        sizes = np.maximum(np.diff(tokens.documents), 1)
        amount = float((np.minimum(self.counts / sizes, 1) * units).sum())
        return float(self.losses.sum()) / amount if amount else math.nan


def score(
    model: Model,
    text: Corpus | Tokens,
    how: str | Protocol = "nonoverlapping",
    length: int | None = None,
    *,
    stride: int | None = None,
    block: int | None = None,
    per_document: int | None = None,
    split: str = "validation",
    tokens: int | None = None,
    document_mask: bool = False,
    precision: torch.dtype | None = None,
    tell: Tell = lambda done, total: None,
) -> Tally:
    """Score a text with any model: one that maps ids to logits, or a `Transformer`.

    >>> score(model, corpus, "sliding", 1024, stride=256).perplexity              # doctest: +SKIP

    Args:
        model: on the device that it shall run on.
        text: a corpus, whose `split` is read, or one split's tokens.
        how: a protocol's name, or a protocol.
        length: tokens that are read at once; None: the model's training length, if it has one.
        stride: of the protocol, as for `protocol`.
        block: likewise.
        per_document: likewise.
        split: of the corpus.
        tokens: how many are scored, at most; None: all.
        document_mask: documents do not see each other.
        precision: of matrix products; None: bfloat16 on a GPU, the weights' own elsewhere.
        tell: called with how many were read, and the number of them all.
    """
    if not callable(model):
        raise TypeError(f"model: expected what maps ids to logits, got {describe(model)}")
    if not isinstance(text, Corpus | Tokens):
        raise TypeError(f"text: expected a corpus or the tokens of one of its splits, got {describe(text)}")
    if precision is not None and precision not in PRECISIONS:
        raise TypeError(f"precision: expected {', '.join(map(str, PRECISIONS))} or None, got {describe(precision)}")
    config = getattr(model, "config", None)
    train_length: int | None = getattr(config, "train_length", None)
    if isinstance(how, str):
        length = train_length if length is None else length
        if length is None:
            raise ValueError("length: expected a number of tokens, as this model has no training length, got none")
        trained = length if train_length is None else train_length
        how = protocol(how, length, trained, stride, block, per_document)
    elif not isinstance(how, Protocol):
        raise TypeError(f"how: expected a protocol's name or a Protocol, got {describe(how)}")
    elif (length, stride, block, per_document) != (None,) * 4:
        raise ValueError("length, stride, block, per_document: expected none beside a Protocol, which has them")
    hide: Hide | None = None
    if getattr(config, "kind", "decoder") == "encoder":
        mask_id = text.mask_id if isinstance(text, Corpus) else None
        if not isinstance(text, Corpus) or mask_id is None:
            raise ValueError("text: expected a corpus whose tokenizer has a mask token, to score an encoder with")
        hide = Masking(MASK_FRACTION, mask_id, text.vocab_size)
    chosen = text[split] if isinstance(text, Corpus) else text
    if tokens is not None:
        whole_number("tokens", tokens, at_least=1)
    most = len(chosen) - 1 if tokens is None else min(tokens, len(chosen) - 1)
    if how.per_document is None and how.length > most > 0:
        raise ValueError(
            f"length: expected at most the {most:,} tokens that are scored of split {chosen.name!r} of "
            f"{chosen.directory}, or no window would be whole, got {how.length:,}"
        )
    return measure(
        model, chosen, Task(chosen, hide, document_mask), how, how.stretches(chosen, tokens), precision, tell
    )


def measure(
    model: Model,
    tokens: Tokens,
    task: Task,
    how: Protocol,
    stretches: list[Stretch],
    precision: torch.dtype | None = None,
    tell: Tell = lambda done, total: None,
    partial: Path | None = None,
) -> Tally:
    """Score stretches of a text, as `score` does.

    `partial` is a file where the tally is kept every few seconds; the same call with the same file resumes from it.
    """
    total = sum(count for _, count in stretches)
    if total < 1:
        raise ValueError(
            f"text: expected at least one token to predict in split {tokens.name!r} of {tokens.directory}, got none"
        )
    if task.hide is not None and how.mask is not None:
        raise ValueError(
            f"protocol: expected nonoverlapping or sliding for an encoder, which sees both ways, got {how}"
        )
    tally, shift = _begun(partial, len(tokens.documents) - 1), 0 if task.hide else 1
    peak, began = Peak(device_of(model)), time.perf_counter()
    before, saved = tally.seconds, began
    rest = itertools.islice(how.readings(stretches), tally.windows, None)
    for group, targets, losses in window_losses(model, task, rest, mask=how.mask, precision=precision):
        scored = (targets != IGNORED).numpy()
        for one, row, each in zip(group, scored, losses.numpy(), strict=True):
            tally.add(tokens, one, shift, row, each, total)
        now = time.perf_counter()
        tally.seconds = before + now - began
        tell(tally.read, total)
        if partial is not None and now - saved > SAVE_SECONDS:
            saved = now
            kept = {key: _plain(value) for key, value in asdict(tally).items()}
            io.write_lines(partial, [kept])  # a line has its checksum
    tally.peak = peak.bytes()
    if partial is not None:
        partial.unlink(missing_ok=True)
    return tally


def unigram_loss(tokens: Tokens, task: Task, vocab_size: int, stretches: list[Stretch]) -> float:
    """Return the mean loss of what is scored of the stretches under the text's own unigram distribution, in nats.

    It is what predicting every token from its frequency alone would give: a model that is not better has learned
    nothing. Of a long text the first part is counted, as far as the stretches go at least.
    """
    asked, counted = (np.zeros(vocab_size, dtype=np.int64) for _ in range(2))
    for start, count in stretches:
        for begin in range(start, start + count, READ):
            _, targets, _ = task.batch([Reading(begin, min(begin + READ, start + count), 0)])
            asked += np.bincount(targets[targets != IGNORED].numpy(), minlength=vocab_size)
    until = min(len(tokens), max(UNIGRAM_TOKENS, *(start + count + 1 for start, count in stretches)))
    for begin in range(0, until, READ):
        counted += np.bincount(tokens.read(begin, min(begin + READ, until)), minlength=vocab_size)
    seen, total = asked > 0, int(asked.sum())
    return float((asked[seen] * np.log(counted.sum() / counted[seen])).sum()) / total if total else math.nan


@dataclass(frozen=True)
class _Kept:
    """A tally on its way, as a file has it."""

    losses: list[float]
    counts: list[int]
    segment_losses: list[float]
    segment_counts: list[int]
    read: int
    windows: int
    seconds: float
    peak: int | None


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _begun(path: Path | None, documents: int) -> Tally:
    """Return the tally that an earlier call left, of a text with as many documents; or a new one."""
    try:
        kept = None if path is None else next(io.read_lines(path, _Kept), None)
    except (FileNotFoundError, TypeError, ValueError):
        kept = None
    if kept is None or (len(kept.losses), len(kept.segment_losses)) != (documents, SEGMENTS):
        return Tally(np.zeros(documents), np.zeros(documents, dtype=np.int64))
    values: dict[str, Any] = {
        key: np.array(value) if isinstance(value, list) else value for key, value in vars(kept).items()
    }
    return Tally(**values)
