"""The folder of an unfinished `prepare`: what is done in it, with checksums, so that a killed run can go on.

`journal.jsonl` opens with the identity of the run (its settings and the checksums of its sources). Then comes a line
for each thing that is finished, written after the thing itself is on the disk. A line that was cut off by a crash is
dropped, and so is a part whose file is not what its line says; a run with another identity starts afresh.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lengthen.data.corpus import WORK, sha256_of
from lengthen.data.pool import Job
from lengthen.data.worker import write_whole

JOURNAL = "journal.jsonl"
LOCK = "lock"


class Work:
    """A run's folder, locked against a second run; used as a context."""

    def __init__(self, out: Path, identity: str) -> None:
        self.folder = out / WORK
        self.identity = identity
        self.tokenizer_sha256: str | None = None
        self.parts: dict[tuple[str, int], dict[str, Any]] = {}
        self._lock: IO[bytes] | None = None
        self._journal: IO[bytes] | None = None

    def __enter__(self) -> Work:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder / LOCK)
        try:
            lines = self._read()
            if lines is None:
                self._clear()
                lines = [{"run": self.identity}]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            write_whole(str(self.folder / JOURNAL), text.encode())
            self._journal = (self.folder / JOURNAL).open("ab")
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._journal, self._lock):
            if file is not None:
                file.close()

    def _read(self) -> list[dict[str, Any]] | None:
        """Return the journal's good lines, or None if it is another run's or there is none."""
        path = self.folder / JOURNAL
        lines: list[dict[str, Any]] = []
        for line in path.read_bytes().splitlines() if path.is_file() else []:
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        if not lines or lines[0] != {"run": self.identity}:
            return None
        for entry in lines[1:]:
            if "tokenizer" in entry:
                self.tokenizer_sha256 = entry["tokenizer"]
            else:
                self.parts[entry["split"], entry["number"]] = entry
        return lines

    def _clear(self) -> None:
        for entry in self.folder.iterdir():
            if entry.name != LOCK:
                entry.unlink()

    def _append(self, entry: dict[str, Any]) -> None:
        assert self._journal is not None
        self._journal.write(json.dumps(entry).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    @property
    def tokenizer_path(self) -> Path:
        """Where the run's tokenizer lies until it is published; the name keeps it apart from that of another run."""
        return self.folder / f"tokenizer.{self.identity[:16]}.json"

    def has_tokenizer(self) -> bool:
        """Return whether the tokenizer was made by a run that was stopped, and is whole."""
        path = self.tokenizer_path
        return self.tokenizer_sha256 is not None and path.is_file() and sha256_of(path) == self.tokenizer_sha256

    def record_tokenizer(self) -> None:
        """Note that the tokenizer is on the disk."""
        self.tokenizer_sha256 = sha256_of(self.tokenizer_path)
        self._append({"tokenizer": self.tokenizer_sha256})

    def part_path(self, split: str, number: int, key: str) -> Path:
        """Return where a part is written; its key keeps apart what the last worker of another run may still write."""
        return self.folder / f"{split}.{number:06d}.{key[:16]}.part"

    def has(self, job: Job) -> bool:
        """Return whether this very part was finished by a run that was stopped, and is whole."""
        entry = self.parts.get((job.split, job.number))
        path = Path(job.out)
        return (
            entry is not None
            and entry["key"] == job.key
            and path.is_file()
            and path.stat().st_size == entry["bytes"]
            and sha256_of(path) == entry["sha256"]
        )

    def record(self, job: Job) -> None:
        """Note that a part is on the disk."""
        entry = {"split": job.split, "number": job.number, "key": job.key, **job.answer}
        self._append(entry)
        self.parts[job.split, job.number] = entry

    def remove(self) -> None:
        """Remove the folder, once all that it held is published."""
        shutil.rmtree(self.folder)  # while the lock is still held, or a second run might begin in it


@contextmanager
def leftovers(out: Path, identity: str) -> Iterator[bool]:
    """Give whether all that lies in `out` beside its corpus is left from a run of this identity that had published it.

    Such a run was killed while it tidied up. Its folder is removed on leaving; another run's is not touched.
    """
    folder = out / WORK
    if not folder.is_dir():
        yield False
        return
    try:
        lock = _locked(folder / LOCK)
    except ValueError:  # a run with other settings is at work here
        yield False
        return
    with lock:
        journal = folder / JOURNAL
        own = not journal.is_file() or journal.read_bytes().startswith(json.dumps({"run": identity}).encode())
        yield own
        if own:
            shutil.rmtree(folder)


def _locked(path: Path) -> IO[bytes]:
    file = path.open("ab")
    try:
        import fcntl
    except ImportError:  # Windows: two runs at once are not noticed there
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"out: another `prepare` is running in {path.parent.parent}") from None
    return file
