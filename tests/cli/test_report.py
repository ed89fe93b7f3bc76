"""`lengthen report`: its arguments reach the report, it prints what it wrote, and errors say what to do."""

from __future__ import annotations

import json
import shlex
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
    pytest.importorskip("matplotlib")
    out, csv, figures = tmp_path / "page.html", tmp_path / "csv", tmp_path / "figures"
    words = ["-o", str(out), "--csv", str(csv), "--figures", str(figures), "--formats", "svg, pdf"]
    assert report.run(arguments(str(folder), *words)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == list(
        map(str, [out, csv / "evaluation.csv", *(figures / f"perplexity.{f}" for f in ("svg", "pdf"))])
    ) + [str(figures / f"{name}.{form}") for name in ("loss", "perplexity_relative") for form in ("svg", "pdf")]
    assert all(Path(path).stat().st_size for path in said)


def test_a_run_that_was_not_measured_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "evaluation.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"run: has no evaluation.jsonl; `lengthen eval .*run` makes it"):
        report.run(arguments(str(folder), "-o", str(tmp_path / "page.html")))
    assert not (tmp_path / "page.html").exists()


def test_the_commands_on_the_page_are_commands(folder: Path) -> None:
    """What a report tells a reader to run is taken by the verbs that it names."""
    from lengthen.cli import analyse, evaluate
    from lengthen.report import collect
    from lengthen.report.sections import analysis_command, command

    found = collect([folder])
    words = shlex.split(command(found.curves[0]))
    assert words[:2] == ["lengthen", "eval"]
    assert parse(evaluate.Arguments, words[2:], "eval", "").lengths == [64, 128]
    for kind in ("resolution", "positions", "reach", "distance", "recall"):
        words = shlex.split(analysis_command(found.runs[0], kind))
        assert words[:2] == ["lengthen", "analyse"]
        assert parse(analyse.Arguments, words[2:], "analyse", "").what == [kind]
