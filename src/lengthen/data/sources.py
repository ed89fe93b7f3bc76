"""What a corpus is made from: files, folders and Hugging Face datasets on disk become a list of files in a fixed order.

A folder gives its files, folders inside it included, in the order of their names; hidden files are left out. A
Hugging Face dataset (`save_to_disk`) gives its Arrow files, in the order of its state.json; of a dict of datasets
each split is kept under its name. The kind of a file is told by its ending, what it is packed with by a second one:
`books.jsonl.zst`.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lengthen.checks import describe, nearest
from lengthen.io import read_json

STANDARD_LIBRARY = "standard-library"  # the word for the default corpus
PACKINGS = {".xz": "xz", ".lzma": "xz", ".gz": "gz", ".zst": "zst", ".bz2": "bz2"}
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
SPLITS = dict.fromkeys(("valid", "val", "dev", "eval"), "validation")  # names of splits that have another one here
# Tests are left out because some are broken on purpose and many are tables of data; the rest is what people read.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """One file to read, the name it goes by in the corpus, and the split it belongs to."""

    path: Path
    name: str
    split: str = "train"

    @property
    def packing(self) -> str:
        """How the file is compressed: "xz", "gz", "zst", "bz2" or ""."""
        return PACKINGS.get(self.path.suffix.lower(), "")

    @property
    def kind(self) -> str:
        """What the file holds: "text", "jsonl", "parquet" or "arrow"."""
        inner = Path(self.path.stem) if self.packing else self.path
        return KINDS.get(inner.suffix.lower(), "text")


def standard_library() -> list[Path]:
    """Return the source files of this interpreter's standard library that are text, without its tests, in order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [root / name for name in _walk(root, LEFT_OUT) if name.endswith(".py")]
    files = [path for path in found if _is_text(path) and not path.is_symlink()]  # some systems link a file to another
    if len(files) < 2:
        raise FileNotFoundError(f"{root}: expected the source of the standard library, got {len(files)} files of text")
    return files


def _is_text(path: Path) -> bool:
    try:
        return "\0" not in path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False


def expand(sources: Any, validation: Sequence[str | Path] = ()) -> list[Source]:
    """Return the files of the sources and of the validation paths; a file that is in both is validation alone."""
    if sources is None or isinstance(sources, str | Path):
        sources = [sources or STANDARD_LIBRARY]
    if not isinstance(sources, Iterable):
        raise TypeError(f"sources: expected paths, {STANDARD_LIBRARY!r} or None, got {describe(sources)}")
    held_out = [replace(file, split="validation") for item in validation for file in _expand_one(item, "validation")]
    taken = {file.path.resolve() for file in held_out}
    files = [file for item in list(sources) or [STANDARD_LIBRARY] for file in _expand_one(item, "sources")]
    files = [*(file for file in files if file.path.resolve() not in taken), *held_out]
    seen: set[Path] = set()
    for file in files:
        if file.path.resolve() in seen:
            raise ValueError(f"sources: {file.path} is named twice")
        seen.add(file.path.resolve())
    return files


def _expand_one(item: Any, argument: str) -> list[Source]:
    if not isinstance(item, str | Path):
        raise TypeError(f"{argument}: expected a path, got {describe(item)}")
    path = Path(item)
    if str(item) == STANDARD_LIBRARY and not path.exists():
        root = Path(sysconfig.get_path("stdlib"))
        return [Source(file, f"{STANDARD_LIBRARY}/{file.relative_to(root).as_posix()}") for file in standard_library()]
    if path.is_file():
        return [Source(path, path.name)]
    if not path.is_dir():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise FileNotFoundError(f"{argument}: {path} is not there{nearest(path.name, [STANDARD_LIBRARY, *beside])}")
    name = path.resolve().name
    if (path / "dataset_dict.json").is_file():
        return _dataset_dict(path, name)
    if (path / "state.json").is_file():
        return _dataset(path, name, "train")
    if (path / "dataset_info.json").is_file() and any(path.glob("*.arrow")):
        return _cached_dataset(path, name)
    files = [Source(path / inside, f"{name}/{inside}") for inside in _walk(path, {"__pycache__"})]
    if not files:
        raise FileNotFoundError(f"{argument}: the folder {path} holds no files")
    return files


def _walk(root: Path, left_out: set[str]) -> list[str]:
    """Return the files under a folder that are not hidden, as names with slashes, sorted by their parts."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        inside = Path(folder).relative_to(root)
        names += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(names, key=lambda name: name.split("/"))


def _dataset_dict(path: Path, name: str) -> list[Source]:
    listing = path / "dataset_dict.json"
    splits = read_json(listing, dict).get("splits")
    if not isinstance(splits, list) or not all(re.fullmatch(r"[\w-]+", str(split)) for split in splits):
        raise ValueError(f"{listing}: expected names of letters and digits under 'splits', got {splits!r}")
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
    files = [Source(path / file, f"{name}/{file}", split) for file in listed]
    for file in files:
        if not file.path.is_file():
            raise FileNotFoundError(f"{file.path}: named by {listing} but not there")
    return files


def _cached_dataset(path: Path, name: str) -> list[Source]:
    """Return the files of a dataset as `load_dataset` keeps it: NAME-SPLIT.arrow or NAME-SPLIT-00000-of-00002.arrow."""
    files = []
    for file in sorted(file.name for file in path.glob("*.arrow") if not file.name.startswith(("cache-", "tmp"))):
        found = re.search(r"-([a-z]+)(-\d+-of-\d+)?\.arrow$", file)
        split = found.group(1) if found else "train"
        files.append(Source(path / file, f"{name}/{file}", SPLITS.get(split, split)))
    return files
