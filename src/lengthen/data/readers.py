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
import io
import itertools
import json
import lzma
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from lengthen.checks import nearest
from lengthen.data.settings import Settings
from lengthen.data.sources import Source
from lengthen.data.tokenizer import optional

BLOCK = 1 << 18  # what is read at once, and about how long a piece gets
# A place to cut: a newline before a first byte that begins no white space, which visible ASCII does not, and of UTF-8
# all but those of U+0085, U+1680, U+2000 … U+3000.
CUT = re.compile(rb"\n(?=[\x21-\x7e\xc3-\xe0\xe4-\xf4])")
LAST_CUT = re.compile(rb"(?s:.+)" + CUT.pattern)

Piece = tuple[bytes, bool]  # UTF-8, and whether its document ends here


class UnreadableError(Exception):
    """A place in a file, what was expected there and what came; `pieces` makes an error of it that names the file."""


# What unpackers and pyarrow say of data that is not theirs, or that was cut short.
BROKEN = (EOFError, OSError, ValueError, NotImplementedError, lzma.LZMAError, zlib.error)


def pieces(source: Source, settings: Settings) -> Iterator[Piece]:
    """Yield the documents of one file in pieces; a document of nothing but white space is left out."""
    readers = {"text": _text, "jsonl": _json_lines, "parquet": _rows, "arrow": _rows}
    begun = False
    try:
        for piece, ends in _cut(readers[source.kind](source, settings)):
            # White space alone has no place to be cut, so a document without a visible character is a single piece.
            if begun or not ends or piece.strip():
                yield piece, ends
                begun = not ends
        return
    except UnreadableError as problem:
        place, expected, got = problem.args
    except BROKEN as problem:
        if isinstance(problem, OSError) and problem.filename is not None:  # it cannot be opened, and says so
            raise
        place, expected, got = "", f"{source.packing or source.kind} data", problem
    raise ValueError(f"{source.path}{place}: expected {expected}, got {got}")


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
        arrow = optional("pyarrow", f"{source.path}")
        return io.BufferedReader(arrow.input_stream(str(source.path), compression="zstd"))
    openers: dict[str, Any] = {"xz": lzma.open, "gz": gzip.open, "bz2": bz2.open, "": open}
    return openers[source.packing](source.path, "rb")


def _decodable(source: Source, *, lines: bool = False, allow_nul: bool = False) -> Iterator[bytes]:
    """Yield a text file in blocks or in lines, sure that they are text; an error names the byte that is not."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    unpacked = " of what it unpacks to" if source.packing else ""
    with _open(source) as file:
        blocks = file if lines else iter(lambda: file.read(BLOCK), b"")
        for block in itertools.chain(blocks, [b""]):
            begun = len(decoder.getstate()[0])  # bytes of a character that the last block did not end
            try:
                decoder.decode(block, final=not block)
                if not allow_nul and (nul := block.find(b"\0")) >= 0:
                    raise UnicodeDecodeError("utf-8", block, begun + nul, begun + nul + 1, "a NUL byte")
            except UnicodeDecodeError as problem:
                at = done - begun + problem.start
                raise UnreadableError("", "UTF-8 text", f"{problem.reason} at byte {at}{unpacked}") from None
            yield block if done else block.removeprefix(codecs.BOM_UTF8)
            done += len(block)


def _text(source: Source, settings: Settings) -> Iterator[Piece]:
    if settings.separator is not None:
        blocks = _decodable(source, allow_nul="\0" in settings.separator)
        yield from _separated(blocks, settings.separator.encode())
        return
    pattern = re.compile(settings.split_before or "")
    for block in _decodable(source, lines=settings.split_before is not None):
        if settings.split_before and pattern.search(block.removesuffix(b"\n").removesuffix(b"\r").decode()):
            yield b"", True
        yield block, False
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


def _json_lines(source: Source, settings: Settings) -> Iterator[Piece]:
    for number, line in enumerate(_decodable(source, lines=True), 1):
        if not line.strip():
            continue
        where = f", line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise UnreadableError(where, "a JSON object", problem) from None
        if not isinstance(value, dict):
            raise UnreadableError(where, "a JSON object", type(value).__name__)
        key = _known(where, settings.text_key, value)
        yield _document(value[key], where, key), True


def _rows(source: Source, settings: Settings) -> Iterator[Piece]:
    optional("pyarrow", f"{source.path}")
    with _open(source) as packed, tempfile.TemporaryFile() as unpacked:
        if source.packing:  # these files are read in any order
            shutil.copyfileobj(packed, unpacked)
            unpacked.seek(0)
        columns = _columns(source.kind, unpacked if source.packing else packed, settings.text_key)
        for row, value in enumerate(value for column in columns for value in column):
            yield _document(value.as_py(), f", row {row}", settings.text_key), True


def _columns(kind: str, file: IO[bytes], key: str) -> Iterator[Any]:
    """Yield the text of a parquet file, of an Arrow file or of an Arrow stream, as `datasets` writes it, by batches."""
    if kind == "parquet":
        table = importlib.import_module("pyarrow.parquet").ParquetFile(file)
        names, batches = table.schema_arrow.names, table.iter_batches(batch_size=256, columns=[key])
    else:
        ipc = importlib.import_module("pyarrow.ipc")
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
        names = reader.schema.names
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    _known("", key, names)
    yield from (batch.column(key) for batch in batches)


def _known(where: str, key: str, names: Iterable[str]) -> str:
    """Return the text_key if it is among the names that a line or a table has."""
    if key not in names:
        raise UnreadableError(where, f"the text_key {key!r}", f"{', '.join(map(repr, names))}{nearest(key, names)}")
    return key


def _document(text: object, where: str, key: str) -> bytes:
    if text is None:  # a missing value: left out, as empty documents are
        return b""
    if not isinstance(text, str):
        raise UnreadableError(where, f"a string under {key!r}", type(text).__name__)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise UnreadableError(where, f"text under {key!r}", f"half a surrogate pair at {problem.start}") from None
