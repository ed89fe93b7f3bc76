"""A word of the command line is read as its field says, and every mistake is named with its flag."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from lengthen.cli import prepare, train
from lengthen.cli.flags import in_flags, parse

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Flags:
    """Every type that a flag has."""

    size: int = 1  # how large
    ratio: float = 0.5
    maybe: bool | None = None
    word: str = "one"
    kind: Literal["near", "far"] = "near"
    limit: int | None = None
    path: Path | None = None
    numbers: list[float] = field(default_factory=lambda: [1.0, 2.0])
    lengths: list[int] | None = None
    formats: list[Literal["svg", "pdf"]] | None = None
    places: bool | list[Literal["qkv", "norm"]] = True
    force: bool = False


GIVEN: list[tuple[str, str, Any]] = [
    ("size", "12", 12),
    ("size", "-1_000", -1000),
    ("ratio", "3", 3.0),
    ("ratio", "1e-4", 1e-4),
    ("ratio", "-inf", -math.inf),
    ("maybe", "none", None),
    ("maybe", "true", True),
    ("maybe", "False", False),
    ("word", "3", "3"),
    ("word", "none", "none"),
    ("word", "a b=c", "a b=c"),
    ("kind", "far", "far"),
    ("limit", "None", None),
    ("limit", "", None),
    ("limit", "7", 7),
    ("path", "a/b", Path("a/b")),
    ("numbers", "0.9,0.95", [0.9, 0.95]),
    ("numbers", "[1, 2]", [1.0, 2.0]),
    ("numbers", "-1,-2", [-1.0, -2.0]),
    ("lengths", "64, 128", [64, 128]),
    ("lengths", "64", [64]),
    ("lengths", "[]", []),
    ("lengths", "none", None),
    ("formats", "svg,pdf", ["svg", "pdf"]),
    ("places", "false", False),
    ("places", "qkv,norm", ["qkv", "norm"]),
    ("places", "norm", ["norm"]),
]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("name", "text", "value"), GIVEN, ids=[f"{name}={text}" for name, text, _ in GIVEN])
def test_a_word_is_read_as_its_field_says(name: str, text: str, value: Any, together: bool) -> None:
    words = [f"--{name}={text}"] if together else [f"--{name}", text]
    read = getattr(parse(Flags, words, "verb", ""), name)
    assert read == value
    assert type(read) is type(value)


def test_a_switch_takes_no_word() -> None:
    assert parse(Flags, ["--force"], "verb", "").force
    assert not parse(Flags, [], "verb", "").force


WRONG = [
    (["--size", "3.5"], "--size: expected a whole number, got '3.5'"),
    (["--size=1e3"], "--size: expected a whole number, got '1e3'"),
    (["--size", "none"], "--size: expected a whole number, got 'none'"),
    (["--ratio", "fast"], "--ratio: expected a number, got 'fast'"),
    (["--maybe", "yes"], "--maybe: expected true or false or none, got 'yes'"),
    (["--limit", "x"], "--limit: expected a whole number or none, got 'x'"),
    (["--lengths", "1,x"], "--lengths: expected a whole number, got 'x'"),
    (["--formats", "svg,gif"], "--formats: expected 'svg' or 'pdf', got 'gif'"),
    (["--kind", "fra"], "--kind: expected 'near' or 'far', got 'fra'; did you mean 'far'?"),
    (["--size"], "Missing value for argument '--size'"),
    (["--siez", "3"], "Unrecognized options: --siez, 3 Perhaps you meant: --size N how large (default: 1)"),
    (["--siz", "3"], "Unrecognized options: --siz, 3"),  # no abbreviations
    (["three"], "Unrecognized options: three"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_a_wrong_word_is_named(words: list[str], message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        parse(Flags, words, "verb", "")
    assert left.value.code == 2
    said = capsys.readouterr()
    assert message in " ".join(re.sub(r"[│─╭╮╰╯]|-{3,}", " ", said.err).split())
    assert said.out == ""


def test_help_has_the_description_defaults_and_choices(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        parse(Flags, ["--help"], "verb", "What it is for.\n\n  lengthen verb x   # an example\n")
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("What it is for.\n\n  lengthen verb x   # an example\n")
    assert "--size N" in said
    assert "how large (default: 1)" in said
    assert "--kind near|far" in said
    assert "--numbers X,…" in said
    assert "(default: 1.0,2.0)" in said
    assert "--lengths N,…|none" in said
    assert "--no-force" not in said


@pytest.mark.parametrize(
    ("kind", "message", "said"),
    [
        (
            prepare.Arguments,
            "out: x holds another corpus; force=True replaces it",
            "--out: x holds another corpus; --force replaces it",
        ),
        (prepare.Arguments, "vocab_size: only a BPE has one", "--vocab-size: only a BPE has one"),
        (prepare.Arguments, "hold out fewer (validation=0)", "hold out fewer (--validation 0)"),
        (prepare.Arguments, "sources: no text; outforce=True", "sources: no text; outforce=True"),
        (train.Arguments, "train.steps: expected at least 1", "--train.steps: expected at least 1"),
        (train.Arguments, "model.positions = 'x': no such", "--model.positions = 'x': no such"),
        (train.Arguments, "f.toml: train.steps: expected at least 1", "f.toml: train.steps: expected at least 1"),
    ],
)
def test_errors_are_in_the_command_lines_words(kind: type, message: str, said: str) -> None:
    assert in_flags(message, kind) == said
