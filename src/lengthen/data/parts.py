"""Parts: about 4 MB of text, encoded; the unit of work, and of what a run that was killed need not do again.

A part is a file in the work folder, written whole or not at all, so one that is there is done. It is an .npz, whose
checksums tell whether it was altered since:

    pieces    int64 [pieces, 4]: tokens, UTF-8 bytes, words, whether the document ends here
    tokens    uint16 or uint32, little endian; each document's end token after it

`join_parts` makes shards of even length out of the parts of a split, and the table of documents.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthen.data.checksums import sha256_of
from lengthen.data.corpus import WIDTH, File, Ints, Shard, Split
from lengthen.data.cuts import BLOCK
from lengthen.data.documents import Part
from lengthen.data.tokenizer import Tokenizer
from lengthen.io import naming, whole

LONG = threading.BoundedSemaphore(2)  # of long texts, which take a quarter of a GB each, so many are encoded at once


def encode_part(path: Path, part: Part, tokenizer: Tokenizer, dtype: str) -> int:
    """Encode pieces and write them, unless that was done before; return the bytes of text."""
    size = sum(len(piece) for piece, _, _ in part)
    with suppress(FileNotFoundError, ValueError):
        _read_part(path)
        return size
    little_endian = np.dtype(dtype).newbyteorder("<")
    end = np.array([] if tokenizer.end_id is None else [tokenizer.end_id], dtype=little_endian)
    rows = np.zeros((len(part), 4), dtype=np.int64)
    arrays: list[npt.NDArray[Any]] = []
    for number, (piece, ends, inside) in enumerate(part):
        text = piece.decode()
        with LONG if len(piece) > BLOCK else nullcontext():
            ids = np.frombuffer(piece, dtype=np.uint8) if tokenizer.name == "bytes" else tokenizer.encode(text)
        arrays += [np.asarray(ids, dtype=little_endian), end if ends else end[:0]]
        rows[number] = (len(arrays[-2]) + len(arrays[-1]), len(piece), len(text.split()) - inside, ends)
    with whole(path) as partial, partial.open("wb") as file:
        np.savez(file, pieces=rows, tokens=np.concatenate(arrays))
    return size


def _read_part(path: Path) -> tuple[Ints, npt.NDArray[Any]]:
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
        work, position = paths[0].parent, 0
        count, sums, begun = 0, np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64)
        with naming(work / "documents"), (work / "documents").open("wb") as table:
            for path in paths:
                rows, tokens = _read_part(path)
                documents, begun = _documents(rows, begun)
                table.write(documents.astype("<i8").tobytes())
                count, sums = count + len(documents), sums + documents.sum(axis=0)
                while len(tokens):
                    number, start = divmod(position, shard_tokens)
                    now, shard = tokens[: shard_tokens - start], work / f"{name}.{number}.shard"
                    with naming(shard), shard.open("ab" if start else "wb") as file:
                        file.write(now.data)
                    position, tokens = position + len(now), tokens[len(now) :]
                done += path.stat().st_size
                progress("writing", done, total)
        if position == 0:
            raise ValueError(f"tokenizer: expected tokens for the text of the split {name!r}, got none")
        shards = [
            publish(work / f"{name}.{i}.shard", out, f"{name}.{i:05d}", "bin")
            for i in range(-(-position // shard_tokens))
        ]
        size, text_bytes, words = sums.tolist()
        splits[name] = Split(
            size,
            count,
            text_bytes,
            words,
            [Shard(**asdict(shard), tokens=shard.bytes // WIDTH[dtype]) for shard in shards],
            publish(work / "documents", out, f"{name}.documents", "bin"),
        )
    return splits


def _documents(rows: Ints, begun: Ints) -> tuple[Ints, Ints]:
    """Return tokens, bytes and words of the documents that end among these pieces, and those of the one begun."""
    first = np.flatnonzero(np.concatenate([[1], rows[:-1, 3]]))  # of each document's pieces
    documents = np.add.reduceat(rows[:, :3], first, axis=0)
    documents[0] += begun
    return (documents, np.zeros_like(begun)) if rows[-1, 3] else (documents[:-1], documents[-1])


def publish(path: Path, out: Path, stem: str, ending: str) -> File:
    """Move a file into the corpus, once it is on the disk, under a name that carries its checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    digest = sha256_of(path)
    said = File(f"{stem}.{digest[:12]}.{ending}", path.stat().st_size, digest)
    path.replace(out / said.file)
    return said
