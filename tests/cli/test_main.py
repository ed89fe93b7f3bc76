"""`lengthen VERB`: help, keys, and errors as one line with the right exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

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
    flags = re.sub(r"[│─╭╮╰╯\s]+", " ", said[said.index("usage:") :])
    # Help is the comment on a field's own line: one that stands inside parentheses is lost.
    assert re.findall(r"(--[\w-]+)(?: [^\s(]+)? \((?:default|required|repeatable)", flags) == []
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
    assert "pip install rich tyro" in capsys.readouterr().err


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


@pytest.mark.parametrize("module", ["tyro", "numpy", "torch", "lengthen.training.loop"])
def test_stopped_while_something_is_imported(module: str, tmp_path: Path) -> None:
    """Whoever swallows the interrupt, as packages do that try an import and go on without."""
    code = f"""
import builtins, os, signal, sys
from lengthen.cli.main import main
inner = builtins.__import__
def imports(name, *more):
    if name == {module!r}:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            pass
    return inner(name, *more)
builtins.__import__ = imports
sys.exit(main(["eval", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nlengthen: stopped\n")


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has more to say"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"
        ),
        MemoryError(),
        MemoryError("Unable to allocate 7 TiB for an array"),
    ],
    ids=repr,
)
def test_too_little_memory_is_one_line(problem: Exception, instead: Callable[[Any], Seen], capsys: Capture) -> None:
    instead(problem)
    assert main(["train", "tiny"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"lengthen train: error: out of memory: {str(problem).partition(chr(10))[0]}")
    assert said.count("\n") == 1


def test_another_error_of_torch_is_not_dressed_up(instead: Callable[[Any], Seen]) -> None:
    instead(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        main(["train", "tiny"])


def test_a_real_lack_of_memory_is_one_line(data: str, tmp_path: Path, capsys: Capture) -> None:
    """Torch's own allocator refuses, with --force, what was refused before it was asked without."""
    words = [
        "train",
        "tiny",
        "--data",
        data,
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
        "--evaluation.every",
        "0",
    ]
    words += ["--model.vocab_size", "100000000000"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "lengthen train: error: --model.vocab_size: expected a model that fits into memory, got 1000"
    )
    assert said.endswith("; --force tries it\n")
    assert main([*words, "--force"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("lengthen train: error: out of memory: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, "PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ({"GOMP_SPINCOUNT": "100"}, None),
        ({"KMP_BLOCKTIME": "0"}, None),
    ],
)
def test_idle_threads_sleep_unless_the_user_says_otherwise(
    given: dict[str, str], left: str | None, instead: Callable[[Any], Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    instead(0)
    main(["train", "tiny"])
    assert os.environ.get("OMP_WAIT_POLICY") == left


def test_they_are_told_before_torch_is_there() -> None:
    code = """
import os, sys
from lengthen.cli import main as program
program._run = lambda verb, words: print("torch" in sys.modules, os.environ["OMP_WAIT_POLICY"]) or 0
program.main(["train"])
"""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=kept)
    assert done.stdout == "False PASSIVE\n"


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
