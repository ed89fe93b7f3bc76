"""Made-up runs for the report's tests, and where the helpers beside this file are found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import made_up

from lengthen.report import Report, collect

METHODS = ("alibi", "xpos", "rotary", "sinusoidal")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Four runs that have everything."""
    return [made_up.write(tmp_path / "runs" / name, name) for name in METHODS]


@pytest.fixture
def report(runs: list[Path]) -> Report:
    return collect(runs)


@pytest.fixture
def one(tmp_path: Path) -> Callable[..., Report]:
    """Make a report of one bare run from these lines."""

    def make(*lines: dict[str, object], name: str = "run") -> Report:
        return collect([made_up.write(tmp_path / name, full=False, lines=list(lines))])

    return make
