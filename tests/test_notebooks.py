"""The notebooks run from the first cell to the last, with fewer steps than they show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum("STEPS = 150" in cell for cell in code) == 1
    shared: dict[str, Any] = {"__name__": path.stem}
    for number, cell in enumerate(code):
        exec(compile(cell.replace("STEPS = 150", "STEPS = 3"), f"{path.name}, cell {number}", "exec"), shared)
    assert not any(tmp_path.iterdir())


def test_each_shows_what_it_found() -> None:
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
