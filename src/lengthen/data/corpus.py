"""A prepared corpus on disk: its index, its token shards, its documents, and the checks that they are whole.

A corpus is a folder. `index.json` names every other file with its size and sha256, so nothing is found by guessing;
`docs/data.md` lists them. Names carry the first digits of the file's sha256: a corpus that is made anew never writes
over a file that the old index still names, and the new index.json takes the old one's place in one step.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

try:
    import numpy as np
    import numpy.typing as npt
except ImportError as problem:  # the base install is torch alone
    raise ImportError(f"lengthen.data needs numpy: pip install numpy ({problem})") from None

from lengthen.checks import nearest
from lengthen.data.checksums import Progress, wrong_files
from lengthen.data.tokenizer import Tokenizer
from lengthen.io import build, read_json, read_lines

FORMAT, VERSION = "lengthen tokens", 1
INDEX = "index.json"
WORK = ".prepare"  # where an unfinished `prepare` keeps its parts
WIDTH = {"uint16": 2, "uint32": 4}  # bytes

Dtype = Literal["uint16", "uint32"]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class File:
    """A file of the corpus."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard(File):
    """A file of tokens."""

    tokens: int


@dataclass(frozen=True)
class SourceList(File):
    """JSON lines: name, split, bytes and sha256 of each source file."""

    files: int


@dataclass(frozen=True)
class TokenizerFile:
    """What the tokens mean: "bytes", which have no file, "bpe" or "json"."""

    kind: str
    file: str | None = None
    bytes: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Split:
    """The shards of one split, and its table of documents: tokens, UTF-8 bytes and words of each, int64."""

    tokens: int
    documents: int
    text_bytes: int
    words: int
    shards: list[Shard]
    documents_file: File


@dataclass(frozen=True)
class Index:
    """All of index.json."""

    format: str
    version: int
    dtype: Dtype
    vocab_size: int
    end_id: int | None
    mask_id: int | None
    tokenizer: TokenizerFile
    splits: dict[str, Split]
    sources: SourceList
    settings: dict[str, Any]  # of `prepare`; what decides the bytes of a corpus beside its sources

    def __post_init__(self) -> None:
        width = WIDTH[fitting_dtype(self.vocab_size, self.dtype, INDEX)]
        for key, value in (("end_id", self.end_id), ("mask_id", self.mask_id)):
            if value is not None and not 0 <= value < self.vocab_size:
                raise ValueError(f"{key}: expected less than vocab_size {self.vocab_size}, got {value}")
        if (self.tokenizer.kind == "bytes") != (self.tokenizer.file is None):
            raise ValueError(f"tokenizer: expected a file, but none for 'bytes', got {self.tokenizer}")
        for name, split in self.splits.items():
            if min(split.tokens, split.documents, *(shard.tokens for shard in split.shards)) < 1:
                raise ValueError(f"splits.{name}: expected at least one token in each shard, and one document")
            if sum(shard.tokens for shard in split.shards) != split.tokens:
                raise ValueError(f"splits.{name}: the shards do not add up to {split.tokens} tokens")
            sizes = [(shard, shard.tokens * width) for shard in split.shards]
            for file, size in [*sizes, (split.documents_file, split.documents * 3 * 8)]:
                if file.bytes != size:
                    raise ValueError(f"splits.{name}: expected {size} bytes for {file.file}, got {file.bytes}")
        names = [file.file for file in self.files()]
        for named in names:
            if Path(named).name != named or "\0" in named or names.count(named) > 1:
                raise ValueError(f"file: expected a name in this folder, another for each, got {named!r}")

    def files(self) -> list[File]:
        """Return every file that the index names."""
        files = [file for split in self.splits.values() for file in (*split.shards, split.documents_file)]
        if self.tokenizer.file is not None:
            files.append(File(self.tokenizer.file, self.tokenizer.bytes, self.tokenizer.sha256))
        return [*files, self.sources]

    @classmethod
    def read(cls, directory: Path) -> Index:
        """Read and check index.json: that it is one of ours, of this version, and of the right shape."""
        path = directory / INDEX
        if not path.is_file():
            begun = "; one was interrupted here: run it again and it resumes" if (directory / WORK).is_dir() else ""
            raise FileNotFoundError(f"{path}: not there; expected a folder that `lengthen prepare` finished{begun}")
        table = read_json(path, dict)
        for key, wanted in (("format", FORMAT), ("version", VERSION)):  # first: another version may have other keys
            if table.get(key) != wanted:
                raise ValueError(f"{path}: expected {key} {wanted!r}, got {table.get(key)!r}; prepare the corpus again")
        return build(cls, table, str(path))


def fitting_dtype(vocab_size: int, dtype: Dtype | None, where: str) -> Dtype:
    """Return the dtype for this many ids: the one asked for if they fit, by default the smallest."""
    if dtype == "uint16" and vocab_size > 1 << 16:
        many = f"the vocabulary of {where} has {vocab_size}"
        raise ValueError(f"dtype: uint16 tells 65536 ids apart, but {many}; expected 'uint32'")
    return dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")


class Tokens:
    """The tokens of one split: all its documents joined, memory-mapped, read by position."""

    def __init__(self, directory: Path, name: str, split: Split, dtype: str) -> None:
        self.directory, self.name, self._split = directory, name, split
        little_endian = np.dtype(dtype).newbyteorder("<")
        self._shards = [np.memmap(directory / shard.file, dtype=little_endian, mode="r") for shard in split.shards]
        self._starts = np.cumsum([0, *(shard.tokens for shard in split.shards)], dtype=np.int64)
        self._table = np.memmap(directory / split.documents_file.file, dtype="<i8", mode="r").reshape(-1, 3)
        self.bytes = self._table[:, 1]  # UTF-8, of each document
        self.words = self._table[:, 2]  # of each document: runs of characters between white space

    def __len__(self) -> int:
        return self._split.tokens

    def __repr__(self) -> str:
        return f"Tokens({self.name!r}, {len(self):,} tokens, {self._split.documents:,} documents)"

    def read(self, start: int, stop: int) -> Ints:
        """Return tokens start … stop − 1 as int64, copied, across the borders of shards where need be."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"start, stop: expected 0 ≤ start ≤ stop ≤ {len(self)}, got {start} and {stop}")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        shards = zip(self._shards[first:last], self._starts[first:last].tolist(), strict=True)
        taken = [shard[max(start - begin, 0) : stop - begin] for shard, begin in shards]
        return np.concatenate([np.zeros(0, dtype=np.int64), *taken], dtype=np.int64)

    def document_starts(self, start: int, stop: int) -> Ints:
        """Return for tokens start … stop − 1 where each one's document starts, from `start` on; 0: there or before."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"start, stop: expected 0 ≤ start ≤ stop ≤ {len(self)}, got {start} and {stop}")
        low, high = np.searchsorted(self.documents, [start, stop], side="left")
        inside = self.documents[low:high] - start
        starts = np.zeros(stop - start, dtype=np.int64)
        starts[inside] = inside
        return np.maximum.accumulate(starts)

    @cached_property
    def documents(self) -> Ints:
        """Where each document starts, and last where the final one ends: [documents + 1] token offsets."""
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._table[:, 0])])
        if starts[-1] != len(self) or (np.diff(starts) < 0).any():
            raise ValueError(
                f"{self.directory / self._split.documents_file.file}: expected documents of {len(self)} tokens in all, "
                f"got {starts[-1]}; the file was altered: prepare the corpus again"
            )
        return starts


class Corpus:
    """A prepared corpus: `corpus["train"]` and `corpus["validation"]` are its tokens. Made by `prepare` or `open`."""

    def __init__(self, directory: Path, index: Index) -> None:
        self.directory, self.index = directory, index
        self.vocab_size, self.end_id, self.mask_id = index.vocab_size, index.end_id, index.mask_id
        self._tokens: dict[str, Tokens] = {}

    @classmethod
    def open(cls, directory: str | Path, verify: bool = False, progress: Progress | None = None) -> Corpus:
        """Open a folder that `prepare` finished, and check that its files are whole.

        Their sizes are compared always, their checksums once and again when they change, or all with `verify`.
        """
        corpus = cls(Path(directory), Index.read(Path(directory)))
        corpus.verify(anew=verify, progress=progress)
        return corpus

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits, "train" first."""
        return tuple(sorted(self.index.splits, key=lambda name: (name != "train", name != "validation", name)))

    def __getitem__(self, split: str) -> Tokens:
        if split not in self.index.splits:
            listed = ", ".join(map(repr, self.splits))
            hint = "; `prepare` makes it with validation=FRACTION or [FILES]" if split == "validation" else ""
            hint = nearest(str(split), self.splits) + hint
            raise ValueError(f"split: {self.directory} has {listed}, got {split!r}{hint}")
        if split not in self._tokens:
            self._tokens[split] = Tokens(self.directory, split, self.index.splits[split], self.index.dtype)
        return self._tokens[split]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {self.index.splits[name].tokens:,}" for name in self.splits)
        return f"Corpus({str(self.directory)!r}, tokens: {sizes})"

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen digits that change when the tokens, the documents or the tokenizer do."""
        index, splits = self.index, self.index.splits.items()
        said: dict[str, Any] = {key: getattr(index, key) for key in ("dtype", "vocab_size", "end_id", "mask_id")}
        said["tokenizer"] = index.tokenizer.sha256 or None
        said["files"] = {name: [file.sha256 for file in (*one.shards, one.documents_file)] for name, one in splits}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def tokenizer_name(self) -> str:
        """What tells this tokenizer from others: the sha256 of its file, or "bytes"."""
        return self.index.tokenizer.sha256 or self.index.tokenizer.kind

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the tokens were made with."""
        said = self.index.tokenizer
        tokenizer = Tokenizer(None if said.file is None else self.directory / said.file, said.kind)
        tokenizer.end_id, tokenizer.mask_id = self.end_id, self.mask_id
        return tokenizer

    @cached_property
    def skipped(self) -> list[tuple[str, str]]:
        """The names of sources that could not be read, and why; `prepare` with `skip_bad` left them out."""
        lines = read_lines(self.directory / self.index.sources.file, dict)
        return [(str(line.get("name")), str(line["skipped"])) for line in lines if "skipped" in line]

    def verify(self, anew: bool = True, progress: Progress | None = None) -> None:
        """Compare the size and the sha256 of every file with the index; an error names the first that differs."""
        for said in self.index.files():
            path = self.directory / said.file
            if not path.is_file():
                raise FileNotFoundError(f"{path}: named by {INDEX} but not there; prepare the corpus again")
            size = path.stat().st_size
            if size != said.bytes:
                how = "truncated" if size < said.bytes else "altered"
                expected = f"expected {said.bytes} bytes, got {size}"
                raise ValueError(f"{path}: {expected}; the file was {how}: prepare the corpus again")
        sums = {said.file: said.sha256 for said in self.index.files()}
        for name in wrong_files(self.directory, sums, anew=anew, progress=progress):
            path = self.directory / name
            raise ValueError(f"{path}: its sha256 is not that of {INDEX}; the file was altered: prepare it again")
