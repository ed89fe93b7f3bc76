"""A corpus of a few lines, for verbs that read one."""

from __future__ import annotations

import pytest

from lengthen.data import prepare


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"Document {number}: " + "the sea, the ship, the whale. " * 10)
    out = tmp_path_factory.mktemp("corpus")
    prepare(folder, out, validation=0.3, workers=1)
    return str(out)
