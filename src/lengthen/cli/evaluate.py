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

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lengthen.cli.progress import amount, show_progress

if TYPE_CHECKING:
    from lengthen.data import Corpus
    from lengthen.evaluation import Result, Subject

TIMES = (1, 2, 4, 8, 16, 32)  # the training length, by default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, or one checkpoint's")
    parser.add_argument("--data", metavar="DIR", type=Path, help="token shards (default: the default corpus)")
    parser.add_argument("--split", default="validation", help="which split of the corpus (validation)")
    parser.add_argument("--lengths", metavar="N,N,…", help="lengths in tokens (1× to 32× the training length)")
    parser.add_argument("--protocol", default="nonoverlapping", metavar="NAME,NAME", help="protocols (nonoverlapping)")
    parser.add_argument("--stride", type=int, metavar="N", help="of sliding (half the length)")
    parser.add_argument("--block", type=int, metavar="N", help="of blockwise (half the training length) and window")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to score (131072, or the longest length)")
    parser.add_argument("--checkpoint", default="last", metavar="last|best", help="which of a run's checkpoints (last)")
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (cuda where there is one)")
    parser.add_argument("--again", action="store_true", help="measure again what is there already")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, with progress; end with a table and the verdicts."""
    import torch

    from lengthen.cli.corpus import open_corpus
    from lengthen.evaluation import evaluate, open_run, protocol, verdicts
    from lengthen.training.config import from_table
    from lengthen.training.settings import read_toml

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    subject = open_run(arguments.run, arguments.checkpoint, device)
    table = subject.checkpoint.path / "config.toml"
    corpus = open_corpus(arguments.data, from_table(read_toml(table, dict), str(table)).data)
    base, longest = subject.model.config.train_length, subject.model.config.longest
    lengths = whole_numbers("--lengths", arguments.lengths) if arguments.lengths else _usual(base, corpus, arguments)
    beyond = [length for length in lengths if longest is not None and length > longest]
    if beyond:
        listed = ", ".join(f"{length:,}" for length in beyond)
        print(f"left out: {listed}: the model learned a vector for each position, and has no more of them")
    names = [name.strip() for name in arguments.protocol.split(",")]
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
    print(describe(subject, results, corpus.fingerprint))
    print()
    for verdict in verdicts(results):
        print(verdict)
    return 0


def _usual(base: int, corpus: Corpus, arguments: argparse.Namespace) -> list[int]:
    """Return the usual lengths, as far as the text goes."""
    there = len(corpus[arguments.split]) - 1
    return [base * times for times in TIMES if base * times <= there] or [base]


def whole_numbers(name: str, text: str) -> list[int]:
    """Return the numbers of a list with commas, in order, each once."""
    try:
        found = sorted({int(part.replace("_", "")) for part in text.split(",") if part.strip()})
    except ValueError:
        raise ValueError(f"{name}: expected whole numbers with commas, got {text!r}") from None
    if not found or found[0] < 1:
        raise ValueError(f"{name}: expected at least one number, each at least 1, got {text!r}")
    return found


def describe(subject: Subject, results: list[Result], data: str) -> str:
    """Return the results as a table, under a line that says what they are of."""
    from lengthen.evaluation import Protocol

    config, first = subject.model.config, results[0]
    head = (
        f"\n{subject.checkpoint.path}: {config.positions}, trained at {config.train_length:,}; split {first.split!r} "
        f"of {data}, the same {first.tokens:,} tokens of {first.documents:,} documents at every length"
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
