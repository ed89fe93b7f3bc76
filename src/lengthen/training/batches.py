"""What each process reads in each step, made ready one step ahead."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthen.config import Config
from lengthen.data import Corpus, Windows
from lengthen.model import IGNORED
from lengthen.training.masking import hide
from lengthen.training.parallel import World

STEP_STRIDE = 1 << 24  # between the seeds of two steps: more than a batch, or the validation split, has rows


@dataclass(frozen=True)
class Work:
    """One process's share of a step."""

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
        if config.model.kind == "encoder" and corpus.mask_id is None:
            raise ValueError("model.kind = 'encoder': the corpus' tokenizer has no mask token to hide tokens with")

    def of(self, step: int) -> Work:
        """Return this process's share of a step, on its device."""
        batch = self.windows.batch(step, self.here.rank, self.here.size)
        ids, targets = batch.ids, batch.targets
        if self.config.model.kind == "encoder":
            first = (step + 1) * STEP_STRIDE + self.here.rank * ids.shape[0]
            ids, targets = self._hide(ids, [first + row for row in range(ids.shape[0])])
        scored = torch.tensor(int((targets != IGNORED).sum()), dtype=torch.float64)
        starts = None if batch.document_starts is None else self._moved(batch.document_starts)
        return Work(self._moved(ids), self._moved(targets), starts, self._moved(scored))

    def validation(self, both: Tensor, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Return what is read and what is predicted of pieces of the validation split, the same at every step."""
        ids, targets = both[:, :-1].contiguous(), both[:, 1:].contiguous()
        return self._hide(ids, numbers) if self.config.model.kind == "encoder" else (ids, targets)

    def _hide(self, ids: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Return an encoder's ids and targets; a row's number says which of its tokens are hidden."""
        assert self.corpus.mask_id is not None
        seeds = [(self.config.train.seed * 1_000_003 + row) % (1 << 63) for row in rows]
        return hide(ids, self.config.train.mask_share, self.corpus.mask_id, self.config.model.vocab_size, seeds)

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
