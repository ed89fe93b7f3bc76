"""`lengthen report`: its arguments reach the report, it prints what it wrote, and errors say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lengthen.cli import report
from lengthen.cli.flags import parse


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    line = {"kind": "evaluation", "positions": "alibi", "train_length": 64, "protocol": "nonoverlapping", "loss": 1.6}
    lines = [json.dumps({**line, "length": length}) + "\n" for length in (64, 128)]
    (run / "evaluation.jsonl").write_text("".join(lines), encoding="utf-8")
    return run


def arguments(*words: str) -> report.Arguments:
    return parse(report.Arguments, words, "report", "")


def test_the_page_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "page.html"
    assert report.run(arguments(str(folder), "-o", str(out))) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_tables_and_figures_too(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, csv, figures = tmp_path / "page.html", tmp_path / "csv", tmp_path / "figures"
    words = ["-o", str(out), "--csv", str(csv), "--figures", str(figures), "--formats", "svg, pdf"]
    assert report.run(arguments(str(folder), *words)) == 0
    said = capsys.readouterr().out.splitlines()
    names = [f"{name}.{form}" for name in ("perplexity", "perplexity_relative") for form in ("pdf", "svg")]
    assert said == list(
        map(str, [out, csv / "evaluation.csv", csv / "differences.csv", *(figures / name for name in names)])
    )
    assert all(Path(path).stat().st_size for path in said)


def test_a_run_without_results_is_left_out_with_a_note(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, out = tmp_path / "empty", tmp_path / "page.html"
    empty.mkdir()
    assert report.run(arguments(str(empty), str(folder), "-o", str(out))) == 0
    assert f"left out: {empty}: no measurements; `lengthen eval RUN` makes them" in capsys.readouterr().err
    assert f"Left out: {empty}" in out.read_text(encoding="utf-8")
    out.unlink()
    with pytest.raises(ValueError, match="expected a folder with measurements, got none"):
        report.run(arguments(str(empty), "-o", str(out)))
    assert not out.exists()
