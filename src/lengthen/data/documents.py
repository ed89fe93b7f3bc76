"""The documents of all sources: read once to learn which split each belongs to, then as often as they are needed.

The split of a document depends on a hash of its text, and on nothing else: not on its place, its file's name or the
number of threads. Equal documents fall on the same side.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from lengthen.data.readers import Piece, pieces
from lengthen.data.settings import Settings
from lengthen.data.sources import Source

PART_BYTES = 4 << 20  # text in a part: a second or two of work, which is what a crash can cost

Progress = Callable[[str, int, int], None]  # the stage, what is done, what there is to do (0 where it is not known)


class Documents:
    """What reading found: `names` of the splits, the bytes of text of each; iterating reads again."""

    def __init__(self, files: list[Source], settings: Settings, fraction: float, progress: Progress) -> None:
        self._files, self._settings = files, settings
        held_out = ["validation"] if fraction else []
        self.names = list(dict.fromkeys(["train", *held_out, *(file.split for file in files)]))
        packed = any(file.packing or file.kind not in ("text", "jsonl") for file in files)
        total = 0 if packed else sum(file.path.stat().st_size for file in files)
        hashes, sizes, splits = array("Q"), array("Q"), array("B")
        fresh = hashlib.blake2b(digest_size=8, key=(settings.seed % (1 << 64)).to_bytes(8, "little"))
        begun, done, digest = 0, 0, fresh.copy()
        for file in files:
            for piece, ends in pieces(file, settings):
                digest.update(piece)
                done += len(piece)
                if ends:
                    hashes.append(int.from_bytes(digest.digest(), "little"))
                    sizes.append(done - begun)
                    splits.append(self.names.index(file.split))
                    begun, digest = done, fresh.copy()
                progress("reading", done, total)
        self._splits = np.array(splits, dtype=np.uint8)
        if fraction and len(splits):
            _hold_out(self._splits, np.array(hashes, dtype=np.uint64), fraction)
        self.bytes = {
            name: int(np.array(sizes, dtype=np.int64)[self._splits == place].sum())
            for place, name in enumerate(self.names)
        }
        for name in self.names:
            if self.bytes[name] == 0:
                listed = ", ".join(str(file.path) for file in files if file.split == name or fraction)
                raise ValueError(f"sources: no text for the split {name!r} in {listed[:500]}")

    def __iter__(self) -> Iterator[tuple[str, bytes, bool]]:
        """Yield every piece, with its document's split and whether the document ends."""
        number = 0
        for file in self._files:
            for piece, ends in pieces(file, self._settings):
                if number == len(self._splits):
                    raise ValueError(f"{file.path}: changed while it was read; run `prepare` again")
                yield self.names[self._splits[number]], piece, ends
                number += ends

    def sample(self, limit: int, progress: Progress) -> Iterator[str]:
        """Yield about `limit` bytes of the train text, chosen piece by piece by a hash of the piece."""
        wanted, done = min(limit, self.bytes["train"]), 0
        for split, piece, _ in self:
            digest = hashlib.blake2b(piece, digest_size=8, person=b"bpe sample").digest()
            if split == "train" and int.from_bytes(digest, "little") < wanted / self.bytes["train"] * 2.0**64:
                yield piece.decode()
                done += len(piece)
                progress("training the tokenizer", done, wanted)

    def parts(self, *, cut: bool) -> Iterator[tuple[str, list[Piece]]]:
        """Yield for each split its pieces in order, about PART_BYTES at a time; without `cut` documents stay whole."""
        held: dict[str, list[Piece]] = {name: [] for name in self.names}
        sizes = dict.fromkeys(self.names, 0)
        begun = bytearray()
        for split, piece, ends in self:
            begun += piece
            if not (cut or ends):
                continue
            held[split].append((bytes(begun), ends))
            sizes[split] += len(begun)
            begun.clear()
            if sizes[split] >= PART_BYTES:
                yield split, held[split]
                held[split], sizes[split] = [], 0
        yield from ((split, part) for split, part in held.items() if part)


def _hold_out(splits: npt.NDArray[np.uint8], hashes: npt.NDArray[np.uint64], fraction: float) -> None:
    """Move the train documents of the smallest hashes to validation, in place; each side has at least one."""
    own = hashes[splits == 0]
    if len(own) == 0 or own.min() == own.max():
        raise ValueError(
            f"validation: a fraction of {fraction:g} needs at least two documents that differ, got {len(own)} "
            f"document{'s' if len(own) > 1 else ''}; split the text with separator or split_before, name files for "
            f"validation, or use validation=0"
        )
    limit = min(max(int(fraction * 2.0**64), int(own.min())), int(own.max()) - 1)
    splits[(splits == 0) & (hashes <= np.uint64(limit))] = 1
