"""Runs' folders are read: what replaces what, what may be missing, and what an error says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up import LENGTHS, evaluation, tasks, write

from lengthen.report import Report, collect
from lengthen.report.charts import METHODS, colours
from lengthen.report.lines import COLOURS
from lengthen.report.sections import verdict
from lengthen.report.tasks import newest


def test_everything_of_a_run_is_read(report: Report) -> None:
    run = report.runs[0]
    assert (run.label, run.positions, run.train_length, run.model["layers"]) == ("alibi", "alibi", 64, 4)
    assert set(run.analyses) == {"resolution", "positions", "reach", "distance", "induction", "longppl"}
    assert [curve.label for curve in report.curves][:2] == ["alibi", "alibi · blockwise 32"]
    assert [one.length for one in report.curves[0].records] == list(LENGTHS)


def test_evaluation_alone_is_enough(tmp_path: Path) -> None:
    run = collect([write(tmp_path / "run", full=False)]).runs[0]
    assert (run.positions, run.train_length, run.model, run.analyses) == ("alibi", 64, {}, {})


def test_a_later_line_replaces_an_earlier_one(one: Callable[..., Report]) -> None:
    first, other = evaluation("alibi", 64), evaluation("alibi", 128)
    report = one(first, other, {**first, "loss": 1.0, "seconds": 5.0})
    assert [(r.length, r.loss) for r in report.curves[0].records] == [(64, 1.0), (128, other["loss"])]


@pytest.mark.parametrize("torn", ['{"kind": "evaluation", "len', '{"kind": "evaluation", "protocol": "nonov', "7"])
def test_a_torn_last_line_is_ignored(tmp_path: Path, torn: str) -> None:
    folder = write(tmp_path / "run", full=False)
    with (folder / "evaluation.jsonl").open("a", encoding="utf-8") as file:
        file.write(torn)
    assert len(collect([folder]).runs[0].evaluations) == len(LENGTHS)


def test_a_torn_line_before_the_last_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", full=False)
    good = (folder / "evaluation.jsonl").read_text(encoding="utf-8")
    (folder / "evaluation.jsonl").write_text('{"kind": "eval\n' + good, encoding="utf-8")
    with pytest.raises(ValueError, match=r"evaluation.jsonl, line 1: expected JSON"):
        collect([folder])


def test_a_model_that_was_trained_anew_is_drawn_alone(one: Callable[..., Report]) -> None:
    first = [evaluation("alibi", n, weights="a", loss=3.0) for n in (64, 128, 256)]
    (curve,) = one(*first, *(evaluation("alibi", n, weights="b", loss=2.0) for n in (64, 128))).curves
    assert [(record.length, record.loss) for record in curve.records] == [(64, 2.0), (128, 2.0)]


def test_a_checkpoint_that_is_there_is_drawn_before_one_that_is_gone(tmp_path: Path) -> None:
    """As after a return to an earlier step, which sets those after it aside."""
    here, gone = "a" * 64, "b" * 64
    lines = [evaluation("alibi", n, checkpoint="step-00001000", step=1000, weights=here, loss=3.0) for n in (64, 128)]
    lines += [evaluation("alibi", n, weights=gone, loss=2.0) for n in (64, 128)]
    folder = write(tmp_path / "run", full=False, lines=lines)
    assert collect([folder]).curves[0].first.weights == gone
    for name, weights in (("step-00001000", here), ("aside-1-step-00002000", gone)):
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "SHA256SUMS").write_text(f"{weights}  model.safetensors\n")
    assert [one.weights for one in collect([folder]).curves[0].records] == [here, here]


def test_analyses_and_answers_of_weights_that_are_gone_are_not_drawn(tmp_path: Path) -> None:
    """As after the same method was trained anew into the folder: the files have the old model's numbers."""
    here, gone = "a" * 64, "b" * 64
    folder = write(tmp_path / "run")
    (folder / "checkpoints" / "step-00002000").mkdir(parents=True)
    (folder / "checkpoints" / "step-00002000" / "SHA256SUMS").write_text(f"{here}  model.safetensors\n")
    lines = [evaluation("alibi", n, protocol="blockwise", block=32, weights=gone) for n in (64, 128)]
    lines += [evaluation("alibi", n, weights=here) for n in (64, 128)]
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for kind, weights in (("reach", here), ("distance", gone)):
        path = folder / "analysis" / f"{kind}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"weights": weights}))
    asked = tasks("alibi")[1] | {"seed": 0}
    several = [asked | {"weights": here}, asked | {"weights": gone}, asked | {"weights": gone, "length": 512}]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in several))
    report = collect([folder])
    assert [curve.first.weights for curve in report.curves] == [here]
    assert "reach" in report.runs[0].analyses
    assert "distance" not in report.runs[0].analyses
    assert report.notes == [f"{folder}: distance, which is of other weights; `lengthen analyse RUN` makes it"]
    assert [(one.weights, one.length) for one in newest(report.runs[0].tasks, report.runs[0].weights)] == [(here, 64)]
    assert {one.length for one in newest(report.runs[0].tasks)} == {64, 512}, "of the model that was asked last"


def test_measurements_of_other_tokens_are_curves_of_their_own(one: Callable[..., Report]) -> None:
    """So that a curve's verdict, and its differences, are over the same tokens."""
    lines = [evaluation("alibi", n) for n in (64, 128)]
    lines += [evaluation("alibi", n, targets=99, tokens=99, loss=1.0) for n in (256, 512)]
    lines += [evaluation("alibi", n, precision="bfloat16") for n in (64, 128)]
    report = one(*lines)
    assert [(curve.label, [record.length for record in curve.records]) for curve in report.curves] == [
        ("alibi · float32 · 65,536 tokens", [64, 128]),
        ("alibi · float32 · 99 tokens", [256, 512]),
        ("alibi · bfloat16", [64, 128]),
    ]
    assert report.curves[1].verdict is None
    assert "99 tokens was not measured at its training length of 64;" in verdict(report.curves)


def test_what_is_of_another_method_is_left_out(tmp_path: Path) -> None:
    """As after another model was trained into the folder."""
    folder = write(tmp_path / "run", "alibi")
    config = folder / "config.toml"
    config.write_text(config.read_text(encoding="utf-8").replace("alibi", "rotary"), encoding="utf-8")
    other = write(tmp_path / "other", "xpos")
    report = collect([folder, other])
    assert [run.positions for run in report.runs] == ["xpos"]
    assert report.notes == [f"{folder}: no measurements; `lengthen eval RUN` makes them"]
    with (folder / "evaluation.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(evaluation("rotary", 64)) + "\n")
    (run,) = collect([folder]).runs
    assert [one.positions for one in run.evaluations] == ["rotary"]
    assert (run.analyses, run.tasks) == ({}, [])


def test_only_the_newest_checkpoint_is_drawn_and_all_are_kept(one: Callable[..., Report]) -> None:
    old = [evaluation("alibi", n, checkpoint="step-00001000", step=1000, loss=3.0) for n in (64, 128, 256)]
    report = one(*[evaluation("alibi", n) for n in (64, 128)], *old)
    (curve,) = report.curves
    assert curve.first.checkpoint == "step-00002000"
    assert len(curve.records) == 2
    assert len(report.runs[0].evaluations) == 5


def test_protocols_strides_and_blocks_are_curves_of_their_own(one: Callable[..., Report]) -> None:
    lines = [evaluation("alibi", n) for n in (64, 128)]
    lines += [evaluation("alibi", n, protocol="sliding", stride=16) for n in (64, 128)]
    lines += [evaluation("alibi", n, protocol="sliding", stride=n // 2) for n in (64, 128, 256)]
    lines += [evaluation("alibi", n, protocol="window", block=64) for n in (128, 256)]
    lines += [evaluation("alibi", n, protocol="blockwise", block=b) for n in (128, 256) for b in (16, 32)]
    lines += [evaluation("alibi", 64, split="test")]
    labels = {curve.label: len(curve.records) for curve in one(*lines).curves}
    assert labels == {
        "alibi · validation of 9f86d081": 2,
        "alibi · test of 9f86d081": 1,
        "alibi · sliding, stride 16 · validation of 9f86d081": 2,
        "alibi · sliding, stride length/2 · validation of 9f86d081": 3,
        "alibi · window 64 · validation of 9f86d081": 2,
        "alibi · blockwise 16 · validation of 9f86d081": 2,
        "alibi · blockwise 32 · validation of 9f86d081": 2,
    }


def test_blockwise_is_relative_to_the_plain_value_at_the_training_length(report: Report) -> None:
    plain, blockwise = report.curves[:2]
    assert plain.reference is plain.records[0]
    assert blockwise.reference is plain.records[0]


def test_labels_say_as_much_as_tells_runs_apart(tmp_path: Path) -> None:
    longer = [evaluation("alibi", 128, train_length=128)]
    paths = [
        write(tmp_path / "a", "xpos", full=False),
        write(tmp_path / "b", "alibi", full=False),
        write(tmp_path / "c", "alibi", full=False),
        write(tmp_path / "d", lines=longer, full=False),
        write(tmp_path / "e" / "same", "t5", full=False),
        write(tmp_path / "f" / "same", "t5", full=False),
    ]
    labels = [run.label for run in collect(paths).runs]
    assert labels[:4] == ["xpos", "alibi (b)", "alibi (c)", "alibi, trained at 128"]
    assert labels[4:] == [f"t5 ({tmp_path / 'e' / 'same'})", f"t5 ({tmp_path / 'f' / 'same'})"]


def test_runs_have_colours_of_their_own(tmp_path: Path) -> None:
    names = ["alibi", "alibi", "xpos", "mine", "rotary", "alibi+rotary"]
    runs = collect([write(tmp_path / str(i), name, full=False) for i, name in enumerate(names)]).runs
    found = colours(runs)
    assert len(set(found)) == len(names)
    assert [found[0], found[2], found[4]] == [METHODS[name] for name in ("alibi", "xpos", "rotary")]
    assert len(set(colours(runs * 3))) == 3 * len(names)  # beyond the palette, markers differ


def test_colours_are_seen_on_white_and_on_black() -> None:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for colour in COLOURS:
        assert 1.05 / (light(colour) + 0.05) >= 3
        assert (light(colour) + 0.05) / (light("#14181c") + 0.05) >= 3


def test_runs_without_results_are_noted_and_missing_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere: expected the folder of a run, got none; `lengthen train`"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    folder = write(tmp_path / "run")
    report = collect([tmp_path / "empty", folder])
    assert [run.path for run in report.runs] == [str(folder)]
    assert report.notes == [f"{tmp_path / 'empty'}: no measurements; `lengthen eval RUN` makes them"]
    (tmp_path / "empty" / "evaluation.jsonl").write_text('{"kind": "other"}\n')
    for paths in ([tmp_path / "empty"], []):
        with pytest.raises(ValueError, match=r"^runs: expected a folder with measurements, got none") as problem:
            collect(paths)
        assert "\n" not in str(problem.value)
    with pytest.raises(ValueError, match="each folder once"):
        collect([folder, tmp_path / "empty" / ".." / "run"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss": "2"}, "line 1: loss: expected a number or none, got '2' (str)"),
        ({"length": None}, "line 1: length: expected a whole number, got None"),
        ({"length": True}, "line 1: length: expected a whole number, got True"),
        ({"length": 0}, "line 1: length: expected at least 1, got 0"),
        ({"protocol": 3}, "line 1: protocol: expected a word, got 3"),
        ({"train_length": 0}, "train_length: expected at least 1, got 0"),
        ({"positions": None}, "expected `positions` in config.toml or evaluation.jsonl, got None"),
    ],
)
def test_wrong_values_are_named(one: Callable[..., Report], change: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match="run") as error:
        one({**evaluation("alibi", 64), **change})
    assert said in str(error.value)


def test_a_line_without_its_length_is_named(one: Callable[..., Report]) -> None:
    line = evaluation("alibi", 64)
    del line["length"]
    with pytest.raises(ValueError, match=r"line 1: length: expected a value, got none"):
        one(line)


def test_analyses_that_are_not_what_they_should_be_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    path = folder / "analysis" / "reach.json"
    for text, said in (
        ("{", "expected JSON"),
        ("[]", "expected a table"),
        ('{"rows": 3}', "rows: expected a list"),
        ('{"rows": [3]}', r"rows\[0\]: expected a table"),
        ('{"rows": [{"length": 3}]}', "row 1: expected what `lengthen analyse --what reach` writes, got KeyError"),
        ('{"rows": [{"length": "3", "reach": [[1]], "fraction": [[1]]}]}', "length: expected a whole number, got '3'"),
        ('{"rows": [{"length": 3, "reach": [["a"]], "fraction": [[1]]}]}', "reach: expected a number, got 'a'"),
        ('{"rows": [{"length": 3, "reach": [1], "fraction": [1]}]}', "row 1: expected what"),
        ('{"rows": [{"length": 3, "reach": [[1, 2]], "fraction": [[1]]}]}', "shorter"),
    ):
        path.write_text(text)
        with pytest.raises((TypeError, ValueError), match=f"reach.json.*{said}"):
            collect([folder])
    path.unlink()
    (folder / "config.toml").write_text("model = ")
    with pytest.raises(ValueError, match=r"config.toml: expected TOML"):
        collect([folder])


def test_values_that_are_not_finite_are_read(one: Callable[..., Report]) -> None:
    lines = [evaluation("alibi", 64), evaluation("alibi", 128, loss=math.inf, perplexity=math.inf)]
    lines.append(evaluation("alibi", 256, loss=None, perplexity=None))
    assert json.dumps(lines[1]).count("Infinity") == 2
    assert [r.loss for r in one(*lines).curves[0].records][1:] == [math.inf, None]


@pytest.mark.parametrize(
    ("losses", "holds"),
    [
        ([1.6, 1.5, 1.4, 1.4, 1.4], 1024),  # better and better
        ([1.6, 1.61, 1.7, 1.6, 1.6], 128),  # what comes after a failure does not count
        ([1.6, 1.5, 1.61, 1.5, 1.63], 512),  # the training length is what counts, not the best
        ([1.6, math.nan, 1.6, 1.6, 1.6], 64),
        ([math.inf, None, math.nan, math.inf, None], None),
    ],
)
def test_how_far_a_curve_holds(one: Callable[..., Report], losses: list[float | None], holds: int | None) -> None:
    bare = {"perplexity": None, "segment_losses": [], "segment_counts": []}
    lines = [evaluation("alibi", n, loss=loss, **bare) for n, loss in zip(LENGTHS, losses, strict=True)]
    found = one(*lines).curves[0].verdict
    assert (found.length if found else None) == holds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"right": [3]}, "expected as many of each"),
        ({"right": [30, 1, 1]}, "right: expected at most"),
        ({"length": "x"}, "length"),
    ],
)
def test_a_wrong_line_of_tasks_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder = write(tmp_path / "run")
    lines = [*tasks("alibi")[1:3], tasks("alibi")[1] | change]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises((TypeError, ValueError), match=rf"tasks\.jsonl, line 3.*{message}"):
        collect([folder])


def test_the_later_of_two_answers_is_drawn(report: Report) -> None:
    found = newest(report.runs[0].tasks)
    assert [(one.task, one.length) for one in found[:2]] == [("passkey", 64), ("passkey", 128)]
    assert found[0].counts == [20, 20, 20]
    assert found[-1].how({}) == "" or found[-1].how({}).startswith("blockwise")
