"""Windows of tokens for training: which tokens stand in which row of which batch, as a pure function of the step.

Nothing is kept between batches, so resuming needs only the step, and the global batch is the same whatever the number
of processes: rank r of w takes rows r·n … (r + 1)·n − 1 of it, n = batch / w.

`order="pack"` goes through the split in epochs. Epoch e cuts the joined documents into windows of `length` tokens
from an offset o(e) in [0, length), and shuffles them; window number step·batch + row counts on through the epochs.
With N tokens an epoch has n = (N − r) // length windows, r = min(length, N − length) being the number of offsets, the
same in every epoch; each of the tokens o + 1 … o + n·length is a target once. What is left out, at both ends, is
under 2·length tokens.

`order="sample"` draws each window's start evenly from [0, N − length), from (seed, step, row).

Random numbers are SplitMix64 (https://doi.org/10.1145/2714064.2660195), written out here so that an order never
depends on the version of another package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lengthen.checks import choice, describe, flag, whole_number
from lengthen.data.corpus import Corpus, Tokens
from lengthen.data.settings import check_seed

IGNORED = -100  # what torch's cross entropy leaves out
_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, the tokens that follow them, and with a document mask where each token's document starts."""

    ids: Tensor  # int64 [rows, length]
    targets: Tensor  # int64 [rows, length]; −100 where the next token is another document's
    document_starts: Tensor | None  # int64 [rows, length]; 0 for a document that began before the row


class Windows:
    """Batches of windows over one split; `batch(step)` is always the same for the same arguments.

    Iterating yields the batches of one epoch, steps 0 … len(windows) − 1.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        length: int,
        batch: int,
        seed: int = 0,
        order: str = "pack",
        document_mask: bool = False,
    ) -> None:
        if isinstance(tokens, Corpus):
            raise TypeError(f"tokens: expected one split of a corpus, as corpus['train'], got {describe(tokens)}")
        self.tokens = tokens
        self.length = whole_number("length", length, at_least=1)
        self.rows = whole_number("batch", batch, at_least=1)
        self.seed = check_seed(seed)
        self.order = choice("order", order, ("pack", "sample"))
        self.document_mask = flag("document_mask", document_mask)
        if len(tokens) < length + 1:
            raise ValueError(
                f"length: a window of {length} tokens and its last target need {length + 1} tokens, but split "
                f"{tokens.name!r} of {tokens.directory} has {len(tokens)}"
            )
        self._offsets = min(length, len(tokens) - length)
        self.per_epoch = (len(tokens) - self._offsets) // length
        self._shuffled: dict[int, Ints] = {}

    def __len__(self) -> int:
        return -(-self.per_epoch // self.rows)  # the last step may run on into the second epoch

    def __iter__(self) -> Iterator[Batch]:
        return map(self.batch, range(len(self)))

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return this rank's rows of the batch of this step."""
        whole_number("step", step, at_least=0)
        whole_number("world", world, at_least=1)
        if not 0 <= whole_number("rank", rank) < world:
            raise ValueError(f"rank: expected 0 … {world - 1}, got {rank}")
        if self.rows % world:
            raise ValueError(f"world: expected a divisor of the batch of {self.rows} windows, got {world}")
        rows = self.rows // world
        starts = [self.start(step, row) for row in range(rank * rows, (rank + 1) * rows)]
        both = np.stack([self.tokens.read(start, start + self.length + 1) for start in starts])
        ids, targets = both[:, :-1], both[:, 1:].copy()
        begins = None
        if self.document_mask:
            found = np.stack([self.tokens.document_starts(start, start + self.length + 1) for start in starts])
            targets[found[:, 1:] == np.arange(1, self.length + 1)] = IGNORED  # where another document begins
            begins = torch.from_numpy(np.ascontiguousarray(found[:, :-1]))
        return Batch(torch.from_numpy(np.ascontiguousarray(ids)), torch.from_numpy(targets), begins)

    def start(self, step: int, row: int) -> int:
        """Return the position of the first token of a row of a step's global batch."""
        if self.order == "sample":
            key = mix(mix(self.seed, 1), step)
            return int(mix(key, row) % (len(self.tokens) - self.length))
        epoch, place = divmod(step * self.rows + row, self.per_epoch)
        return self.offset(epoch) + int(self._order_of(epoch)[place]) * self.length

    def offset(self, epoch: int) -> int:
        """Return where an epoch's first window starts."""
        return int(mix(mix(self.seed, 2), epoch) % self._offsets)

    def _order_of(self, epoch: int) -> Ints:
        if epoch not in self._shuffled:
            while len(self._shuffled) >= 2:  # a batch that crosses a border needs the two epochs on either side of it
                del self._shuffled[next(iter(self._shuffled))]
            self._shuffled[epoch] = _permutation(self.per_epoch, mix(mix(self.seed, 3), epoch))
        return self._shuffled[epoch]


def mix(key: int, number: Any) -> Any:
    """Return 64 random bits for a number, or for each of an array of uint64, under a key: one step of SplitMix64."""
    z = (key + (number + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _permutation(count: int, key: int) -> Ints:
    """Return 0 … count − 1 in the order of their random bits under a key."""
    return np.argsort(mix(key, np.arange(count, dtype=np.uint64)), kind="stable").astype(np.int64)
