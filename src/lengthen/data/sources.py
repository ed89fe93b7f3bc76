"""What a corpus is made from: files, folders and Hugging Face datasets on disk become a list of files in a fixed order.

A folder gives its files, folders inside it included, in the order of their names; hidden files are left out. A
Hugging Face dataset (`save_to_disk`) gives its Arrow files, in the order of its state.json; of a dict of datasets
each split is kept under its name. The kind of a file is told by its ending, what it is packed with by a second one:
`books.jsonl.zst`.

Only regular files are read, and of a folder only what lies in it: a link that leads out of it is followed when asked
to. What cannot be read is a problem of its Source, which `expand` raises or, when asked to, hands on.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lengthen.checks import describe, nearest
from lengthen.io import read_json

STANDARD_LIBRARY = "standard-library"  # the word for the default corpus
PACKINGS = {".xz": "xz", ".lzma": "xz", ".gz": "gz", ".zst": "zst", ".bz2": "bz2"}
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
SPLITS = dict.fromkeys(("valid", "val", "dev", "eval"), "validation")  # names of splits that have another one here
# Tests are left out because some are broken on purpose and many are tables of data; the rest is what people read.
LEADS_OUT = "expected a file in the folder that was named, got a link out of it; follow_links=True reads it"
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """One file to read, the name it goes by in the corpus, and the split it belongs to."""

    path: Path
    name: str
    split: str = "train"
    problem: str = ""  # why it cannot be read

    @property
    def packing(self) -> str:
        """How the file is compressed: "xz", "gz", "zst", "bz2" or ""."""
        return PACKINGS.get(self.path.suffix.lower(), "")

    @property
    def kind(self) -> str:
        """What the file holds: "text", "jsonl", "parquet" or "arrow"."""
        inner = Path(self.path.stem) if self.packing else self.path
        return KINDS.get(inner.suffix.lower(), "text")

    @property
    def real(self) -> str:
        """The path without links, which tells whether two are the same file."""
        if os.path.islink(self.path):
            return os.path.realpath(self.path)
        return os.path.join(_real_folder(str(self.path.parent)), self.path.name)


@lru_cache(maxsize=64)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def standard_library() -> list[Path]:
    """Return the source files of this interpreter's standard library that are text, without its tests, in order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [root / name for name in _walk(root, LEFT_OUT)[0] if name.endswith(".py")]
    files = [path for path in found if not path.is_symlink() and _is_text(path)]  # some systems link a file to another
    if len(files) < 2:
        raise FileNotFoundError(f"{root}: expected the source of the standard library, got {len(files)} files of text")
    return files


def _is_text(path: Path) -> bool:
    try:
        return "\0" not in path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False


def expand(
    sources: Any, validation: Sequence[str | Path] = (), *, follow_links: bool = False, skip_bad: bool = False
) -> list[Source]:
    """Return the files of the sources and of the validation paths; a file that is in both is validation alone."""
    if sources is None or isinstance(sources, str | Path):
        sources = [sources or STANDARD_LIBRARY]
    if not isinstance(sources, Iterable):
        raise TypeError(f"sources: expected paths, {STANDARD_LIBRARY!r} or None, got {describe(sources)}")
    _real_folder.cache_clear()
    held_out = [file for item in validation for file in _expand_one(item, "validation", follow_links)]
    held_out = [replace(file, split="validation") for file in held_out]
    taken = {file.real for file in held_out}
    files = [
        file for item in list(sources) or [STANDARD_LIBRARY] for file in _expand_one(item, "sources", follow_links)
    ]
    files = _once([*(file for file in files if file.real not in taken), *held_out])
    files = [replace(file, name=os.fsencode(file.name).decode("utf-8", "backslashreplace")) for file in files]
    bad = [file for file in files if file.problem]
    if bad and not skip_bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise ValueError(f"{bad[0].path}: {bad[0].problem}{more}; skip_bad=True leaves such files out")
    return files


def _once(files: list[Source]) -> list[Source]:
    """Return each file once, under its own name rather than a link's; one that is named twice is a mistake."""
    found: dict[str, Source] = {}

    def indirect(file: Source) -> tuple[bool, bool, int]:
        path = os.path.abspath(file.path)
        return path != file.real, os.path.islink(path), len(file.path.parts)

    for file in files:
        other = found.setdefault(file.real, file)
        if other is not file:
            if os.path.abspath(file.path) == os.path.abspath(other.path):
                raise ValueError(f"sources: {file.path} is named twice")
            found[file.real] = min(other, file, key=indirect)
    chosen = set(map(id, found.values()))
    return [file for file in files if id(file) in chosen]


def _expand_one(item: Any, argument: str, follow: bool) -> list[Source]:
    if not isinstance(item, str | Path):
        raise TypeError(f"{argument}: expected a path, got {describe(item)}")
    path = Path(item)
    if str(item) == STANDARD_LIBRARY and not path.exists():
        root = Path(sysconfig.get_path("stdlib"))
        return [Source(file, f"{STANDARD_LIBRARY}/{file.relative_to(root).as_posix()}") for file in standard_library()]
    if not os.path.lexists(path):
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise FileNotFoundError(f"{argument}: {path} is not there{nearest(path.name, [STANDARD_LIBRARY, *beside])}")
    if not path.is_dir():
        return [_checked(Source(path, path.name))]
    name = path.resolve().name
    if (path / "dataset_dict.json").is_file():
        files = _dataset_dict(path, name)
    elif (path / "state.json").is_file():
        files = _dataset(path, name, "train")
    elif (path / "dataset_info.json").is_file() and any(path.glob("*.arrow")):
        files = _cached_dataset(path, name)
    else:
        names, problems = _walk(path, {"__pycache__"}, follow)
        files = [Source(path / inside, f"{name}/{inside}", problem=problems.get(inside, "")) for inside in names]
    if not files:
        raise FileNotFoundError(f"{argument}: the folder {path} holds no files")
    inside = None if follow else os.path.realpath(path)
    return [file if file.problem else _checked(file, inside) for file in files]


def _checked(file: Source, root: str | None = None) -> Source:
    """Return the file with what is wrong with it: only a regular file is read, and only inside this folder."""
    link = os.path.islink(file.path)
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFREG: ""}
    try:
        got = kinds.get(stat.S_IFMT(file.path.stat().st_mode), "a device")
    except OSError as problem:
        got = problem.strerror or "an error"
        if link and problem.errno in (errno.ENOENT, errno.ELOOP):
            got = "a link to nothing" if problem.errno == errno.ENOENT else "a link to itself"
    if got:
        return replace(file, problem=f"expected a regular file, got {got}")
    if root is not None and not _inside(file.real, root):
        return replace(file, problem=LEADS_OUT)
    return file


def _inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _walk(root: Path, left_out: set[str], follow: bool = False) -> tuple[list[str], dict[str, str]]:
    """Return the files under a folder that are not hidden, as names with slashes, sorted by their parts.

    With them come the folders that cannot be read or lead out of it, and what is wrong with each.
    """
    names, problems, real_root = [], {}, os.path.realpath(root)
    seen = {real_root}

    def name_of(path: str) -> str:
        return Path(path).relative_to(root).as_posix()

    def failed(problem: OSError) -> None:
        if str(problem.filename) == str(root):
            raise problem
        problems[name_of(problem.filename)] = f"expected a folder that can be read, got {problem.strerror}"

    def enters(path: str) -> bool:
        if not os.path.islink(path):
            return True
        real = os.path.realpath(path)
        if _inside(real, real_root) or real in seen:  # the files are listed where they are
            return False
        seen.add(real)
        if not follow:
            problems[name_of(path)] = LEADS_OUT
        return follow

    for folder, folders, files in os.walk(root, onerror=failed, followlinks=True):
        shown = [name for name in folders if name not in left_out and not name.startswith(".")]
        folders[:] = [name for name in sorted(shown) if enters(os.path.join(folder, name))]
        names += [name_of(os.path.join(folder, name)) for name in files if not name.startswith(".")]
    return sorted([*names, *problems], key=lambda name: name.split("/")), problems


def _dataset_dict(path: Path, name: str) -> list[Source]:
    listing = path / "dataset_dict.json"
    splits = read_json(listing, dict).get("splits")
    if not isinstance(splits, list) or not all(re.fullmatch(r"[\w-]+", str(split)) for split in splits):
        raise ValueError(f"{listing}: expected names of letters and digits under 'splits', got {describe(splits)}")
    names = [str(split) for split in splits]
    return [file for one in names for file in _dataset(path / one, f"{name}/{one}", SPLITS.get(one, one))]


def _dataset(path: Path, name: str, split: str) -> list[Source]:
    listing = path / "state.json"
    state = read_json(listing, dict)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ValueError(f"{listing}: the dataset is a selection by indices; call flatten_indices() and save it again")
    try:
        listed = [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise ValueError(f"{listing}: expected Arrow files under '_data_files'") from None
    for file in listed:
        if not re.fullmatch(r"[^/\\\0]*[^/\\\0.][^/\\\0]*", file):
            raise ValueError(f"{listing}: expected names of files beside it under '_data_files', got {file!r}")
    files = [Source(path / file, f"{name}/{file}", split) for file in listed]
    lost = f"named by {listing.name} but not there"
    return [file if os.path.lexists(file.path) else replace(file, problem=lost) for file in files]


def _cached_dataset(path: Path, name: str) -> list[Source]:
    """Return the files of a dataset as `load_dataset` keeps it: NAME-SPLIT.arrow or NAME-SPLIT-00000-of-00002.arrow."""
    files = []
    for file in sorted(file.name for file in path.glob("*.arrow") if not file.name.startswith(("cache-", "tmp"))):
        found = re.search(r"-([a-z]+)(-\d+-of-\d+)?\.arrow$", file)
        split = found.group(1) if found else "train"
        files.append(Source(path / file, f"{name}/{file}", SPLITS.get(split, split)))
    return files
