"""A corpus of a few lines, for verbs that read one, and a model that was trained on it for two steps."""

from __future__ import annotations

import pytest

from lengthen.cli.main import main
from lengthen.data import prepare

SMALL = ["--model.layers=1", "--model.width=16", "--model.heads=2", "--model.train_length=16", "--train.batch=4"]
SMALL += ["--train.steps=2", "--evaluation.every=0", "--checkpoint.every=0", "--schedule.warmup=1", "--device=cpu"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"Document {number}: " + "the sea, the ship, the whale. " * 10)
    out = tmp_path_factory.mktemp("corpus")
    prepare(folder, out, validation=0.3, workers=1)
    return str(out)


@pytest.fixture(scope="session")
def model(data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("model") / "run"
    assert main(["train", "tiny", "--data", data, "--out", str(out), *SMALL]) == 0
    return str(out)
