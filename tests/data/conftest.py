"""Small corpora for the tests of the data layer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lengthen.data import Corpus, prepare

WORDS = [
    *("the", "of", "ship", "sea", "whale", "captain", "über", "naïve", "海", "мир", "said", "and\n", "then\n\n", ""),
    *("looked", "\t", "at", "don't", "1851", "…", "--", "(so)"),
]


def story(seed: int, words: int) -> str:
    """Text with every kind of white space and several scripts, the same for the same seed."""
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice([" ", " ", " ", "\n", "\n\n", "  "]) for _ in range(words)) + "end"


@pytest.fixture(scope="session")
def stories() -> list[str]:
    return [story(seed, 40 + 37 * seed) for seed in range(30)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, stories: list[str]) -> Path:
    """A folder with a text file a story."""
    path = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(stories):
        (path / f"{number:02d}.txt").write_bytes(text.encode())
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Corpus:
    """The stories as bytes, in shards so short that documents lie across their borders; not to be written to."""
    return prepare(folder, tmp_path_factory.mktemp("corpus"), shard_tokens=1000, validation=0.2, workers=1)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Corpus]:
    """Prepare into a new folder, in this process."""

    def run(sources: object, **options: object) -> Corpus:
        options = {"workers": 1, "validation": 0, **options}
        number = len(list(tmp_path.glob("made*")))
        return prepare(sources, tmp_path / f"made{number}", **options)  # type: ignore[arg-type]

    return run


@pytest.fixture(scope="session")
def texts() -> Callable[..., list[str]]:
    """The documents of a split, decoded, without their end tokens."""

    def read(corpus: Corpus, split: str = "train") -> list[str]:
        tokens, tokenizer = corpus[split], corpus.tokenizer
        found = []
        for start, stop in zip(tokens.documents[:-1], tokens.documents[1:], strict=True):
            ids = tokens.read(int(start), int(stop)).tolist()
            if corpus.end_id is not None:
                assert ids.pop() == corpus.end_id
            found.append(tokenizer.decode(ids))
        return found

    return read


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Every file of a folder by its name."""

    def read(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return read
