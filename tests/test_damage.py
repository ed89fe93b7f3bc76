"""Files of a run or a corpus that are damaged at random: right numbers, or one line that names the file.

Bits are flipped, bytes swapped, cut off, overwritten and added, files emptied, swapped and deleted. Whatever it is, a
command ends with exit 0 and the numbers that it gives without damage, or with exit 1 and one line: never with a
traceback, and never with other numbers. What a stranger wrote has right checksums and wrong values: it is used, or
refused in one line. LENGTHEN_DAMAGE=5000 tries as many cases of each kind:

    LENGTHEN_DAMAGE=5000 python -m pytest -q -x tests/test_damage.py
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lengthen.cli.main import main
from lengthen.data import prepare
from lengthen.io import line_of
from lengthen.training import log
from lengthen.training.checkpoint import seal

MANY = os.environ.get("LENGTHEN_DAMAGE")
OF_A_RUN, OF_A_CORPUS, OF_STRANGERS = (int(MANY),) * 3 if MANY else (50, 25, 40)
CONFIG = """
[model]
layers = 1
width = 16
heads = 2
train_length = 16
[train]
batch = 4
[schedule]
shape = "constant"
warmup = 2
[evaluation]
every = 2
lengths = [16]
tokens = 128
[checkpoint]
every = 2
keep = 9
"""
Capture = pytest.CaptureFixture[str]


class Case:
    """A run of six steps, measured once, and the corpus it was trained on, to be damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.corpus, self.run = folder, folder / "corpus", folder / "run"

    def words(self, verb: str, steps: int) -> list[str]:
        if verb == "eval":
            data = ["--data", str(self.corpus)]
            return ["eval", str(self.run), *data, "--lengths", "16,32", "--tokens", "100", "--device", "cpu"]
        more = ["--data", str(self.corpus), "--out", str(self.run), "--train.steps", str(steps)]
        return ["train", str(self.folder / "config.toml"), *more, "--plain", "--device", "cpu"]

    def losses(self) -> dict[tuple[str, int], float]:
        records = log.read(self.run / "metrics.jsonl")
        return {(record["kind"], record["step"]): record["loss"] for record in records}

    def weights(self, step: int) -> bytes:
        return (self.run / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()


def table(out: str) -> list[list[str]]:
    """Return what `lengthen eval` prints: its table without the speed, and its verdicts."""
    _, _, rest = out.partition("length  ×")
    rows = [re.split(r"\s{2,}", line.strip()) for line in rest.splitlines()[1:]]
    return [row[:-1] if len(row) > 1 else row for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return the run and the corpus as they were made; nobody may change them."""
    case = Case(tmp_path_factory.mktemp("whole"))
    texts = case.folder / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"Document {number}: " + "the sea, the ship, the whale. " * 8)
    prepare(texts, case.corpus, validation=0.3, workers=1)
    (case.folder / "config.toml").write_text(CONFIG)
    assert main(case.words("train", 6)) == 0
    assert main(case.words("eval", 6)) == 0
    return case


@pytest.fixture(scope="module")
def expected(whole: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a copy of the run that went on to eight steps without damage."""
    case = Case(tmp_path_factory.mktemp("expected") / "case")
    shutil.copytree(whole.folder, case.folder)
    assert main(case.words("train", 8)) == 0
    return case


@pytest.fixture
def case(whole: Case, tmp_path: Path, capsys: Capture) -> Case:
    """Return a copy to be damaged."""
    shutil.copytree(whole.folder, tmp_path / "case")
    capsys.readouterr()
    return Case(tmp_path / "case")


# Damage: each takes a file, and another of the same folder, and returns those that are not as they were.


def change(path: Path, draw: random.Random, how: Callable[[bytearray], None]) -> list[Path]:
    data = bytearray(path.read_bytes())
    how(data)
    path.write_bytes(data)
    return [path]


def flip(path: Path, other: Path, draw: random.Random) -> list[Path]:
    def how(data: bytearray) -> None:
        for _ in range(draw.choice((1, 1, 3))):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)

    return change(path, draw, how) if path.stat().st_size else [path]


def overwrite(path: Path, other: Path, draw: random.Random) -> list[Path]:
    def how(data: bytearray) -> None:
        start, size = draw.randrange(len(data) + 1), draw.randint(1, 64)
        data[start : start + size] = draw.choice((bytes(size), draw.randbytes(size), b"[" * size, b"9" * size))

    return change(path, draw, how)


def swap_bytes(path: Path, other: Path, draw: random.Random) -> list[Path]:
    def how(data: bytearray) -> None:
        size = draw.randint(1, 16)
        one, two = (draw.randrange(max(1, len(data) - size)) for _ in range(2))
        data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]

    return change(path, draw, how)


def cut(path: Path, other: Path, draw: random.Random) -> list[Path]:
    def how(data: bytearray) -> None:
        del data[draw.choice((0, draw.randrange(len(data) + 1), len(data) - 1)) :]

    return change(path, draw, how) if path.stat().st_size else [path]


def add(path: Path, other: Path, draw: random.Random) -> list[Path]:
    return change(path, draw, lambda data: data.extend(draw.choice((b"\n", b"{}", draw.randbytes(30)))))


def swap_files(path: Path, other: Path, draw: random.Random) -> list[Path]:
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)
    return [path, other]


def copy_over(path: Path, other: Path, draw: random.Random) -> list[Path]:
    path.write_bytes(other.read_bytes())
    return [path]


def delete(path: Path, other: Path, draw: random.Random) -> list[Path]:
    path.unlink()
    return [path]


KINDS = (flip, flip, overwrite, swap_bytes, cut, add, swap_files, copy_over, delete)


def damage(folder: Path, draw: random.Random) -> list[Path]:
    """Damage a file below a folder, or two; return those that were touched."""
    touched: list[Path] = []
    for _ in range(draw.choice((1, 1, 2))):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
        path, other = draw.choice(files), draw.choice(files)
        if draw.random() < 0.5:  # of the same name: the most alike
            other = draw.choice([file for file in files if file.name == path.name])
        touched += draw.choice(KINDS)(path, other, draw)
    return touched


def refused(status: int, err: str, touched: list[Path]) -> bool:
    """Return whether a command ended with an error, which must be one line that names what was damaged."""
    lines = [line for line in err.splitlines() if line.startswith("lengthen")]
    assert "Traceback" not in err
    assert len(lines) == (status != 0), err
    if status == 0:
        return False
    assert status == 1
    assert any(path.name in lines[0] for path in touched), (lines[0], touched)
    return True


@pytest.mark.parametrize("number", range(OF_A_RUN))
def test_training_goes_on_as_it_would_have_or_says_why_not(
    case: Case, expected: Case, capsys: Capture, number: int
) -> None:
    touched = damage(case.run, random.Random(f"train {number}"))
    status = main(case.words("train", 8))
    said = capsys.readouterr()
    if refused(status, said.err, touched):
        return
    assert case.weights(8) == expected.weights(8)
    found, right = case.losses(), expected.losses()
    assert {key: right[key] for key in found} == found
    began = re.search(r"resuming after step (\d)", said.out)
    first = int(began[1]) if began else 0
    assert [key for key in right if key[1] > first and key not in found] == []
    assert first == 6 or "passed over, as it is not whole: " in said.out


@pytest.mark.parametrize("number", range(OF_A_RUN))
def test_a_measurement_is_the_same_or_is_refused(case: Case, whole: Case, capsys: Capture, number: int) -> None:
    assert main(whole.words("eval", 6)) == 0
    right = table(capsys.readouterr().out)
    assert len(right) > 3
    touched = damage(case.run, random.Random(f"eval {number}"))
    status = main(case.words("eval", 6))
    said = capsys.readouterr()
    if not refused(status, said.err, touched):
        assert table(said.out) == right


@pytest.mark.parametrize("number", range(OF_A_CORPUS))
@pytest.mark.parametrize("verb", ["train", "eval"])
def test_a_damaged_corpus_is_refused_or_gives_the_same(
    case: Case, whole: Case, expected: Case, capsys: Capture, verb: str, number: int
) -> None:
    assert main(whole.words("eval", 6)) == 0
    right = table(capsys.readouterr().out)
    if verb == "eval":  # measured, not remembered
        (case.run / "evaluation.jsonl").unlink()
    touched = damage(case.corpus, random.Random(f"{verb} of a corpus {number}"))
    status = main(case.words(verb, 8))
    said = capsys.readouterr()
    if refused(status, said.err, touched):
        return
    if verb == "eval":
        assert table(said.out) == right
    else:
        assert case.weights(8) == expected.weights(8)
        assert case.losses() == expected.losses()


# What a stranger wrote: whole, with right checksums, and with values that nobody expects.

ODD: list[Any] = [None, True, 0, -1, 3, 2**64, 1e308, -1.5, float("nan"), float("inf"), "", "x", "../x", [], ["a"], {}]


def altered(value: Any, draw: random.Random) -> Any:
    """Return JSON with one value changed, left out or added, at any depth."""
    if isinstance(value, dict | list) and value and draw.random() < 0.85:
        places: list[Any] = sorted(value) if isinstance(value, dict) else list(range(len(value)))
        changed, place, how = value.copy(), draw.choice(places), draw.random()
        if how < 0.15:
            del changed[place]
        elif how < 0.25 and isinstance(changed, dict):
            changed[f"{place}x"] = draw.choice(ODD)
        else:
            changed[place] = altered(value[place], draw)
        return changed
    return draw.choice(ODD)


def forge(path: Path, draw: random.Random) -> None:
    """Alter a value of JSON, of a line of JSON lines, or of a header of safetensors with the config in it."""
    if path.suffix == ".json":
        path.write_text(json.dumps(altered(json.loads(path.read_text()), draw)))
    elif path.suffix == ".jsonl":
        lines = path.read_text().splitlines(keepends=True) or ["{}\n"]
        number = draw.randrange(len(lines))
        said = altered({key: value for key, value in json.loads(lines[number]).items() if key != "crc32"}, draw)
        lines[number] = line_of(said) if isinstance(said, dict) else json.dumps(said) + "\n"
        path.write_text("".join(lines))
    else:
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        config = header.get("__metadata__", {}).get("lengthen")
        if config and draw.random() < 0.5:
            header["__metadata__"]["lengthen"] = json.dumps(altered(json.loads(config), draw))
        else:
            header = altered(header, draw)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("number", range(OF_STRANGERS))
def test_what_a_stranger_wrote_is_used_or_refused_in_one_line(case: Case, capsys: Capture, number: int) -> None:
    draw = random.Random(f"stranger {number}")
    kinds = (".json", ".jsonl", ".safetensors")
    files = [path for folder in (case.run, case.corpus) for path in sorted(folder.rglob("*")) if path.suffix in kinds]
    touched = draw.choice(files)
    forge(touched, draw)
    for folder in (case.run / "checkpoints").iterdir():
        seal(folder)
    verbs = [
        case.words("eval", 6),
        case.words("train", 8),
        ["report", str(case.run), "-o", str(case.folder / "a.html")],
    ]
    status = main(draw.choice(verbs))
    refused(status, capsys.readouterr().err, [touched])
