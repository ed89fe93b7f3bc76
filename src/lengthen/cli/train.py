"""Train a language model from a preset (or a TOML file of your own) on token shards.

  lengthen train tiny                                       # the default corpus: Python's own standard library
  lengthen train configs/small.toml --data data/books --out runs/books
  lengthen train tiny --model.positions rotary --train.steps 500 --out runs/rotary
  torchrun --nproc-per-node 8 -m lengthen train configs/xl.toml --data data/books

Any key of the file can be given as --section.key VALUE; `--keys` lists them all. A run that was stopped, in whatever
way, goes on where it was when the same command is given again. Everything is in its folder: config.toml, metrics.jsonl,
and checkpoints/step-…/model.safetensors, which needs nothing else to be used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

TAKES_KEYS = True  # words like --train.steps 500 go to `arguments.keys`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a preset's name, or a TOML file")
    parser.add_argument(
        "--data", metavar="DIR", type=Path, help="token shards from `lengthen prepare`; without it, the default corpus"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="the run's folder (default: runs/NAME of the config)")
    parser.add_argument(
        "--resume",
        metavar="auto|never|PATH",
        default="auto",
        help="go on from the last checkpoint in --out (auto, the default), refuse if there is one (never), "
        "or go on from a checkpoint elsewhere",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    parser.add_argument("--tensorboard", action="store_true", help="write for TensorBoard too, into the run's folder")
    parser.add_argument("--plain", action="store_true", help="plain lines, even on a terminal")
    parser.add_argument("--keys", dest="list", action="store_true", help="list every --section.key with its default")


def run(arguments: argparse.Namespace) -> int:
    """Train, and say where the result is."""
    from lengthen.training import config as configs
    from lengthen.training import settings, train, world

    if arguments.list:
        _list_keys()
        return 0
    if arguments.config is None:
        known = ", ".join(configs.presets())
        raise ValueError(f"CONFIG: expected a TOML file or one of the presets {known}, got none")
    path = configs.find(arguments.config)
    words = [*arguments.keys, *([("log.tensorboard", "true")] if arguments.tensorboard else [])]
    # Read once before the data is, so that a wrong key is told at once; the vocabulary's size is then still to come.
    draft = configs.from_table(
        settings.apply(settings.read_toml(path, dict), words, configs.Config), str(path), vocab_size=1
    )
    with world(arguments.device) as here:
        corpus = _corpus(arguments.data, draft.data, here)
        config = configs.load(path, words, corpus.vocab_size)
        out = arguments.out or Path("runs") / path.stem
        watchers = _watchers(arguments.plain) if here.first else []
        outcome = train(config, corpus, out, here, arguments.resume, watchers)
    return 0 if outcome.finished else 130


def _corpus(directory: Path | None, data: Any, here: Any) -> Any:
    """Return the corpus; the default one is prepared by the first process, and the others wait for it."""
    from lengthen.cli.corpus import open_corpus

    problem: Exception | None = None
    if here.first:
        try:
            return open_corpus(directory, data)
        except Exception as found:
            problem = found
            raise
        finally:
            here.agree(problem)
    here.agree(None)
    return open_corpus(directory, data)


def _watchers(plain: bool) -> list[Any]:
    """Return the live view on a terminal, plain lines elsewhere."""
    from lengthen.cli.lines import Lines

    if plain or not sys.stdout.isatty():
        return [Lines()]
    try:
        from lengthen.cli.live import Live
    except ImportError:
        print('lengthen train: for a live view, pip install "lengthen[cli]"', file=sys.stderr)
        return [Lines()]
    return [Live()]


def _list_keys() -> None:
    """Print every key with its default."""
    import dataclasses

    from lengthen.training import settings
    from lengthen.training.config import Config

    for field in dataclasses.fields(Config):
        section: Any = field.default if field.default is not dataclasses.MISSING else None
        kind = settings.fields(Config)[field.name]
        for item in dataclasses.fields(kind):
            default: Any = item.default
            if section is not None:
                default = getattr(section, item.name)
            elif item.default_factory is not dataclasses.MISSING:
                default = item.default_factory()
            shown = "(none)" if default is dataclasses.MISSING else default
            print(f"--{field.name}.{item.name:<24} {shown}")
