"""Typed settings: a TOML file and dotted words of the command line into nested dataclasses, or an error by name.

    [train]                       @dataclass class Train: steps: int = 1000
    steps = 500                   @dataclass class Settings: train: Train

`build(Settings, {"train": {"steps": 500}})` and `apply(table, [("train.steps", "500")], Settings)` know from the
annotations what a key is called and what it may hold. An unknown key is refused with the nearest known one.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lengthen.attention.checks import describe
from lengthen.positions.options import nearest

T = TypeVar("T")
Table = dict[str, Any]


def read_toml(path: str | Path) -> Table:
    """Return the table in a TOML file, or say what is wrong with it and where."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except tomllib.TOMLDecodeError as problem:
        raise ValueError(f"{path}: expected TOML, got something else: {problem}") from None


def keys(kind: type, prefix: str = "") -> dict[str, Any]:
    """Return every dotted key that a dataclass knows, with its type; a `dict` stands for all keys below it."""
    found: dict[str, Any] = {}
    for name, hint in fields(kind).items():
        if dataclasses.is_dataclass(hint):
            found |= keys(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            found[prefix + name] = hint
    return found


def apply(table: Mapping[str, Any], words: Iterable[tuple[str, str]], kind: type) -> Table:
    """Return the table with dotted words of the command line put in, each read as its key's type says."""
    known = keys(kind)
    result: Table = copy.deepcopy(dict(table))
    for key, text in words:
        hint = known.get(key)
        if hint is None:
            parent, _, _ = key.rpartition(".")
            if _origin(known.get(parent)) is not dict:
                raise ValueError(f"--{key}: unknown key{nearest(key, known)}")
            hint = Any
        *path, last = key.split(".")
        here = result
        for part in path:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                raise ValueError(f"--{key}: {part} holds {describe(here)}, not a table")
        here[last] = parse(key, text, hint)
    return result


def parse(key: str, text: str, hint: Any) -> Any:
    """Return a word of the command line as the type of its key."""
    options = _alternatives(hint)
    if type(None) in options and text.lower() in ("none", ""):
        return None
    for option in options:
        if _origin(option) is list:
            (item,) = typing.get_args(option)
            return [parse(key, part.strip(), item) for part in text.strip("[]").split(",") if part.strip()]
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if option in (int, float):
            try:
                return option(text.replace("_", "") if option is int else text)
            except ValueError:
                continue
        if option is str:
            return text
        if option is Any:
            return _literal(text)
    raise ValueError(f"--{key}: expected {_named(hint)}, got {text!r}")


def _literal(text: str) -> Any:
    """Return what the text would be as a value in TOML, or the text itself: for keys whose type is not known here."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def build(kind: type[T], table: Mapping[str, Any], where: str = "", prefix: str = "") -> T:
    """Return the dataclass with the table's values, each of the type that its field says."""
    hints = fields(kind)
    start = f"{where}: " if where else ""
    for key in table:
        if key not in hints:
            known = [*keys(kind, prefix), *(prefix + name for name in hints)]
            raise ValueError(f"{start}unknown key '{prefix}{key}'{nearest(prefix + key, known)}")
    values: Table = {}
    for name, hint in hints.items():
        key = prefix + name
        if dataclasses.is_dataclass(hint):
            inner = table.get(name, {})
            if not isinstance(inner, Mapping):
                raise TypeError(f"{start}{key}: expected a table, got {describe(inner)}")
            values[name] = build(typing.cast(type, hint), inner, where, f"{key}.")
        elif name in table:
            values[name] = _checked(start + key, table[name], hint)
    missing = [
        field.name
        for field in dataclasses.fields(typing.cast(Any, kind))
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{start}{prefix}{missing[0]}: expected a value, got none, and it has no default")
    return kind(**values)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Return the value if it is what the annotation says; whole numbers serve as floats."""
    for option in _alternatives(hint):
        if option is Any or (option is type(None) and value is None):
            return value
        if _origin(option) is list and isinstance(value, list):
            (item,) = typing.get_args(option)
            return [_checked(f"{name}[{place}]", one, item) for place, one in enumerate(value)]
        if _origin(option) is dict and isinstance(value, Mapping):
            return dict(value)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    raise TypeError(f"{name}: expected {_named(hint)}, got {describe(value)}")


def to_toml(settings: Any) -> str:
    """Return a dataclass of tables as TOML text; keys that hold None are left out, as TOML has no word for it."""
    lines: list[str] = []

    def put(table: Mapping[str, Any], path: str) -> None:
        plain = {key: value for key, value in table.items() if value is not None and not isinstance(value, dict)}
        if path and plain:
            lines.append(f"[{path}]")
        lines.extend(f"{key} = {_value(value)}" for key, value in plain.items())
        if plain:
            lines.append("")
        for key, value in table.items():
            if isinstance(value, dict):
                put(value, f"{path}.{key}" if path else key)

    put(dataclasses.asdict(settings), "")
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(one) for one in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON allows and TOML does not
    return repr(value)


def fields(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass and their types."""
    return {key: hint for key, hint in typing.get_type_hints(kind).items() if not key.startswith("_")}


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _named(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "none"}

    def one(option: Any) -> str:
        if _origin(option) is list:
            return f"a list (each item {one(typing.get_args(option)[0])})"
        return "a table" if _origin(option) is dict else names.get(option, str(option))

    return " or ".join(one(option) for option in _alternatives(hint))
