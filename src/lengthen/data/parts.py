"""Parts: about 4 MB of text, encoded; the unit of work, and of what a run that was killed need not do again.

A part is a file in the work folder, written whole or not at all, so one that is there is done. It is an .npz, whose
checksums tell whether it was altered since:

    pieces    int64 [pieces, 4]: tokens, UTF-8 bytes, words, whether the document ends here
    tokens    uint16 or uint32, little endian; each document's end token after it

`join_parts` makes shards of even length out of the parts of a split, and the table of documents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthen.data.corpus import WIDTH, File, Shard, Split, sha256_of
from lengthen.data.readers import Piece
from lengthen.data.tokenizer import Tokenizer
from lengthen.io import naming, whole, write_bytes


def encode_part(path: Path, part: Sequence[Piece], tokenizer: Tokenizer, dtype: str) -> int:
    """Encode pieces and write them, unless that was done before; return the bytes of text."""
    size = sum(len(piece) for piece, _ in part)
    with suppress(FileNotFoundError, ValueError):
        _read_part(path)
        return size
    little_endian = np.dtype(dtype).newbyteorder("<")
    end = np.array([] if tokenizer.end_id is None else [tokenizer.end_id], dtype=little_endian)
    rows = np.zeros((len(part), 4), dtype=np.int64)
    arrays: list[npt.NDArray[Any]] = []
    for number, (piece, ends) in enumerate(part):
        text = piece.decode()
        ids = np.frombuffer(piece, dtype=np.uint8) if tokenizer.name == "bytes" else tokenizer.encode(text)
        arrays += [np.asarray(ids, dtype=little_endian), end if ends else end[:0]]
        rows[number] = (len(arrays[-2]) + len(arrays[-1]), len(piece), len(text.split()), ends)
    with whole(path) as partial, partial.open("wb") as file:
        np.savez(file, pieces=rows, tokens=np.concatenate(arrays))
    return size


def _read_part(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Return a part's pieces and tokens."""
    try:
        with np.load(path) as part:
            return part["pieces"], part["tokens"]
    except FileNotFoundError:
        raise
    except Exception as problem:  # of numpy and of zipfile, which have many for bytes that are not theirs
        raise ValueError(f"{path}: altered since it was written ({problem}); run `prepare` again") from None


def join_parts(
    parts: dict[str, list[Path]], out: Path, dtype: str, shard_tokens: int, progress: Callable[[str, int, int], None]
) -> dict[str, Split]:
    """Write the shards and the documents of each split into `out`."""
    splits, done, total = {}, 0, sum(path.stat().st_size for paths in parts.values() for path in paths)
    for name, paths in parts.items():
        work, tables, position = paths[0].parent, [], 0
        for path in paths:
            table, tokens = _read_part(path)
            tables.append(table)
            while len(tokens):
                number, start = divmod(position, shard_tokens)
                now, shard = tokens[: shard_tokens - start], work / f"{name}.{number}.shard"
                with naming(shard), shard.open("ab" if start else "wb") as file:
                    file.write(now.data)
                position, tokens = position + len(now), tokens[len(now) :]
            done += path.stat().st_size
            progress("writing", done, total)
        shards = [
            publish(work / f"{name}.{i}.shard", out, f"{name}.{i:05d}", "bin")
            for i in range(-(-position // shard_tokens))
        ]
        rows = np.concatenate(tables)
        first = np.flatnonzero(np.concatenate([[1], rows[:-1, 3]]))  # of each document's pieces
        documents = np.add.reduceat(rows[:, :3], first, axis=0)
        write_bytes(work / "documents", documents.astype("<i8").tobytes())
        size, text_bytes, words = (int(column) for column in documents.sum(axis=0))
        splits[name] = Split(
            size,
            len(documents),
            text_bytes,
            words,
            [Shard(**asdict(shard), tokens=shard.bytes // WIDTH[dtype]) for shard in shards],
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
