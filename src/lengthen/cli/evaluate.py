"""Measure a model's perplexity at any lengths, and the longest length that it holds.

  lengthen eval runs/tiny                                        # 1×, 2×, … 32× the training length
  lengthen eval runs/tiny --lengths 64,1024,131072 --data data/books
  lengthen eval runs/xpos --protocol nonoverlapping,blockwise    # as the LEX paper: blocks of half the training length
  lengthen eval runs/xpos --per-document 4096                    # the first 4,096 tokens of each document
  lengthen eval runs/tiny --protocol sliding --stride 1 --lengths 64 --tokens 4096
  lengthen eval models/bloom-560m --data book.txt                # a folder of Hugging Face (docs/huggingface.md)
  lengthen eval runs/rotary --positions.scaling yarn --positions.factor 8    # the method changed after training
  lengthen eval runs/small --task passkey,needles --lengths 1024,4096,16384  # retrieval from a long text

Protocols: nonoverlapping (pieces, each read by itself), sliding (windows, the last --stride tokens of each scored),
blockwise and window (pieces, read with blockwise causal attention or with a window). The same tokens are scored at
every length; an encoder is scored on masked tokens. --positions.NAME VALUE is an option of the position method.
Results are appended to evaluation.jsonl in the run's folder. Existing results are not measured again, and an
interrupted measurement resumes.

--task runs tasks with exact answers instead: --samples per length, with the needle at each of --depths, in text of the
corpus. Protocols are nonoverlapping, blockwise or window; results go to
tasks.jsonl. docs/tasks.md explains each.

The verdict: a model holds to the longest length before its perplexity is more than 2 % above that at the training
length, over the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lengthen.cli import flags
from lengthen.cli.progress import amount, show_progress

if TYPE_CHECKING:
    from lengthen.data import Corpus
    from lengthen.evaluation import Result, Subject

Protocol = Literal["nonoverlapping", "sliding", "blockwise", "window"]
Task = Literal["passkey", "needles", "variables", "common_words", "frequent_words", "recall"]
TIMES = (1, 2, 4, 8, 16, 32)  # the training length, by default


@dataclass(frozen=True)
class Arguments:
    """Arguments of `lengthen eval`."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run's folder, one checkpoint's, or a model of Hugging Face: its folder, or OWNER/NAME."""
    data: Path | None = None  # token shards, or a text; none: what the model was trained on, or Python's source
    split: str | None = None  # of the corpus; none: validation, or all of a text
    lengths: list[int] | None = None  # in tokens; none: 1× to 32× the training length
    protocol: list[Protocol] = field(default_factory=lambda: ["nonoverlapping"])  # how a text is read
    stride: int | None = None  # of sliding; none: half the length
    block: int | None = None  # tokens; none: half the training length for blockwise, all of it for window
    per_document: int | None = None  # read only this many tokens of each document; none: documents joined
    tokens: int | None = None  # to score; none: 131072, or the longest length
    task: list[Task] = field(default_factory=list)  # run these tasks instead of measuring perplexity
    samples: int = 100  # task: samples per length
    depths: list[float] | None = None  # task: where the needle is, 0 (beginning) to 1 (end); none: 0,0.25,0.5,0.75,1
    seed: int = 0  # task: other samples
    checkpoint: Literal["last", "best"] = "last"  # which of a run's checkpoints
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of the forward pass; auto: bfloat16 autocast on a GPU
    device: str | None = None  # cpu or cuda; none: cuda where there is one
    again: bool = False  # measure again even if a result exists
    verify: bool = False  # compare every file of the corpus with its checksum, not only those that changed
    positions: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)  # --positions.NAME


def parse(words: list[str]) -> Arguments:
    """Return the words, options of the position method among them."""
    return flags.parse_with_positions(Arguments, words, "eval", __doc__ or "")


def run(arguments: Arguments) -> int:
    """Evaluate, with progress; end with a table and the verdicts."""
    from lengthen.cli import tasks
    from lengthen.cli.corpus import corpus_of, split_of
    from lengthen.evaluation import evaluate, protocol
    from lengthen.interop.subjects import open_model
    from lengthen.training.parallel import pick_device

    device = pick_device(arguments.device)
    subject = open_model(arguments.run, arguments.checkpoint, device, arguments.positions, tell=print)
    corpus = corpus_of(subject, arguments.data, arguments.verify)
    split = split_of(corpus, arguments.split)
    base, longest = subject.model.config.train_length, subject.model.config.longest
    given = arguments.lengths
    lengths = _usual(base, corpus, split, arguments) if given is None else whole_numbers("--lengths", given)
    beyond = [length for length in lengths if longest is not None and length > longest]
    if beyond:
        listed = ", ".join(f"{length:,}" for length in beyond)
        print(f"left out: {listed}: the model learned a vector for each position, and has no more of them")
        lengths = [length for length in lengths if length not in beyond]
        if not lengths:
            raise ValueError(f"--lengths: expected one of at most {longest:,} tokens, got {listed}")
    if arguments.task:
        return tasks.run(arguments, subject, corpus, split, lengths)
    names = arguments.protocol
    chosen = [
        protocol(
            name,
            length,
            base,
            arguments.stride if name == "sliding" or len(names) == 1 else None,
            arguments.block if name in ("blockwise", "window") or len(names) == 1 else None,
            arguments.per_document,
        )
        for length in lengths
        for name in names
    ]
    with show_progress(unit="tokens") as progress:
        results = evaluate(
            subject,
            corpus,
            chosen,
            split=split,
            tokens=arguments.tokens,
            precision=arguments.precision,
            tell=lambda one, done, total: progress(f"{one.length:,} {one}", done, total),
            again=arguments.again,
        )
    print(describe(subject, results, corpus))
    print()
    print("\n".join(judged(results)))
    return 0


def judged(results: list[Result]) -> list[str]:
    """Return the verdict under each protocol, or why there is none, a line each."""
    from lengthen.evaluation.verdict import grouped, verdicts

    found, base = verdicts(results), results[0].train_length
    measured = {name: base in (one.length for one in group) for name, group in grouped(results).items()}
    why = {True: "not finite", False: "not measured; add it to --lengths"}
    none = f"no verdict, as perplexity at the training length of {base:,} is"
    return [f"{name}: {found.get(name) or f'{none} {why[there]}'}" for name, there in measured.items()]


def _usual(base: int, corpus: Corpus, split: str, arguments: Arguments) -> list[int]:
    """Return the usual lengths, as far as the text goes."""
    if arguments.task:
        return [base * times for times in TIMES]  # a task's text is repeated where it is short
    there = len(corpus[split]) - 1
    return [base * times for times in TIMES if base * times <= there] or [base]


def whole_numbers(name: str, given: list[int]) -> list[int]:
    """Return the numbers in order, each once."""
    if not given or min(given) < 1:
        raise ValueError(f"{name}: expected at least one number, each at least 1, got {given}")
    return sorted(set(given))


def describe(subject: Subject, results: list[Result], corpus: Corpus) -> str:
    """Return the results as a table, under lines that say what they are of."""
    from lengthen.evaluation import Protocol
    from lengthen.evaluation.verdict import changes

    config, first = subject.model.config, results[0]
    changed = ", ".join(f"{name} {value}" for name, value in config.position_options.items())
    trained = (subject.checkpoint.state.data or corpus.fingerprint) == corpus.fingerprint  # as far as is known
    another = "" if trained else ", which is not what it was trained on"
    head = (
        f"\n{subject.checkpoint.path}: {config.positions}{f' ({changed})' if changed else ''}, trained at "
        f"{config.train_length:,}; read in {first.precision} on {first.device}\n"
        f"{corpus.directory}, split {first.split!r} ({corpus.fingerprint}){another}: the same {first.tokens:,} "
        f"{'tokens' if first.task == 'next tokens' else first.task} of {first.documents:,} documents at every length"
        f"{', which do not see each other' if first.document_mask else ''}"
    )
    change = changes(results)
    rows: list[tuple[str, ...]] = [
        ("length", "×", "protocol", "loss", "perplexity", "change", "per word", "bits/byte", "tokens/s", "memory")
    ]
    for one in results:
        rows.append(
            (
                f"{one.length:,}",
                f"{one.length / one.train_length:g}",
                str(Protocol(one.protocol, one.length, one.stride, one.block, one.per_document)),
                f"{one.loss:.4f}",
                f"{one.perplexity:.3f}",
                change.get(one.key, ""),
                f"{one.perplexity_per_word:,.4g}",
                f"{one.bits_per_byte:.4f}",
                f"{one.tokens_per_second:,.0f}",
                "–" if one.peak_bytes is None else amount(one.peak_bytes),
            )
        )
    if all(one.peak_bytes is None for one in results):
        rows = [row[:-1] for row in rows]
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
