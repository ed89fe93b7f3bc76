"""Every example runs, with little work, and leaves nothing behind."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
WORK = {
    "long_attention": "--lengths 64 1200",
    "train_and_stretch": "--methods alibi --steps 2 --tokens 1024 --text",
    "endless_text": "--tokens 20",
}


@pytest.mark.parametrize("name", WORK)
def test_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = WORK[name].split()
    words += [str(Path(__file__).parents[1] / "docs")] if words[-1] == "--text" else []
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) > 1
    assert not any(tmp_path.iterdir())


def test_none_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(WORK)
