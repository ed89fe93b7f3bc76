"""Scoring a text with a model under a protocol: losses summed by document, in stretches that a stop does not lose."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lengthen.data import Tokens
from lengthen.evaluation.memory import Peak
from lengthen.evaluation.protocols import Protocol, Reading
from lengthen.model import Transformer

BATCH_TOKENS = {"cpu": 16_384, "cuda": 131_072}  # read in one pass, if a window is shorter than that
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
        model: on the device that it shall run on, in `eval` mode.
        tokens: the split.
        protocol: how it is read.
        targets: how many are scored; the split has one token more, at least.
        tell: called with how many were scored, and the number of them all.
        partial: a file where the tally is kept every few seconds; a call with the same `name` goes on from it.
        name: what is measured, of JSON's types; a tally kept under another name is not used.
    """
    if not 1 <= targets < len(tokens):
        raise ValueError(f"targets: expected 1 … {len(tokens) - 1}, all that the text has, got {targets}")
    device = next(model.parameters()).device
    tally = _kept(partial, name) or Tally(
        np.zeros(len(tokens.documents) - 1), np.zeros(len(tokens.documents) - 1, dtype=np.int64)
    )
    peak, began = Peak(device), time.perf_counter()
    before, saved = tally.seconds, began
    rest = itertools.islice(protocol.readings(targets), tally.windows, None)
    for group in _groups(rest, max(1, BATCH_TOKENS.get(device.type, 1) // protocol.length)):
        _add(tally, tokens, group, _losses(model, tokens, group, protocol, device))
        now = time.perf_counter()
        tally.seconds = before + now - began
        tell(int(tally.counts.sum()), targets)
        if partial is not None and now - saved > SAVE_SECONDS:
            saved = now
            _keep(partial, name, tally)
    tally.peak = peak.bytes()
    if partial is not None:
        partial.unlink(missing_ok=True)
    return tally


def _groups(readings: Iterator[Reading], size: int) -> Iterator[list[Reading]]:
    """Yield up to `size` windows at a time, those of one length together; the order stays."""
    for _, same in itertools.groupby(readings, key=lambda one: one.stop - one.start):
        while group := list(itertools.islice(same, size)):
            yield group


def _losses(
    model: Transformer, tokens: Tokens, group: list[Reading], protocol: Protocol, device: torch.device
) -> npt.NDArray[np.float64]:
    both = torch.from_numpy(np.stack([tokens.read(one.start, one.stop + 1) for one in group])).to(device)
    with torch.no_grad(), _precision(device):
        _, losses = model(both[:, :-1].contiguous(), both[:, 1:].contiguous(), mask=protocol.mask)
    counted: Tensor = losses.double().cpu()
    return counted.numpy()


def _precision(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def _add(tally: Tally, tokens: Tokens, group: list[Reading], losses: npt.NDArray[np.float64]) -> None:
    for one, row in zip(group, losses, strict=True):
        places = np.arange(one.start + one.context + 1, one.stop + 1)  # where the scored targets stand in the text
        documents = np.searchsorted(tokens.documents, places, side="right") - 1
        first, last = int(documents[0]), int(documents[-1]) + 1
        here = documents - first
        tally.losses[first:last] += np.bincount(here, weights=row[one.context :], minlength=last - first)
        tally.counts[first:last] += np.bincount(here, minlength=last - first)
    tally.windows += len(group)


def _keep(path: Path, name: object, tally: Tally) -> None:
    record = {"name": name, "windows": tally.windows, "seconds": tally.seconds}
    record |= {"losses": tally.losses.tolist(), "counts": tally.counts.tolist()}
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)


def _kept(path: Path | None, name: object) -> Tally | None:
    """Return the tally that an earlier call left under this name."""
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if record.get("name") != name or "losses" not in record:
        return None
    return Tally(
        np.array(record["losses"], dtype=np.float64),
        np.array(record["counts"], dtype=np.int64),
        record["windows"],
        record["seconds"],
    )
