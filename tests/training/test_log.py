"""The run's log: the very floats, each step once, and a torn line is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthen.io import line_of
from lengthen.training.log import Log, Record, read


def write(path: Path, records: list[Record], after: int = -1) -> None:
    log = Log(path, after)
    for record in records:
        log.write(record)
    log.close()


def step(number: int, **more: object) -> Record:
    return {"kind": "step", "step": number, **more}


@given(loss=st.floats(), rate=st.floats())
def test_floats_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, loss: float, rate: float) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    write(path, [step(1, loss=loss, lr=rate)])
    (record,) = read(path)
    for ours, theirs in ((record["loss"], loss), (record["lr"], rate)):
        assert ours == theirs or (math.isnan(ours) and math.isnan(theirs))
        assert math.copysign(1, ours) == math.copysign(1, theirs) or math.isnan(theirs)


def test_a_record_is_readable_at_once(tmp_path: Path) -> None:
    log = Log(tmp_path / "metrics.jsonl", -1)
    for number in (1, 2):
        log.write(step(number))
        assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == list(range(1, number + 1))
    log.close()


def test_a_torn_last_line_is_no_record_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [step(number, loss=1 / number) for number in (1, 2, 3)])
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in (1, last // 2, last - 1):
        path.write_bytes(whole[:-cut])
        assert [record["step"] for record in read(path)] == [1, 2]
    write(path, [step(3)], after=2)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_going_on_drops_what_will_be_said_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    evaluation = {"kind": "evaluation", "step": 3, "length": 8, "loss": 0.1 + 0.2}
    write(path, [step(1), step(2), step(3), evaluation, step(4), {**evaluation, "step": 4}])
    write(path, [step(4, again=True)], after=3)
    assert list(read(path)) == [step(1), step(2), step(3), evaluation, step(4, again=True)]
    assert list(tmp_path.iterdir()) == [path]


def test_starting_anew_drops_everything(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"kind": "evaluation", "step": 0, "length": 8}, step(1)])
    path.write_text(path.read_text() + "damaged\n")  # whatever it is
    write(path, [step(1, new=True)])
    assert list(read(path)) == [step(1, new=True)]


def test_a_line_torn_in_the_middle_is_an_error(tmp_path: Path) -> None:
    """That is no killed process: somebody wrote into the file."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(line_of(step(1)) + '{"ste\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: expected JSON"):
        list(read(path))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (line_of({"kind": "step", "loss": 2.0}), "step: expected a value, got none"),
        (line_of({"kind": "step", "step": "3"}), "step: expected a whole number, got '3'"),
        (line_of({"step": 3}), "kind: expected a value, got none"),
        ("[1, 2]\n", "the file: expected a table"),
        ('{"kind": "step", "step": 3, "crc32": "00000000"}\n', "expected a line whose crc32 is .*, got 00000000"),
        ('{"kind": "step", "step": 3}\n', "expected a line whose crc32 is .*, got None"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [step(1)])
    path.write_text(path.read_text() + line)
    with pytest.raises((TypeError, ValueError), match=rf"metrics\.jsonl, line 2: {problem}"):
        Log(path, after=5)
