"""What each process reads in each step, made ready one step ahead."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthen.config import Config
from lengthen.data import Corpus, Windows
from lengthen.data.masking import Masking
from lengthen.model import IGNORED
from lengthen.model.score import Task
from lengthen.training.parallel import World


def masking(config: Config, corpus: Corpus, seed: int = 0) -> Masking | None:
    """Return what hides an encoder's tokens; None for a decoder. A text is scored with seed 0."""
    if config.model.kind == "decoder":
        return None
    if corpus.mask_id is None:
        raise ValueError(f"model.kind = 'encoder': the tokenizer of {corpus.directory} has no mask token to hide with")
    return Masking(config.train.mask_fraction, corpus.mask_id, corpus.vocab_size, seed)


def scoring(config: Config, corpus: Corpus, split: str = "validation") -> Task:
    """Return what a run's model is asked of a text, as in training: next or hidden tokens, documents apart or not."""
    return Task(corpus[split], masking(config, corpus), config.data.document_mask)


@dataclass(frozen=True)
class Work:
    """One process's part of a step."""

    ids: Tensor
    targets: Tensor
    document_starts: Tensor | None
    scored: Tensor  # how many targets count, a scalar

    def passes(self, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield ids, targets and document starts of at most so many rows at a time."""
        for start in range(0, self.ids.shape[0], rows):
            here = slice(start, start + rows)
            starts = None if self.document_starts is None else self.document_starts[here]
            yield self.ids[here], self.targets[here], starts


class Batches:
    """The work of every step, from the train split; `of(step)` is a function of the step."""

    def __init__(self, corpus: Corpus, config: Config, here: World) -> None:
        self.config, self.here, self.corpus = config, here, corpus
        self.windows = Windows(
            corpus["train"],
            length=config.model.train_length,
            batch=config.train.batch,
            seed=config.train.seed,
            order=config.data.order,
            document_mask=config.data.document_mask,
        )
        if config.train.batch % here.size:
            raise ValueError(
                f"train.batch: expected a multiple of the {here.size} processes, got {config.train.batch} windows"
            )
        self.hide = masking(config, corpus, config.train.seed)

    def of(self, step: int) -> Work:
        """Return this process's part of a step, on its device."""
        batch = self.windows.batch(step, self.here.rank, self.here.size)
        ids, targets = batch.ids, batch.targets
        if self.hide is not None:
            row = (step * self.here.size + self.here.rank) * ids.shape[0]  # of all rows of all steps
            ids, targets = self.hide(ids, row * ids.shape[1] + torch.arange(ids.numel()).view(ids.shape))
        scored = torch.tensor(int((targets != IGNORED).sum()), dtype=torch.float64)
        starts = None if batch.document_starts is None else self._moved(batch.document_starts)
        return Work(self._moved(ids), self._moved(targets), starts, self._moved(scored))

    def _moved(self, part: Tensor) -> Tensor:
        if self.here.device.type != "cuda":
            return part
        return part.pin_memory().to(self.here.device, non_blocking=True)

    def __call__(self, first: int, last: int) -> Iterator[tuple[int, Work]]:
        """Yield each step from `first` to before `last` with its work, read while the step before is computed."""
        with ThreadPoolExecutor(max_workers=1) as pool:
            ahead = pool.submit(self.of, first) if first < last else None
            for step in range(first, last):
                assert ahead is not None
                work = ahead.result()
                ahead = pool.submit(self.of, step + 1) if step + 1 < last else None
                yield step, work
