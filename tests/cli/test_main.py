"""`lengthen VERB`: help, keys, and errors as one line with the right exit status."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from lengthen.cli import train
from lengthen.cli.main import MODULES, VERBS, _keys, main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[argparse.Namespace]]:
    """Have `lengthen train` do something else; return the list of what it is given."""

    def use(what: Any) -> list[argparse.Namespace]:
        seen: list[argparse.Namespace] = []

        def run(arguments: argparse.Namespace) -> int:
            seen.append(arguments)
            if isinstance(what, BaseException):
                raise what
            return int(what)

        monkeypatch.setattr(train, "run", run)
        return seen

    return use


def test_without_a_verb_help_is_printed(capsys: Capture) -> None:
    assert main([]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: lengthen")
    for verb, summary in VERBS.items():
        assert verb in said.out
        assert summary in " ".join(said.out.split())
    assert said.err == ""


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_help_is_its_docstring(verb: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    module = import_module(f"lengthen.cli.{MODULES.get(verb, verb)}")
    assert module.__doc__ is not None
    assert module.__doc__.strip() in said
    assert f"\n  lengthen {verb} " in said, "there is no example"


def test_the_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("lengthen 0.")


def test_wrong_usage_exits_with_2(capsys: Capture) -> None:
    for words, problem in (
        (["trane"], "invalid choice: 'trane'"),
        (["train", "tiny", "--stepz", "3"], "unrecognized arguments: --stepz 3"),
        (["train", "tiny", "--dat", "x"], "unrecognized arguments: --dat x"),  # no abbreviations
        (["prepare"], "the following arguments are required: -o/--out"),
    ):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2, words
        said = capsys.readouterr()
        assert problem in said.err.replace("-o/--output", "-o/--out")
        assert said.out == ""


def test_keys_are_told_from_other_words() -> None:
    assert _keys(["train", "tiny", "--a.b", "v", "--data", "x.y", "--a.c=w=1", "--out=runs/x.y", "-o", "z.w"]) == (
        ["train", "tiny", "--data", "x.y", "--out=runs/x.y", "-o", "z.w"],
        [("a.b", "v"), ("a.c", "w=1")],
    )
    assert _keys(["--a.b", "-5", "--a.c", "-1e-3", "--a.d="]) == ([], [("a.b", "-5"), ("a.c", "-1e-3"), ("a.d", "")])


def test_keys_reach_the_verb(instead: Callable[[Any], list[argparse.Namespace]]) -> None:
    seen = instead(0)
    assert main(["train", "--train.steps", "5", "tiny", "--model.positions=t5", "--plain"]) == 0
    assert seen[0].keys == [("train.steps", "5"), ("model.positions", "t5")]
    assert seen[0].config == "tiny"
    assert seen[0].plain


@pytest.mark.parametrize("words", [["--train.steps"], ["--train.steps", "--data", "x"], ["--train.steps", "--a.b=3"]])
def test_a_key_without_a_value_is_named(words: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "tiny", *words])
    assert left.value.code == 2
    assert capsys.readouterr().err == "lengthen: error: --train.steps: expected a value, got none\n"


def test_a_verb_without_keys_refuses_them(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        main(["prepare", "x.txt", "-o", "out", "--train.steps", "5"])
    assert left.value.code == 2
    assert "prepare takes no keys, got --train.steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "problem",
    [
        ValueError("a value"),
        TypeError("a type"),
        FileNotFoundError("a file"),
        FloatingPointError("a loss"),
        ImportError("an extra"),
    ],
    ids=repr,
)
def test_an_error_is_one_line_and_status_1(
    problem: Exception, instead: Callable[[Any], list[argparse.Namespace]], capsys: Capture
) -> None:
    instead(problem)
    assert main(["train", "tiny"]) == 1
    said = capsys.readouterr()
    assert said.err == f"lengthen train: error: {problem}\n"
    assert said.out == ""


def test_a_traceback_on_request(instead: Callable[[Any], list[argparse.Namespace]]) -> None:
    instead(ValueError("a value"))
    for words in (["train", "tiny", "--traceback"], ["--traceback", "train", "tiny"]):
        with pytest.raises(ValueError, match="a value"):
            main(words)


def test_a_mistake_of_the_program_is_not_dressed_up(instead: Callable[[Any], list[argparse.Namespace]]) -> None:
    instead(AssertionError("a bug"))
    with pytest.raises(AssertionError, match="a bug"):
        main(["train", "tiny"])


def test_stopped_by_hand(instead: Callable[[Any], list[argparse.Namespace]], capsys: Capture) -> None:
    instead(KeyboardInterrupt())
    assert main(["train", "tiny"]) == 130
    assert capsys.readouterr().err == "\nlengthen: stopped\n"


def test_the_verbs_status_is_the_programs(instead: Callable[[Any], list[argparse.Namespace]]) -> None:
    instead(130)
    assert main(["train", "tiny"]) == 130


def test_as_a_program_whose_reader_has_gone() -> None:
    """`lengthen train --keys | true`: no traceback, whether Python buffers what it prints or not."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    piped = f"set -o pipefail; {sys.executable} -m lengthen train --keys | true"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stderr == ""
    assert done.returncode == 141
