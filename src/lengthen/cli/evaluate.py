"""Measure a model's perplexity at any lengths, each number with how it was made, and how far it can be stretched.

  lengthen eval runs/tiny                                          1×, 2×, … 32× the training length
  lengthen eval runs/tiny --lengths 64,1024,131072 --data data/books
  lengthen eval runs/xpos --protocol nonoverlapping,blockwise      as the LEX paper: blocks of half the training length
  lengthen eval runs/tiny --protocol sliding --stride 1 --lengths 64 --tokens 4096

Protocols: nonoverlapping (pieces, each read by itself), sliding (windows, the last --stride tokens of each scored),
blockwise and window (pieces, read with blockwise causal attention or with a window). The same tokens are scored at
every length. Results go to evaluation.jsonl in the run's folder as they come; what is there already is not measured
again, and what was interrupted goes on where it was.

The verdict is the longest length at which the loss is within 1 % of its best, as a multiple of the training length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lengthen.cli.progress import amount, show_progress

if TYPE_CHECKING:
    from lengthen.data import Corpus
    from lengthen.evaluation import Result, Subject

Protocol = Literal["nonoverlapping", "sliding", "blockwise", "window"]
TIMES = (1, 2, 4, 8, 16, 32)  # the training length, by default


@dataclass(frozen=True)
class Arguments:
    """What `lengthen eval` is told."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]  # a run's folder, or one checkpoint's
    data: Path | None = None  # token shards; none: those that the model was trained on
    split: str = "validation"  # of the corpus
    lengths: list[int] | None = None  # in tokens; none: 1× to 32× the training length
    protocol: list[Protocol] = field(default_factory=lambda: ["nonoverlapping"])  # how a text is read
    stride: int | None = None  # of sliding; none: half the length
    block: int | None = None  # of blockwise, none: half the training length; of window, none: all of it
    tokens: int | None = None  # to score; none: 131072, or the longest length
    checkpoint: Literal["last", "best"] = "last"  # which of a run's checkpoints
    device: str | None = None  # cpu or cuda; none: cuda where there is one
    again: bool = False  # measure again what is there already


def run(arguments: Arguments) -> int:
    """Evaluate, with progress; end with a table and the verdicts."""
    from lengthen.cli.corpus import corpus_of
    from lengthen.evaluation import evaluate, open_run, protocol, verdicts
    from lengthen.training.parallel import pick_device

    subject = open_run(arguments.run, arguments.checkpoint, pick_device(arguments.device))
    corpus = corpus_of(subject, arguments.data)
    base, longest = subject.model.config.train_length, subject.model.config.longest
    given = arguments.lengths
    lengths = _usual(base, corpus, arguments) if given is None else whole_numbers("--lengths", given)
    beyond = [length for length in lengths if longest is not None and length > longest]
    if beyond:
        listed = ", ".join(f"{length:,}" for length in beyond)
        print(f"left out: {listed}: the model learned a vector for each position, and has no more of them")
    names = arguments.protocol
    chosen = [
        protocol(
            name,
            length,
            base,
            arguments.stride if name == "sliding" or len(names) == 1 else None,
            arguments.block if name in ("blockwise", "window") or len(names) == 1 else None,
        )
        for length in lengths
        if length not in beyond
        for name in names
    ]
    with show_progress(unit="tokens") as progress:
        results = evaluate(
            subject,
            corpus,
            chosen,
            split=arguments.split,
            tokens=arguments.tokens,
            tell=lambda one, done, total: progress(f"{one.length:,} {one}", done, total),
            again=arguments.again,
        )
    print(describe(subject, results, corpus))
    print()
    for verdict in verdicts(results):
        print(verdict)
    return 0


def _usual(base: int, corpus: Corpus, arguments: Arguments) -> list[int]:
    """Return the usual lengths, as far as the text goes."""
    there = len(corpus[arguments.split]) - 1
    return [base * times for times in TIMES if base * times <= there] or [base]


def whole_numbers(name: str, given: list[int]) -> list[int]:
    """Return the numbers in order, each once."""
    if not given or min(given) < 1:
        raise ValueError(f"{name}: expected at least one number, each at least 1, got {given}")
    return sorted(set(given))


def describe(subject: Subject, results: list[Result], corpus: Corpus) -> str:
    """Return the results as a table, under a line that says what they are of."""
    from lengthen.evaluation import Protocol

    config, first = subject.model.config, results[0]
    head = (
        f"\n{subject.checkpoint.path}: {config.positions}, trained at {config.train_length:,}\n"
        f"{corpus.directory}, split {first.split!r} ({corpus.fingerprint}): the same {first.tokens:,} tokens of "
        f"{first.documents:,} documents at every length"
    )
    rows = [("length", "×", "protocol", "loss ± s.e.", "perplexity", "per word", "bits/byte", "tokens/s", "memory")]
    for one in results:
        rows.append(
            (
                f"{one.length:,}",
                f"{one.length / one.train_length:g}",
                str(Protocol(one.protocol, one.length, one.stride, one.block)),
                f"{one.loss:.4f}" + ("" if one.loss_se is None else f" ± {one.loss_se:.4f}"),
                f"{one.perplexity:.3f}",
                f"{one.perplexity_per_word:,.4g}",
                f"{one.bits_per_byte:.4f}",
                f"{one.tokens_per_second:,.0f}",
                "–" if one.peak_bytes is None else amount(one.peak_bytes),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {2}  # columns of words
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([head, *lines])
