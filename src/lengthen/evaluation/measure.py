"""Scoring a text with a model under a protocol: losses summed by document, in stretches that a stop does not lose."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthen import io
from lengthen.data import Tokens
from lengthen.evaluation.memory import Peak
from lengthen.evaluation.protocols import Protocol
from lengthen.model import Transformer
from lengthen.model.score import Reading, window_losses

SAVE_SECONDS = 10.0

Tell = Callable[[int, int], None]  # targets scored, and how many there are


@dataclass
class Tally:
    """Losses and counts by document, and how many windows they are from."""

    losses: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    windows: int = 0
    seconds: float = 0.0
    peak: int | None = None

    @property
    def loss(self) -> float:
        """The mean loss of a token."""
        return float(self.losses.sum() / self.counts.sum())

    @property
    def standard_error(self) -> float | None:
        """The mean's standard error over documents: tokens of one document are not independent of each other.

        It is that of a ratio of sums, √(n/(n − 1)·Σ (l_d − mean·c_d)²) / Σ c_d over n documents.
        """
        seen = self.counts > 0
        n = int(seen.sum())
        if n < 2:
            return None
        off = self.losses[seen] - self.loss * self.counts[seen]
        return float(math.sqrt(n / (n - 1) * float((off**2).sum())) / self.counts.sum())

    def add(self, tokens: Tokens, one: Reading, losses: npt.NDArray[np.float64]) -> None:
        """Add the losses of one window's tokens to the documents that their targets stand in."""
        places = np.arange(one.start + one.context + 1, one.stop + 1)  # where the scored targets stand in the text
        documents = np.searchsorted(tokens.documents, places, side="right") - 1
        first, last = int(documents[0]), int(documents[-1]) + 1
        here = documents - first
        self.losses[first:last] += np.bincount(here, weights=losses[one.context :], minlength=last - first)
        self.counts[first:last] += np.bincount(here, minlength=last - first)
        self.windows += 1

    def per(self, tokens: Tokens, units: npt.NDArray[np.int64]) -> float:
        """Return nats per unit (bytes, words); of a document that was scored in part, its share of them counts."""
        sizes = np.diff(tokens.documents)
        sizes[0] -= 1  # the first token of the text is nobody's target
        share = self.counts / np.maximum(sizes, 1)
        return float(self.losses.sum() / (share * units).sum())


def score(
    model: Transformer,
    tokens: Tokens,
    protocol: Protocol,
    targets: int,
    *,
    tell: Tell = lambda done, total: None,
    partial: Path | None = None,
    name: object = None,
) -> Tally:
    """Score the first `targets` targets of a split.

    Args:
        model: on the device that it shall run on.
        tokens: the split.
        protocol: how it is read.
        targets: how many are scored; the split has one token more, at least.
        tell: called with how many were scored, and the number of them all.
        partial: a file where the tally is kept every few seconds; a call with the same `name` goes on from it.
        name: what is measured, of JSON's types; a tally kept under another name is not used.
    """
    if not 1 <= targets < len(tokens):
        raise ValueError(f"targets: expected 1 … {len(tokens) - 1}, all that the text has, got {targets}")
    documents = len(tokens.documents) - 1
    tally = _kept(partial, name, documents) or Tally(np.zeros(documents), np.zeros(documents, dtype=np.int64))
    peak, began = Peak(next(model.parameters()).device), time.perf_counter()
    before, saved = tally.seconds, began
    rest = itertools.islice(protocol.readings(targets), tally.windows, None)
    for group, losses in window_losses(model, tokens.read, rest, protocol.mask):
        for one, row in zip(group, losses.numpy(), strict=True):
            tally.add(tokens, one, row)
        now = time.perf_counter()
        tally.seconds = before + now - began
        tell(int(tally.counts.sum()), targets)
        if partial is not None and now - saved > SAVE_SECONDS:
            saved = now
            sums = tally.losses.tolist(), tally.counts.tolist()
            io.write_json(partial, _Kept(name, tally.windows, tally.seconds, *sums))
    tally.peak = peak.bytes()
    if partial is not None:
        partial.unlink(missing_ok=True)
    return tally


@dataclass(frozen=True)
class _Kept:
    """A tally on its way, as a file has it."""

    name: Any
    windows: int
    seconds: float
    losses: list[float]
    counts: list[int]


def _kept(path: Path | None, name: object, documents: int) -> Tally | None:
    """Return the tally that an earlier call left under this name, of a text with as many documents."""
    try:
        kept = None if path is None else io.read_json(path, _Kept)
    except (FileNotFoundError, TypeError, ValueError):
        return None
    if kept is None or kept.name != name or len(kept.losses) != documents:
        return None
    return Tally(np.array(kept.losses), np.array(kept.counts, dtype=np.int64), kept.windows, kept.seconds)
