"""`lengthen VERB …`: finds the verb, runs it, and turns errors that a person can mend into one clear line.

A verb is a module of this folder with `add_arguments(parser)` and `run(arguments)`, which returns the exit status; its
docstring is the long help, examples included. A verb is imported when it is named, so that each needs only its own
packages.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

VERBS = {
    "demo": "train six methods short, test them long, and show it: a few minutes",
    "prepare": "turn text into token shards",
    "train": "train a model from a preset and token shards",
    "eval": "measure perplexity at any length, and how far a model can be stretched",
    "analyse": "look inside: resolution, loss by position, reach, attention by distance, recall",
    "report": "put runs on one page: curves, tables, how each number was made",
}

MODULES = {"eval": "evaluate"}  # where a verb's name would hide one of Python's own


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status: 0 for success, 1 for an error with its message, 2 for wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in words
    words, keys = _keys([word for word in words if word != "--traceback"])
    parser = _parser(next((word for word in words if not word.startswith("-")), None))
    arguments = parser.parse_args(words)
    if arguments.verb is None:
        parser.print_help()
        return 0
    arguments.keys = keys
    if keys and not arguments.takes_keys:
        parser.error(f"{arguments.verb} takes no keys, got --{keys[0][0]}")
    try:
        status = int(arguments.function(arguments))
        sys.stdout.flush()  # here, so that a reader who has gone is noticed here
        return status
    except KeyboardInterrupt:
        print("\nlengthen: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as with `lengthen … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (
        ValueError,
        TypeError,
        ArithmeticError,
        OSError,
        ImportError,
    ) as problem:  # what checks of input, files and extras raise
        if traceback:
            raise
        print(f"lengthen {arguments.verb}: error: {problem}", file=sys.stderr)
        return 1


def _keys(words: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the words without those like --train.steps 500 or --train.steps=500, and those as pairs."""
    rest, keys = [], []
    waiting = iter(words)
    for word in waiting:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in key:
            rest.append(word)
            continue
        if not equals:
            value = next(waiting, "--")
            if value.startswith("--"):
                print(f"lengthen: error: --{key}: expected a value, got none", file=sys.stderr)
                raise SystemExit(2)
        keys.append((key, value))
    return rest, keys


def _parser(verb: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lengthen",
        description="Train short, test long: language models that work beyond the length they were trained at.",
        epilog="`lengthen VERB --help` explains a verb, with examples; --traceback shows where an error arose.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, summary in VERBS.items():
        if name != verb:
            verbs.add_parser(name, help=summary, add_help=False)
            continue
        module = importlib.import_module(f"lengthen.cli.{MODULES.get(name, name)}")
        child = verbs.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(child)
        child.set_defaults(function=module.run, takes_keys=getattr(module, "TAKES_KEYS", False))
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lengthen")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"
