"""From finished parts to a corpus: shards of even length, tables of documents, and last of all the index.

Every file is written under a temporary name, brought to the disk, and renamed to a name that carries its own
checksum, so that no file that an older index names is ever written over by something else. The new index.json then
takes the place of the old one in a single step; before it the old corpus is whole, after it the new one is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lengthen.data.corpus import INDEX, Corpus
from lengthen.data.worker import write_whole

OURS = re.compile(
    r"([\w-]+\.(\d{5,}|documents)\.[0-9a-f]{12}\.bin|tokenizer\.[0-9a-f]{12}\.json|sources\.[0-9a-f]{12}\.jsonl)"
    r"(\.\d+\.tmp)?|index\.json\.\d+\.tmp"
)


class Shards:
    """Writes one split's tokens to shards of a fixed number of tokens, the last one shorter."""

    def __init__(self, work: Path, out: Path, split: str, shard_tokens: int, width: int) -> None:
        self._temporary, self._out, self._split = work / f"{split}.shard", out, split
        self._limit, self._width = shard_tokens * width, width
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._written = 0
        self.shards: list[dict[str, Any]] = []

    def write(self, data: memoryview) -> None:
        """Add tokens, as bytes."""
        while data:
            if self._file is None:
                self._file, self._hash, self._written = self._temporary.open("wb"), hashlib.sha256(), 0
            now = data[: self._limit - self._written]
            self._file.write(now)
            self._hash.update(now)
            self._written += len(now)
            data = data[len(now) :]
            if self._written == self._limit:
                self.close()

    def close(self) -> None:
        """Finish the shard that is being written, if one is."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        digest = self._hash.hexdigest()
        name = f"{self._split}.{len(self.shards):05d}.{digest[:12]}.bin"
        os.replace(self._temporary, self._out / name)
        said = {"file": name, "tokens": self._written // self._width, "bytes": self._written, "sha256": digest}
        self.shards.append(said)


def publish_split(
    work: Path, out: Path, split: str, parts: Iterable[tuple[Path, dict[str, Any]]], shard_tokens: int, dtype: str
) -> Iterator[int | dict[str, Any]]:
    """Join the parts of one split; yield the bytes of each part when it is written, and last what the index says."""
    shards = Shards(work, out, split, shard_tokens, np.dtype(dtype).itemsize)
    tables: list[npt.NDArray[np.int64]] = []
    for path, entry in parts:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"{path}: altered since it was written; run `prepare` again")
        table = np.frombuffer(data, dtype="<i8", count=4 * entry["pieces"]).astype(np.int64).reshape(-1, 4)
        tables.append(table)
        shards.write(memoryview(data)[table.nbytes :])
        yield len(data)
    shards.close()
    documents = _documents(np.concatenate(tables))
    yield {
        "tokens": int(documents[:, 0].sum()),
        "documents": len(documents),
        "text_bytes": int(documents[:, 1].sum()),
        "words": int(documents[:, 2].sum()),
        "shards": shards.shards,
        "documents_file": publish_file(out, f"{split}.documents", "bin", documents.astype("<i8").tobytes()),
    }


def _documents(pieces: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Add up the pieces of each document: [documents, 3] of tokens, bytes and words."""
    ends = pieces[:, 3]
    first = np.flatnonzero(np.concatenate([np.ones(1, dtype=np.int64), ends[:-1]]))
    return np.add.reduceat(pieces[:, :3], first, axis=0)


def publish_file(out: Path, stem: str, ending: str, data: bytes) -> dict[str, Any]:
    """Write a small file under a name that carries its checksum; return what the index says of it."""
    digest = hashlib.sha256(data).hexdigest()
    name = f"{stem}.{digest[:12]}.{ending}"
    write_whole(str(out / name), data)
    return {"file": name, "bytes": len(data), "sha256": digest}


def publish_index(out: Path, index: dict[str, Any]) -> Corpus:
    """Put the index in place, which makes the corpus; then remove the files that no index names any longer."""
    sync_folder(out)
    write_whole(str(out / INDEX), (json.dumps(index, indent=1, sort_keys=True) + "\n").encode())
    sync_folder(out)
    corpus = Corpus.open(out)
    remove_strays(corpus)
    return corpus


def remove_strays(corpus: Corpus) -> None:
    """Remove files of a corpus that its index does not name: those of the corpus that it replaced."""
    named = {said["file"] for said in corpus.files()}
    for path in corpus.directory.iterdir():
        if OURS.fullmatch(path.name) and path.name not in named:
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Bring renames in a folder to the disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
