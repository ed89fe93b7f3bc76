"""Turn text into token shards that `lengthen train` reads.

Sources are text files, JSON lines (.jsonl), parquet, each also as .xz, .gz, .zst or .bz2, folders of these, and Hugging
Face datasets on disk (`save_to_disk`). Without any, the source of this Python's standard library is used: real, long
documents, and no download.

An interrupted run resumes when the same command is given again. An existing corpus made from the same sources and
settings is kept; one made from others is an error, unless --force replaces it.

Examples:
  lengthen prepare -o data/python                                  # the standard library, as bytes
  lengthen prepare books.txt.xz --separator '\\0' -o data/books \\
      --tokenizer bpe --vocab-size 16384                           # documents between NUL bytes; a BPE trained on them
  lengthen prepare wiki.train.txt --validation wiki.valid.txt \\
      --split-before '^ = [^=].* = $' -o data/wiki                 # a document begins at each title line
  lengthen prepare texts/ --tokenizer gpt2/tokenizer.json -o data/t  # a folder, with an existing tokenizer
"""

from __future__ import annotations

import shlex
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lengthen.cli.progress import amount, duration, show_progress

SHOWN = 10  # files that were skipped, of which the first are named
OWN = ("out", "sources", "default", "validation", "separator")  # the other arguments are options of `prepare`


@dataclass(frozen=True)
class Arguments:
    """Arguments of `lengthen prepare`; none: the default of `lengthen.data.prepare`."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]  # the folder to make
    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[SOURCE …]")] = ()
    """Files, folders or datasets on disk."""
    default: bool = False  # the standard library's source, as without any SOURCE
    tokenizer: str = "bytes"  # bytes, bpe, the path of a tokenizer.json, or a prepared corpus that has one
    vocab_size: int | None = None  # ids of a BPE, special ones included; none: 16384
    sample_bytes: int | None = None  # text that a BPE is trained on; none: 67108864
    end_token: str | None = None  # the token of a tokenizer.json that ends a document
    mask_token: str | None = None  # the token of a tokenizer.json that masks another
    dtype: Literal["uint16", "uint32"] | None = None  # of an id; none: the smallest that fits
    validation: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FRACTION|PATH …")] = ()
    """A fraction of the documents, or files and folders; none: 0.05, unless a dataset has its own."""
    text_key: str | None = None  # where JSON lines, parquet and datasets have the text; none: text
    separator: str | None = None  # what stands between documents, escapes allowed: '\0'
    split_before: str | None = None  # a regular expression: a line that matches begins a new document
    encoding: str | None = None  # of text files, by Python's name for it; none: utf-8
    skip_bad: bool = False  # leave out files that cannot be read, and say which
    follow_links: bool = False  # read links that lead out of the folder that was named
    seed: int | None = None  # another choice of validation documents; none: 0
    workers: int | None = None  # threads that encode; none: one per core
    shard_tokens: int | None = None  # tokens in a shard; none: 134217728
    force: bool = False  # replace a corpus made from other sources or settings


def run(arguments: Arguments) -> int:
    """Prepare, with progress; print a summary and the next command."""
    from lengthen.data import prepare

    if arguments.default and arguments.sources:
        raise ValueError(f"--default: expected no other source beside it, got {', '.join(arguments.sources)}")
    options = {name: value for name, value in vars(arguments).items() if value is not None and name not in OWN}
    if arguments.separator is not None:
        options["separator"] = unescape(arguments.separator)
    if arguments.validation:
        options["validation"] = validation(list(arguments.validation))
    began = time.monotonic()
    stages = set()
    with show_progress() as progress:

        def watch(stage: str, done: int, total: int) -> None:
            stages.add(stage)
            if stage != "unchanged":
                progress(stage, done, total)

        corpus = prepare(list(arguments.sources) or None, arguments.out, progress=watch, **options)
    took = f"{duration(time.monotonic() - began)}"
    state = "already prepared, checked and unchanged" if "unchanged" in stages else f"prepared in {took}"
    print(f"\n{corpus.directory}: {state}")
    for name in corpus.splits:
        split = corpus.index.splits[name]
        per = split.text_bytes / split.tokens
        print(
            f"  {name:<12}{split.documents:>10,} documents{split.tokens:>16,} tokens"
            f"{amount(split.text_bytes):>12} of text{per:>8.2f} bytes per token"
        )
    print(f"  tokenizer   {corpus.tokenizer.name}, {corpus.vocab_size:,} ids")
    for name, reason in corpus.skipped[:SHOWN]:
        print(f"  skipped     {name}: {reason}")
    if len(corpus.skipped) > SHOWN:
        print(f"  skipped     {len(corpus.skipped) - SHOWN:,} more: see {corpus.index.sources.file}")
    print("\nNext: " + shlex.join(["lengthen", "train", "tiny", "--data", str(corpus.directory)]))
    return 0


def unescape(text: str) -> str:
    """Return a separator with its escapes, as in a Python string, replaced by what they stand for."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python only warns of an escape that it does not know
            return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except (UnicodeDecodeError, DeprecationWarning, SyntaxWarning) as problem:
        raise ValueError(
            f"--separator: expected text with escapes such as \\0 or \\n, got {text!r}: {problem}"
        ) from None


def validation(words: list[str]) -> float | list[str]:
    """Return a fraction if there is one number and no file of that name, or else the paths."""
    if len(words) == 1 and not Path(words[0]).exists():
        try:
            return float(words[0])
        except ValueError:
            pass
    return words
