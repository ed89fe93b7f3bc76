"""Two texts with the same words: one of bytes, one of a BPE with merges."""

from __future__ import annotations

from pathlib import Path

import pytest

from lengthen.data import Corpus, prepare
from lengthen.evaluation.tasks import Haystack

TEXT = "A fox and 12 crows sat on a wall. It is 300 years old.\nThe pass is closed; the key of it is lost ........\n"


@pytest.fixture(scope="session", params=["bytes", "bpe"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text.txt").write_text("\0".join(f"{n} {TEXT * 9}" for n in range(40)), encoding="utf-8")
    size = None if request.param == "bytes" else 400
    kind = {"tokenizer": request.param, "vocab_size": size, "validation": 0.2, "workers": 1}
    return prepare(folder / "text.txt", folder / "corpus", separator="\0", **kind)


@pytest.fixture
def text(corpus: Corpus) -> Haystack:
    return Haystack.of(corpus)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
