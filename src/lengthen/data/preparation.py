"""`prepare`: from sources to a corpus on disk, in passes that each hold a bounded amount of text.

    checking    the sha256 of every source file: has anything changed, is there anything to do
    reading     every document once: is it text, how much is there, which documents are validation
    training    the BPE, if one is asked for, on a sample of the train documents
    tokenising  parts of about 4 MB, several at once; those that are there from a run that was killed are kept
    writing     the parts joined into shards; then the index

What is not finished lies in `.prepare/<run>`, `<run>` being a hash of the settings and of the sources: whatever is
there under its name is whole and belongs to this run, and resuming is leaving out what is there.

Parts are encoded in threads, not processes: `tokenizers` lets go of Python's lock while it encodes, which is nine
tenths of the work, and threads share one import of torch, are ended with the process and run no main module again.

The split of a document depends on a hash of its text, and on nothing else: not on its place, its file's name or the
number of threads. Equal documents fall on the same side.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthen.checks import describe, nearest, number, whole_number
from lengthen.data import corpus as corpus_format
from lengthen.data.corpus import (
    INDEX,
    WORK,
    Corpus,
    Index,
    Settings,
    SourceList,
    TokenizerFile,
    fitting_dtype,
    sha256_of,
)
from lengthen.data.parts import encode_part, join_parts, publish
from lengthen.data.readers import Piece, pieces
from lengthen.data.sources import Source, expand
from lengthen.data.tokenizer import Tokenizer, optional, train
from lengthen.io import read_lines, sync_folder, write_json, write_lines

PART_BYTES = 4 << 20  # text in a part: a second or two of work, which is what a crash can cost
SHARD_TOKENS = 1 << 27  # 256 MB in uint16
SAMPLE_BYTES = 64 << 20  # what a BPE is trained on; more changes little but the time
NAMED_BY_CONTENT = re.compile(r".+\.[0-9a-f]{12}\.(bin|json|jsonl)")

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

    Run again after an interruption it resumes. A corpus that is there already, from the same sources and settings, is
    checked and left as it is; one from others is refused, unless `force` replaces it.
    """
    kind, tokenizer_path = find_tokenizer(tokenizer, vocab_size, end_token, mask_token)
    fraction, held_out = check_validation(validation)
    settings = Settings(
        text_key=text_key,
        separator=separator,
        split_before=split_before,
        tokenizer=kind,
        tokenizer_sha256=None if tokenizer_path is None else sha256_of(tokenizer_path),
        vocab_size=16384 if kind == "bpe" and vocab_size is None else vocab_size,
        sample_bytes=sample_bytes if kind == "bpe" else None,
        end_token=end_token,
        mask_token=mask_token,
        validation="files" if held_out else fraction,
        seed=seed,
        shard_tokens=shard_tokens,
        dtype=dtype,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = whole_number("processes", cores if processes is None else processes, at_least=1)
    files = expand(sources, held_out)
    check_sources(files, Path(out), settings)
    own = next((file for file in files if file.split == "validation"), None)
    if own is not None and not held_out:
        if validation:
            raise ValueError(f"validation: {fraction} asked for, but the source {own.name} is validation already")
        fraction = 0.0
    return Run(settings, files, fraction, tokenizer_path, Path(out), workers, progress or (lambda *_: None)).corpus(
        force
    )


# What is asked for.


def find_tokenizer(
    tokenizer: Any, vocab_size: int | None, end_token: str | None, mask_token: str | None
) -> tuple[str, Path | None]:
    """Return the kind of the tokenizer, "bytes", "bpe" or "json", and the file of the last."""
    if not isinstance(tokenizer, str | Path):
        raise TypeError(f"tokenizer: expected 'bytes', 'bpe' or a path, got {describe(tokenizer)}")
    path = Path(tokenizer)
    if (path / INDEX).is_file():  # that of another corpus
        said = Index.read(path).tokenizer
        path = Path(said.kind) if said.file is None else path / said.file
    kind = str(path) if str(path) in ("bytes", "bpe") else "json"
    for key, value, needed in (
        ("vocab_size", vocab_size, "bpe"),
        ("end_token", end_token, "json"),
        ("mask_token", mask_token, "json"),
    ):
        if value is not None and kind != needed:
            only = "tokenizer='bpe'" if needed == "bpe" else "a tokenizer.json"
            raise ValueError(f"{key}: only {only} has one to choose, got {value!r} for {str(tokenizer)!r}")
    if kind == "bpe":
        optional("tokenizers", "tokenizer='bpe'")
    if kind != "json":
        return kind, None
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        got = f"{str(tokenizer)!r}{nearest(str(tokenizer), ('bytes', 'bpe'))}"
        raise FileNotFoundError(f"tokenizer: expected 'bytes', 'bpe', a tokenizer.json or a corpus, got {got}")
    return kind, path


def check_validation(validation: Any) -> tuple[float, list[str | Path]]:
    """Return the fraction of the documents to hold out, and the files."""
    if validation is None or isinstance(validation, int | float):
        fraction = number("validation", 0.05 if validation is None else validation, at_least=0)
        if fraction >= 1:
            raise ValueError(f"validation: expected a fraction of the documents below 1, or paths, got {validation}")
        return fraction, []
    paths = [validation] if isinstance(validation, str | Path) else validation
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | Path) for path in paths):
        raise TypeError(f"validation: expected a fraction of the documents or paths, got {describe(validation)}")
    return 0.0, list(paths)


def check_sources(files: list[Source], out: Path, settings: Settings) -> None:
    """Check that the files give something to train on, lie apart from `out`, and can be split as asked."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder, got the file {out}")
    for key in ("separator", "split_before"):
        if getattr(settings, key) is not None and all(file.kind != "text" for file in files):
            raise ValueError(f"{key}: splits text files, but there is none among the sources")
    if not any(file.split == "train" for file in files):
        raise ValueError("sources: all of them are held out for validation, which leaves nothing to train on")
    for file in files:
        if out.resolve() in file.path.resolve().parents:
            raise ValueError(f"out: expected a folder apart from the sources, but {file.path} lies in {out}")


# What is there already.


@dataclass(frozen=True)
class SourceFile:
    """One line of the list of sources."""

    name: str
    split: str
    bytes: int
    sha256: str


def existing(out: Path, settings: Settings, sources: list[SourceFile], force: bool) -> Corpus | None:
    """Return the corpus at `out` if it is what is asked for and whole, None if it is to be made, or refuse."""
    if not (out / INDEX).exists():
        return None
    try:
        index = Index.read(out)
        before = list(read_lines(out / index.sources.file, SourceFile))
    except (ValueError, TypeError, OSError) as problem:
        if force:
            return None
        raise ValueError(f"out: {out} holds a corpus that cannot be read ({problem}); force=True replaces it") from None
    if found := differences(index.settings, settings, before, sources):
        if force:
            return None
        raise ValueError(f"out: {out} holds another corpus ({'; '.join(found[:4])}); force=True replaces it")
    try:
        return Corpus.open(out, verify=True)
    except (ValueError, OSError):  # damaged: the same sources and settings mend it
        return None


def differences(old: Settings, new: Settings, before: list[SourceFile], after: list[SourceFile]) -> list[str]:
    """Say in which settings and sources two corpora differ."""
    wanted = asdict(new)
    found = [
        f"{key}: {one!r} there, {wanted[key]!r} asked for" for key, one in asdict(old).items() if one != wanted[key]
    ]
    was, now = ({(file.name, file.split): file for file in files} for files in (before, after))
    found += [f"source {key[0]} has changed" for key in now if key in was and was[key] != now[key]]
    found += [f"source {name} ({split}) was there" for name, split in was if (name, split) not in now]
    found += [f"source {name} ({split}) is new" for name, split in now if (name, split) not in was]
    return found or ([] if before == after else ["the order of the sources"])


@contextmanager
def locked(out: Path) -> Iterator[Path]:
    """Give the work folder, held against a second run."""
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("ab") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"out: another `prepare` is running in {out}") from None
        except (ImportError, OSError):  # Windows, and file systems without locks: two runs at once are not noticed
            pass
        yield work


# What is made.


@dataclass
class Run:
    """One call of `prepare`: its passes over the sources, and what reading found."""

    settings: Settings
    files: list[Source]
    fraction: float  # of the documents, for validation
    tokenizer_path: Path | None
    out: Path
    workers: int
    progress: Progress
    names: list[str] = field(default_factory=list)  # of the splits
    split_of: list[int] | npt.NDArray[np.uint8] = field(default_factory=list)  # each document's, as a place in `names`
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of text in each split

    def corpus(self, force: bool) -> Corpus:
        """Return the corpus: the one that is there, or a new one."""
        stamps = self.stamps()
        sources = self.checksums(stamps)
        corpus = existing(self.out, self.settings, sources, force)
        if corpus is None:
            self.read()  # before anything is written: an error here leaves nothing behind
        else:
            self.progress("unchanged", 0, 0)
            if not (self.out / WORK).exists():
                return corpus
        with locked(self.out) as work:
            if corpus is None:
                named = [
                    corpus_format.VERSION,
                    PART_BYTES,
                    asdict(self.settings),
                    [asdict(source) for source in sources],
                ]
                folder = work / hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
                folder.mkdir(exist_ok=True)
                corpus = self.make(folder, sources, stamps)
            kept = {said.file for said in corpus.index.files()}
            for path in self.out.iterdir():  # of the corpus that this one replaced, or of a run that was killed
                if NAMED_BY_CONTENT.fullmatch(path.name) and path.name not in kept:
                    path.unlink()
            shutil.rmtree(work)
        return corpus

    def stamps(self) -> dict[Path, tuple[int, int]]:
        """Return size and time of every file that is read."""
        paths = [*(file.path for file in self.files), *([self.tokenizer_path] if self.tokenizer_path else [])]
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    def checksums(self, stamps: dict[Path, tuple[int, int]]) -> list[SourceFile]:
        """Return name, split, size and sha256 of each source file: what the corpus is made from."""
        total, sources, done = sum(size for size, _ in stamps.values()), [], 0
        for file in self.files:
            sources.append(SourceFile(file.name, file.split, stamps[file.path][0], sha256_of(file.path)))
            done += stamps[file.path][0]
            self.progress("checking", done, total)
        return sources

    def read(self) -> None:
        """Read every document once: whether it is text, and which split it belongs to."""
        self.names = list(
            dict.fromkeys(["train", *(["validation"] if self.fraction else []), *(f.split for f in self.files)])
        )
        plain = all(file.kind in ("text", "jsonl") and not file.packing for file in self.files)
        total = sum(file.path.stat().st_size for file in self.files) if plain else 0
        hashes, sizes, splits = array("Q"), array("Q"), array("B")
        fresh = hashlib.blake2b(digest_size=8, key=(self.settings.seed % (1 << 64)).to_bytes(8, "little"))
        begun = done = 0
        digest = fresh.copy()
        for file in self.files:
            for piece, ends in pieces(file, self.settings):
                digest.update(piece)
                done += len(piece)
                if ends:
                    hashes.append(int.from_bytes(digest.digest(), "little"))
                    sizes.append(done - begun)
                    splits.append(self.names.index(file.split))
                    begun, digest = done, fresh.copy()
                self.progress("reading", done, total)
        self.split_of = np.array(splits, dtype=np.uint8)
        if self.fraction:
            hold_out(self.split_of, np.array(hashes, dtype=np.uint64), self.fraction)
        for place, name in enumerate(self.names):
            self.sizes[name] = int(np.array(sizes, dtype=np.int64)[self.split_of == place].sum())
            if self.sizes[name] == 0:
                listed = ", ".join(str(file.path) for file in self.files if file.split == name or self.fraction)
                raise ValueError(f"sources: no text for the split {name!r} in {listed[:500]}")

    def pieces(self) -> Iterator[tuple[str, bytes, bool]]:
        """Yield every piece again, with its document's split."""
        number = 0
        for file in self.files:
            for piece, ends in pieces(file, self.settings):
                if number == len(self.split_of):
                    raise ValueError(f"{file.path}: changed while it was read; run `prepare` again")
                yield self.names[self.split_of[number]], piece, ends
                number += ends

    def make(self, folder: Path, sources: list[SourceFile], stamps: dict[Path, tuple[int, int]]) -> Corpus:
        """Train the tokenizer, encode the parts, join them; the index comes last and makes the corpus."""
        tokenizer = self.tokenizer(folder)
        dtype = fitting_dtype(tokenizer.vocab_size, self.settings.dtype, str(tokenizer.path))
        parts = self.encode(folder, tokenizer, dtype)
        for path, stamp in self.stamps().items():
            if stamp != stamps[path]:
                raise ValueError(f"{path}: changed while it was read; run `prepare` again")
        splits = join_parts(parts, self.out, dtype, self.settings.shard_tokens, self.progress)
        said = TokenizerFile("bytes")
        if tokenizer.path is not None:
            copied = Path(shutil.copyfile(tokenizer.path, folder / "tokenizer"))
            said = TokenizerFile(tokenizer.name, **asdict(publish(copied, self.out, "tokenizer", "json")))
        write_lines(folder / "sources", sources)
        listing = SourceList(**asdict(publish(folder / "sources", self.out, "sources", "jsonl")), files=len(sources))
        ids = (tokenizer.vocab_size, tokenizer.end_id, tokenizer.mask_id)
        index = Index(corpus_format.FORMAT, corpus_format.VERSION, dtype, *ids, said, splits, listing, self.settings)
        write_json(folder / INDEX, index)
        sync_folder(self.out)
        (folder / INDEX).replace(self.out / INDEX)
        sync_folder(self.out)
        return Corpus.open(self.out)

    def tokenizer(self, folder: Path) -> Tokenizer:
        """Return the tokenizer; a BPE is trained unless it is there."""
        if self.settings.tokenizer == "bytes":
            return Tokenizer()
        path = self.tokenizer_path or folder / "tokenizer.json"
        if not path.exists() and self.settings.vocab_size is not None:
            train(self.sample(), self.settings.vocab_size, path)
        tokenizer = Tokenizer(path, self.settings.tokenizer)
        if self.settings.end_token is not None:
            tokenizer.end_id = tokenizer.find("end_token", self.settings.end_token)
        if self.settings.mask_token is not None:
            tokenizer.mask_id = tokenizer.find("mask_token", self.settings.mask_token)
        return tokenizer

    def sample(self) -> Iterator[str]:
        """Yield about `sample_bytes` of the train text, chosen piece by piece by a hash of the piece."""
        wanted, done = min(self.settings.sample_bytes or 0, self.sizes["train"]), 0
        chosen = wanted / self.sizes["train"] * 2.0**64
        for split, piece, _ in self.pieces():
            digest = hashlib.blake2b(piece, digest_size=8, person=b"bpe sample").digest()
            if split == "train" and int.from_bytes(digest, "little") < chosen:
                yield piece.decode()
                done += len(piece)
                self.progress("training the tokenizer", done, wanted)

    def encode(self, folder: Path, tokenizer: Tokenizer, dtype: str) -> dict[str, list[Path]]:
        """Encode all parts, several at a time; return their files, in order, for each split."""
        paths: dict[str, list[Path]] = {name: [] for name in self.names}
        pending: deque[Future[int]] = deque()
        done, total = 0, sum(self.sizes.values())
        with ThreadPoolExecutor(self.workers) as pool:

            def finish(most: int) -> None:
                nonlocal done
                while len(pending) > most:
                    done += pending.popleft().result()
                    self.progress("tokenising", done, total)

            for split, part in self.parts(cut=tokenizer.cuttable()):
                paths[split].append(folder / f"{split}.{len(paths[split]):06d}.part")
                pending.append(pool.submit(encode_part, paths[split][-1], part, tokenizer, dtype))
                finish(2 * self.workers)  # so many are in memory
            finish(0)
        return paths

    def parts(self, *, cut: bool) -> Iterator[tuple[str, list[Piece]]]:
        """Yield the parts: for each split its pieces in order, about PART_BYTES at a time."""
        held: dict[str, list[Piece]] = {name: [] for name in self.names}
        sizes = dict.fromkeys(self.names, 0)
        begun = bytearray()
        for split, piece, ends in self.pieces():
            if not cut:  # this tokenizer may join what stands on either side of a newline: documents stay whole
                begun += piece
                if not ends:
                    continue
                piece = bytes(begun)
                begun.clear()
            held[split].append((piece, ends))
            sizes[split] += len(piece)
            if sizes[split] >= PART_BYTES:
                yield split, held[split]
                held[split], sizes[split] = [], 0
        yield from ((split, part) for split, part in held.items() if part)


def hold_out(split_of: npt.NDArray[np.uint8], hashes: npt.NDArray[np.uint64], fraction: float) -> None:
    """Move the train documents of the smallest hashes to validation, in place; each side has at least one."""
    train = split_of == 0
    own = hashes[train]
    if len(own) == 0:
        return
    if own.min() == own.max():
        raise ValueError(
            f"validation: a fraction of {fraction:g} needs at least two documents that differ, got {len(own)} "
            f"document{'s' if len(own) > 1 else ''}; split the text with separator or split_before, name files for "
            f"validation, or use validation=0"
        )
    limit = min(max(int(fraction * 2.0**64), int(own.min())), int(own.max()) - 1)
    split_of[train & (hashes <= np.uint64(limit))] = 1
