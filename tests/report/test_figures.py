"""Figures for a paper are drawn: which files, in which formats, the same ones each time."""

from __future__ import annotations

import math
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up import evaluation

from lengthen.report import Report, write_figures

EVERY = {
    *("perplexity", "loss", "perplexity_per_word", "bits_per_byte", "perplexity_relative", "resolution"),
    *("resolution_relative", "loss_by_position", "speed", "memory", "recall", "reach", "distance"),
}


def test_every_figure_as_svg_and_pdf(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = write_figures(report, tmp_path / "a")
    assert {path.name for path in paths} == {f"{name}.{form}" for name in EVERY for form in ("svg", "pdf")}
    for path in paths:
        if path.suffix == ".svg":
            assert ET.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"%PDF")


def test_the_same_numbers_give_the_same_file(one: Callable[..., Report], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = one(*[evaluation("alibi", n) for n in (64, 128)])
    first, second = (write_figures(report, tmp_path / name, ["svg", "pdf"]) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_what_is_not_finite_is_left_out(one: Callable[..., Report], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bad = {"loss": math.inf, "perplexity": math.inf, "loss_se": math.nan, "bits_per_byte": None}
    lines = [evaluation("alibi", 64), evaluation("alibi", 128, **bad)]
    assert write_figures(one(*lines), tmp_path / "a", ["svg"])
    only = one(evaluation("alibi", 128, **bad, peak_bytes=None, perplexity_per_word=None), name="other")
    names = {path.stem for path in write_figures(only, tmp_path / "b", ["svg"])}
    assert names == {"speed"}  # the papers' curves alone are no figure


@pytest.mark.parametrize(("formats", "said"), [(["gif"], "got gif"), ([], "got none")])
def test_unknown_formats_are_refused(report: Report, tmp_path: Path, formats: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        write_figures(report, tmp_path, formats)


def test_without_matplotlib_the_extra_is_named(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"lengthen\[report\]"):
        write_figures(report, tmp_path)
