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

from lengthen.checks import whole_number
from lengthen.data import documents
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
    sha256_of,
)
from lengthen.data.documents import Documents, Progress
from lengthen.data.options import check_sources, check_validation, find_tokenizer
from lengthen.data.parts import encode_part, join_parts, publish
from lengthen.data.readers import Reading
from lengthen.data.sources import Source, expand
from lengthen.data.tokenizer import BYTE_VOCAB_SIZE, Tokenizer, train
from lengthen.io import read_lines, sync_folder, write_json, write_lines

SHARD_TOKENS = 1 << 27  # 256 MB in uint16
SAMPLE_BYTES = 64 << 20  # what a BPE is trained on; more changes little but the time
NAMED_BY_CONTENT = re.compile(r".+\.[0-9a-f]{12}\.(bin|json|jsonl)")


@dataclass(frozen=True)
class SourceFile:
    """One line of the list of sources."""

    name: str
    split: str
    bytes: int
    sha256: str


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
    if kind == "bpe":
        vocab_size = whole_number("vocab_size", 16384 if vocab_size is None else vocab_size, at_least=BYTE_VOCAB_SIZE)
    fitting_dtype(BYTE_VOCAB_SIZE if kind == "bytes" else vocab_size or 1, dtype, f"tokenizer={kind!r}")
    fraction, held_out = check_validation(validation)
    reading = Reading(text_key, separator, split_before)
    settings = {
        "tokenizer": kind,
        "tokenizer_sha256": None if tokenizer_path is None else sha256_of(tokenizer_path),
        "vocab_size": vocab_size,
        "sample_bytes": whole_number("sample_bytes", sample_bytes, at_least=1) if kind == "bpe" else None,
        "end_token": end_token,
        "mask_token": mask_token,
        "validation": "files" if held_out else fraction,
        "seed": whole_number("seed", seed, at_least=0),
        **asdict(reading),
        "shard_tokens": whole_number("shard_tokens", shard_tokens, at_least=1),
        "dtype": dtype,
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = whole_number("processes", cores if processes is None else processes, at_least=1)
    files = expand(sources, held_out)
    fraction = check_sources(files, Path(out), reading, fraction, validation)
    run = Run(settings, tokenizer_path, files, Path(out), workers, progress or (lambda stage, done, total: None))
    corpus = run.existing(force)
    if corpus is not None:
        run.progress("unchanged", 0, 0)
        return run.tidied(corpus) if (run.out / WORK).exists() else corpus
    return run.tidied(Documents(files, reading, fraction, seed, run.progress))


class Run:
    """One call of `prepare`."""

    def __init__(
        self,
        settings: dict[str, Any],
        tokenizer_path: Path | None,
        files: list[Source],
        out: Path,
        workers: int,
        progress: Progress,
    ) -> None:
        self.settings, self.tokenizer_path, self.files = settings, tokenizer_path, files
        self.out, self.workers, self.progress = out, workers, progress
        self.stamps = self._stamps()
        self.sources: list[SourceFile] = []
        total, done = sum(self.stamps[file.path][0] for file in files), 0
        for file in files:
            size = self.stamps[file.path][0]
            self.sources.append(SourceFile(file.name, file.split, size, sha256_of(file.path)))
            done += size
            progress("checking", done, total)

    def _stamps(self) -> dict[Path, tuple[int, int]]:
        paths = [*(file.path for file in self.files), *([self.tokenizer_path] if self.tokenizer_path else [])]
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    def existing(self, force: bool) -> Corpus | None:
        """Return the corpus that is there if it is the one asked for, None if one is to be made, or refuse."""
        if not (self.out / INDEX).exists():
            return None
        try:
            index = Index.read(self.out)
            before = list(read_lines(self.out / index.sources.file, SourceFile))
        except (ValueError, TypeError, OSError) as problem:
            other = f"a corpus that cannot be read ({problem})"
        else:
            found = self._differences(index.settings, before)
            if not found:
                try:
                    return Corpus.open(self.out, verify=True)
                except (ValueError, OSError):  # damaged: the same sources and settings mend it
                    return None
            other = f"another corpus ({'; '.join(found[:4])})"
        if not force:
            raise ValueError(f"out: {self.out} holds {other}; force=True replaces it")
        return None

    def _differences(self, settings: dict[str, Any], sources: list[SourceFile]) -> list[str]:
        """Say in which settings and sources the corpus that is there differs."""
        pairs = [(key, settings.get(key), self.settings.get(key)) for key in sorted({*settings, *self.settings})]
        found = [f"{key}: {there!r} there, {asked!r} asked for" for key, there, asked in pairs if there != asked]
        was, now = ({(file.name, file.split): file for file in files} for files in (sources, self.sources))
        found += [f"source {key[0]} has changed" for key in now if key in was and was[key] != now[key]]
        found += [f"source {name} ({split}) was there" for name, split in was if (name, split) not in now]
        found += [f"source {name} ({split}) is new" for name, split in now if (name, split) not in was]
        return found or ([] if sources == self.sources else ["the order of the sources"])

    def tidied(self, made: Corpus | Documents) -> Corpus:
        """Make the corpus, if it is not there; remove what an older one or a killed run has left."""
        with locked(self.out) as work:
            corpus = self.make(work, made) if isinstance(made, Documents) else made
            kept = {said.file for said in corpus.index.files()}
            for path in self.out.iterdir():
                if NAMED_BY_CONTENT.fullmatch(path.name) and path.name not in kept:
                    path.unlink()
            shutil.rmtree(work)
        return corpus

    def make(self, work: Path, found: Documents) -> Corpus:
        """Train the tokenizer, encode the parts, join them; the index comes last and makes the corpus."""
        named = [VERSION, documents.PART_BYTES, self.settings, [asdict(source) for source in self.sources]]
        folder = work / hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
        folder.mkdir(exist_ok=True)
        tokenizer = self.tokenizer(folder, found)
        dtype = fitting_dtype(tokenizer.vocab_size, self.settings["dtype"], str(tokenizer.path))
        parts = self.encode(folder, found, tokenizer, dtype)
        for path, stamp in self._stamps().items():
            if stamp != self.stamps[path]:
                raise ValueError(f"{path}: changed while it was read; run `prepare` again")
        splits = join_parts(parts, self.out, dtype, self.settings["shard_tokens"], self.progress)
        said = TokenizerFile("bytes")
        if tokenizer.path is not None:
            copied = Path(shutil.copyfile(tokenizer.path, folder / "tokenizer"))
            said = TokenizerFile(tokenizer.name, **asdict(publish(copied, self.out, "tokenizer", "json")))
        write_lines(folder / "sources", self.sources)
        listing = asdict(publish(folder / "sources", self.out, "sources", "jsonl"))
        ids = (tokenizer.vocab_size, tokenizer.end_id, tokenizer.mask_id)
        listed = SourceList(**listing, files=len(self.sources))
        write_json(folder / INDEX, Index(FORMAT, VERSION, dtype, *ids, said, splits, listed, self.settings))
        sync_folder(self.out)
        (folder / INDEX).replace(self.out / INDEX)
        sync_folder(self.out)
        return Corpus.open(self.out)

    def tokenizer(self, folder: Path, found: Documents) -> Tokenizer:
        """Return the tokenizer; a BPE is trained unless it is there."""
        if self.settings["tokenizer"] == "bytes":
            return Tokenizer()
        path = self.tokenizer_path
        for trained in folder.glob("tokenizer.*.json"):  # by a run that was killed; its name is its checksum
            path = trained if sha256_of(trained).startswith(trained.name.split(".")[1]) else path
        if path is None:
            texts = found.sample(self.settings["sample_bytes"], self.progress)
            train(texts, self.settings["vocab_size"], folder / "trained")
            path = folder / publish(folder / "trained", folder, "tokenizer", "json").file
        tokenizer = Tokenizer(path, self.settings["tokenizer"])
        tokenizer.choose(self.settings["end_token"], self.settings["mask_token"])
        return tokenizer

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

        with ThreadPoolExecutor(self.workers) as pool:
            for split, part in found.parts(cut=tokenizer.cuttable()):
                paths[split].append(folder / f"{split}.{len(paths[split]):06d}.part")
                pending.append(pool.submit(encode_part, paths[split][-1], part, tokenizer, dtype))
                finish(2 * self.workers)  # so many are in memory
            finish(0)
        return paths


@contextmanager
def locked(out: Path) -> Iterator[Path]:
    """Give the work folder, held against a second run."""
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
