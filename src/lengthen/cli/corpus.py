"""The corpus of a verb: the folder that was named, or the default one, prepared if it is not there yet."""

from __future__ import annotations

import sys
from pathlib import Path

from lengthen.cli.progress import show_progress
from lengthen.config import Config, DataConfig
from lengthen.data import Corpus, prepare
from lengthen.evaluation import Subject
from lengthen.io import read_toml

VOCABULARY = 4096  # of the default corpus with a BPE
LARGE = 1 << 30  # bytes that take seconds to read


def default_folder(data: DataConfig) -> Path:
    """Return where the default corpus of a tokenizer lies: one a version of Python, whose source it is."""
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


def corpus_of(subject: Subject, directory: Path | None, verify: bool = False) -> Corpus:
    """Return the corpus to read with a run's model: the one that was named, or the one that it was trained on."""
    if directory is not None:
        return checked(directory, verify)
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
