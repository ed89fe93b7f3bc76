"""Figures for a paper are drawn: which files, in which formats, the same ones each time."""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from made_up import evaluation

from lengthen.report import Report, write_figures
from lengthen.report.lines import lines, row

EVERY = {
    *("perplexity", "perplexity_per_word", "bits_per_byte", "perplexity_relative", "resolution"),
    *("resolution_relative", "loss_by_position", "speed", "memory", "induction", "longppl", "reach", "distance"),
    *("task_passkey", "task_variables", "depths_passkey"),
}


def test_every_figure_as_svg_and_pdf(report: Report, tmp_path: Path) -> None:
    paths = write_figures(report, tmp_path / "a")
    assert {path.name for path in paths} == {f"{name}.{form}" for name in EVERY for form in ("svg", "pdf")}
    for path in paths:
        if path.suffix == ".svg":
            assert ET.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"%PDF")


def test_the_same_numbers_give_the_same_file(one: Callable[..., Report], tmp_path: Path) -> None:
    report = one(*[evaluation("alibi", n) for n in (64, 128)])
    first, second = (write_figures(report, tmp_path / name, ["svg", "png"]) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_long_lengths_are_written_out(one: Callable[..., Report], tmp_path: Path) -> None:
    paths = write_figures(one(*[evaluation("alibi", 1 << n) for n in (10, 14, 20)]), tmp_path, ["svg"])
    (drawn,) = [path.read_text() for path in paths if path.stem == "perplexity"]
    assert ">1,048,576<" in drawn
    assert "e+" not in drawn


def test_what_is_not_finite_is_left_out(one: Callable[..., Report], tmp_path: Path) -> None:
    bad = {"loss": math.inf, "perplexity": math.inf, "unigram": math.nan, "bits_per_byte": None}
    lines = [evaluation("alibi", 64), evaluation("alibi", 128, **bad)]
    assert write_figures(one(*lines), tmp_path / "a", ["svg"])
    only = one(evaluation("alibi", 128, **bad, peak_bytes=None, perplexity_per_word=None), name="other")
    names = {path.stem for path in write_figures(only, tmp_path / "b", ["svg"])}
    assert names == {"speed"}  # the papers' curves alone are no figure


@pytest.mark.parametrize(("formats", "said"), [(["gif"], "got gif"), ([], "got none")])
def test_unknown_formats_are_refused(report: Report, tmp_path: Path, formats: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        write_figures(report, tmp_path, formats)


def test_without_altair_the_extra_is_named(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lengthen.report.charts", "lengthen.report.lines"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(ImportError, match="pip install altair vl-convert-python"):
        write_figures(report, tmp_path)


def test_names_at_line_ends_do_not_overlap(tmp_path: Path) -> None:
    """Twenty runs that end at nearly the same value have names a line's height apart, all inside the plot."""
    rows = [row(f"run {n}", n, "full", x, 10 + n / 1e6, {}) for n in range(20) for x in (1, 2)]
    chart = lines(rows, "x", "y", 400).to_dict()
    low, high = next(one for one in chart["layer"] if one["mark"]["type"] == "line")["encoding"]["y"]["scale"]["domain"]
    names = next(one for one in chart["layer"] if "limit" in one["mark"])
    ends = sorted(one["y"] for one in chart["datasets"][names["data"]["name"]])
    pixels = [(end - low) / (high - low) * chart["height"] for end in ends]
    assert 0 <= min(pixels) < max(pixels) <= chart["height"]
    assert min(b - a for a, b in pairwise(pixels)) > 14.9


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values", [[1e308, -1e308, 1.0], [5e-324, 1.0], [0.0], [3.0, 3.0], [1.0, 1.0 + 2**-52], [1e99]]
)
def test_any_numbers_can_be_drawn(values: list[float], log: bool) -> None:
    chart = lines([row("a", 0, "full", n + 1, value, {}) for n, value in enumerate(values)], "x", "y", 400, log)
    assert chart is None or json.dumps(chart.to_dict(), allow_nan=False)
