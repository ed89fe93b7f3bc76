"""Documents out of files, in pieces: a file of any size is read in a fixed amount of memory.

A document comes as pieces of about 256 KB, bytes of UTF-8, each with whether it is the document's last. Long
documents are cut only *before a newline that no white space follows*. GPT-2's pattern, with which byte-level BPE
splits text into words, splits there too, and splits nothing differently on either side: of a run of white space
before a visible character it keeps the last one apart (`\\s+(?!\\S)|\\s+`), and that one is the newline. So the
tokens of the pieces are the tokens of the whole, and the counts of words add up. A test compares them.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import json
import lzma
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from lengthen.checks import describe, nearest
from lengthen.data.sources import Source
from lengthen.data.tokenizer import optional

BLOCK = 1 << 18  # what is read at once, and about how long a piece gets
# A place to cut: a newline before a first byte that begins no white space, which visible ASCII does not, and of UTF-8
# all but those of U+0085, U+1680, U+2000 … U+3000.
CUT = re.compile(rb"\n(?=[\x21-\x7e\xc3-\xe0\xe4-\xf4])")
LAST_CUT = re.compile(rb"(?s:.+)" + CUT.pattern)

Piece = tuple[bytes, bool]  # UTF-8, and whether its document ends here


@dataclass(frozen=True)
class Reading:
    """How documents are told apart inside a file."""

    text_key: str = "text"
    separator: str | None = None
    split_before: str | None = None

    def __post_init__(self) -> None:
        for key in ("text_key", "separator", "split_before"):
            value = getattr(self, key)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{key}: expected a string, got {describe(value)}")
            if value == "":
                raise ValueError(f"{key}: expected a string of at least one character, got {value!r}")
        if self.separator is not None and self.split_before is not None:
            both = f"{self.separator!r} and {self.split_before!r}"
            raise ValueError(f"separator, split_before: expected one of them, got {both}")
        try:
            re.compile(self.split_before or "")
        except re.error as problem:
            raise ValueError(
                f"split_before: expected a regular expression, got {self.split_before!r}: {problem}"
            ) from None


def pieces(source: Source, reading: Reading) -> Iterator[Piece]:
    """Yield the documents of one file in pieces; a document of nothing but white space is left out."""
    readers = {"text": _text, "jsonl": _json_lines, "parquet": _rows, "arrow": _rows}
    begun = False
    try:
        for piece, ends in _cut(readers[source.kind](source, reading)):
            # White space alone has no place to be cut, so a document without a visible character is a single piece.
            if begun or not ends or piece.strip():
                yield piece, ends
                begun = not ends
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as problem:
        if isinstance(problem, OSError) and problem.filename is not None:  # it cannot be opened, and says so
            raise
        raise ValueError(f"{source.path}: expected {source.packing or source.kind} data, got {problem}") from None


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
            searched = 0
        if ends:
            yield bytes(held), True
            held.clear()
            searched = 0


def _place(held: bytearray, searched: int) -> int:
    """Return the last place up to BLOCK to cut at, or else the first one after it, or 0 if there is none."""
    found = None if searched else LAST_CUT.match(held, 0, BLOCK + 1)
    found = found or CUT.search(held, max(searched, BLOCK))
    return found.end() - 1 if found else 0


def _open(source: Source) -> Any:
    """Open a file to read what it unpacks to."""
    if source.packing == "zst":
        return optional("pyarrow", f"{source.path}").input_stream(str(source.path), compression="zstd")
    openers: dict[str, Any] = {"xz": lzma.open, "gz": gzip.open, "bz2": bz2.open, "": open}
    return openers[source.packing](source.path, "rb")


def _blocks(source: Source, allow_nul: bool = False) -> Iterator[bytes]:
    """Yield a text file's bytes, sure that they are text; an error names the file and the byte that is not."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    unpacked = " of what it unpacks to" if source.packing else ""
    with _open(source) as file:
        while True:
            block = file.read(BLOCK)
            begun = len(decoder.getstate()[0])  # bytes of a character that the last block did not end
            try:
                decoder.decode(block, final=not block)
                if not allow_nul and (nul := block.find(b"\0")) >= 0:
                    raise UnicodeDecodeError("utf-8", block, begun + nul, begun + nul + 1, "a NUL byte")
            except UnicodeDecodeError as problem:
                at = f"byte {done - begun + problem.start}{unpacked}"
                raise ValueError(f"{source.path}: expected UTF-8 text, got {problem.reason} at {at}") from None
            if not block:
                return
            yield block if done else block.removeprefix(codecs.BOM_UTF8)
            done += len(block)


def _text(source: Source, reading: Reading) -> Iterator[Piece]:
    blocks = _blocks(source, allow_nul="\0" in (reading.separator or ""))
    if reading.separator is not None:
        yield from _separated(blocks, reading.separator.encode())
    elif reading.split_before is None:
        yield from ((block, False) for block in blocks)
        yield b"", True
    else:
        pattern = re.compile(reading.split_before)
        for number, line in enumerate(_lines(blocks)):
            if number:
                yield b"\n", False
            if pattern.search(line.removesuffix(b"\r").decode()):
                yield b"", True
            yield line, False
        yield b"", True


def _separated(blocks: Iterable[bytes], separator: bytes) -> Iterator[Piece]:
    held = b""
    for block in blocks:
        *whole, held = (held + block).split(separator)
        yield from ((document, True) for document in whole)
        # Keep what may be the beginning of a separator; hand on the rest of the document.
        kept = max(len(held) - len(separator) + 1, 0)
        yield held[:kept], False
        held = held[kept:]
    yield held, True


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines without their newline, and split at no other: not at U+2028 or form feeds."""
    held: list[bytes] = []
    for piece, ends in _separated(blocks, b"\n"):
        held.append(piece)
        if ends:
            yield b"".join(held)
            held = []


def _json_lines(source: Source, reading: Reading) -> Iterator[Piece]:
    for number, line in enumerate(_lines(_blocks(source)), 1):
        if not line.strip():
            continue
        where = f"{source.path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{where}: expected a JSON object, got {problem}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
        _check_key(where, reading.text_key, value)
        yield _document(value[reading.text_key], where, reading.text_key), True


def _check_key(where: str, key: str, known: Iterable[str]) -> None:
    if key not in known:
        listed = ", ".join(map(repr, known))
        raise ValueError(f"{where}: text_key: expected {key!r}, got {listed}{nearest(key, known)}")


def _document(text: object, where: str, key: str) -> bytes:
    if text is None:  # a missing value: left out, as empty documents are
        return b""
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected a string under {key!r}, got {type(text).__name__}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as problem:
        at = problem.start
        raise ValueError(f"{where}: expected text under {key!r}, got half a surrogate pair at {at}") from None


def _rows(source: Source, reading: Reading) -> Iterator[Piece]:
    arrow, key, row = optional("pyarrow", f"{source.path}"), reading.text_key, 0
    with _open(source) as packed, tempfile.TemporaryFile() as unpacked:
        if source.packing:  # these files are read in any order
            shutil.copyfileobj(packed, unpacked)
            unpacked.seek(0)
        try:
            for batch in _batches(source, unpacked if source.packing else packed, key):
                for value in batch.column(key):
                    yield _document(value.as_py(), f"{source.path}, row {row}", key), True
                    row += 1
        except arrow.ArrowException as problem:
            raise ValueError(f"{source.path}: expected {source.kind} data, got {problem}") from None


def _batches(source: Source, file: IO[bytes], key: str) -> Iterator[Any]:
    """Yield the record batches of a parquet file, of an Arrow file, or of an Arrow stream, as `datasets` writes it."""
    if source.kind == "parquet":
        table = importlib.import_module("pyarrow.parquet").ParquetFile(file)
        _check_key(f"{source.path}", key, table.schema_arrow.names)
        yield from table.iter_batches(batch_size=256, columns=[key])
        return
    ipc = importlib.import_module("pyarrow.ipc")
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
    _check_key(f"{source.path}", key, reader.schema.names)
    yield from (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
