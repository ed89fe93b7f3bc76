"""A prepared corpus on disk: its index, its token shards, its documents, and the checks that they are whole.

A corpus is a folder. `index.json` names every other file with its size and sha256, so nothing is found by guessing:

    index.json                          the format, the vocabulary, the splits and their files
    train.00000.<sha>.bin               tokens, uint16 or uint32, little endian, nothing else
    train.documents.<sha>.bin           a row a document: tokens, UTF-8 bytes, words; int64, little endian
    tokenizer.<sha>.json                what the tokens mean (not for bytes, which need no file)
    sources.<sha>.jsonl                 what it was made from

Names carry the first digits of the file's sha256: a corpus that is made anew never writes over a file that the old
index still names, and the new index.json takes the old one's place in one step.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

try:
    import numpy as np
    import numpy.typing as npt
except ImportError as problem:  # the base install is torch alone
    raise ImportError(f'lengthen.data needs numpy: pip install "lengthen[data]" ({problem})') from None

from lengthen.checks import nearest
from lengthen.data.tokenizer import Tokenizer, open_tokenizer

FORMAT = "lengthen tokens"
VERSION = 1
INDEX = "index.json"
WORK = ".prepare"  # where an unfinished `prepare` keeps its parts
LARGEST = {"uint16": 1 << 16, "uint32": 1 << 32}  # how many ids each dtype can tell apart
DOCUMENT_COLUMNS = ("tokens", "bytes", "words")

Ints = npt.NDArray[np.int64]


class Tokens:
    """The tokens of one split: all its documents joined, memory-mapped, read by position."""

    def __init__(self, directory: Path, name: str, split: dict[str, Any], dtype: str) -> None:
        self.name = name
        self.directory = directory
        self._split = split
        self._little_endian = np.dtype(dtype).newbyteorder("<")
        sizes = [int(shard["tokens"]) for shard in split["shards"]]
        self._ends = np.cumsum(np.array(sizes, dtype=np.int64)) if sizes else np.zeros(0, dtype=np.int64)
        self._shards = [self._map(shard["file"]) for shard in split["shards"]]

    def _map(self, file: str) -> npt.NDArray[Any]:
        return np.memmap(self.directory / file, dtype=self._little_endian, mode="r")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __repr__(self) -> str:
        return f"Tokens({self.name!r}, {len(self):,} tokens, {len(self.bytes):,} documents)"

    def read(self, start: int, stop: int) -> Ints:
        """Return tokens start … stop − 1 as int64, copied, across the borders of shards where need be."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"start, stop: expected 0 ≤ start ≤ stop ≤ {len(self)}, got {start} and {stop}")
        first = int(np.searchsorted(self._ends, start, side="right"))
        out = np.empty(stop - start, dtype=np.int64)
        done = 0
        while done < len(out):
            shard = self._shards[first]
            before = start + done - (int(self._ends[first]) - len(shard))
            taken = shard[before : before + len(out) - done]
            out[done : done + len(taken)] = taken
            done += len(taken)
            first += 1
        return out

    @cached_property
    def _table(self) -> Ints:
        path = self.directory / self._split["documents_file"]["file"]
        table = np.fromfile(path, dtype="<i8").astype(np.int64).reshape(-1, len(DOCUMENT_COLUMNS))
        if len(table) != self._split["documents"] or int(table[:, 0].sum()) != len(self) or (table < 0).any():
            raise ValueError(
                f"{path}: expected {self._split['documents']} documents with {len(self)} tokens in all, got "
                f"{len(table)} with {int(table[:, 0].sum())}; the file was altered: prepare the corpus again"
            )
        return table

    @cached_property
    def documents(self) -> Ints:
        """Where each document starts, and last where the final one ends: [documents + 1] token offsets."""
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._table[:, 0])])

    @cached_property
    def bytes(self) -> Ints:
        """The UTF-8 bytes of each document."""
        return np.ascontiguousarray(self._table[:, 1])

    @cached_property
    def words(self) -> Ints:
        """The words of each document: runs of characters between white space."""
        return np.ascontiguousarray(self._table[:, 2])


class Corpus:
    """A prepared corpus: `corpus["train"]` and `corpus["validation"]` are its tokens. Made by `prepare` or `open`."""

    def __init__(self, directory: Path, index: dict[str, Any]) -> None:
        self.directory = directory
        self.index = index
        self.vocab_size: int = index["vocab_size"]
        self.end_id: int | None = index["end_id"]
        self.mask_id: int | None = index["mask_id"]
        self._tokens: dict[str, Tokens] = {}

    @classmethod
    def open(cls, directory: str | Path, verify: bool = False) -> Corpus:
        """Open a folder that `prepare` finished; check its index and the size of every file, or all with `verify`."""
        directory = Path(directory)
        corpus = cls(directory, read_index(directory))
        corpus._check_sizes()
        if verify:
            corpus.verify()
        return corpus

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits, "train" first."""
        return tuple(sorted(self.index["splits"], key=lambda name: (name != "train", name != "validation", name)))

    def __getitem__(self, split: str) -> Tokens:
        if split not in self.index["splits"]:
            listed = ", ".join(repr(name) for name in self.splits)
            raise ValueError(
                f"split: {self.directory} has {listed}, got {split!r}{nearest(str(split), self.splits)}"
                + ("; `prepare` makes it with validation=SHARE or [FILES]" if split == "validation" else "")
            )
        if split not in self._tokens:
            self._tokens[split] = Tokens(self.directory, split, self.index["splits"][split], self.index["dtype"])
        return self._tokens[split]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {self.index['splits'][name]['tokens']:,}" for name in self.splits)
        return f"Corpus({str(self.directory)!r}, tokens: {sizes})"

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen digits that change when the tokens, the documents or the tokenizer do."""
        files = {name: [part["sha256"] for part in _split_files(split)] for name, split in self.index["splits"].items()}
        said = {key: self.index[key] for key in ("dtype", "vocab_size", "end_id", "mask_id")}
        whole = {**said, "tokenizer": self.index["tokenizer"].get("sha256"), "files": files}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def tokenizer_name(self) -> str:
        """What tells this tokenizer from others: the sha256 of its file, or "bytes"."""
        said = self.index["tokenizer"]
        return str(said.get("sha256") or said["kind"])

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the tokens were made with."""
        said = self.index["tokenizer"]
        path = self.directory / said["file"] if "file" in said else None
        return open_tokenizer(said["kind"], path, end_id=self.end_id, mask_id=self.mask_id)

    def files(self) -> list[dict[str, Any]]:
        """Return every file that the index names: `file`, `bytes`, `sha256`."""
        listed = [part for split in self.index["splits"].values() for part in _split_files(split)]
        listed += [self.index["sources"]] if "file" in self.index["sources"] else []
        return listed + ([self.index["tokenizer"]] if "file" in self.index["tokenizer"] else [])

    def _check_sizes(self) -> None:
        for said in self.files():
            path = self.directory / said["file"]
            if not path.is_file():
                raise FileNotFoundError(f"{path}: named by {INDEX} but not there; prepare the corpus again")
            size = path.stat().st_size
            if size != said["bytes"]:
                raise ValueError(
                    f"{path}: expected {said['bytes']} bytes, got {size}; the file was "
                    f"{'truncated' if size < said['bytes'] else 'altered'}: prepare the corpus again"
                )

    def verify(self) -> None:
        """Compare the sha256 of every file with the index; an error names the first that differs."""
        self._check_sizes()
        for said in self.files():
            path = self.directory / said["file"]
            if sha256_of(path) != said["sha256"]:
                raise ValueError(f"{path}: its sha256 is not that of {INDEX}; the file was altered: prepare it again")


def _split_files(split: dict[str, Any]) -> list[dict[str, Any]]:
    return [*split["shards"], split["documents_file"]]


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fitting_dtype(vocab_size: int, dtype: str | None, where: str) -> str:
    """Return the dtype for this many ids: the smallest that fits, or the one asked for if it does."""
    if dtype is not None and dtype not in LARGEST:
        raise ValueError(f"dtype: expected 'uint16' or 'uint32', got {dtype!r}{nearest(str(dtype), LARGEST)}")
    chosen = dtype or ("uint16" if vocab_size <= LARGEST["uint16"] else "uint32")
    if vocab_size > LARGEST[chosen]:
        raise ValueError(
            f"dtype: {chosen} tells {LARGEST[chosen]} ids apart, but the vocabulary of {where} has {vocab_size}"
            + ("; expected 'uint32'" if chosen == "uint16" else "")
        )
    return chosen


def read_index(directory: Path) -> dict[str, Any]:
    """Read and check index.json: that it is one of ours, of this version, and names what it must."""
    path = directory / INDEX
    if not path.is_file():
        begun = (directory / WORK).is_dir()
        raise FileNotFoundError(
            f"{path}: not there; expected a folder that `lengthen prepare` finished"
            + ("; one was interrupted here: run it again and it goes on" if begun else "")
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path}: expected JSON, got {problem}; prepare the corpus again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a JSON object with format {FORMAT!r}")
    if index.get("version") != VERSION:
        raise ValueError(f"{path}: expected version {VERSION}, got {index.get('version')!r}; prepare the corpus again")
    try:
        _check_index(index)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ValueError(f"{path}: {type(problem).__name__}: {problem}; prepare the corpus again") from None
    return index


def _check_index(index: dict[str, Any]) -> None:
    fitting_dtype(index["vocab_size"], index["dtype"], INDEX)
    width = np.dtype(index["dtype"]).itemsize
    for key in ("end_id", "mask_id"):
        if index[key] is not None and not 0 <= index[key] < index["vocab_size"]:
            raise ValueError(f"{key}: expected less than vocab_size {index['vocab_size']}, got {index[key]}")
    named = [index["tokenizer"]] if "file" in index["tokenizer"] else []
    for name, split in index["splits"].items():
        named += _split_files(split)
        if sum(shard["tokens"] for shard in split["shards"]) != split["tokens"]:
            raise ValueError(f"split {name!r}: its shards do not add up to {split['tokens']} tokens")
        if any(shard["bytes"] != shard["tokens"] * width for shard in split["shards"]):
            raise ValueError(f"split {name!r}: a shard's bytes are not {width} × its tokens")
        if split["documents_file"]["bytes"] != split["documents"] * 8 * len(DOCUMENT_COLUMNS):
            raise ValueError(f"split {name!r}: its table of documents does not fit {split['documents']} documents")
    for said in named:
        if Path(said["file"]).name != said["file"] or not isinstance(said["sha256"], str):
            raise ValueError(f"file: expected a name in this folder and its sha256, got {said}")
