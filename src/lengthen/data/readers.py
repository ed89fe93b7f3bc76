"""Documents out of files, in pieces: a file of any size is read in a fixed amount of memory.

A document comes as pieces of about 256 KB, bytes of UTF-8, each with whether it is the document's last. Long
documents are cut only *before a newline that no white space follows*. GPT-2's pattern, with which byte-level BPE
splits text into words, splits there too, and splits nothing differently on either side: of a run of white space
before a visible character it keeps the last one apart (`\\s+(?!\\S)|\\s+`), and that one is the newline. So the
tokens of the pieces are the tokens of the whole, and the counts of words add up. A test compares them.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from lengthen.checks import nearest
from lengthen.data.sources import Source
from lengthen.data.tokenizer import optional

BLOCK = 1 << 18  # what is read at once, and about how long a piece gets
BOM = b"\xef\xbb\xbf"
# First bytes that begin no white space: visible ASCII, and those of UTF-8 but for U+0085, U+1680, U+2000 … U+3000's.
VISIBLE = frozenset([*range(0x21, 0x7F), *range(0xC3, 0xE1), *range(0xE4, 0xF5)])

Piece = tuple[bytes, bool]  # UTF-8, and whether its document ends here


@dataclass(frozen=True)
class Reading:
    """How documents are told apart inside a file."""

    text_key: str = "text"
    separator: bytes | None = None
    split_before: re.Pattern[str] | None = None


def pieces(source: Source, reading: Reading) -> Iterator[Piece]:
    """Yield the documents of one file in pieces; a document of nothing but white space is left out."""
    readers = {"text": _text, "jsonl": _json_lines, "parquet": _parquet, "arrow": _arrow}
    opened = False
    with _naming(source):
        for piece, ends in _cut(readers[source.kind](source, reading)):
            # White space alone has no place to be cut, so a document without a visible character is a single piece.
            if ends and not opened and not piece.strip():
                continue
            yield piece, ends
            opened = not ends


@contextmanager
def _naming(source: Source) -> Iterator[None]:
    """Name the file in the errors of packages that unpack it."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as problem:
        if isinstance(problem, OSError) and problem.filename is not None:  # it cannot be opened, and says so
            raise
        raise ValueError(f"{source.path}: expected {source.packing or 'readable'} data, got {problem}") from None


def _cut(documents: Iterable[Piece]) -> Iterator[Piece]:
    """Join what comes in small and cut what gets long, at places where cutting changes no token."""
    held = bytearray()
    searched = 0  # no place to cut before this one
    for part, ends in documents:
        held += part
        while len(held) > BLOCK:
            place = _place(held, searched)
            if place == 0:
                searched = len(held) - 1
                break
            yield bytes(held[:place]), False
            del held[:place]
            searched = 1
        if ends:
            yield bytes(held), True
            held.clear()
            searched = 0


def _place(held: bytearray, searched: int) -> int:
    """Return the last place up to BLOCK to cut at, or else the first one after it, or 0 if there is none."""
    place = held.rfind(b"\n", max(searched, 1), BLOCK)
    while place > 0:
        if held[place + 1] in VISIBLE:
            return place
        place = held.rfind(b"\n", max(searched, 1), place)
    place = held.find(b"\n", max(searched, BLOCK), len(held) - 1)
    while place > 0:
        if held[place + 1] in VISIBLE:
            return place
        place = held.find(b"\n", place + 1, len(held) - 1)
    return 0


def _unpacked(source: Source) -> Iterator[bytes]:
    """Yield a file's bytes, unpacked, in blocks of BLOCK bytes but for the last."""
    if source.packing == "zst":
        yield from _even(_unpacked_zst(source))
        return
    openers: dict[str, Any] = {"xz": lzma.open, "gz": gzip.open, "bz2": bz2.open, "": open}
    with openers[source.packing](source.path, "rb") as file:
        while block := file.read(BLOCK):
            yield block


def _unpacked_zst(source: Source) -> Iterator[bytes]:
    package = optional("zstandard", f"{source.path}")
    with source.path.open("rb") as file:
        frame = None
        while packed := file.read(BLOCK):
            while packed:
                frame = frame or package.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(packed)
                except package.ZstdError as problem:
                    raise ValueError(f"{source.path}: expected zst data, got {problem}") from None
                packed = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
        if frame is not None:
            raise EOFError("a file that ends in the middle of a frame")


def _even(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Make blocks of BLOCK bytes: what a package hands out at once must not decide where documents are cut."""
    held = bytearray()
    for block in blocks:
        held += block
        while len(held) >= BLOCK:
            yield bytes(held[:BLOCK])
            del held[:BLOCK]
    if held:
        yield bytes(held)


def _checked(source: Source, allow_nul: bool) -> Iterator[bytes]:
    """Yield a text file's bytes, sure that they are text; an error names the file and the byte that is not."""
    done, tail = 0, b""
    for number, block in enumerate(_unpacked(source)):
        at = -1 if allow_nul else block.find(b"\0")
        data = tail + block
        try:
            data.decode("utf-8")
            tail = b""
        except UnicodeDecodeError as problem:
            tail = data[problem.start :]
            if problem.reason != "unexpected end of data":  # which is a character that the next block goes on with
                raise _not_text(source, done - len(data) + len(block) + problem.start, problem.reason) from None
        if at >= 0:
            raise _not_text(source, done + at, "a NUL byte")
        done += len(block)
        yield block.removeprefix(BOM) if number == 0 else block
    if tail:
        raise _not_text(source, done - len(tail), "unexpected end of data")


def _not_text(source: Source, offset: int, reason: str) -> ValueError:
    unpacked = " of what it unpacks to" if source.packing else ""
    return ValueError(f"{source.path}: expected UTF-8 text, got {reason} at byte {offset}{unpacked}")


def _text(source: Source, reading: Reading) -> Iterator[Piece]:
    blocks = _checked(source, reading.separator is not None and b"\0" in reading.separator)
    if reading.split_before is not None:
        return _split_before(blocks, reading.split_before)
    return _separated(blocks, reading.separator)


def _separated(blocks: Iterable[bytes], separator: bytes | None) -> Iterator[Piece]:
    held = b""
    for block in blocks:
        if separator is None:
            yield block, False
            continue
        *whole, held = (held + block).split(separator)
        for document in whole:
            yield document, True
        # Keep what may be the beginning of a separator; hand on the rest of the document.
        kept = len(held) - len(separator) + 1
        if kept > 0:
            yield held[:kept], False
            held = held[kept:]
    yield held, True


def _split_before(blocks: Iterable[bytes], pattern: re.Pattern[str]) -> Iterator[Piece]:
    for line in _lines(blocks):
        if pattern.search(line.rstrip(b"\r\n").decode("utf-8")):
            yield b"", True
        yield line, False
    yield b"", True


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines with their newline, and no other: not at U+2028 or form feeds."""
    held: list[bytes] = []
    for block in blocks:
        first, *rest = block.split(b"\n")
        for line in rest:
            held.append(first)
            yield b"".join(held) + b"\n"
            held, first = [], line
        held.append(first)
    if last := b"".join(held):
        yield last


def _json_lines(source: Source, reading: Reading) -> Iterator[Piece]:
    for number, line in enumerate(_lines(_checked(source, allow_nul=False)), 1):
        if not line.strip():
            continue
        where = f"{source.path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as problem:
            raise ValueError(f"{where}: expected a JSON object, got {problem}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
        if reading.text_key not in value:
            raise ValueError(_no_key(where, reading.text_key, value))
        yield _document(value[reading.text_key], where, reading.text_key), True


def _no_key(where: str, key: str, known: Iterable[str]) -> str:
    listed = list(known)
    return f"{where}: text_key: expected {key!r}, got {', '.join(map(repr, listed))}{nearest(key, listed)}"


def _document(text: object, where: str, key: str) -> bytes:
    if text is None:  # a missing value: left out, as empty documents are
        return b""
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected a string under {key!r}, got {type(text).__name__}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise ValueError(
            f"{where}: expected text under {key!r}, got half a surrogate pair at {problem.start}"
        ) from None


@contextmanager
def _seekable(source: Source) -> Iterator[IO[bytes]]:
    """Open a file that must be read in any order: one that is packed is unpacked to a temporary file."""
    if not source.packing:
        with source.path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as unpacked:
        for block in _unpacked(source):
            unpacked.write(block)
        unpacked.seek(0)
        yield unpacked


def _parquet(source: Source, reading: Reading) -> Iterator[Piece]:
    arrow = optional("pyarrow", f"{source.path}")
    parquet = optional("pyarrow.parquet", f"{source.path}")
    with _seekable(source) as file, _arrow_errors(source, arrow, "a parquet file"):
        table = parquet.ParquetFile(file)
        if reading.text_key not in table.schema_arrow.names:
            raise ValueError(_no_key(str(source.path), reading.text_key, table.schema_arrow.names))
        yield from _rows(source, reading, table.iter_batches(batch_size=256, columns=[reading.text_key]))


def _arrow(source: Source, reading: Reading) -> Iterator[Piece]:
    arrow = optional("pyarrow", f"{source.path}")
    ipc = optional("pyarrow.ipc", f"{source.path}")
    with _seekable(source) as file, _arrow_errors(source, arrow, "an Arrow file"):
        is_file = file.read(6) == b"ARROW1"  # `datasets` writes the stream format, others the file format
        file.seek(0)
        reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
        if reading.text_key not in reader.schema.names:
            raise ValueError(_no_key(str(source.path), reading.text_key, reader.schema.names))
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        yield from _rows(source, reading, batches)


@contextmanager
def _arrow_errors(source: Source, arrow: Any, expected: str) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError) as problem:
        raise ValueError(f"{source.path}: expected {expected}, got {problem}") from None


def _rows(source: Source, reading: Reading, batches: Iterable[Any]) -> Iterator[Piece]:
    row = 0
    for batch in batches:
        for value in batch.column(reading.text_key):
            yield _document(value.as_py(), f"{source.path}, row {row}", reading.text_key), True
            row += 1
