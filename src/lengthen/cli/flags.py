"""A verb's words into its dataclass, by tyro: flags, help and errors come from the fields, their types and comments.

Values are read as the files have them: `true`, `none`, and lists with commas (64,128).
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from lengthen.checks import nearest
from lengthen.io import alternatives, keys, literal, named

T = TypeVar("T")
POSITIONS = "--positions."


def parse(kind: type[T], words: Sequence[str], verb: str, description: str, default: T | None = None) -> T:
    """Return the words as a dataclass; help and errors are printed, and end the program."""
    if {"-h", "--help"} & set(words):
        print(description)
    return tyro.cli(
        kind,
        prog=f"lengthen {verb}",
        description="",
        args=[part for word in words for part in _parts(word)],
        default=tyro.MISSING_NONPROP if default is None else default,
        use_underscores=verb == "train",  # whose flags are the keys of a file
        config=(tyro.conf.FlagCreatePairsOff,),
        registry=REGISTRY,
    )


def take(words: Sequence[str], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """Return what is given as PREFIXname value, for names that no dataclass lists, and the words that are left."""
    taken, rest, queue = {}, [], [part for word in words for part in _parts(word)]
    while queue:
        word = queue.pop(0)
        if not word.startswith(prefix):
            rest.append(word)
            continue
        if not queue or queue[0].startswith("--"):
            raise ValueError(f"{word}: expected a value, got none")
        taken[word.removeprefix(prefix)] = _read_as_it_looks(queue.pop(0))
    return taken, rest


def _read_as_it_looks(text: str) -> Any:
    """Return a word whose type no field says: none, true or false, a number, a list with commas, or a text."""
    if text.lower() in ("none", "true", "false"):
        return read(text, bool | None)
    value = literal(text)
    return [literal(part.strip()) for part in text.split(",")] if isinstance(value, str) and "," in value else value


def parse_with_positions(kind: type[T], words: Sequence[str], verb: str, description: str) -> T:
    """Return the words as `parse` does, with --positions.NAME VALUE, options of the position method, as a table."""
    options, rest = take(words, POSITIONS)  # of whatever name: what a method takes, the method checks
    arguments: Any = parse(kind, rest, verb, description)
    return dataclasses.replace(arguments, positions=options)  # type: ignore[no-any-return]


def _parts(word: str) -> list[str]:
    """Return --steps=4 as two words, for which tyro names the nearest flag that there is."""
    flag, equals, value = word.partition("=")
    return [flag, value] if word.startswith("--") and equals and not value.startswith("-") else [word]


def in_flags(message: str, kind: type) -> str:
    """Return an error of the library in the command line's words: `--force` for `force=True`, `--out:` for `out:`."""
    hints = typing.get_type_hints(kind, include_extras=True)
    positional = [name for name, hint in hints.items() if tyro.conf.Positional in typing.get_args(hint)]
    names = "|".join(re.escape(name.removeprefix("keys.")) for name in keys(kind) if name not in positional)

    def flag(name: str) -> str:
        return "--" + (name if "." in name else name.replace("_", "-"))

    message = re.sub(rf"^({names})(?=: | = )", lambda found: flag(found[1]), message)
    given = rf"(?<=[ (])({names})=(\w+)"
    return re.sub(given, lambda found: flag(found[1]) + ("" if found[2] == "True" else f" {found[2]}"), message)


REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Numbers, words, true and false, none, and lists of these, each as one word of the command line."""
    hint = info.type
    if not _plain(hint):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=_metavar(hint),
        instance_from_str=lambda given: read(given[0], hint),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [shown(value)],
    )


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def _plain(hint: Any) -> bool:
    kinds = (int, float, bool, str, NoneType, list, Literal)
    return all(_origin(option) in kinds for option in alternatives(hint))


def _metavar(hint: Any) -> str:
    names = {int: "N", float: "X", bool: "true|false", str: "TEXT", NoneType: "none"}

    def one(option: Any) -> str:
        if _origin(option) is list:
            return f"{one(typing.get_args(option)[0])},…"
        return "|".join(typing.get_args(option)) if _origin(option) is Literal else names[option]

    return "|".join(one(option) for option in alternatives(hint))


def read(text: str, hint: Any) -> Any:
    """Return a word of the command line as an annotation says."""
    options = alternatives(hint)
    if NoneType in options and text.lower() in ("none", ""):
        return None
    for option in options:
        if _origin(option) is list:
            (item,) = typing.get_args(option)
            return [read(part.strip(), item) for part in text.strip("[]").split(",") if part.strip()]
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
        if option is str or (_origin(option) is Literal and text in typing.get_args(option)):
            return text
    words = [word for option in options if _origin(option) is Literal for word in typing.get_args(option)]
    raise ValueError(f"expected {named(hint)}, got {text!r}{nearest(text, words)}")


def shown(value: Any) -> str:
    """Return a value as one would give it."""
    if isinstance(value, list):
        return ",".join(map(shown, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
