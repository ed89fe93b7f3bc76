"""Typed settings: tables into dataclasses and back, dotted words by their type, and every mistake by name."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthen.training import settings


@dataclass(frozen=True)
class Inner:
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
class Outer:
    inner: Inner
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
    assert settings.keys(Outer) == KEYS


def test_what_is_not_given_has_its_default() -> None:
    built = settings.build(Outer, {"inner": {"size": 3}})
    assert built == Outer(Inner(size=3))
    built = settings.build(Outer, {"inner": {"size": 3, "ratio": 2}, "middle": {"deep": {"level": 7}}})
    assert built == Outer(Inner(size=3, ratio=2.0), Middle(Deep(7)))
    assert isinstance(built.inner.ratio, float), "a whole number serves as a float, and becomes one"


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
floats = st.floats(allow_nan=False)
inners = st.builds(
    Inner,
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


@given(inner=inners, level=st.integers(0, 9), name=words)
def test_toml_and_back(inner: Inner, level: int, name: str) -> None:
    config = Outer(inner, Middle(Deep(level), name))
    again = settings.build(Outer, tomllib.loads(settings.to_toml(config)))
    assert again == config
    assert repr(again) == repr(config), "a number became another type"


def test_characters_that_toml_wants_escaped() -> None:
    config = Outer(Inner(size=1, word="".join(map(chr, range(160))) + '\\ "€海'))
    assert settings.build(Outer, tomllib.loads(settings.to_toml(config))) == config


def test_none_is_left_out_of_toml() -> None:
    text = settings.to_toml(Outer(Inner(size=1)))
    assert "limit" not in text
    assert "maybe" not in text
    assert tomllib.loads(text)["inner"]["numbers"] == [1.0, 2.0]


UNKNOWN: list[tuple[dict[str, Any], str]] = [
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


@pytest.mark.parametrize(("table", "message"), UNKNOWN, ids=range(len(UNKNOWN)))
def test_an_unknown_key_is_named_with_the_nearest(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.build(Outer, table, "f.toml")


WRONG: list[tuple[dict[str, Any], str]] = [
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


@pytest.mark.parametrize(("table", "message"), WRONG, ids=[str(table) for table, _ in WRONG])
def test_a_wrong_type_is_named(table: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=rf"^f\.toml: {message}"):
        settings.build(Outer, {"inner": {"size": 1} | table}, "f.toml")


def test_a_section_that_is_no_table_is_named() -> None:
    with pytest.raises(TypeError, match=r"^f\.toml: inner: expected a table, got 5 \(int\)$"):
        settings.build(Outer, {"inner": 5}, "f.toml")
    with pytest.raises(TypeError, match=r"^middle.deep: expected a table, got \[\] \(list\)$"):
        settings.build(Outer, {"inner": {"size": 1}, "middle": {"deep": []}})


def test_a_missing_value_is_named() -> None:
    with pytest.raises(ValueError, match=r"^f\.toml: inner.size: expected a value, got none, and it has no default$"):
        settings.build(Outer, {}, "f.toml")


GIVEN: list[tuple[str, str, Any]] = [
    ("inner.size", "12", 12),
    ("inner.size", "-1_000", -1000),
    ("inner.ratio", "3", 3.0),
    ("inner.ratio", "1e-4", 1e-4),
    ("inner.ratio", "-inf", -math.inf),
    ("inner.flag", "true", True),
    ("inner.flag", "False", False),
    ("inner.maybe", "none", None),
    ("inner.maybe", "true", True),
    ("inner.word", "3", "3"),
    ("inner.word", "none", "none"),
    ("inner.word", "a b=c", "a b=c"),
    ("inner.limit", "None", None),
    ("inner.limit", "", None),
    ("inner.limit", "7", 7),
    ("inner.numbers", "0.9,0.95", [0.9, 0.95]),
    ("inner.numbers", "[1, 2]", [1.0, 2.0]),
    ("inner.lengths", "64, 128", [64, 128]),
    ("inner.lengths", "64", [64]),
    ("inner.lengths", "[]", []),
    ("inner.lengths", "none", None),
    ("inner.options.base", "500", 500),
    ("inner.options.base", "5e2", 500.0),
    ("inner.options.learned", "true", True),
    ("inner.options.scaling", "yarn", "yarn"),
    ("inner.options.scaling", '"yarn"', "yarn"),
    ("inner.options.sizes", "[1, 2]", [1, 2]),
    ("middle.deep.level", "4", 4),
]


@pytest.mark.parametrize(("key", "text", "value"), GIVEN, ids=[f"{key}={text}" for key, text, _ in GIVEN])
def test_a_word_is_read_as_its_key_says(key: str, text: str, value: Any) -> None:
    table = settings.apply({"inner": {"size": 1}}, [(key, text)], Outer)
    built: Any = dataclasses.asdict(settings.build(Outer, table))
    for part in key.split("."):
        built = built[part]
    assert built == value
    assert type(built) is type(value)


BAD_WORDS = [
    ("inner.size", "3.5", r"^--inner.size: expected a whole number, got '3.5'$"),
    ("inner.size", "none", r"^--inner.size: expected a whole number, got 'none'$"),
    ("inner.ratio", "fast", r"^--inner.ratio: expected a number, got 'fast'$"),
    ("inner.flag", "yes", r"^--inner.flag: expected true or false, got 'yes'$"),
    ("inner.limit", "x", r"^--inner.limit: expected a whole number or none, got 'x'$"),
    ("inner.lengths", "1,x", r"^--inner.lengths: expected a whole number, got 'x'$"),
    ("inner.options", "3", r"^--inner.options: expected a table, got '3'$"),
    ("inner.siez", "3", r"^--inner.siez: unknown key; did you mean 'inner.size'\?$"),
    ("innr.size", "3", r"^--innr.size: unknown key; did you mean 'inner.size'\?$"),
    ("inner", "3", r"^--inner: unknown key"),
    ("inner.options.a.b", "3", r"^--inner.options.a.b: unknown key"),
    ("middle.deep.x", "3", r"^--middle.deep.x: unknown key"),
]


@pytest.mark.parametrize(("key", "text", "message"), BAD_WORDS, ids=[f"{key}={text}" for key, text, _ in BAD_WORDS])
def test_a_wrong_word_is_named(key: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.apply({"inner": {"size": 1}}, [(key, text)], Outer)


def test_words_change_a_copy_and_the_last_one_counts() -> None:
    table = {"inner": {"size": 1, "numbers": [1.0]}}
    changed = settings.apply(table, [("inner.size", "2"), ("inner.size", "3"), ("inner.options.x", "1")], Outer)
    assert changed == {"inner": {"size": 3, "numbers": [1.0], "options": {"x": 1}}}
    changed["inner"]["numbers"].append(2.0)
    assert table == {"inner": {"size": 1, "numbers": [1.0]}}


def test_a_word_below_what_is_no_table() -> None:
    with pytest.raises(ValueError, match=r"^--middle.deep.level: deep holds 5 \(int\), not a table$"):
        settings.apply({"middle": {"deep": 5}}, [("middle.deep.level", "2")], Outer)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text("[inner]\nsize = 3\n")
    assert settings.read_toml(path, dict) == {"inner": {"size": 3}}
    path.write_text("[inner\nsize = 3\n")
    with pytest.raises(ValueError, match=r"f\.toml: expected TOML, got something else: .*line 1"):
        settings.read_toml(path, dict)
    with pytest.raises(FileNotFoundError):
        settings.read_toml(tmp_path / "none.toml", dict)


def test_a_date_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text("[inner]\nsize = 2020-01-01\n")
    with pytest.raises(TypeError, match=r"^f\.toml: inner.size: expected a whole number, got datetime.date"):
        settings.build(Outer, settings.apply(settings.read_toml(path, dict), [], Outer), "f.toml")
