"""Files: written whole or not at all, and read against a schema.

    write_json(path, value)                 the old file stays until the new one is on the disk
    with whole(path) as partial: …          the same for what a library writes
    read_json(path, Index)                  a dataclass, or an error that names the file, the key and what was expected
    read_lines(path, Record)                JSON lines; a last line that a killed process left torn is not one, and a
                                            line that was altered since (its crc32 says so) is refused
    read_toml(path, Config)

A schema is a dataclass: its annotations say what each key may hold, nested ones are tables, and keys with defaults may
be missing. `dict` takes any table. An unknown key is refused with the nearest known one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import time
import tomllib
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lengthen.checks import describe, nearest

T = TypeVar("T")
Table = dict[str, Any]
AnyPath = str | os.PathLike[str]

SUM = "crc32"  # the last key of a line
PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial")  # a file while it is written
LEFT_AFTER = 24 * 3600.0  # seconds after which such a file is one that a killed process left
_swept: set[Path] = set()  # folders that this process has looked through for those


# Writing.


@contextmanager
def whole(path: AnyPath) -> Iterator[Path]:
    """Give the path to write to; it takes its final name, on the disk, once the block ends without an error."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")  # nobody else's, whatever their number
    try:
        with naming(target):
            _sweep(target.parent)
            yield partial
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(target)
            sync_folder(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left in a folder, once it is old enough to be nobody's work."""
    if folder in _swept:
        return
    _swept.add(folder)
    for path in folder.glob(".*.partial"):
        with suppress(OSError):
            if PARTIAL.fullmatch(path.name) and time.time() - path.stat().st_mtime > LEFT_AFTER:
                path.unlink()


@contextmanager
def naming(path: AnyPath) -> Iterator[None]:
    """Add the path to an error of the system that names no file, as those of writing to a full disk do."""
    try:
        yield
    except OSError as problem:
        if problem.errno is not None and problem.filename is None:
            problem.filename = str(path)
        raise


def write_bytes(path: AnyPath, data: bytes) -> None:
    """Write a file, all of it or nothing."""
    with whole(path) as partial:
        partial.write_bytes(data)


def write_text(path: AnyPath, text: str) -> None:
    """Write a file of UTF-8, all of it or nothing, with the line ends that the text has."""
    write_bytes(path, text.encode())


def write_json(path: AnyPath, value: Any) -> None:
    """Write a value, or a dataclass, as JSON; a number is read back as the very same."""
    write_text(path, json.dumps(plain(value), indent=1, ensure_ascii=False) + "\n")


def line_of(table: Any) -> str:
    """Return a table, or a dataclass, as one line of JSON lines, with the crc32 of what it says as its last key."""
    return json.dumps({**plain(table), SUM: _crc(plain(table))}, ensure_ascii=False) + "\n"


def _crc(table: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(table).encode()):08x}"


def write_lines(path: AnyPath, values: Iterable[Any]) -> None:
    """Write values as JSON lines, all of them or nothing."""
    write_text(path, "".join(map(line_of, values)))


def plain(value: Any) -> Any:
    """Return a dataclass as a table; other values as they are."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def sync_folder(folder: AnyPath) -> None:
    """Bring renames in a folder to the disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading.


def read_json(path: AnyPath, kind: type[T]) -> T:
    """Return what a JSON file holds, as a dataclass; `dict` takes any table."""
    return parse_json(Path(path).read_bytes(), kind, str(path))


def parse_json(data: bytes, kind: type[T], where: str, prefix: str = "") -> T:
    """Return what a text of JSON holds, as a dataclass; `where` is what errors call it."""
    return build(kind, _decoded(where, data, "JSON", json.loads), where, prefix)


def read_toml(path: AnyPath, kind: type[T]) -> T:
    """Return what a TOML file holds, as a dataclass; `dict` takes any table."""
    return build(kind, _decoded(str(path), Path(path).read_bytes(), "TOML", tomllib.loads), str(path))


def read_lines(path: AnyPath, kind: type[T]) -> Iterator[T]:
    """Yield what each line of a file of JSON lines holds; a last line without its end is torn, and left out."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            where = f"{path}, line {number}"
            table = _decoded(where, line, "JSON", json.loads)
            said = table.pop(SUM, None) if isinstance(table, dict) else None
            if said is not None and said != _crc(table):
                raise ValueError(f"{where}: expected a line whose {SUM} is {said}, got another: the line was altered")
            yield build(kind, table, where)


def _decoded(where: str, data: bytes, language: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(data.decode())
    except (ValueError, RecursionError) as problem:  # of the encoding, and of the language: both are ValueErrors
        raise ValueError(f"{where}: expected {language}, got something else: {problem}") from None


# The schema.


def build(kind: type[T], table: Any, where: str = "", prefix: str = "") -> T:
    """Return the dataclass with the table's values, each of the type that its field says."""
    start = f"{where}: " if where else ""
    if not isinstance(table, Mapping):
        raise TypeError(f"{start}{prefix.rstrip('.') or 'the file'}: expected a table, got {describe(table)}")
    if not dataclasses.is_dataclass(kind):
        return typing.cast(T, dict(table))
    hints = fields(kind)
    for key in table:
        if key not in hints:
            known = [*keys(kind, prefix), *(prefix + name for name in hints)]
            raise ValueError(f"{start}unknown key '{prefix}{key}'{nearest(prefix + key, known)}")
    values = {name: checked(where, prefix + name, table[name], hint) for name, hint in hints.items() if name in table}
    for field in dataclasses.fields(kind):
        if field.name in values or field.default is not dataclasses.MISSING:
            continue
        if field.default_factory is not dataclasses.MISSING:
            continue
        if not dataclasses.is_dataclass(hints[field.name]):
            raise ValueError(f"{start}{prefix}{field.name}: expected a value, got none, and it has no default")
        values[field.name] = build(hints[field.name], {}, where, f"{prefix}{field.name}.")
    try:
        return kind(**values)
    except (TypeError, ValueError) as problem:  # of the dataclass's own checks, which name the key
        raise type(problem)(f"{start}{problem}") from None


def checked(where: str, key: str, value: Any, hint: Any) -> Any:
    """Return the value if it is what the annotation says; whole numbers serve as floats."""
    for option in alternatives(hint):
        origin = typing.get_origin(option) or option
        if option is Any or (option is types.NoneType and value is None):
            return value
        if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
            return build(typing.cast(type, option), value, where, f"{key}.")
        if origin is list and isinstance(value, list | tuple):
            (item,) = typing.get_args(option) or (Any,)
            return [checked(where, f"{key}[{place}]", one, item) for place, one in enumerate(value)]
        if origin is dict and isinstance(value, Mapping):
            item = (typing.get_args(option) or (str, Any))[1]
            return {name: checked(where, f"{key}.{name}", one, item) for name, one in value.items()}
        if origin is typing.Literal and value in typing.get_args(option):
            return value
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    start = f"{where}: " if where else ""
    words = [word for option in alternatives(hint) if _is_literal(option) for word in typing.get_args(option)]
    hinted = nearest(value, words) if isinstance(value, str) else ""
    wrong = ValueError if words and isinstance(value, str) else TypeError
    raise wrong(f"{start}{key}: expected {named(hint)}, got {describe(value)}{hinted}")


def keys(kind: type, prefix: str = "") -> dict[str, Any]:
    """Return every dotted key that a dataclass knows, with its type; a `dict` stands for all keys below it."""
    found: dict[str, Any] = {}
    for name, hint in fields(kind).items():
        if dataclasses.is_dataclass(hint):
            found |= keys(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            found[prefix + name] = hint
    return found


def fields(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass and their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(typing.cast(Any, kind)) if field.init}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) or _is_union(hint) else (hint,)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union


def _is_literal(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Literal


def named(hint: Any) -> str:
    """Return what an annotation allows, in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", types.NoneType: "none"}

    def one(option: Any) -> str:
        origin = typing.get_origin(option) or option
        if origin is list:
            return f"a list (each item {one((typing.get_args(option) or (Any,))[0])})"
        if origin is dict or dataclasses.is_dataclass(option):
            return "a table"
        if origin is typing.Literal:
            return " or ".join(repr(word) for word in typing.get_args(option))
        return words.get(option, str(option))

    return " or ".join(one(option) for option in alternatives(hint))


def literal(text: str) -> Any:
    """Return what a text is as a value in TOML, or the text itself: for a value whose type is not known."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


# TOML, written.


def to_toml(settings: Any) -> str:
    """Return a dataclass of tables as TOML text; keys that hold None are left out, as TOML has no word for it."""
    lines: list[str] = []

    def put(table: Mapping[str, Any], path: str) -> None:
        own = {key: value for key, value in table.items() if value is not None and not isinstance(value, dict)}
        if path and own:
            lines.append(f"[{path}]")
        lines.extend(f"{key} = {_value(value)}" for key, value in own.items())
        if own:
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
