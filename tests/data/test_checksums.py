"""A file of a corpus is compared with its checksum once, and again when it changes."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from lengthen.data import Corpus, checksums
from lengthen.data.checksums import wrong_files


@pytest.fixture
def copy(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus that was written a while ago, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checksums, "SETTLED", -3600.0)  # as if it were an hour from now
    shutil.copytree(corpus.directory, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read, as they are."""
    names: list[str] = []
    plain = checksums.sha256_of

    def counting(path: Path, *arguments: Any) -> str:
        names.append(path.name)
        return plain(path, *arguments)

    monkeypatch.setattr(checksums, "sha256_of", counting)
    return names


def test_each_file_is_read_once(copy: Path, read: list[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    opened = Corpus.open(copy, progress=lambda *said: seen.append(said))
    files = {file.file: file.bytes for file in opened.index.files()}
    assert sorted(read) == sorted(files)
    assert seen[-1] == ("checking the corpus", sum(files.values()), sum(files.values()))
    Corpus.open(copy)
    assert len(read) == len(files)
    Corpus.open(copy, verify=True)
    assert len(read) == 2 * len(files)


@pytest.mark.parametrize("meddle", ["mtime", "mtime kept", "replaced"])
def test_a_file_that_changed_is_read_again(copy: Path, read: list[str], meddle: str) -> None:
    """Even one whose size and mtime were put back: the system keeps a time of its own."""
    shard = copy / Corpus.open(copy).index.splits["train"].shards[1].file
    read.clear()
    times, data = shard.stat(), bytearray(shard.read_bytes())
    data[10] ^= 1
    if meddle == "replaced":
        (copy / "new").write_bytes(data)
        (copy / "new").replace(shard)
    else:
        shard.write_bytes(data)
    if meddle != "mtime":
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    for _ in range(2):  # and a wrong one is not remembered
        with pytest.raises(ValueError, match=rf"{shard.name}: its sha256 is not that of index.json"):
            Corpus.open(copy)
    assert read == [shard.name] * 2
    data[10] ^= 1
    shard.write_bytes(data)
    Corpus.open(copy)
    assert read == [shard.name] * 3


def test_another_checksum_in_the_index_is_noticed(copy: Path) -> None:
    Corpus.open(copy)
    index = copy / "index.json"
    right = Corpus.open(copy).index.splits["train"].shards[0].sha256
    index.write_text(index.read_text().replace(right, right[::-1]))
    with pytest.raises(ValueError, match="sha256"):
        Corpus.open(copy)


def test_a_file_just_written_is_not_remembered(tmp_path: Path, read: list[str], monkeypatch: Any) -> None:
    """Within a step of the file system's clock it could change, and keep its times."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "file").write_bytes(b"data")
    said = {"file": checksums.sha256_of(tmp_path / "file")}
    read.clear()
    assert wrong_files(tmp_path, said) == wrong_files(tmp_path, said) == []
    assert len(read) == 2
    now = time.time()
    monkeypatch.setattr(checksums.time, "time", lambda: now + 60)
    assert wrong_files(tmp_path, said) == wrong_files(tmp_path, said) == []
    assert len(read) == 3


@pytest.mark.parametrize("state", ["a file", "damaged", "a list", "other shapes", "read-only"])
def test_a_cache_that_cannot_be_used(copy: Path, read: list[str], state: str, tmp_path: Path, monkeypatch: Any) -> None:
    count = len(Corpus.open(copy).index.files())
    (memory,) = (tmp_path / "cache" / "lengthen" / "checked").iterdir()
    if state == "a file":
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("")
    elif state == "read-only":
        memory.unlink()
        monkeypatch.setattr(checksums, "write_json", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    else:
        shapes = {"damaged": "{", "a list": "[1]", "other shapes": f'{{"{read[0]}": 3}}'}
        memory.write_text(shapes[state])
    read.clear()
    for _ in range(2):
        Corpus.open(copy)
    assert len(read) == count * (2 if state in ("a file", "read-only") else 1)


def test_a_copy_is_checked_anew(copy: Path, tmp_path: Path, read: list[str]) -> None:
    count = len(Corpus.open(copy).index.files())
    shutil.copytree(copy, tmp_path / "second")  # with the same times
    Corpus.open(tmp_path / "second")
    assert len(read) == 2 * count


def test_a_corpus_is_not_written_to(copy: Path) -> None:
    before = sorted(path.name for path in copy.iterdir())
    Corpus.open(copy)
    assert sorted(path.name for path in copy.iterdir()) == before
