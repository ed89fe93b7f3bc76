"""Look into a trained model: where its loss falls, how far it looks, what it tells apart.

  resolution   R(s), how well the scores tell near from far, for each layer and the model; --blockwise beside it
  positions    loss by position in the window, and how much of what long inputs gain is context, how much the early
               tokens' curse fading
  reach        ALiBi: how many keys back each head must look, and the share of the score matrix that is
  distance     how much of its attention each head spends at which distance
  recall       for a model trained on recall (configs/recall.toml): how often it finds a value at growing distances;
               --lengths are the distances, and no data is needed

RUN is a run's folder, whose last checkpoint is used, or one checkpoint's folder. Results are written to
RUN/analysis/NAME.json. docs/analyses.md has the definitions.

Examples:
  lengthen analyse runs/tiny                                          every analysis that fits the model
  lengthen analyse runs/tiny --data data/python --what resolution --blockwise --lengths 64,256,1024
  lengthen analyse runs/tiny --data data/python --what positions --tokens 65536 --stride 1
  lengthen analyse runs/recall --what recall --lengths 16,32,64,128,256
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import tyro

from lengthen.cli.progress import show_progress

if TYPE_CHECKING:
    from lengthen.data import Corpus
    from lengthen.evaluation import Subject

OPTIONS = {  # of each analysis, among the arguments
    "resolution": ("split", "tokens", "blockwise", "block"),
    "positions": ("split", "tokens", "stride"),
    "reach": ("split", "tokens"),
    "distance": ("split", "tokens"),
    "recall": ("trials", "seed"),
}
Name = Literal["resolution", "positions", "reach", "distance", "recall"]
NAMES: tuple[Name, ...] = get_args(Name)
USUAL = NAMES[:-1]


@dataclass(frozen=True)
class Arguments:
    """What `lengthen analyse` is told."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]  # a run's folder, or a checkpoint's
    data: Path | None = None  # token shards; none: those that the model was trained on
    what: list[Name] | None = None  # none: all but recall, and reach for ALiBi alone
    lengths: list[int] | None = None  # tokens read at once; none: the training length times 1, 2, 4, 8, 16
    tokens: int = 16_384  # of the text to read
    split: str = "validation"  # of the corpus
    blockwise: bool = False  # resolution: with blockwise attention too
    block: int | None = None  # its block; none: half the training length
    stride: int | None = None  # positions: of sliding windows; none: the shortest length / 8
    trials: int = 256  # recall: questions
    seed: int = 0  # recall: other questions
    device: str | None = None  # cpu, cuda or cuda:1; none: cuda where there is one


def run(arguments: Arguments) -> int:
    """Analyse, with progress; write the results, and end with short tables."""
    from lengthen.cli.evaluate import whole_numbers
    from lengthen.evaluation import open_run
    from lengthen.evaluation.analyses import ANALYSES, fitting_lengths, write
    from lengthen.training.parallel import pick_device

    asked = wanted(arguments.what)
    given = whole_numbers("--lengths", arguments.lengths) if arguments.lengths is not None else None
    for name in ("tokens", "trials", "block", "stride"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected a whole number of at least 1, got {value}")
    subject = open_run(arguments.run_folder, device=pick_device(arguments.device))
    corpus = _corpus(arguments.data, asked, subject)
    names = _fitting(asked, subject, said=arguments.what is not None)
    texts = {name: None if name == "recall" else corpus for name in names}
    lengths = {name: fitting_lengths(subject, texts[name], arguments.split, given) for name in names}
    for name in names:
        options = {option: getattr(arguments, option) for option in OPTIONS[name]}
        with show_progress(unit="tokens") as progress:
            found = ANALYSES[name].analyse(subject, texts[name], lengths[name], progress=progress, **options)
        path = write(subject.folder, found)
        print()
        for line in ANALYSES[name].table(found):
            print(line)
        print(f"  {path}")
    return 0


def wanted(given: list[Name] | None) -> list[str]:
    """Return the analyses that are asked for, in the order of NAMES."""
    return [name for name in NAMES if name in (USUAL if given is None else given)]


def _corpus(directory: Path | None, asked: list[str], subject: Subject) -> Corpus | None:
    """Return the corpus, if an analysis reads one: the one that was named, or the one that the run was trained on."""
    from lengthen.cli.corpus import corpus_of
    from lengthen.evaluation.runs import refuse_other_tokens

    if asked == ["recall"]:
        return None
    corpus = corpus_of(subject, directory)
    refuse_other_tokens(subject, corpus)
    return corpus


def _fitting(asked: list[str], subject: Subject, said: bool) -> list[str]:
    """Refuse an analysis that the model has nothing for; if it was not asked for by name, leave it out."""
    from lengthen.evaluation.analyses import reach

    if "reach" in asked and (said or reach.bounded(subject.model)):
        reach.refuse_unbounded(subject.model)
        return asked
    return [name for name in asked if name != "reach"]
