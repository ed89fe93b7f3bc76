"""The documents of all sources: read once to learn which split each belongs to, then as often as they are needed.

The split of a document depends on a hash of its text, and on nothing else: not on its place, its file's name or the
number of threads. Equal documents fall on the same side. Where there is one document to choose from, its end is held
out instead. Whatever the number of documents, one byte is kept for each.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lengthen.data import cuts, vocabulary
from lengthen.data.readers import UnreadableError, pieces
from lengthen.data.settings import Settings
from lengthen.data.sources import Source

PART_BYTES = 4 << 20  # text in a part: a second or two of work, which is what a crash can cost
PIECE_BYTES = 100  # what a piece takes in memory beside its text
WHOLE = 1 << 20  # how long a document stays whole for a tokenizer of which it is not known where text may be cut
# A BPE is trained on words, and looks through a whole word at each of its merges: a word of megabytes would take days.
LONG_WORD = re.compile("|".join(rf"{kind}{{512}}(?={kind})" for kind in (r"[^\W\d_]", r"\d", r"[^\w\s]", r"\s")))
LEFT_OUT = 255  # the split of a document of nothing but white space

Progress = Callable[[str, int, int], None]  # the stage, what is done, what there is to do (0 where it is not known)
Part = list[tuple[bytes, bool, bool]]  # pieces: UTF-8, whether the document ends, whether the piece begins in a word


@dataclass
class Reading:
    """What reading found: the split of each document, and of each split the bytes of text."""

    splits: bytearray = field(default_factory=bytearray)
    bytes: Counter[int] = field(default_factory=Counter)
    documents: int = 0  # of train, before any were held out
    lowest: int = 1 << 64  # of their hashes
    highest: int = -1
    last: tuple[int, int, int] = (0, 0, 0)  # the number of the last one, and where its visible text begins and ends

    def add(self, other: Reading) -> None:
        """Add what was read after it."""
        if other.documents:
            self.last = (len(self.splits) + other.last[0], *other.last[1:])
        self.splits += other.splits
        self.bytes.update(other.bytes)
        self.documents += other.documents
        self.lowest, self.highest = min(self.lowest, other.lowest), max(self.highest, other.highest)


class Documents:
    """What reading found: `names` of the splits, the bytes of text of each; iterating reads again."""

    def __init__(
        self, files: list[Source], settings: Settings, fraction: float, progress: Progress, *, skip_bad: bool = False
    ) -> None:
        self._files, self._settings, self._progress = files, settings, progress
        self.skipped: dict[Source, str] = {}  # the files that cannot be read, and why
        held_out = ["validation"] if fraction else []
        self.names = list(dict.fromkeys(["train", *held_out, *(file.split for file in files)]))
        self._border: tuple[int, int] | None = None  # the document whose end is held out, and where that begins
        limit = int(fraction * 2.0**64) if fraction else -1
        found = self._read(limit, skip_bad)
        self._files = [file for file in files if file not in self.skipped]
        self._splits = found.splits
        if fraction and found.documents == 1:
            self._border = self._hold_out_the_end(found, fraction)
        elif fraction and found.documents and not found.lowest <= limit < found.highest:  # a side would be empty
            if found.lowest == found.highest:
                raise ValueError(
                    f"validation: a fraction of {fraction:g} needs documents that differ, got {found.documents} equal "
                    f"ones; name files for validation, or use validation=0"
                )
            found = self._read(found.lowest if found.lowest > limit else found.highest - 1)
            self._splits = found.splits
        self.bytes = {name: found.bytes[place] for place, name in enumerate(self.names)}
        for name in self.names:
            if self.bytes[name] == 0:
                listed = ", ".join(str(file.path) for file in self._files if file.split == name or fraction)
                skipped = f" ({len(self.skipped)} files cannot be read)" if self.skipped else ""
                raise ValueError(f"sources: no text for the split {name!r} in {listed[:500] or 'any file'}{skipped}")

    def _read(self, limit: int, skip_bad: bool = False) -> Reading:
        """Read all files; train documents with a hash up to the limit are validation."""
        packed = any(file.packing or file.kind not in ("text", "jsonl") for file in self._files)
        total = 0 if packed else sum(file.path.stat().st_size for file in self._files)
        found = Reading()
        for file in self._files:
            try:
                found.add(self._read_one(file, limit, sum(found.bytes.values()), total))
            except UnreadableError as problem:
                if not skip_bad:
                    raise ValueError(f"{problem}; skip_bad=True leaves such files out") from None
                self.skipped[file] = problem.reason
        return found

    def _read_one(self, file: Source, limit: int, before: int, total: int) -> Reading:
        found, own = Reading(), self.names.index(file.split)
        fresh = hashlib.blake2b(digest_size=8, key=(self._settings.seed % (1 << 64)).to_bytes(8, "little"))
        digest, size, begins, stops, done = fresh.copy(), 0, 0, 0, before
        for piece, ends in pieces(file, self._settings):
            digest.update(piece)
            if visible := len(piece.rstrip()):
                begins = begins if stops else size + len(piece) - len(piece.lstrip())
                stops = size + visible
            size, done = size + len(piece), done + len(piece)
            if ends:
                split, number = own if stops else LEFT_OUT, int.from_bytes(digest.digest(), "little")
                if split == 0:
                    found.documents += 1
                    found.lowest, found.highest = min(found.lowest, number), max(found.highest, number)
                    found.last = (len(found.splits), begins, stops)
                    split = 1 if number <= limit else 0
                found.splits.append(split)
                found.bytes[split] += size
                digest, size, begins, stops = fresh.copy(), 0, 0, 0
            self._progress("reading", done, total)
        return found

    def _hold_out_the_end(self, found: Reading, fraction: float) -> tuple[int, int]:
        """Return the one train document, and where its end begins: at a line, or at a word, or at a character."""
        number, begins, stops = found.last
        size = found.bytes[0] + found.bytes[1]
        least = stops - max(round(fraction * stops), 1)
        window, at = bytearray(), 0  # from three bytes before it, as a character may begin there, to half the way
        first, last = max(least - 3, 0), least + max((stops - least) // 2, 1)
        for document, piece, _ in self._numbered():
            if document == number:
                window += piece[max(first - at, 0) : max(last - at, 0)]
                at += len(piece)
        ends = [window.find(border, least - first) + 1 for border in (b"\n", b" ")]
        place = first + next((end for end in ends if end), cuts.character_border(window, least - first))
        if place <= begins:
            raise ValueError(
                f"validation: a fraction of {fraction:g} needs two documents, or one whose end can be held out, got "
                f"one of {size} bytes; name files for validation, or use validation=0"
            )
        found.bytes[0], found.bytes[1] = place, size - place
        self._progress("validation is the end of the text", size - place, size)
        return number, place

    def _numbered(self) -> Iterator[tuple[int, bytes, bool]]:
        number = 0
        for file in self._files:
            for piece, ends in pieces(file, self._settings):
                if number == len(self._splits):
                    raise ValueError(f"{file.path}: changed while it was read; run `prepare` again")
                yield number, piece, ends
                number += ends

    def __iter__(self) -> Iterator[tuple[str, bytes, bool]]:
        """Yield every piece, with its document's split and whether the document ends."""
        at = 0  # where the piece begins in the document whose end is held out
        for number, piece, ends in self._numbered():
            split = self._splits[number]
            if self._border is not None and number == self._border[0]:
                place, at = self._border[1] - at, at + len(piece)
                split = 0 if place >= len(piece) else 1
                if 0 <= place < len(piece):
                    yield "train", piece[:place], True
                    piece = piece[place:]
            if split != LEFT_OUT:
                yield self.names[split], piece, ends

    def sample(self, limit: int, folder: Path) -> Iterator[str]:
        """Return about `limit` bytes of the train text, chosen piece by piece by a hash of the piece.

        Of a text with too many words to be trained on, a half, a quarter, … of that. It is collected in a file first.
        """
        wanted, done = min(limit, self.bytes["train"]), 0
        below = wanted / self.bytes["train"] * 2.0**64
        words, sizes, levels = vocabulary.Vocabulary(), array("I"), bytearray()
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            for split, piece, _ in self:
                number = int.from_bytes(hashlib.blake2b(piece, digest_size=8, person=b"bpe sample").digest(), "little")
                if split != "train" or number >= below:
                    continue
                level = next(k for k in range(65) if number >= below / 2.0 ** (k + 1) or k == 64)
                if wanted > vocabulary.BYTES:
                    words.add(piece.decode(), level)
                file.write(piece)
                sizes.append(len(piece))
                levels.append(level)
                done += len(piece)
                self._progress("training the tokenizer", done, wanted)
            stack.pop_all()  # closed when it was read
        return _texts(file, zip(sizes, levels, strict=True), words.finish())

    def parts(self, *, cut: bool) -> Iterator[tuple[str, Part]]:
        """Yield for each split its pieces in order, about PART_BYTES at a time; without `cut` they are long ones."""
        held: dict[str, Part] = {name: [] for name in self.names}
        sizes = dict.fromkeys(self.names, 0)
        begun, before = bytearray(), b""  # of a document, what is not handed on yet, and what came before that
        for split, piece, ends in self:
            begun += piece
            if not (cut or ends or len(begun) >= WHOLE):
                continue
            *texts, last = cuts.small(bytes(begun)) if cut and begun else [bytes(begun)]
            for text, stops in [*((text, False) for text in texts), (last, ends)]:
                held[split].append((text, stops, _inside_a_word(before, text)))
                sizes[split] += len(text) + PIECE_BYTES
                before = b"" if stops else text
            begun.clear()
            if sizes[split] >= PART_BYTES:
                yield split, held[split]
                held[split], sizes[split] = [], 0
        yield from ((split, part) for split, part in held.items() if part)


def _texts(file: IO[bytes], taken: Iterable[tuple[int, int]], least: int) -> Iterator[str]:
    """Yield the pieces in a file, of which the sizes and the levels are given, from this level on."""
    with file:
        file.seek(0)
        for size, level in taken:
            piece = file.read(size)
            if level >= least:
                for part in cuts.small(piece):
                    yield from without_long_words(part.decode())


def without_long_words(text: str) -> Iterator[str]:
    """Yield a text in pieces, cut where a run of letters, digits, other characters or spaces would be too long."""
    start = 0
    for found in LONG_WORD.finditer(text):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def _inside_a_word(before: bytes, after: bytes) -> bool:
    last, first = before[-4:].decode("utf-8", "ignore")[-1:], after[:4].decode("utf-8", "ignore")[:1]
    return bool(last and first) and not last.isspace() and not first.isspace()
