"""`prepare`: from sources to a corpus on disk, in passes that each hold a bounded amount of text.

    checking    the sha256 of every source file: has anything changed, is there anything to do
    reading     every document once: is it text, how much is there, which documents are validation
    training    the BPE, if one is asked for, on a sample of the train documents
    tokenising  parts of about 4 MB, several processes; a journal notes each one that is finished
    writing     the parts joined into shards; then the index

The split of a document depends on a hash of its text, and on nothing else: not on its place, its file's name or the
number of processes. Equal documents fall on the same side.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthen.data.corpus import FORMAT, INDEX, VERSION, Corpus, fitting_dtype, read_index, sha256_of
from lengthen.data.journal import Work, leftovers
from lengthen.data.options import Options, check_options, check_sources, differences
from lengthen.data.pool import Job, encode, train_tokenizer
from lengthen.data.publish import publish_file, publish_index, publish_split, remove_strays
from lengthen.data.readers import Piece, pieces
from lengthen.data.sources import Source, expand
from lengthen.data.tokenizer import (
    BYTE_END,
    BYTE_MASK,
    BYTE_VOCAB_SIZE,
    END,
    END_NAMES,
    MASK,
    MASK_NAMES,
    load_json,
    size_of,
    special_id,
)
from lengthen.data.worker import write_whole

PART_BYTES = 4 << 20  # text in a part: a second or two of work, which is what a crash can cost
SHARD_TOKENS = 1 << 27  # 256 MB in uint16
SAMPLE_BYTES = 64 << 20  # what a BPE is trained on; more changes little but the time
TRAINING = "training the tokenizer"

Progress = Callable[[str, int, int], None]  # the stage, what is done, what there is to do (0 where it is not known)


def prepare(
    sources: str | Path | Iterable[str | Path] | None,
    out: str | Path,
    *,
    tokenizer: str | Path = "bytes",
    vocab_size: int | None = None,
    end_token: str | None = None,
    mask_token: str | None = None,
    sample_bytes: int = SAMPLE_BYTES,
    validation: float | str | Path | Sequence[str | Path] | None = None,
    text_key: str = "text",
    separator: str | None = None,
    split_before: str | None = None,
    processes: int | None = None,
    seed: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    dtype: str | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> Corpus:
    """Turn sources into a corpus at `out`; None is the standard library. `docs/data.md` explains each option.

    What an interrupted run has finished is used again. A corpus that is already there from the same sources and
    settings is returned as it is; one from others is refused, or with `force` replaced once the new one is whole.
    """
    options = check_options(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        end_token=end_token,
        mask_token=mask_token,
        sample_bytes=sample_bytes,
        validation=validation,
        text_key=text_key,
        separator=separator,
        split_before=split_before,
        processes=processes,
        seed=seed,
        shard_tokens=shard_tokens,
        dtype=dtype,
    )
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder, got the file {out}")
    files = expand(sources, options.held_out)
    share = check_sources(options, files, out)
    run = Run(options, files, share, out, progress or (lambda stage, done, total: None))
    record = run.checksums()
    identity = _identity(options.settings, record)
    if (out / INDEX).exists():
        there = _compare(out, options.settings, record, force)
        if there is not None:
            with leftovers(out, identity) as free:
                if free:  # no other run is about to name these files
                    remove_strays(there)
            run.progress("unchanged", 0, 0)
            return there
    documents = run.read()
    with Work(out, identity) as work:
        return run.make(work, documents, record)


def _identity(settings: dict[str, Any], record: list[dict[str, Any]]) -> str:
    whole = json.dumps([VERSION, settings, record], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


def _compare(out: Path, settings: dict[str, Any], record: list[dict[str, Any]], force: bool) -> Corpus | None:
    """Return the corpus at `out` if it is what is asked for and whole, None if it is to be made, or refuse."""
    try:
        index = read_index(out)
        before = index["settings"]
        sources = (out / index["sources"]["file"]).read_text(encoding="utf-8").splitlines()
        listed = [json.loads(line) for line in sources]
    except (ValueError, KeyError, OSError) as problem:
        if force:
            return None
        raise ValueError(f"out: {out} holds a corpus that cannot be read ({problem}); force=True replaces it") from None
    found = differences(before, settings) + _changed(listed, record)
    if not found:
        try:
            return Corpus.open(out, verify=True)
        except (ValueError, OSError):  # damaged: the same sources and settings mend it
            return None
    if not force:
        raise ValueError(f"out: {out} holds another corpus ({'; '.join(found[:4])}); force=True replaces it")
    return None


def _changed(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    if old == new:
        return []
    before = {(entry["name"], entry["split"]): entry for entry in old}
    after = {(entry["name"], entry["split"]): entry for entry in new}
    gone = [f"source {name} ({split}) was there" for name, split in before if (name, split) not in after]
    added = [f"source {name} ({split}) is new" for name, split in after if (name, split) not in before]
    other = [f"source {key[0]} has changed" for key in after if key in before and before[key] != after[key]]
    return other + gone + added or ["the order of the sources"]


@dataclass(frozen=True)
class Documents:
    """What reading found: the split of each document, as a place in `names`, and the bytes of each split."""

    names: list[str]
    splits: npt.NDArray[np.uint8]
    bytes: dict[str, int]


class Run:
    """One call of `prepare`: its passes over the sources."""

    def __init__(self, options: Options, files: list[Source], share: float, out: Path, progress: Progress) -> None:
        self.options, self.files, self.share, self.out, self.progress = options, files, share, out, progress
        self.stamps = [_stamp(file.path) for file in files]

    def checksums(self) -> list[dict[str, Any]]:
        """Return name, split, size and sha256 of each source file: what the corpus is made from."""
        total, done, record = sum(size for size, _ in self.stamps), 0, []
        for file, (size, _) in zip(self.files, self.stamps, strict=True):
            record.append({"name": file.name, "split": file.split, "bytes": size, "sha256": sha256_of(file.path)})
            done += size
            self.progress("checking", done, total)
        return record

    def read(self) -> Documents:
        """Read every document once; an error here leaves nothing behind."""
        names = list(dict.fromkeys(["train", *(["validation"] if self.share else []), *(f.split for f in self.files)]))
        plain = all(file.kind in ("text", "jsonl") and not file.packing for file in self.files)
        total = sum(size for size, _ in self.stamps) if plain else 0
        hashes, sizes, splits = array("Q"), array("Q"), array("B")
        done = 0
        for file in self.files:
            size, digest = 0, self._digest()
            for piece, ends in pieces(file, self.options.reading):
                digest.update(piece)
                size += len(piece)
                done += len(piece)
                if ends:
                    hashes.append(int.from_bytes(digest.digest(), "little"))
                    sizes.append(size)
                    splits.append(names.index(file.split))
                    size, digest = 0, self._digest()
                self.progress("reading", done, total)
        where = np.array(splits, dtype=np.uint8)
        if self.share:
            self._hold_out(where, np.array(hashes, dtype=np.uint64))
        lengths = np.array(sizes, dtype=np.int64)
        found = {name: int(lengths[where == place].sum()) for place, name in enumerate(names)}
        for name, size in found.items():
            if size == 0:
                listed = ", ".join(str(f.path) for f in self.files if f.split == name or self.share)
                raise ValueError(f"sources: no text for the split {name!r} in {listed[:500]}")
        return Documents(names, where, found)

    def _digest(self) -> hashlib.blake2b:
        return hashlib.blake2b(digest_size=8, key=(self.options.settings["seed"] % (1 << 64)).to_bytes(8, "little"))

    def _hold_out(self, where: npt.NDArray[np.uint8], hashes: npt.NDArray[np.uint64]) -> None:
        """Move the train documents of the smallest hashes to validation, in place; each side has at least one."""
        train = where == 0
        own = hashes[train]
        if len(own) == 0:
            return
        if own.min() == own.max():
            raise ValueError(
                f"validation: a share of {self.share:g} needs at least two documents that differ, got {len(own)} "
                f"document{'s' if len(own) > 1 else ''}; split the text with separator or split_before, name files for "
                f"validation, or use validation=0"
            )
        limit = min(max(int(self.share * 2.0**64), int(own.min())), int(own.max()) - 1)
        where[train & (hashes <= np.uint64(limit))] = 1

    def documents(self, found: Documents) -> Iterator[tuple[str, bytes, bool]]:
        """Yield every piece again, with its document's split."""
        number = 0
        for file in self.files:
            for piece, ends in pieces(file, self.options.reading):
                if number == len(found.splits):
                    raise ValueError(f"{file.path}: changed while it was read; run `prepare` again")
                yield found.names[found.splits[number]], piece, ends
                number += ends

    def make(self, work: Work, found: Documents, record: list[dict[str, Any]]) -> Corpus:
        """Train the tokenizer, encode the parts, write the corpus."""
        words = self._tokenizer(work, found)
        self._encode(work, found, words)
        for file, stamp in zip(self.files, self.stamps, strict=True):
            if _stamp(file.path) != stamp:
                raise ValueError(f"{file.path}: changed while it was read; run `prepare` again")
        settings = self.options.settings
        total, done, splits = sum(entry["bytes"] for entry in work.parts.values()), 0, {}
        for name in found.names:
            entries = [work.parts[key] for key in sorted(work.parts) if key[0] == name]
            parts = [(work.part_path(name, entry["number"], entry["key"]), entry) for entry in entries]
            for said in publish_split(work.folder, self.out, name, parts, settings["shard_tokens"], words["dtype"]):
                if isinstance(said, dict):
                    splits[name] = said
                else:
                    done += said
                    self.progress("writing", done, total)
        tokenizer: dict[str, Any] = {"kind": self.options.kind}
        if words["path"] is not None:
            tokenizer |= publish_file(self.out, "tokenizer", "json", Path(words["path"]).read_bytes())
        lines = "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in record)
        sources = {**publish_file(self.out, "sources", "jsonl", lines.encode()), "files": len(record)}
        index = {
            "format": FORMAT,
            "version": VERSION,
            **{key: words[key] for key in ("dtype", "vocab_size", "end_id", "mask_id")},
            "tokenizer": tokenizer,
            "splits": splits,
            "sources": sources,
            "settings": settings,
        }
        corpus = publish_index(self.out, index)
        work.remove()
        return corpus

    def _tokenizer(self, work: Work, found: Documents) -> dict[str, Any]:
        """Return what a worker and the index need to know of the tokenizer, once it is there."""
        options, dtype = self.options, self.options.settings["dtype"]
        if options.kind == "bytes":
            chosen = fitting_dtype(BYTE_VOCAB_SIZE, dtype, "bytes")
            special = {"end_id": BYTE_END, "mask_id": BYTE_MASK}
            return {
                "kind": "bytes",
                "path": None,
                "dtype": chosen,
                "vocab_size": BYTE_VOCAB_SIZE,
                "cut": True,
                **special,
            }
        if not work.has_tokenizer():
            if options.tokenizer_path is not None:
                write_whole(str(work.tokenizer_path), options.tokenizer_path.read_bytes())
            else:
                sample = self._sample(found)
                size, path = options.settings["vocab_size"], work.tokenizer_path
                train_tokenizer(sample, size, [END, MASK], path, options.processes)
            work.record_tokenizer()
        return describe_json(work.tokenizer_path, options, dtype)

    def _sample(self, found: Documents) -> Iterator[bytes]:
        """Yield about `sample_bytes` of the train text, chosen piece by piece by a hash of the piece."""
        limit, whole = self.options.settings["sample_bytes"], found.bytes["train"]
        chosen = min(1.0, limit / whole) * 2.0**64
        done = 0
        for split, piece, _ in self.documents(found):
            digest = hashlib.blake2b(piece, digest_size=8, person=b"bpe sample").digest()
            if split == "train" and int.from_bytes(digest, "little") < chosen:
                yield piece
                done += len(piece)
                self.progress(TRAINING, done, min(limit, whole))

    def _encode(self, work: Work, found: Documents, words: dict[str, Any]) -> None:
        """Encode what the journal does not have yet."""
        total, state = sum(found.bytes.values()), {"done": 0}
        wanted: set[tuple[str, int]] = set()

        def missing() -> Iterator[Job]:  # runs in the threads of the pool, one at a time
            for job in self._jobs(work, found, cut=words["cut"]):
                wanted.add((job.split, job.number))
                if work.has(job):
                    state["done"] += job.size
                else:
                    yield job

        processes = min(self.options.processes, -(-total // PART_BYTES))
        for job in encode(missing(), words, processes):  # in any order
            work.record(job)
            state["done"] += job.size
            self.progress("tokenising", state["done"], total)
        work.parts = {key: entry for key, entry in work.parts.items() if key in wanted}

    def _jobs(self, work: Work, found: Documents, *, cut: bool) -> Iterator[Job]:
        """Yield the parts: for each split its pieces in order, about PART_BYTES at a time."""
        held: dict[str, list[Piece]] = {name: [] for name in found.names}
        sizes, numbers = dict.fromkeys(found.names, 0), dict.fromkeys(found.names, 0)
        begun = bytearray()
        for split, piece, ends in self.documents(found):
            if not cut:  # this tokenizer may join what stands on either side of a newline: documents stay whole
                begun += piece
                if not ends:
                    continue
                piece = bytes(begun)
                begun.clear()
            held[split].append((piece, ends))
            sizes[split] += len(piece)
            if sizes[split] >= PART_BYTES:
                yield _job(work, split, numbers[split], held[split])
                held[split], sizes[split] = [], 0
                numbers[split] += 1
        for split in found.names:
            if held[split]:
                yield _job(work, split, numbers[split], held[split])


def _job(work: Work, split: str, number: int, part: list[Piece]) -> Job:
    key = hashlib.sha256(work.identity.encode())
    for piece, ends in part:
        key.update(len(piece).to_bytes(8, "little") + bytes([ends]))
        key.update(piece)
    digest = key.hexdigest()
    return Job(split, number, part, digest, str(work.part_path(split, number, digest)))


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def describe_json(path: Path, options: Options, dtype: str | None) -> dict[str, Any]:
    """Return what there is to know of a tokenizer.json: its size, its special tokens, whether pieces may be cut."""
    where = options.tokenizer_path or path
    inner = load_json(path)
    said = json.loads(path.read_text(encoding="utf-8"))
    model = said.get("model") or {}
    if model.get("dropout"):
        raise ValueError(f"{where}: expected no dropout, which gives other tokens each time, got {model['dropout']}")
    size = size_of(inner)
    splitting = said.get("pre_tokenizer") or {}
    cut = (
        model.get("type") == "BPE"
        and not said.get("normalizer")
        and splitting.get("type") == "ByteLevel"
        and not splitting.get("add_prefix_space")
        and splitting.get("use_regex", True)
        and all(token["special"] for token in said.get("added_tokens") or [])
    )
    return {
        "kind": options.kind,
        "path": str(path),
        "dtype": fitting_dtype(size, dtype, str(where)),
        "vocab_size": size,
        "end_id": special_id(inner, "end_token", options.settings["end_token"], END_NAMES, where),
        "mask_id": special_id(inner, "mask_token", options.settings["mask_token"], MASK_NAMES, where),
        "cut": bool(cut),
    }
