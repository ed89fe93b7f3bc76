"""Turn text into token shards that `lengthen train` reads.

Sources are text files, JSON lines (.jsonl), parquet, each also as .xz, .gz, .zst or .bz2, folders of these, and Hugging
Face datasets on disk (`save_to_disk`). Without any, the source of this Python's standard library is used: real, long
documents, and no download.

A run that was stopped goes on where it stopped when it is given again. A corpus that is already there is left as it is
if sources and settings are the same, and is refused if they are not, unless --force is given.

Examples:
  lengthen prepare -o data/python                                    the standard library, as bytes
  lengthen prepare books.txt.xz --separator '\\0' -o data/books \\
      --tokenizer bpe --vocab-size 16384                             documents between NUL bytes; a BPE trained on them
  lengthen prepare wiki.train.txt --validation wiki.valid.txt \\
      --split-before '^ = [^=].* = $' -o data/wiki                   a document begins at each title line
  lengthen prepare texts/ --tokenizer gpt2/tokenizer.json -o data/t  a folder, with somebody else's tokenizer
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

from lengthen.cli.progress import amount, duration, show_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="files, folders or datasets on disk")
    parser.add_argument("--default", action="store_true", help="the standard library's source, as without any SOURCE")
    parser.add_argument("-o", "--out", required=True, metavar="DIR", help="the folder to make")
    words = parser.add_argument_group("tokens")
    words.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, bpe, the path of a tokenizer.json, or a prepared corpus whose tokenizer it shall be (bytes)",
    )
    words.add_argument("--vocab-size", type=int, metavar="N", help="ids of a BPE, special ones included (16384)")
    words.add_argument("--sample-bytes", type=int, metavar="N", help="text that a BPE is trained on (67108864)")
    words.add_argument("--end-token", metavar="TOKEN", help="the token of a tokenizer.json that ends a document")
    words.add_argument("--mask-token", metavar="TOKEN", help="the token of a tokenizer.json that masks another")
    words.add_argument("--dtype", metavar="TYPE", help="uint16 or uint32 (the smallest that fits)")
    documents = parser.add_argument_group("documents")
    documents.add_argument(
        "--validation",
        nargs="+",
        metavar="FRACTION|PATH",
        help="a fraction of the documents, or files and folders (0.05; what a dataset has itself comes first)",
    )
    documents.add_argument(
        "--text-key", metavar="KEY", help="where JSON lines, parquet and datasets have the text (text)"
    )
    documents.add_argument("--separator", metavar="TEXT", help="what stands between documents, escapes allowed: '\\0'")
    documents.add_argument("--split-before", metavar="REGEX", help="a line that matches begins a new document")
    documents.add_argument("--seed", type=int, metavar="N", help="another choice of validation documents (0)")
    running = parser.add_argument_group("running")
    running.add_argument("--processes", type=int, metavar="N", help="parts that are encoded at once (one per core)")
    running.add_argument("--shard-tokens", type=int, metavar="N", help="tokens in a shard (134217728)")
    running.add_argument("--force", action="store_true", help="replace a corpus made from other sources or settings")


OPTIONS = (
    *("tokenizer", "vocab_size", "sample_bytes", "end_token", "mask_token", "dtype", "text_key", "split_before"),
    *("seed", "processes", "shard_tokens", "force"),
)  # those of `prepare` that go by the same name here; one that was not given is left to its default there


def run(arguments: argparse.Namespace) -> int:
    """Prepare, with progress; end with what was made and what comes next."""
    from lengthen.data import prepare

    if arguments.default and arguments.sources:
        raise ValueError(f"--default: expected no other source beside it, got {', '.join(arguments.sources)}")
    options: dict[str, Any] = {
        name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None and value is not False
    }
    if arguments.separator is not None:
        options["separator"] = unescape(arguments.separator)
    if arguments.validation is not None:
        options["validation"] = validation(arguments.validation)
    began = time.monotonic()
    stages = set()
    with show_progress() as progress:

        def watch(stage: str, done: int, total: int) -> None:
            stages.add(stage)
            if stage != "unchanged":
                progress(stage, done, total)

        corpus = prepare(arguments.sources or None, arguments.out, progress=watch, **options)
    took = f"{duration(time.monotonic() - began)}"
    state = "already prepared, checked and unchanged" if "unchanged" in stages else f"prepared in {took}"
    print(f"\n{corpus.directory}: {state}")
    for name in corpus.splits:
        split = corpus.index.splits[name]
        per = split.text_bytes / split.tokens
        print(
            f"  {name:<12}{split.documents:>10,} documents{split.tokens:>16,} tokens"
            f"{amount(split.text_bytes):>12} of text{per:>8.2f} bytes a token"
        )
    print(f"  tokenizer   {corpus.tokenizer().name}, {corpus.vocab_size:,} ids")
    print(f"\nNext: lengthen train configs/tiny.toml --data {corpus.directory}")
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
