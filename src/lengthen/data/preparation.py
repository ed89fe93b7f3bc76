"""`prepare`: from sources to a corpus on disk, in passes that each hold a bounded amount of text.

    checking    the sha256 of every source file: has anything changed, is there anything to do
    reading     every document once: is it text, how much is there, which documents are validation
    training    the BPE, if one is asked for, on a sample of the train documents
    tokenising  parts of about 4 MB, several at once
    writing     the parts joined into shards; then the index

What is not finished lies in `.prepare/<run>`, `<run>` being a hash of the settings and of the sources: a file that is
there under its name is whole and belongs to this run, and resuming is leaving out what is there.

Parts are encoded in threads, not processes: `tokenizers` releases Python's lock while it encodes, which is most of the
work. Threads share one import of torch, end with the process, and run no main module again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lengthen.checks import flag, whole_number
from lengthen.data import documents
from lengthen.data.checksums import sha256_of
from lengthen.data.corpus import (
    FORMAT,
    INDEX,
    VERSION,
    WORK,
    Corpus,
    Index,
    SourceList,
    TokenizerFile,
    fitting_dtype,
)
from lengthen.data.documents import Documents, Progress
from lengthen.data.parts import encode_part, join_parts, publish
from lengthen.data.settings import Settings, check_encoding, check_validation, find_tokenizer
from lengthen.data.sources import Source, expand
from lengthen.data.tokenizer import Tokenizer, train
from lengthen.io import build, read_lines, sync_folder, write_json, write_text

SAMPLE_BYTES = 64 << 20  # what a BPE is trained on; more changes little but the time
MOST = 12  # workers by default: each takes some 50 MB, and more find Python's lock taken
LAYOUT = 2  # of parts: counted up when other pieces go into a part, so that those of an older version are not used
OWN_NAMES = re.compile(r".+\.[0-9a-f]{12}\.(bin|json|jsonl)|\.index\.json\.[0-9a-f]{16}\.partial")


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
    encoding: str = "utf-8",
    skip_bad: bool = False,
    follow_links: bool = False,
    workers: int | None = None,
    seed: int = 0,
    shard_tokens: int = Settings.shard_tokens,
    dtype: str | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> Corpus:
    """Turn sources into a corpus at `out`; None is the standard library. `docs/data.md` explains each option.

    Run again after an interruption it resumes. A corpus that is there already, from the same sources and settings, is
    checked and left as it is; one from others is refused, unless `force` replaces it.
    """
    kind, tokenizer_file = find_tokenizer(tokenizer)
    fraction, held_out = check_validation(validation)
    asked = {
        "tokenizer": kind,
        "tokenizer_sha256": None if tokenizer_file is None else sha256_of(tokenizer_file),
        "vocab_size": 16384 if kind == "bpe" and vocab_size is None else vocab_size,
        "sample_bytes": sample_bytes if kind == "bpe" else None,
        "end_token": end_token,
        "mask_token": mask_token,
        "validation": "files" if held_out else fraction,
        "seed": seed,
        "text_key": text_key,
        "separator": separator,
        "split_before": split_before,
        "shard_tokens": shard_tokens,
        "dtype": dtype,
        "encoding": check_encoding(encoding),
    }
    settings = build(Settings, asked)
    fitting_dtype(settings.vocab_size or 1, settings.dtype, f"tokenizer={kind!r}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = whole_number("workers", min(cores, MOST) if workers is None else workers, at_least=1)
    skip_bad = flag("skip_bad", skip_bad)
    files = expand(sources, held_out, follow_links=flag("follow_links", follow_links), skip_bad=skip_bad)
    fraction = check_files(files, Path(out), settings, fraction, given=validation is not None)
    run = Run(settings, tokenizer_file, files, Path(out), workers, skip_bad, progress or (lambda *said: None))
    corpus = run.existing(force)
    if corpus is None:
        found = Documents(run.readable, settings, fraction, run.progress, skip_bad=skip_bad)
        with work_folder(run.out) as work:
            return run.make(work, found)
    run.progress("unchanged", 0, 0)
    if (run.out / WORK).exists():  # left by a run that was killed once its index was there
        with work_folder(run.out):
            pass
    return corpus


def check_files(files: list[Source], out: Path, settings: Settings, fraction: float, *, given: bool) -> float:
    """Check the options against the files; return the fraction of the train documents that go to validation."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder, got the file {out}")
    for key in ("separator", "split_before", "encoding"):
        if getattr(settings, key) is not None and all(file.kind != "text" for file in files):
            raise ValueError(f"{key}: is for text files, but there is none among the sources")
    real_out = os.path.join(os.path.realpath(out), "")
    for file in files:
        if file.real.startswith(real_out):
            raise ValueError(f"out: expected a folder apart from the sources, but {file.path} lies in {out}")
    if not any(file.split == "train" for file in files):
        raise ValueError("sources: all of them are held out for validation, which leaves nothing to train on")
    own = next((file for file in files if file.split == "validation"), None)
    if own is not None and given and fraction > 0:
        raise ValueError(f"validation: {fraction} asked for, but the source {own.name} is validation already")
    return 0.0 if own is not None else fraction


@dataclass
class Run:
    """One call of `prepare`; making one reads the checksums of the sources."""

    settings: Settings
    tokenizer_file: Path | None
    files: list[Source]
    out: Path
    workers: int
    skip_bad: bool
    progress: Progress

    def __post_init__(self) -> None:
        self.readable: list[Source] = []
        self.stamps = {} if self.tokenizer_file is None else {self.tokenizer_file: _stamp(self.tokenizer_file)}
        self.sources: list[dict[str, Any]] = []
        total, done = sum(file.path.stat().st_size for file in self.files if not file.problem), 0
        for file in self.files:
            size, digest, problem = 0, "", file.problem
            if not problem:
                try:
                    self.stamps[file.path], digest = _stamp(file.path), sha256_of(file.path)
                    size = self.stamps[file.path][0]
                    self.readable.append(file)
                except OSError as error:
                    if not self.skip_bad:
                        raise
                    problem = str(error.strerror)
            said = {"name": file.name, "split": file.split, "bytes": size, "sha256": digest}
            self.sources.append(said | ({"skipped": problem} if problem else {}))
            done += size
            self.progress("checking", done, total)

    def existing(self, force: bool) -> Corpus | None:
        """Return the corpus that is there if it is the one asked for, None if one is to be made, or refuse."""
        if not (self.out / INDEX).exists():
            return None
        try:
            index = Index.read(self.out)
            sources = list(read_lines(self.out / index.sources.file, dict))
            there, asked = _flat(index.settings, sources), _flat(self.settings.table(), self.sources)
            skipped = any("skipped" in said for said in sources) and not self.skip_bad
        except (KeyError, ValueError, TypeError, OSError) as problem:
            other = f"a corpus that cannot be read ({problem})"
        else:
            there, asked = (there | {"skip_bad": True}, asked | {"skip_bad": False}) if skipped else (there, asked)
            pairs = [(key, there.get(key), asked.get(key)) for key in sorted({*there, *asked})]
            found = [f"{key}: {was!r} there, {now!r} asked for" for key, was, now in pairs if was != now]
            if not found and _names(sources) == _names(self.sources):
                try:
                    return Corpus.open(self.out, verify=True)
                except (ValueError, OSError):  # damaged: the same sources and settings mend it
                    return None
            other = f"another corpus ({'; '.join(found[:4]) or 'the order of the sources'})"
        if not force:
            raise ValueError(f"out: {self.out} holds {other}; force=True replaces it")
        return None

    def make(self, work: Path, found: Documents) -> Corpus:
        """Train the tokenizer, encode the parts, join them; the index comes last and makes the corpus."""
        named = [VERSION, LAYOUT, documents.PART_BYTES, self.settings.table(), self.sources]
        folder = work / hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
        folder.mkdir(exist_ok=True)
        tokenizer = self.tokenizer(folder, found)
        dtype = fitting_dtype(tokenizer.vocab_size, self.settings.dtype, str(tokenizer.path))
        parts = self.encode(folder, found, tokenizer, dtype)
        for path, stamp in self.stamps.items():
            if stamp != _stamp(path):
                raise ValueError(f"{path}: changed while it was read; run `prepare` again")
        splits = join_parts(parts, self.out, dtype, self.settings.shard_tokens, self.progress)
        said = TokenizerFile("bytes")
        if tokenizer.path is not None:
            copied = Path(shutil.copyfile(tokenizer.path, folder / "tokenizer"))
            said = TokenizerFile(tokenizer.name, **asdict(publish(copied, self.out, "tokenizer", "json")))
        for file, source in zip(self.files, self.sources, strict=True):
            if file in found.skipped:
                source["skipped"] = found.skipped[file]
        lines = [json.dumps(said, ensure_ascii=False) + "\n" for said in self.sources]  # the index has their checksum
        write_text(folder / "sources", "".join(lines))
        listed = SourceList(**asdict(publish(folder / "sources", self.out, "sources", "jsonl")), files=len(self.files))
        ids = (tokenizer.vocab_size, tokenizer.end_id, tokenizer.mask_id)
        sync_folder(self.out)
        index = Index(FORMAT, VERSION, dtype, *ids, said, splits, listed, self.settings.table())
        write_json(self.out / INDEX, index)
        return Corpus(self.out, index)

    def tokenizer(self, folder: Path, found: Documents) -> Tokenizer:
        """Return the tokenizer; a BPE is trained unless it is there."""
        settings, path = self.settings, self.tokenizer_file
        if settings.tokenizer == "bpe":
            path = folder / "tokenizer.json"
            if not path.exists():
                train(found.sample(settings.sample_bytes or 0, folder), settings.vocab_size or 0, path)
        return Tokenizer(path, settings.tokenizer, settings.end_token, settings.mask_token)

    def encode(self, folder: Path, found: Documents, tokenizer: Tokenizer, dtype: str) -> dict[str, list[Path]]:
        """Encode all parts, several at a time; return their files, in order, for each split."""
        paths: dict[str, list[Path]] = {name: [] for name in found.names}
        pending: deque[Future[int]] = deque()
        done, total = 0, sum(found.bytes.values())

        def finish(most: int) -> None:
            nonlocal done
            while len(pending) > most:
                done += pending.popleft().result()
                self.progress("tokenising", done, total)

        pool = ThreadPoolExecutor(self.workers)
        try:
            for split, part in found.parts(cut=tokenizer.cuttable()):
                paths[split].append(folder / f"{split}.{len(paths[split]):06d}.part")
                pending.append(pool.submit(encode_part, paths[split][-1], part, tokenizer, dtype))
                finish(2 * self.workers)  # so many are in memory
            finish(0)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C those that have begun are finished, and kept
        return paths


def _stamp(path: Path) -> tuple[int, int]:
    seen = path.stat()
    return seen.st_size, seen.st_mtime_ns


def _names(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in said.items() if key != "skipped"} for said in sources]


def _flat(settings: dict[str, Any], sources: list[dict[str, Any]]) -> dict[str, Any]:
    """Return settings and sources as one table, to be compared with another."""
    return settings | {f"source {said['name']} ({said['split']})": f"sha256 {said['sha256'][:12]}…" for said in sources}


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """Give the work folder, held against a second run; then remove it, and files of a corpus that is no more."""
    work, busy = out / WORK, ValueError(f"out: another `prepare` is running in {out}")
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("ab") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except (ImportError, OSError):  # Windows, and file systems without locks: two runs at once are not noticed
            pass
        if not (work / "lock").exists() or not os.path.samestat(os.fstat(lock.fileno()), (work / "lock").stat()):
            raise busy  # it ended this moment, and its folder is gone
        yield work
        kept = {said.file for said in Index.read(out).files()}
        for path in out.iterdir():
            if OWN_NAMES.fullmatch(path.name) and path.name not in kept:
                path.unlink()
        shutil.rmtree(work)
