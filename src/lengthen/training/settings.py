"""Dotted words of the command line into the table of a config, each read as its key's type says."""

from __future__ import annotations

import copy
import tomllib
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from lengthen.checks import describe, nearest
from lengthen.io import Table, alternatives, build, fields, keys, named, read_toml, to_toml

__all__ = ["apply", "build", "fields", "keys", "parse", "read_toml", "to_toml"]


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
    options = alternatives(hint)
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
    raise ValueError(f"--{key}: expected {named(hint)}, got {text!r}")


def _literal(text: str) -> Any:
    """Return what the text would be as a value in TOML, or the text itself: for keys whose type is not known here."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint) or hint
