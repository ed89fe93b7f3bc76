"""Files are written whole or not at all, and what is read is what the schema says, or an error that names the file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from lengthen import io


@dataclass(frozen=True)
class Inner:
    size: int
    ratio: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    kind: Literal["near", "far"] = "near"
    sizes: list[int] | None = None
    each: dict[str, Inner] = field(default_factory=dict)


GOOD: dict[str, Any] = {"name": "a", "inner": {"size": 3, "ratio": 2}, "each": {"x": {"size": 1}}}


def test_a_dataclass_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    io.write_json(path, GOOD)
    read = io.read_json(path, Outer)
    assert read == Outer("a", Inner(3, 2.0), each={"x": Inner(1)})
    io.write_json(path, read)
    assert io.read_json(path, Outer) == read
    io.write_lines(path, [read, read])
    assert list(io.read_lines(path, Outer)) == [read, read]
    path.write_text(io.to_toml(read))
    assert io.read_toml(path, Outer) == read


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([1], r"the file: expected a table, got \[1\]"),
        ({**GOOD, "nme": 1}, "unknown key 'nme'; did you mean 'name'"),
        ({**GOOD, "inner": {"size": 3, "ratoi": 1}}, "unknown key 'inner.ratoi'; did you mean 'inner.ratio'"),
        ({**GOOD, "inner": {}}, "inner.size: expected a value, got none"),
        ({**GOOD, "inner": 5}, r"inner: expected a table, got 5"),
        ({**GOOD, "inner": {"size": True}}, r"inner.size: expected a whole number, got True \(bool\)"),
        ({**GOOD, "kind": "fra"}, "kind: expected 'near' or 'far', got 'fra' .*did you mean 'far'"),
        ({**GOOD, "sizes": [1, "2"]}, r"sizes\[1\]: expected a whole number, got '2'"),
        ({**GOOD, "each": {"x": {"size": "1"}}}, "each.x.size: expected a whole number"),
    ],
)
def test_another_shape_is_refused_by_file_and_key(table: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(table))
    with pytest.raises((TypeError, ValueError), match=rf"a\.json: {message}"):
        io.read_json(path, Outer)
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(table) + "\n")
    with pytest.raises((TypeError, ValueError), match=rf"a\.json, line 2: {message}"):
        list(io.read_lines(path, Outer))


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"", b"[" * 100_000])
def test_what_is_no_json_is_refused_by_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.json: expected JSON, got something else"):
        io.read_json(path, dict)


def test_a_torn_last_line_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    assert list(io.read_lines(path, dict)) == [{"a": 1}]


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    io.write_text(path, "old\r\n")
    with pytest.raises(FileNotFoundError), io.whole(path) as partial:
        (partial / "never").write_text("a file is no folder, and there is none yet")
    assert path.read_bytes() == b"old\r\n"
    with io.whole(path) as partial:
        partial.write_text("new")
        assert path.read_bytes() == b"old\r\n"
    assert path.read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]
