"""Parts: about 4 MB of text, encoded; the unit of work, and of what a run that was killed need not do again.

A part is a file in the work folder, written whole or not at all, so one that is there is done:

    int64                   the number of pieces
    int64 [pieces, 4]       tokens, UTF-8 bytes, words, whether the document ends here
    uint16 or uint32        the tokens; each document's end token after it
    32 bytes                the sha256 of all that

All little endian. `join_parts` makes shards of even length out of the parts of a split, and the table of documents.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthen.data.corpus import WIDTH, File, Shard, Split, sha256_of
from lengthen.data.readers import Piece
from lengthen.data.tokenizer import Tokenizer
from lengthen.io import write_bytes

DIGEST = 32


def encode_part(path: Path, part: Sequence[Piece], tokenizer: Tokenizer, dtype: str) -> int:
    """Encode pieces and write them, unless that was done before; return the bytes of text."""
    size = sum(len(piece) for piece, _ in part)
    if _is_whole(path):
        return size
    little_endian = np.dtype(dtype).newbyteorder("<")
    end = np.array([] if tokenizer.end_id is None else [tokenizer.end_id], dtype=little_endian)
    rows = np.zeros((len(part), 4), dtype="<i8")
    arrays: list[npt.NDArray[Any]] = []
    for number, (piece, ends) in enumerate(part):
        text = piece.decode()
        ids = np.frombuffer(piece, dtype=np.uint8) if tokenizer.name == "bytes" else tokenizer.encode(text)
        arrays += [np.asarray(ids, dtype=little_endian), end if ends else end[:0]]
        rows[number] = (len(arrays[-2]) + len(arrays[-1]), len(piece), len(text.split()), ends)
    data = np.array([len(rows)], dtype="<i8").tobytes() + rows.tobytes() + np.concatenate(arrays).tobytes()
    write_bytes(path, data + hashlib.sha256(data).digest())
    return size


def _read_part(path: Path) -> tuple[npt.NDArray[np.int64], memoryview]:
    """Return a part's table and, as bytes, its tokens."""
    data = memoryview(path.read_bytes())
    if hashlib.sha256(data[:-DIGEST]).digest() != data[-DIGEST:]:
        raise ValueError(f"{path}: altered since it was written; run `prepare` again")
    pieces = int(np.frombuffer(data[:8], dtype="<i8")[0])
    table = np.frombuffer(data[8:], dtype="<i8", count=4 * pieces).astype(np.int64).reshape(-1, 4)
    return table, data[8 + table.nbytes : -DIGEST]


def _is_whole(path: Path) -> bool:
    try:
        _read_part(path)
    except (FileNotFoundError, ValueError):
        return False
    return True


def join_parts(
    parts: dict[str, list[Path]], out: Path, dtype: str, shard_tokens: int, progress: Callable[[str, int, int], None]
) -> dict[str, Split]:
    """Write the shards and the documents of each split into `out`."""
    splits, done, total = {}, 0, sum(path.stat().st_size for paths in parts.values() for path in paths)
    for name, paths in parts.items():
        work, limit = paths[0].parent, shard_tokens * WIDTH[dtype]
        tables, position = [], 0
        for path in paths:
            table, data = _read_part(path)
            tables.append(table)
            while data:
                number, start = divmod(position, limit)
                now = data[: limit - start]
                with (work / f"{name}.{number}.shard").open("ab" if start else "wb") as shard:
                    shard.write(now)
                position, data = position + len(now), data[len(now) :]
            done += path.stat().st_size
            progress("writing", done, total)
        files = [
            publish(work / f"{name}.{i}.shard", out, f"{name}.{i:05d}", "bin") for i in range(-(-position // limit))
        ]
        rows = np.concatenate(tables)
        first = np.flatnonzero(np.concatenate([[1], rows[:-1, 3]]))  # of each document's pieces
        documents = np.add.reduceat(rows[:, :3], first, axis=0)
        (work / "documents").write_bytes(documents.astype("<i8").tobytes())
        tokens, text_bytes, words = (int(total) for total in documents.sum(axis=0))
        splits[name] = Split(
            tokens,
            len(documents),
            text_bytes,
            words,
            [Shard(file.file, file.bytes, file.sha256, file.bytes // WIDTH[dtype]) for file in files],
            publish(work / "documents", out, f"{name}.documents", "bin"),
        )
    return splits


def publish(path: Path, out: Path, stem: str, ending: str) -> File:
    """Move a file into the corpus, once it is on the disk, under a name that carries its checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    digest = sha256_of(path)
    said = File(f"{stem}.{digest[:12]}.{ending}", path.stat().st_size, digest)
    path.replace(out / said.file)
    return said
