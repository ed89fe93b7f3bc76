"""Train a language model from a preset (or a TOML file of your own) on token shards.

  lengthen train tiny                                       # the default corpus: Python's own standard library
  lengthen train configs/small.toml --data data/books --out runs/books
  lengthen train tiny --model.positions rotary --train.steps 500 --out runs/rotary
  lengthen train tiny --init runs/tiny --model.train_length 256 --out runs/longer
  torchrun --nproc-per-node 8 -m lengthen train configs/xl.toml --data data/books

Any key of the file can be given as --section.key VALUE; --model.position_options.NAME VALUE is an option of the
position method. A run that was interrupted resumes when the same command is given again. Its folder holds config.toml,
metrics.jsonl, and checkpoints/step-…/model.safetensors, which alone is enough to use the model.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lengthen import config as configs
from lengthen import io
from lengthen.cli import flags

if TYPE_CHECKING:
    from lengthen.data import Corpus
    from lengthen.training import Watcher, World

OPTIONS = "--model.position_options."  # of whatever name: what a method takes, the method checks
SWITCHES = ("--help", "--plain", "--tensorboard", "--verify", "--force")  # the flags without a value


class DraftModel(configs.ModelConfig):
    """The shape of a transformer."""

    def __post_init__(self) -> None:
        """Check nothing yet: a check needs every key, and torch, which --help does not import."""


@dataclass(frozen=True)
class Draft(configs.Config):
    """The unchecked config while it is assembled from the file and the command line."""

    model: DraftModel


@dataclass(frozen=True)
class Arguments:
    """Arguments of `lengthen train`: the config file, each of its keys, and where and how to run."""

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]  # a preset's name, or a TOML file
    keys: Annotated[Draft, tyro.conf.FlagConversionOff, tyro.conf.arg(name="")]
    data: Path | None = None  # token shards from `lengthen prepare`; without it, the default corpus
    out: Path | None = None  # the run's folder; none: runs/NAME of the config
    resume: str = "auto"  # from the last whole checkpoint in --out; never; step-15 in --out; or a checkpoint's path
    init: Path | None = None  # begin with the weights of a run, a checkpoint or a model's file, at step 0
    device: str | None = None  # cpu, cuda or cuda:1; none: cuda where there is one
    tensorboard: bool = False  # the same as --log.tensorboard true
    plain: bool = False  # plain lines, even on a terminal
    verify: bool = False  # compare every file of the corpus with its checksum, not only those that changed
    force: bool = False  # start even if the estimate says that memory is too small

    def resolved(self) -> configs.Config:
        """Return the config, checked."""
        config = configs.Config(**vars(self.keys) | {"model": configs.ModelConfig(**vars(self.keys.model))})
        return replace(config, log=replace(config.log, tensorboard=True)) if self.tensorboard else config


def parse(words: list[str]) -> Arguments:
    """Return the words over the values of the file that they name."""
    given, words = flags.take(words, OPTIONS)
    words = _joined(words)
    name = next((word for word in words if not word.startswith("-")), None)
    if name is None and not {"-h", "--help"} & set(words):
        raise ValueError(f"CONFIG: expected a TOML file or one of the presets {', '.join(configs.presets())}, got none")
    draft = _draft(configs.find(name) if name else None)
    options = {**draft.model.position_options, **given}
    draft.model.position_options.clear()  # no flags of ours: what they are is the method's affair
    arguments = flags.parse(Arguments, words, "train", __doc__ or "", Arguments(tyro.MISSING, draft))
    arguments.keys.model.position_options.update(options)
    return arguments


def _joined(words: list[str]) -> list[str]:
    """Return the words with each flag and its value as one: --train.steps 5 as --train.steps=5."""
    joined = [""]
    for word in words:
        flag = joined[-1] if joined[-1].startswith("--") else "="
        if "=" in flag or flag in SWITCHES or word.startswith("--"):
            joined.append(word)
        else:
            joined[-1] += f"={word}"
    return joined[1:]


def _draft(path: Path | None) -> Draft:
    """Return the config of a file; sizes missing from it must be given."""
    table = io.read_toml(path, dict) if path else {}
    sizes = dict.fromkeys(("layers", "width", "heads", "train_length"), 1)
    given = table.get("model", {})
    if isinstance(given, dict):
        table["model"] = {"vocab_size": None} | sizes | given
    draft = io.build(Draft, table, str(path))
    vars(draft.model).update((name, tyro.MISSING) for name in sizes if name not in given)
    return draft


def run(arguments: Arguments) -> int:
    """Train; print where the result is and the next command."""
    from lengthen.training import train, world

    config = arguments.resolved()
    out = arguments.out or Path("runs") / Path(arguments.config).stem
    with world(arguments.device) as here:
        corpus = _corpus(arguments.data, config.data, here, arguments.verify)
        watchers = [_watcher(arguments.plain)] if here.first else []
        more: dict[str, Any] = {"init": arguments.init, "force": arguments.force}
        outcome = train(config, corpus, out, here, arguments.resume, watchers, **more)
    if not outcome.finished:
        return 130
    if here.first:
        print("\nNext: " + shlex.join(["lengthen", "eval", str(out)]))
    return 0


def _corpus(directory: Path | None, data: configs.DataConfig, here: World, verify: bool = False) -> Corpus:
    """Return the corpus; the default one is prepared by the first process, and the others wait for it."""
    from lengthen.cli.corpus import open_corpus

    first = here.all_or_none(lambda: open_corpus(directory, data, verify) if here.first else None)
    return here.all_or_none(lambda: first or open_corpus(directory, data))


def _watcher(plain: bool) -> Watcher:
    """Return the live view on a terminal, plain lines elsewhere."""
    from lengthen.cli.lines import Lines
    from lengthen.cli.live import Live

    return Lines() if plain or not sys.stdout.isatty() else Live()
