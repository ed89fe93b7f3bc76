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

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

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
NAMES = tuple(OPTIONS)
USUAL = NAMES[:-1]
TOKENS = 16_384
TRIALS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="a run's folder, or a checkpoint's")
    parser.add_argument("--data", metavar="DIR", type=Path, help="token shards (default: the default corpus)")
    parser.add_argument(
        "--what", metavar="NAMES", help=f"of {', '.join(NAMES)}, with commas (all but recall; reach for ALiBi alone)"
    )
    parser.add_argument(
        "--lengths", metavar="N,N,…", help="tokens read at once (the training length times 1, 2, 4, 8, 16)"
    )
    parser.add_argument("--tokens", metavar="N", type=int, default=TOKENS, help=f"of the text to read ({TOKENS})")
    parser.add_argument("--split", metavar="NAME", default="validation", help="of the corpus (validation)")
    parser.add_argument("--blockwise", action="store_true", help="resolution: with blockwise attention too")
    parser.add_argument("--block", metavar="N", type=int, help="its block (half the training length)")
    parser.add_argument("--stride", metavar="N", type=int, help="positions: of sliding windows (shortest length / 8)")
    parser.add_argument("--trials", metavar="N", type=int, default=TRIALS, help=f"recall: questions ({TRIALS})")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="recall: other questions (0)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:1 (default: cuda where there is one)")


def run(arguments: argparse.Namespace) -> int:
    """Analyse, with progress; write the results, and end with short tables."""
    import torch

    from lengthen.cli.evaluate import whole_numbers
    from lengthen.evaluation import open_run
    from lengthen.evaluation.analyses import ANALYSES, fitting_lengths, write

    asked = wanted(arguments.what)
    given = whole_numbers("--lengths", arguments.lengths) if arguments.lengths is not None else None
    for name in ("tokens", "trials", "block", "stride"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected a whole number of at least 1, got {value}")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    subject = open_run(arguments.run_folder, device=device)
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


def wanted(given: str | None) -> list[str]:
    """Return the analyses that are asked for, in the order of NAMES."""
    from lengthen.checks import nearest

    asked = list(USUAL) if given is None else [word.strip() for word in given.split(",")]
    for word in asked:
        if word not in NAMES:
            raise ValueError(f"--what: expected of {', '.join(NAMES)}, got {word!r}{nearest(word, NAMES)}")
    return [name for name in NAMES if name in asked]


def _corpus(directory: Path | None, asked: list[str], subject: Subject) -> Corpus | None:
    """Return the corpus, if an analysis reads one: the folder's, or the default one of the run's config."""
    from lengthen.cli.corpus import open_corpus
    from lengthen.evaluation.runs import refuse_other_tokens
    from lengthen.training.config import from_table
    from lengthen.training.settings import read_toml

    if asked == ["recall"]:
        return None
    table = subject.checkpoint.path / "config.toml"
    corpus = open_corpus(directory, from_table(read_toml(table, dict), str(table)).data)
    refuse_other_tokens(subject, corpus)
    return corpus


def _fitting(asked: list[str], subject: Subject, said: bool) -> list[str]:
    """Refuse an analysis that the model has nothing for; if it was not asked for by name, leave it out."""
    from lengthen.evaluation.analyses import reach

    if "reach" in asked and (said or reach.bounded(subject.model)):
        reach.refuse_unbounded(subject.model)
        return asked
    return [name for name in asked if name != "reach"]
