"""`lengthen VERB …`: finds the verb, runs it, and prints errors that the user can fix as one line.

A verb is a module of this folder with a dataclass `Arguments` (its flags, each with a comment as help) and
`run(arguments)`, which returns the exit status; its docstring is the long help, examples included. Help needs no torch:
what a verb works with is imported by `run`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lengthen import __version__

VERBS = {
    "demo": "train six position methods short, test them long, write a report: a few minutes",
    "prepare": "turn text into token shards",
    "train": "train a model from a preset and token shards",
    "eval": "measure perplexity at any length, the longest length that holds, and long-context tasks",
    "analyse": "analyse a model: resolution, loss by position, reach, attention by distance, induction, LongPPL",
    "generate": "generate text, streamed, with any cache policy",
    "serve": "serve a model: OpenAI's completions API, and a web page",
    "report": "write an HTML report of runs: curves, tables, how each number was measured",
    "export": "export a model to a Hugging Face folder",
}

MODULES = {"eval": "evaluate"}  # where a verb's name would hide one of Python's own

NEEDS = {  # what a verb works with, and imports only to run
    "demo": ("lengthen.evaluation", "lengthen.report"),
    "prepare": ("lengthen.data",),
    "train": ("lengthen.training",),
    "eval": ("lengthen.evaluation",),
    "analyse": ("lengthen.evaluation",),
    "generate": ("lengthen.evaluation",),
    "serve": ("lengthen.evaluation",),
    "report": ("lengthen.report",),
    "export": ("lengthen.interop.export",),
}

STOPPED = "lengthen: stopped"

USAGE = f"""\
usage: lengthen VERB …

Train short, test long: language models that work beyond the length they were trained at.

{chr(10).join(f"  {verb:<10}{summary}" for verb, summary in VERBS.items())}

`lengthen VERB --help` explains a verb, with examples. --version prints the version, --traceback shows where an error
arose."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status: 0 for success, 1 for an error with its message, 2 for wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in words
    verb, *words = [word for word in words if word != "--traceback"] or ["--help"]
    if verb in ("-h", "--help"):
        print(USAGE)
        return 0
    if verb == "--version":
        print(f"lengthen {__version__}")
        return 0
    if verb not in VERBS:
        from lengthen.checks import nearest  # here: the less is imported above, the sooner a Ctrl-C is heard

        expected = f"expected a verb ({', '.join(VERBS)}), got {verb!r}{nearest(verb, VERBS)}"
        print(f"lengthen: error: {expected}", file=sys.stderr)
        return 2
    wait_quietly()
    try:
        status = _run(verb, words)
        sys.stdout.flush()  # here, so that a reader who has gone is noticed here
        return status
    except KeyboardInterrupt:
        print(f"\n{STOPPED}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as with `lengthen … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, TypeError, ArithmeticError, OSError, ImportError) as problem:  # of input, files and extras
        if traceback:
            raise
        return _say(verb, str(problem))
    except (MemoryError, RuntimeError) as problem:
        if traceback or not _out_of_memory(problem):
            raise
        first = str(problem).strip().partition("\n")[0]
        return _say(verb, f"out of memory: {first or 'no more is left'}; a smaller batch, length or model needs less")


def wait_quietly() -> None:
    """Have OpenMP's idle threads sleep, unless the user has said how they wait; torch reads this when it is loaded.

    Threads that spin for the next piece of work hold cores that other processes need (docs/training.md has numbers).
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(os.environ):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _say(verb: str, problem: str) -> int:
    print(f"lengthen {verb}: error: {problem}", file=sys.stderr)
    return 1


def _out_of_memory(problem: BaseException) -> bool:
    """Whether this is what torch, or Python, raises when there is no memory left."""
    said = f"{type(problem).__name__} {problem}"
    return isinstance(problem, MemoryError) or "OutOfMemoryError" in said or "can't allocate memory" in said


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """Leave the program at a Ctrl-C: packages that are interrupted while they are imported do not all pass it on."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        os.write(2, f"\n{STOPPED}\n".encode())
        os._exit(130)

    try:
        before = signal.signal(signal.SIGINT, leave)
    except ValueError:  # not the main thread, which signals go to
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(verb: str, words: list[str]) -> int:
    with _stopped_at_once():
        try:
            from lengthen.cli import flags
        except ImportError as problem:
            raise ImportError(
                f"{problem}; the command line needs pip install rich tyro numpy safetensors tokenizers"
            ) from None
        module = importlib.import_module(f"lengthen.cli.{MODULES.get(verb, verb)}")
    read = getattr(module, "parse", None)
    arguments = read(words) if read else flags.parse(module.Arguments, words, verb, module.__doc__ or "")
    with _stopped_at_once():
        for name in NEEDS.get(verb, ()):
            importlib.import_module(name)
    try:
        return int(module.run(arguments))
    except (TypeError, ValueError) as problem:  # of the library, which knows no flags
        problem.args = (flags.in_flags(str(problem), module.Arguments),)
        raise
