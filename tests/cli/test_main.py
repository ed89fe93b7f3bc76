"""`lengthen VERB`: help, keys, and errors as one line with the right exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lengthen.cli import train
from lengthen.cli.main import MODULES, VERBS, main

Capture = pytest.CaptureFixture[str]
Seen = list[train.Arguments]


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Seen]:
    """Have `lengthen train` do something else; return the list of what it is given."""

    def use(what: Any) -> Seen:
        seen: Seen = []

        def run(arguments: train.Arguments) -> int:
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


@pytest.mark.parametrize("words", [[], ["--help"], *([verb, "--help"] for verb in VERBS), ["train", "xl", "--help"]])
def test_help_needs_no_torch(words: list[str]) -> None:
    code = f"""
import sys
from lengthen.cli.main import main
try:
    main({words})
finally:
    assert not {{"torch", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_the_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lengthen 0.")


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "; did you mean 'train'?"), ("TRAIN", "; did you mean 'train'?"), ("x", "")]
)
def test_a_mistyped_verb_is_hinted(word: str, hint: str, capsys: Capture) -> None:
    assert main([word, "tiny"]) == 2
    said = capsys.readouterr()
    assert said.err == f"lengthen: error: expected a verb ({', '.join(VERBS)}), got {word!r}{hint}\n"
    assert said.out == ""


def test_wrong_usage_exits_with_2(capsys: Capture) -> None:
    for words, problems in (
        (["train", "tiny", "--steps", "3"], ("Unrecognized options: --steps, 3", "--train.steps N")),
        (["train", "tiny", "--steps=3"], ("Unrecognized options: --steps, 3", "--train.steps N")),
        (["train", "tiny", "--dat", "x"], ("Unrecognized options: --dat, x", "--data")),  # no abbreviations
        (["train", "tiny", "--train.steps", "--data", "x"], ("Missing value for argument '--train.steps'",)),
        (["prepare"], ("-o PATH, --out PATH",)),
        (["prepare", "x.txt", "-o", "out", "--train.steps", "5"], ("Unrecognized options: --train.steps",)),
    ):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2, words
        said = capsys.readouterr()
        assert all(problem in said.err for problem in problems), said.err
        assert said.out == ""


def test_words_reach_the_verb(instead: Callable[[Any], Seen]) -> None:
    seen = instead(0)
    assert main(["train", "--train.steps", "5", "tiny", "--model.positions=t5", "--plain", "--out", "x"]) == 0
    assert seen[0].keys.train.steps == 5
    assert seen[0].keys.model.positions == "t5"
    assert (seen[0].config, seen[0].plain, seen[0].out) == ("tiny", True, Path("x"))


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for module in [name for name in sys.modules if name.startswith(("tyro", "lengthen.cli.flags"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("lengthen.cli.flags")
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["train", "tiny"]) == 1
    assert 'pip install "lengthen[cli,train]"' in capsys.readouterr().err


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
def test_an_error_is_one_line_and_status_1(problem: Exception, instead: Callable[[Any], Seen], capsys: Capture) -> None:
    instead(problem)
    assert main(["train", "tiny"]) == 1
    said = capsys.readouterr()
    assert said.err == f"lengthen train: error: {problem}\n"
    assert said.out == ""


def test_a_traceback_on_request(instead: Callable[[Any], Seen]) -> None:
    instead(ValueError("a value"))
    for words in (["train", "tiny", "--traceback"], ["--traceback", "train", "tiny"]):
        with pytest.raises(ValueError, match="a value"):
            main(words)


def test_a_mistake_of_the_program_is_not_dressed_up(instead: Callable[[Any], Seen]) -> None:
    instead(AssertionError("a bug"))
    with pytest.raises(AssertionError, match="a bug"):
        main(["train", "tiny"])


def test_stopped_by_hand(instead: Callable[[Any], Seen], capsys: Capture) -> None:
    instead(KeyboardInterrupt())
    assert main(["train", "tiny"]) == 130
    assert capsys.readouterr().err == "\nlengthen: stopped\n"


def test_the_verbs_status_is_the_programs(instead: Callable[[Any], Seen]) -> None:
    instead(130)
    assert main(["train", "tiny"]) == 130


def test_as_a_program_whose_reader_has_gone() -> None:
    """`lengthen train --help | true`: no traceback, whether Python buffers what it prints or not."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    piped = f"set -o pipefail; {sys.executable} -m lengthen train --help | true"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stderr == ""
    assert done.returncode == 141
