"""The corpus of a verb: the folder that was named, or the default one, prepared if it is not there yet."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from lengthen.cli.progress import show_progress
from lengthen.config import Config, DataConfig
from lengthen.data import Corpus, prepare
from lengthen.evaluation import Subject
from lengthen.interop.subjects import special_token
from lengthen.io import read_toml

VOCABULARY = 4096  # of the default corpus with a BPE
LARGE = 1 << 30  # bytes that take seconds to read


def default_folder(data: DataConfig) -> Path:
    """Return where the default corpus of a tokenizer lies: one per version of Python, whose source it is."""
    name = "bytes" if data.tokenizer == "bytes" else f"bpe-{data.vocab_size or VOCABULARY}"
    return Path("data") / f"python-{sys.version_info.major}.{sys.version_info.minor}-{name}"


def checked(directory: Path, verify: bool = False) -> Corpus:
    """Open a corpus; if a large one has to be read for it, show how far that is. `verify` reads all of it."""
    with show_progress(sys.stderr) as progress:

        def watch(stage: str, done: int, total: int) -> None:
            if total >= LARGE:
                progress(stage, done, total)

        return Corpus.open(directory, verify, progress=watch)


def open_corpus(directory: Path | None, data: DataConfig, verify: bool = False) -> Corpus:
    """Return the corpus in a folder; without one, that of Python's standard library, with the config's tokenizer."""
    if directory is not None:
        return checked(directory, verify)
    if data.tokenizer == "json":
        raise ValueError("data.tokenizer: expected 'bytes' or 'bpe' for the default corpus, got 'json'; give --data")
    folder = default_folder(data)
    if not (folder / "index.json").exists():
        print(f"preparing the default corpus, the source of Python's standard library, into {folder}")
        size = None if data.tokenizer == "bytes" else data.vocab_size or VOCABULARY
        with show_progress() as progress:
            prepare(None, folder, tokenizer=data.tokenizer, vocab_size=size, progress=progress)
    return checked(folder, verify)


def prepared(subject: Subject, text: Path | None) -> Corpus:
    """Return a text, or the standard library's source, as tokens of a model, below `data`; once made, it is found."""
    state = subject.checkpoint.state
    tokenizer: str | Path | None = subject.tokenizer or ("bytes" if state.tokenizer == "bytes" else state.folder)
    if tokenizer is None:
        raise ValueError(f"--data: expected token shards, since {subject.checkpoint.path} has no tokenizer, got {text}")
    name = default_folder(DataConfig()).name.removesuffix("-bytes") if text is None else text.stem
    own = f"{sys.prefix if text is None else text.resolve()} {state.tokenizer}"
    folder = Path("data") / f"{name}-{hashlib.sha256(own.encode()).hexdigest()[:8]}"
    end = None if subject.tokenizer is None else special_token(subject.tokenizer, "eos_token")
    held_out = None if text is None else 0.0  # all of a text is read; of the standard library, what is held out
    print(f"reading {text or 'the source of Python’s standard library'} as tokens of this model, kept in {folder}")
    with show_progress() as progress:
        return prepare(
            text, folder, tokenizer=tokenizer, end_token=end, validation=held_out, progress=progress, force=True
        )


def split_of(corpus: Corpus, asked: str | None) -> str:
    """Return the split to read: the one that was named, or the validation split, or all that there is."""
    if asked is not None:
        return asked
    return "validation" if "validation" in corpus.splits else corpus.splits[0]


def corpus_of(subject: Subject, directory: Path | None, verify: bool = False) -> Corpus:
    """Return the corpus to read with a run's model: the one that was named, or the one that it was trained on.

    A text that was named is prepared with the model's tokenizer. So is the source of Python's standard library, for a
    model that was not trained here.
    """
    if directory is not None and directory.is_file():
        return prepared(subject, directory)
    if directory is not None:
        return checked(directory, verify)
    if subject.tokenizer is not None:
        return prepared(subject, None)
    path, state = subject.checkpoint.path, subject.checkpoint.state
    trained = state.folder
    if trained is not None and not Path(trained).is_dir():
        raise FileNotFoundError(f"--data: {path} was trained on {trained}, which is not there any more; name a corpus")
    data = read_toml(path / "config.toml", Config).data
    corpus = open_corpus(None if trained is None else Path(trained), data, verify)
    if corpus.fingerprint != state.data:
        raise ValueError(
            f"--data: {path} was trained on a corpus with the fingerprint {state.data}, and {corpus.directory} has "
            f"{corpus.fingerprint}; name the corpus to read"
        )
    return corpus
