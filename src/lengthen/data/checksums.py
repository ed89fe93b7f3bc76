"""Checksums of files, and what is remembered of those that were right.

To read every byte of a large corpus at every start would take minutes, so a file that was compared with its sha256 is
not read again until its size or one of its times changes. That is kept in the user's cache folder, a file per corpus,
so a corpus that cannot be written to is no slower, and a copy of a corpus is checked anew. A file that was written to
within the last seconds is not remembered: the system's clock might not tell the next write from this one.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lengthen.io import read_json, write_json

SETTLED = 3.0  # seconds; FAT's times have steps of two

Progress = Callable[[str, int, int], None]


def sha256_of(path: Path, read: Callable[[int], object] = lambda size: None) -> str:
    """Return the sha256 of a file's bytes; `read` is told how many were read."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            read(len(block))
    return digest.hexdigest()


def wrong_files(
    folder: Path, said: dict[str, str], *, anew: bool = False, progress: Progress | None = None
) -> list[str]:
    """Return the files of a folder whose sha256 is another than was said; those remembered are read only if `anew`."""
    memory = _memory_of(folder)
    known = {} if anew else _remembered(memory)
    stamps = {name: _stamp(folder / name) for name in said}
    wanted = [name for name in said if known.get(name) != [said[name], *stamps[name]]]
    if not wanted:
        return []
    began, done, total = time.time(), 0, sum(stamps[name][0] for name in wanted)

    lock = threading.Lock()

    def read(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            if progress is not None:
                progress("checking the corpus", done, total)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases Python's lock
        found = dict(zip(wanted, pool.map(lambda name: sha256_of(folder / name, read), wanted), strict=True))
    right = [name for name in wanted if found[name] == said[name]]
    old = (began - SETTLED) * 1e9
    settled = [name for name in right if stamps[name] == _stamp(folder / name) and max(stamps[name][1:]) < old]
    kept = [name for name in said if name not in wanted or name in settled]
    with suppress(OSError):  # no home, or one that cannot be written to: then all is read again next time
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, {name: [said[name], *stamps[name]] for name in kept})
    return [name for name in wanted if name not in right]


def _stamp(path: Path) -> list[int]:
    """Return what changes when a file is written to: its size and its times, the second of which nobody can set."""
    seen = path.stat()
    return [seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns]


def _memory_of(folder: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "lengthen" / "checked" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"


def _remembered(memory: Path) -> dict[str, Any]:
    try:
        return dict(read_json(memory, dict))
    except (OSError, ValueError, TypeError):  # none, or damaged
        return {}
