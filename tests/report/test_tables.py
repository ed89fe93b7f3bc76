"""Every number of the CSV files is the one in the runs' files, to the last bit."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import evaluation

from lengthen.evaluation.errors import standard_error
from lengthen.report import Report, Run, write_csv
from lengthen.report.analyses import KINDS
from lengthen.report.collect import Measurement, paired

SEGMENTS = ("segment_losses", "segment_counts")


def measurement(*arguments: Any, **other: Any) -> Measurement:
    record = evaluation(*arguments, **other)
    del record["kind"]
    return Measurement(**record)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def analysis(run: Path, kind: str) -> dict[str, Any]:
    return dict(json.loads((run / "analysis" / f"{kind}.json").read_text(encoding="utf-8")))


def test_evaluations_are_those_of_the_files(report: Report, runs: list[Path], tmp_path: Path) -> None:
    paths = write_csv(report, tmp_path / "csv")
    names = ["evaluation", "resolution", "positions", "curse", "reach", "distance", "induction", "longppl", "tasks"]
    names.append("differences")
    assert [path.name for path in paths] == [f"{name}.csv" for name in names]
    rows = iter(read(paths[0]))
    for run in runs:
        for line in (run / "evaluation.jsonl").read_text(encoding="utf-8").splitlines():
            record, row = json.loads(line), next(rows)
            assert row.pop("run") == str(run)
            told = {key: value for key, value in record.items() if key not in ("kind", *SEGMENTS)}
            assert row == {key: "" if value in (None, {}) else str(value) for key, value in told.items()}
    assert next(rows, None) is None


def test_differences_are_paired(report: Report, tmp_path: Path) -> None:
    write_csv(report, tmp_path)
    found = {(row["curve"], row["length"], row["other_curve"]): row for row in read(tmp_path / "differences.csv")}
    along, between = found["alibi", "1024", "alibi"], found["alibi", "64", "xpos"]
    assert float(along["loss_difference"]) == pytest.approx(-0.12)
    segments = [-0.12 * 30000, -0.12 * 35536]
    assert float(along["loss_difference_se"]) == pytest.approx(standard_error(segments, [32768, 32768]))
    assert float(along["perplexity_ratio"]) == pytest.approx(math.exp(-0.12))
    assert along["other_length"] == "64"
    assert (float(between["loss_difference"]), float(between["loss_difference_se"])) == (0, 0)
    other = report.runs[1].evaluations[0]
    assert paired(report.runs[0].evaluations[0], dataclasses.replace(other, data="another")) is None


def test_analyses_are_those_of_the_files(report: Report, runs: list[Path], tmp_path: Path) -> None:
    write_csv(report, tmp_path)
    of = {name: read(tmp_path / f"{name}.csv") for name in KINDS}

    def numbers(name: str, column: str) -> list[float]:
        return [float(row[column]) for row in of[name]]

    both = [(analysis(run, kind), kind) for kind in of for run in runs]
    rows = {kind: [row for found, k in both if k == kind for row in found["rows"]] for kind in of}
    assert numbers("resolution", "resolution") == [
        value for row in rows["resolution"] for value in [row["resolution"], *row["layers"]]
    ]
    assert numbers("positions", "loss") == [value for row in rows["positions"] for value in row["loss"]]
    assert numbers("positions", "position") == [value for row in rows["positions"] for value in row["positions"]]
    for key in ("reach", "fraction"):
        assert numbers("reach", key) == [value for row in rows["reach"] for heads in row[key] for value in heads]
    assert numbers("distance", "weight") == [
        value for row in rows["distance"] for heads in row["weight"] for weights in heads for value in weights
    ]
    for row in [row for row in of["induction"] if row["layer"]]:
        assert (row["difference"], row["sequences"]) == ("", "")
    of["induction"] = [row for row in of["induction"] if not row["layer"]]
    for key in ("length", "sequences", "first", "second", "difference", "standard_error"):
        assert numbers("induction", key) == [row[key] for row in rows["induction"]]
    for key in ("previous", "induction"):
        layers = [float(row[key]) for row in read(tmp_path / "induction.csv") if row["layer"]]
        assert layers == [value for row in rows["induction"] for value in row[key]]
    for key in ("length", "long_ppl", "standard_error", "soft_long_ppl", "key_tokens"):
        assert numbers("longppl", key) == [row[key] for row in rows["longppl"]]
    curse = read(tmp_path / "curse.csv")
    assert [float(row["from_curse"]) for row in curse] == [0.15] * len(runs)


@given(value=st.floats(), length=st.integers(1, 2**40), name=st.text(max_size=20).filter(lambda s: "\0" not in s))
def test_any_float_and_any_text_come_back(tmp_path_factory: Any, value: float, length: int, name: str) -> None:
    name = name.encode("utf-8", "replace").decode()
    record = measurement("alibi", length, loss=value, device=name)
    (path,) = write_csv(
        Report([Run("run", "alibi", 64, "alibi", evaluations=[record])]), tmp_path_factory.mktemp("csv")
    )
    (row,) = read(path)
    again = float(row["loss"])
    assert again == value or (math.isnan(again) and math.isnan(value))
    assert row["device"].removeprefix("'") == name.replace("\r", " ").removeprefix("'")
    assert row["length"] == str(length)


FORMULAS = (
    "=1+1",
    '=HYPERLINK("http://x.example","y")',
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(1)",
    "\t=1",
    "\r=1",
    "＝1",
)


@pytest.mark.parametrize("text", FORMULAS)
def test_no_spreadsheet_runs_what_a_file_says(tmp_path: Path, text: str) -> None:
    run = Run(text, text, 64, text, evaluations=[measurement(text, 64, device=text, checkpoint=text, loss=-1.5)])
    (path,) = write_csv(Report([run]), tmp_path)
    (row,) = read(path)
    assert {row[key] for key in ("run", "positions", "device", "checkpoint")} == {f"'{text}".replace("\r", " ")}
    assert row["loss"] == "-1.5"  # a number is no formula


@pytest.mark.parametrize("text", ["-5", "+1e3", "alibi", "a=1", "'=1", ""])
def test_other_text_is_as_it_was(tmp_path: Path, text: str) -> None:
    (path,) = write_csv(
        Report([Run("run", "alibi", 64, evaluations=[measurement("alibi", 64, device=text)])]), tmp_path
    )
    assert read(path)[0]["device"] == text


def test_what_no_run_has_is_not_written(tmp_path: Path) -> None:
    report = Report([Run("run", "alibi", 64, "alibi", evaluations=[measurement("alibi", 64)])])
    assert [path.name for path in write_csv(report, tmp_path)] == ["evaluation.csv"]


def test_tasks_have_a_row_for_all_samples_and_one_for_each_depth(report: Report, tmp_path: Path) -> None:
    write_csv(report, tmp_path)
    found = [row for row in read(tmp_path / "tasks.csv") if row["run"] == report.runs[0].path]
    assert [(row["task"], row["length"], row["depth"]) for row in found][2:7] == [
        ("passkey", "64", ""),
        ("passkey", "64", "0.0"),
        ("passkey", "64", "0.5"),
        ("passkey", "64", "1.0"),
        ("passkey", "128", ""),
    ]
    asked = report.runs[0].tasks[1]
    p = sum(asked.right) / 60
    assert float(found[2]["accuracy"]) == p
    assert float(found[2]["standard_error"]) == pytest.approx(math.sqrt(p * (1 - p) / 60))
    assert [row["depth"] for row in found if row["task"] == "variables"] == [""]
