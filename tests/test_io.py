"""Files are written whole or not at all, and what is read is what the schema says, or an error that names the file."""

from __future__ import annotations

import errno
import json
import os
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_an_altered_line_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"loss": 0.1 + 0.2, "name": "é"}, {}, {"loss": float("inf"), "deep": {"x": [1, None]}}]
    io.write_lines(path, records)
    assert list(io.read_lines(path, dict)) == records
    good = path.read_bytes()
    assert [json.loads(line).keys() - {"crc32"} for line in good.splitlines()] == [one.keys() for one in records]
    for old, new in ((b"0.3000", b"0.3100"), (b"loss", b"lass"), (b'"crc32": "', b'"crc32": "0'), (b", null", b"")):
        assert old in good
        path.write_bytes(good.replace(old, new, 1))
        with pytest.raises(ValueError, match=r"a\.jsonl, line [13]: expected a line whose crc32 is .* altered"):
            list(io.read_lines(path, dict))
    path.write_bytes(b'{"loss": 1}\n')  # written by somebody else
    assert list(io.read_lines(path, dict)) == [{"loss": 1}]


def test_many_who_write_one_file_at_once_do_not_meet(tmp_path: Path) -> None:
    """Threads have one process number, and so have processes in containers."""
    path = tmp_path / "a.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: io.write_json(path, {"number": [number] * 1000}), range(200)))
    assert len(set(io.read_json(path, dict)["number"])) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_what_killed_processes_left_goes_when_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "_swept", set())
    old, young, other = (tmp_path / f".{name}.partial" for name in ("a.json." + "0" * 16, "b.json." + "1" * 16, "mine"))
    for path in (old, young, other):
        path.write_text("half")
    long_ago = time.time() - 2 * io.LEFT_AFTER
    for path in (old, other):
        os.utime(path, (long_ago, long_ago))
    io.write_text(tmp_path / "a.json", "whole")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.json", young, other])


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


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '.*/a.json'$"), io.whole(tmp_path / "a.json"):
        raise OSError(errno.ENOSPC, "No space left on device")  # as writing does, which knows no name
    with pytest.raises(OSError, match=r"^no number$"), io.whole(tmp_path / "a.json"):
        raise OSError("no number")
    with pytest.raises(FileNotFoundError, match=r"'.*/other'$"), io.whole(tmp_path / "a.json"):
        (tmp_path / "other").read_bytes()
    assert list(tmp_path.iterdir()) == []


# Settings: every type that a config has.


@dataclass(frozen=True)
class Section:
    size: int
    ratio: float = 0.5
    flag: bool = False
    maybe: bool | None = None
    word: str = "one"
    limit: int | None = None
    numbers: list[float] = field(default_factory=lambda: [1.0, 2.0])
    lengths: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Deep:
    level: int = 3


@dataclass(frozen=True)
class Middle:
    deep: Deep = Deep()
    name: str = "middle"


@dataclass(frozen=True)
class Settings:
    inner: Section
    middle: Middle = Middle()


KEYS: dict[str, Any] = {
    "inner.size": int,
    "inner.ratio": float,
    "inner.flag": bool,
    "inner.maybe": bool | None,
    "inner.word": str,
    "inner.limit": int | None,
    "inner.numbers": list[float],
    "inner.lengths": list[int] | None,
    "inner.options": dict[str, Any],
    "middle.deep.level": int,
    "middle.name": str,
}


def test_keys_are_those_of_the_fields() -> None:
    assert io.keys(Settings) == KEYS


def test_what_is_not_given_has_its_default() -> None:
    built = io.build(Settings, {"inner": {"size": 3}})
    assert built == Settings(Section(size=3))
    built = io.build(Settings, {"inner": {"size": 3, "ratio": 2}, "middle": {"deep": {"level": 7}}})
    assert built == Settings(Section(size=3, ratio=2.0), Middle(Deep(7)))
    assert isinstance(built.inner.ratio, float), "a whole number serves as a float, and becomes one"


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
floats = st.floats(allow_nan=False)
sections = st.builds(
    Section,
    size=st.integers(-(2**62), 2**62),
    ratio=floats,
    flag=st.booleans(),
    maybe=st.one_of(st.none(), st.booleans()),
    word=words,
    limit=st.one_of(st.none(), st.integers(0, 10**9)),
    numbers=st.lists(floats, max_size=4),
    lengths=st.one_of(st.none(), st.lists(st.integers(0, 10**9), max_size=4)),
    options=st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.one_of(st.integers(-99, 99), floats, st.booleans(), words, st.lists(st.integers(0, 9), max_size=3)),
        max_size=3,
    ),
)


@given(inner=sections, level=st.integers(0, 9), name=words)
def test_settings_become_toml_and_come_back(inner: Section, level: int, name: str) -> None:
    config = Settings(inner, Middle(Deep(level), name))
    again = io.build(Settings, tomllib.loads(io.to_toml(config)))
    assert again == config
    assert repr(again) == repr(config), "a number became another type"


def test_characters_that_toml_wants_escaped() -> None:
    config = Settings(Section(size=1, word="".join(map(chr, range(160))) + '\\ "€海'))
    assert io.build(Settings, tomllib.loads(io.to_toml(config))) == config


def test_none_is_left_out_of_toml() -> None:
    text = io.to_toml(Settings(Section(size=1)))
    assert "limit" not in text
    assert "maybe" not in text
    assert tomllib.loads(text)["inner"]["numbers"] == [1.0, 2.0]


UNKNOWN_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"iner": {}}, r"^f\.toml: unknown key 'iner'; did you mean 'inner'\?$"),
    ({"inner": {"size": 1, "siez": 2}}, r"^f\.toml: unknown key 'inner.siez'; did you mean 'inner.size'\?$"),
    (
        {"middle": {"dep": {}}, "inner": {"size": 1}},
        r"^f\.toml: unknown key 'middle.dep'; did you mean 'middle.deep'\?$",
    ),
    (
        {"middle": {"deep": {"levle": 1}}, "inner": {"size": 1}},
        r"^f\.toml: unknown key 'middle.deep.levle'; did you mean 'middle.deep.level'\?$",
    ),
    ({"inner": {"size": 1}, "qqqq": 1}, r"^f\.toml: unknown key 'qqqq'$"),
]


@pytest.mark.parametrize(("table", "message"), UNKNOWN_KEYS, ids=range(len(UNKNOWN_KEYS)))
def test_an_unknown_key_is_named_with_the_nearest(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        io.build(Settings, table, "f.toml")


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"size": "3"}, r"inner.size: expected a whole number, got '3' \(str\)$"),
    ({"size": 3.0}, r"inner.size: expected a whole number, got 3.0 \(float\)$"),
    ({"size": True}, r"inner.size: expected a whole number, got True \(bool\)$"),
    ({"ratio": True}, r"inner.ratio: expected a number, got True \(bool\)$"),
    ({"ratio": [1]}, r"inner.ratio: expected a number, got \[1\] \(list\)$"),
    ({"flag": 1}, r"inner.flag: expected true or false, got 1 \(int\)$"),
    ({"maybe": "x"}, r"inner.maybe: expected true or false or none, got 'x' \(str\)$"),
    ({"word": 1}, r"inner.word: expected a word, got 1 \(int\)$"),
    ({"limit": 1.5}, r"inner.limit: expected a whole number or none, got 1.5 \(float\)$"),
    ({"numbers": 1.0}, r"inner.numbers: expected a list \(each item a number\), got 1.0 \(float\)$"),
    ({"numbers": [1.0, "x"]}, r"inner.numbers\[1\]: expected a number, got 'x' \(str\)$"),
    ({"lengths": [1, 2.5]}, r"inner.lengths\[1\]: expected a whole number, got 2.5 \(float\)$"),
    ({"options": [1]}, r"inner.options: expected a table, got \[1\] \(list\)$"),
]


@pytest.mark.parametrize(("table", "message"), WRONG_TYPES, ids=[str(table) for table, _ in WRONG_TYPES])
def test_a_wrong_type_is_named(table: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=rf"^f\.toml: {message}"):
        io.build(Settings, {"inner": {"size": 1} | table}, "f.toml")


def test_a_section_that_is_no_table_is_named() -> None:
    with pytest.raises(TypeError, match=r"^f\.toml: inner: expected a table, got 5 \(int\)$"):
        io.build(Settings, {"inner": 5}, "f.toml")
    with pytest.raises(TypeError, match=r"^middle.deep: expected a table, got \[\] \(list\)$"):
        io.build(Settings, {"inner": {"size": 1}, "middle": {"deep": []}})


def test_a_missing_value_is_named() -> None:
    with pytest.raises(ValueError, match=r"^f\.toml: inner.size: expected a value, got none, and it has no default$"):
        io.build(Settings, {}, "f.toml")


@pytest.mark.parametrize(
    ("text", "value"),
    [("500", 500), ("5e2", 500.0), ("true", True), ("yarn", "yarn"), ('"yarn"', "yarn"), ("[1, 2]", [1, 2]), ("", "")],
)
def test_a_text_is_a_value_of_toml_or_itself(text: str, value: Any) -> None:
    assert io.literal(text) == value
    assert type(io.literal(text)) is type(value)
