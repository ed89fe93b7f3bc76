"""How much of a text a BPE can be trained on in bounded memory.

Training takes about 120 bytes for each byte of the words that differ. English has some 1 MB of them in 64 MB; Japanese,
which puts no spaces between words, has nearly 64. So the words are counted first, and of a text with too many a half,
a quarter, … of the pieces is taken. Counting every eighth word, chosen by a hash of the word, tells it well enough.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from lengthen.data.cuts import WHITE, code_points, kinds_of

BYTES = 4 << 20  # of words that differ: half a GB
TOGETHER = 100  # short pieces
EVERY = 8  # words of which one is counted
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2⁶⁴


class Vocabulary:
    """The words of pieces that come with a level: those of level k stay when the text is halved k times."""

    def __init__(self) -> None:
        self.halvings = 0
        self._words: dict[int, tuple[int, int]] = {}  # the hash of a word: its highest level, its bytes
        self._size = 0
        self._held: dict[int, list[str]] = {}  # of each level, pieces that are counted together

    def add(self, piece: str, level: int) -> None:
        """Count the words of a piece, with others of its level."""
        if level < self.halvings:
            return
        held = self._held.setdefault(level, [])
        held.append(piece)
        if len(held) == TOGETHER or len(piece) > 10_000:
            self._count(level)

    def finish(self) -> int:
        """Count what is left; return how often the text is to be halved."""
        for level in list(self._held):
            self._count(level)
        return self.halvings

    def _count(self, level: int) -> None:
        """Count the words of what is held; halve the text while they are too many."""
        for word, size in zip(*_words("\n".join(self._held.pop(level))), strict=True):
            before = self._words.get(word)
            self._size += size if before is None else 0
            self._words[word] = (level if before is None else max(level, before[0]), size)
        while self._size * EVERY > BYTES:
            self.halvings += 1
            self._words = {word: said for word, said in self._words.items() if said[0] >= self.halvings}
            self._size = sum(size for _, size in self._words.values())


def _words(text: str) -> tuple[list[int], list[int]]:
    """Return the hashes and the sizes in bytes of every eighth of the words that differ.

    A word is a run of characters of one kind, as GPT-2's pattern has it. Its hash is Σ c[i]·b^i over its characters,
    brought to its start: all words at once are differences of one running sum.
    """
    points, kinds = code_points(text).astype(np.uint64), kinds_of(text)
    starts = np.flatnonzero(np.diff(kinds, prepend=255))
    stops = np.append(starts, len(kinds))[1:]
    starts, stops = (places[kinds[starts] != WHITE] for places in (starts, stops))
    powers, inverses = _powers(1 << len(points).bit_length())
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((points + np.uint64(1)) * powers[: len(points)])])
    hashes = (sums[stops] - sums[starts]) * inverses[starts]
    hashes ^= hashes >> np.uint64(29)  # its low bits depend on the low bits of characters alone
    counted = hashes % np.uint64(EVERY) == 0
    hashes, first = np.unique(hashes[counted], return_index=True)
    sizes = np.concatenate([[0], np.cumsum(1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000))])
    bytes_ = (sizes[stops] - sizes[starts])[counted][first] + 1  # and the space before it
    return hashes.tolist(), bytes_.tolist()


@cache
def _powers(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return b^i and b^−i for i < count, modulo 2⁶⁴."""

    def of(base: int) -> npt.NDArray[np.uint64]:
        bases = np.full(count, base, dtype=np.uint64)
        bases[0] = 1
        return np.multiply.accumulate(bases)

    return of(_BASE), of(pow(_BASE, -1, 1 << 64))
