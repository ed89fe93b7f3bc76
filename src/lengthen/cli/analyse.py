"""Analyse a trained model: loss by position, reach, attention by distance, resolution, induction, LongPPL.

  resolution   R(s), how well scores tell near keys from far ones, per layer and model; --blockwise adds blockwise rows
  positions    loss by position in the window; splits the gain of longer inputs into more context and a weaker early
               token curse
  reach        with a bias: how many keys back each head must read, and as a fraction of the score matrix
  distance     how much of its attention each head spends at which distance
  longppl      perplexity over the tokens that a long context helps to predict; --judge is a run that chooses them
  induction    does it copy n random tokens when they are repeated, and which heads do it; --lengths are n

RUN is a run's folder, whose last checkpoint is used, or one checkpoint's folder. Results are written to
RUN/analysis/NAME.json. docs/analyses.md has the definitions.

Examples:
  lengthen analyse runs/tiny                                        # every analysis that fits the model
  lengthen analyse runs/tiny --data data/python --what resolution --blockwise --lengths 64,256,1024
  lengthen analyse runs/tiny --data data/python --what positions --tokens 65536 --stride 1
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import tyro

from lengthen.cli.progress import show_progress

if TYPE_CHECKING:
    from lengthen.evaluation import Subject

OPTIONS = {  # of each analysis, among the arguments
    "resolution": ("tokens", "blockwise", "block"),
    "positions": ("tokens", "stride"),
    "reach": ("tokens",),
    "distance": ("tokens",),
    "induction": ("tokens", "seed"),
    "longppl": ("tokens", "stride", "short", "alpha", "beta"),
}
Name = Literal["resolution", "positions", "reach", "distance", "induction", "longppl"]
NAMES: tuple[Name, ...] = get_args(Name)


@dataclass(frozen=True)
class Arguments:
    """Arguments of `lengthen analyse`."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run's folder, a checkpoint's, or a model of Hugging Face."""
    data: Path | None = None  # token shards, or a text; none: what the model was trained on, or Python's source
    what: list[Name] | None = None  # none: all that fit; reach needs a bias
    lengths: list[int] | None = None  # tokens read at once; none: 1 to 16 times the training length, as far as fit
    tokens: int = 16_384  # of the text to read
    split: str | None = None  # of the corpus; none: validation, or all of a text
    blockwise: bool = False  # resolution: with blockwise attention too
    block: int | None = None  # its block; none: half the training length
    stride: int | None = None  # positions, longppl: of sliding windows; none: the shortest length / 8, short / 8
    short: int | None = None  # longppl: tokens of the short context; none: the training length / 8
    alpha: float = 2.0  # longppl: nats by which the long context must lower a key token's loss
    beta: float = -2.0  # longppl: the log likelihood that a key token must have with the long context
    judge: Path | None = None  # longppl: the run whose model chooses the key tokens; none: the model itself
    seed: int = 0  # induction: other sequences
    device: str | None = None  # cpu, cuda or cuda:1; none: cuda where there is one
    verify: bool = False  # compare every file of the corpus with its checksum, not only those that changed


def run(arguments: Arguments) -> int:
    """Analyse, with progress; write the results, and end with short tables."""
    from lengthen.cli.corpus import corpus_of, split_of
    from lengthen.cli.evaluate import whole_numbers
    from lengthen.evaluation.analyses import ANALYSES, LENGTHS, fitting_lengths, refuse_encoder, write
    from lengthen.evaluation.runs import refuse_other_tokens
    from lengthen.interop.subjects import open_model
    from lengthen.training.parallel import pick_device

    asked = wanted(arguments.what)
    given = whole_numbers("--lengths", arguments.lengths) if arguments.lengths is not None else None
    for name, least in (("tokens", 1), ("block", 1), ("stride", 1), ("short", 1), ("seed", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name}: expected a whole number of at least {least}, got {value}")
    subject = open_model(arguments.run_folder, device=pick_device(arguments.device))
    refuse_encoder(subject.model)
    corpus = corpus_of(subject, arguments.data, arguments.verify)
    refuse_other_tokens(subject, corpus)
    split = split_of(corpus, arguments.split)
    text = corpus[split]
    judge = None if arguments.judge is None else open_model(arguments.judge, device=pick_device(arguments.device))
    if judge is not None:
        refuse_encoder(judge.model)
        refuse_other_tokens(judge, corpus)
    names = _fitting(asked, subject, given, said=arguments.what is not None)
    lengths = {name: fitting_lengths(subject, LENGTHS[name], text, given) for name in names}
    for name in names:
        options = {option: getattr(arguments, option) for option in OPTIONS[name]}
        options |= {"judge": judge} if name == "longppl" else {}
        with show_progress(unit="tokens") as progress:
            found = ANALYSES[name].analyse(subject, corpus, lengths[name], split=split, progress=progress, **options)
        path = write(subject.folder, found)
        print()
        for line in ANALYSES[name].table(found):
            print(line)
        print(f"  {path}")
    return 0


def wanted(given: list[Name] | None) -> list[str]:
    """Return the analyses that are asked for, in the order of NAMES."""
    return [name for name in NAMES if given is None or name in given]


def _fitting(asked: list[str], subject: Subject, given: list[int] | None, said: bool) -> list[str]:
    """Refuse an analysis that does not apply to the model; skip it if it was not named."""
    from lengthen.evaluation.analyses import LENGTHS, longppl, reach

    if said:
        if "reach" in asked:
            reach.refuse_unbounded(subject.model)
        return asked
    longest, read = subject.model.config.longest, LENGTHS["induction"].read(max(given or [0]))
    fits = {"reach": reach.bounded(subject.model), "induction": longest is None or read <= longest}
    if given is not None:
        fits["longppl"] = min(given) > longppl.usual_short(subject.model)
    return [name for name in asked if fits.get(name, True)]
