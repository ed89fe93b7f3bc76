"""Documents out of files, in pieces: a file of any size is read in a fixed amount of memory.

A document comes as pieces of at most 256 KB, bytes of UTF-8, each with whether it is the document's last. `cuts` says
where documents are cut. A line of JSON, and a row of a table, is held whole.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import itertools
import json
import lzma
import re
import shutil
import signal
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from lengthen.checks import nearest
from lengthen.data import cuts
from lengthen.data.settings import Settings
from lengthen.data.sources import Source
from lengthen.data.tokenizer import optional

MATCHED = 1 << 18  # bytes of a line that split_before sees
LONGEST_LINE = 64 << 20  # of JSON: to parse one takes several times its size
SECONDS = 10.0  # what split_before may take for 256 KB of lines, which take milliseconds

Piece = tuple[bytes, bool]  # UTF-8, and whether its document ends here


class UnreadableError(ValueError):
    """A file that is not what its name says; `reason` is the message without the file's path."""

    def __init__(self, path: object, place: str, expected: str, got: object) -> None:
        self.reason = f"{place.lstrip(', ')}{': ' if place else ''}expected {expected}, got {got}"
        super().__init__(f"{path}{place}: expected {expected}, got {got}")


class SlowPatternError(ValueError):
    """A regular expression that does not come to an end."""


class _PlaceError(Exception):
    """A place in a file, what was expected there and what came; `pieces` adds the file."""


# What unpackers and pyarrow say of data that is not theirs, or that was cut short.
BROKEN = (EOFError, OSError, ValueError, NotImplementedError, lzma.LZMAError, zlib.error)


def pieces(source: Source, settings: Settings) -> Iterator[Piece]:
    """Yield the documents of one file in pieces."""
    readers = {"text": _text, "jsonl": _json_lines, "parquet": _rows, "arrow": _rows}
    try:
        yield from _cut(readers[source.kind](source, settings))
        return
    except _PlaceError as problem:
        place, expected, got = problem.args
    except SlowPatternError:
        raise
    except BROKEN as problem:
        if isinstance(problem, OSError) and problem.errno is not None:  # of the system, not of the data
            problem.filename = problem.filename or str(source.path)
            raise
        place, expected, got = "", f"{source.packing or source.kind} data", problem
    raise UnreadableError(source.path, place, expected, got)


def _cut(documents: Iterable[Piece]) -> Iterator[Piece]:
    """Join what comes in small and cut what gets long."""
    held = bytearray()
    for part, ends in documents:
        held += part
        while len(held) > cuts.BLOCK and (place := cuts.place(held)):
            yield bytes(held[:place]), False
            del held[:place]
        if ends:
            yield bytes(held), True
            held.clear()


def _open(source: Source) -> Any:
    """Open a file to read what it unpacks to."""
    if source.packing == "zst":
        arrow = optional("pyarrow", f"{source.path}")
        return io.BufferedReader(arrow.input_stream(str(source.path), compression="zstd"))
    openers: dict[str, Any] = {"xz": lzma.open, "gz": gzip.open, "bz2": bz2.open, "": open}
    return openers[source.packing](source.path, "rb")


def _blocks(source: Source, encoding: str, *, allow_nul: bool = False) -> Iterator[bytes]:
    """Yield a text file in blocks of UTF-8, without its byte order mark; an error names the byte that is no text."""
    decoder, done = codecs.getincrementaldecoder(encoding)(), 0
    named = "UTF-8" if encoding == "utf-8" else encoding
    unpacked = " of what it unpacks to" if source.packing else ""
    mark = True  # where one may come
    with _open(source) as file:
        for block in itertools.chain(iter(lambda: file.read(cuts.BLOCK), b""), [b""]):
            state = decoder.getstate()
            begun = len(state[0])  # bytes of a character that the last block did not end
            try:
                text = decoder.decode(block, final=not block)
                if not allow_nul and "\0" in text:
                    at = _bytes_before_nul(encoding, state, block)
                    raise UnicodeDecodeError(encoding, block, begun + at, begun + at + 1, "a NUL character")
                decoded = block if encoding == "utf-8" else text.encode()
            except UnicodeDecodeError as problem:
                at = done - begun + problem.start
                raise _PlaceError("", f"{named} text", f"{problem.reason} at byte {at}{unpacked}") from None
            done += len(block)
            yield decoded.removeprefix(codecs.BOM_UTF8) if mark else decoded
            mark = mark and not decoded


def _bytes_before_nul(encoding: str, state: tuple[bytes, int], block: bytes) -> int:
    """Return how many bytes of a block come before its first NUL character."""
    decoder = codecs.getincrementaldecoder(encoding)()
    decoder.setstate(state)
    return next(at for at in range(len(block)) if "\0" in decoder.decode(block[at : at + 1]))


def _text(source: Source, settings: Settings) -> Iterator[Piece]:
    separator, encoding = settings.separator, settings.encoding or "utf-8"
    blocks = _blocks(source, encoding, allow_nul=separator is not None and "\0" in separator)
    if separator is not None:
        yield from _separated(blocks, separator.encode())
    elif settings.split_before is not None:
        yield from _split_before(source, blocks, settings.split_before)
    else:
        yield from ((block, False) for block in blocks)
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


def _split_before(source: Source, blocks: Iterable[bytes], pattern: str) -> Iterator[Piece]:
    """Begin a document at each line that matches; of a long line its first MATCHED bytes are matched."""
    begins, number, held = re.compile(pattern), 0, b""
    inside = False  # a line whose beginning was matched already
    for block in itertools.chain(blocks, [b""]):
        *lines, held = (held + block).split(b"\n")
        lines = [line + b"\n" for line in lines]
        cut = len(held) > MATCHED or (not block and bool(held))  # the line is longer, or the file ends
        lines, held = ([*lines, held], b"") if cut else (lines, held)
        found = []
        with _time_limit():
            for line in lines:
                number += not inside
                try:
                    found.append(not inside and begins.search(_matched(line)) is not None)
                except TimeoutError:
                    got = f"{pattern!r}, which takes more than {SECONDS:g} s at line {number} of {source.path}"
                    raise SlowPatternError(f"split_before: expected a pattern that ends, got {got}") from None
                inside = not line.endswith(b"\n")
        for line, first in zip(lines, found, strict=True):
            if first:
                yield b"", True
            yield line, False
    yield b"", True


def _matched(line: bytes) -> str:
    return line[:MATCHED].removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "ignore")


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeoutError after SECONDS; only the main thread, and no Windows, can interrupt a regular expression."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _json_lines(source: Source, settings: Settings) -> Iterator[Piece]:
    for number, line in enumerate(_lines(_blocks(source, "utf-8")), 1):
        if not line.strip():
            continue
        where = f", line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise _PlaceError(where, "a JSON object", problem) from None
        if not isinstance(value, dict):
            raise _PlaceError(where, "a JSON object", type(value).__name__)
        key = _known(where, settings.text_key, value)
        yield _document(value[key], where, key), True


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    held, number = bytearray(), 1
    for block in blocks:
        first, *more = block.split(b"\n")
        held += first
        for line in more:
            yield bytes(held)
            held[:] = line
            number += 1
        if len(held) > LONGEST_LINE:
            raise _PlaceError(f", line {number}", f"at most {LONGEST_LINE:,} bytes", "more")
    yield bytes(held)


def _rows(source: Source, settings: Settings) -> Iterator[Piece]:
    arrow = optional("pyarrow", f"{source.path}")
    with _open(source) as packed, tempfile.TemporaryFile() as unpacked:
        if source.packing:  # these files are read in any order
            shutil.copyfileobj(packed, unpacked)
            unpacked.seek(0)
        try:
            columns = _columns(source.kind, unpacked if source.packing else packed, settings.text_key)
            for row, value in enumerate(value for column in columns for value in column):
                yield _document(value.as_py(), f", row {row}", settings.text_key), True
        except arrow.ArrowException as problem:
            raise _PlaceError("", f"{source.kind} data", problem) from None


def _columns(kind: str, file: IO[bytes], key: str) -> Iterator[Any]:
    """Yield the text of a parquet file, of an Arrow file or of an Arrow stream, as `datasets` writes it, by batches."""
    if kind == "parquet":
        table = importlib.import_module("pyarrow.parquet").ParquetFile(file, buffer_size=cuts.BLOCK)
        names, rows = table.schema_arrow.names, max(table.metadata.num_rows, 1)
        size = sum(table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups))
        at_once = min(max((4 << 20) * rows // max(size, 1), 1), 256)  # some 4 MB
        batches = table.iter_batches(batch_size=at_once, columns=[key])
    else:
        ipc = importlib.import_module("pyarrow.ipc")
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
        names = reader.schema.names
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    _known("", key, names)
    if names.count(key) > 1:
        raise _PlaceError("", f"one column {key!r}", f"{names.count(key)} of that name")
    for batch in batches:
        column = batch.column(key)
        column.validate(full=True)  # a damaged one would end the process
        yield column


def _known(where: str, key: str, names: Iterable[str]) -> str:
    """Return the text_key if it is among the names that a line or a table has."""
    if key not in names:
        listed = ", ".join(map(repr, names))
        raise _PlaceError(where, f"the text_key {key!r}", f"{listed[:500]}{nearest(key, names)}")
    return key


def _document(text: object, where: str, key: str) -> bytes:
    if text is None:  # a missing value: left out, as empty documents are
        return b""
    if not isinstance(text, str):
        raise _PlaceError(where, f"a string under {key!r}", type(text).__name__)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise _PlaceError(where, f"text under {key!r}", f"half a surrogate pair at {problem.start}") from None
