"""`lengthen analyse`, from words to files and tables: what it writes, says and refuses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import lengthen
from lengthen.cli import analyse
from lengthen.cli.flags import parse
from lengthen.cli.main import main
from lengthen.data import Corpus
from lengthen.evaluation import analyses, open_run

Capture = pytest.CaptureFixture[str]
SMALL = {
    "model.layers": "2",
    "model.width": "16",
    "model.heads": "2",
    "model.train_length": "16",
    "train.batch": "4",
    "train.steps": "2",
    "evaluation.every": "0",
    "checkpoint.every": "1",
    "schedule.warmup": "2",
}
TINY = ["--device", "cpu", *(f"--{key}={value}" for key, value in SMALL.items())]


def trained(data: str, out: Path, *words: str) -> Path:
    assert main(["train", "tiny", "--data", data, "--out", str(out), *TINY, *words]) == 0
    return out


@pytest.fixture(scope="module")
def alibi(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(data, tmp_path_factory.mktemp("alibi") / "run")


@pytest.fixture(scope="module")
def learned(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(data, tmp_path_factory.mktemp("learned") / "run", "--model.positions", "learned")


def run(*words: object) -> int:
    return analyse.run(parse(analyse.Arguments, [*map(str, words), "--device", "cpu"], "analyse", ""))


def read(run: Path, name: str) -> dict[str, Any]:
    found = json.loads((run / "analysis" / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_everything_at_once(alibi: Path, data: str, capsys: Capture) -> None:
    assert run(alibi, "--data", data, "--lengths", "16,40", "--tokens", 160, "--blockwise") == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert sorted(path.name for path in (alibi / "analysis").iterdir()) == [
        f"{name}.json" for name in ("distance", "induction", "longppl", "positions", "reach", "resolution")
    ]
    for name in ("resolution", "positions", "reach", "distance", "induction"):
        found = read(alibi, name)
        weights = found.pop("weights")
        assert re.fullmatch("[0-9a-f]{64}", weights)
        assert {key: found[key] for key in list(found)[:8]} == {
            "kind": name,
            "positions": "alibi",
            "train_length": 16,
            "checkpoint": "step-00000002",
            "data": Corpus.open(data).fingerprint,
            "precision": "float32",
            "device": "cpu",
            "version": lengthen.__version__,
        }
        assert f"\n  {alibi / 'analysis' / f'{name}.json'}\n" in said.out

    rows = read(alibi, "resolution")["rows"]
    assert [(row["length"], row["blockwise"], row["block"]) for row in rows] == [
        (16, False, None),
        (40, False, None),
        (16, True, 8),
        (40, True, 8),
    ]
    for row in rows:
        assert row["resolution"] == pytest.approx(sum(row["layers"]) / 2)
        assert len(row["layers"]) == 2
    assert rows[0]["resolution"] == pytest.approx(rows[2]["resolution"])  # two blocks are all there is
    assert rows[1]["resolution"] != pytest.approx(rows[3]["resolution"], rel=1e-3)
    assert re.search(r"^  40, blocks of 8( +-?\d[\d.e-]*){3}$", said.out, flags=re.MULTILINE)

    found = read(alibi, "positions")
    short, long = found["rows"]
    assert (short["positions"], long["positions"]) == ([1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 32, 40])
    assert (sum(short["count"]), sum(long["count"])) == (160, 160)
    assert all(0 < loss < 2 * math.log(258) for loss in short["loss"] + long["loss"])
    split = found["curse"]
    assert (split["short"], split["long"], split["stride"], split["tokens"]) == (16, 40, 2, 160)
    assert split["gain"] == pytest.approx(split["from_context"] + split["from_curse"], abs=1e-9)
    assert f"gain {split['gain']:.4f} = context" in said.out

    for row in read(alibi, "reach")["rows"]:
        assert [len(row["reach"]), len(row["reach"][0])] == [2, 2]
        for layer in range(2):
            for head in range(2):
                fraction = row["reach"][layer][head] / ((row["length"] + 1) / 2)
                assert row["fraction"][layer][head] == pytest.approx(fraction)
                assert 0 < fraction <= 1
    row = read(alibi, "distance")["rows"][1]
    assert row["distances"] == [0, 1, 2, 4, 8, 16, 32]
    for heads in row["weight"]:
        for buckets in heads:
            assert len(buckets) == 7
            assert sum(buckets) == pytest.approx(1, abs=1e-6)
    found = read(alibi, "induction")
    assert found["vocabulary"] == len(set("Document 0123456789: the sea, the ship, the whale. ") & set(said_in(data)))
    assert [(row["length"], row["sequences"]) for row in found["rows"]] == [(16, 5), (40, 4)]
    for row in found["rows"]:
        assert row["difference"] == pytest.approx(row["second"] - row["first"])
        assert 0 < row["standard_error"] < 1
        assert len(row["previous"]) == len(row["induction"]) == 2
        assert all(0 < weight < 1 for weight in row["previous"] + row["induction"])


def said_in(data: str, tokens: int = 160) -> str:
    """Return the text that an analysis reads."""
    return Corpus.open(data).tokenizer.decode(Corpus.open(data)["validation"].read(0, tokens))


def test_induction_by_seed_and_length(alibi: Path, data: str) -> None:
    def found(*words: object) -> list[dict[str, Any]]:
        assert run(alibi, "--data", data, "--what", "induction", "--tokens", 500, *words) == 0
        rows: list[dict[str, Any]] = read(alibi, "induction")["rows"]
        return rows

    rows = found()
    assert [row["length"] for row in rows] == [8, 16, 32, 64, 128]  # so much again is the training length, and beyond
    assert [row["sequences"] for row in rows] == [31, 15, 7, 4, 4]
    assert found("--lengths", "32,2") == [*found("--lengths", "2"), rows[2]]  # whatever else is asked for
    assert found("--lengths", "32", "--seed", 1) != [rows[2]]
    text = Corpus.open(data)["validation"]
    longer = [len(text) + 1]  # it is not read from the text
    assert analyses.fitting_lengths(open_run(alibi), analyses.LENGTHS["induction"], text, longer) == longer


def test_longppl_with_a_judge(alibi: Path, learned: Path, data: str, tmp_path: Path, capsys: Capture) -> None:
    words = ("--what", "longppl", "--lengths", "12,16", "--tokens", 64, "--short", 4, "--alpha", -9, "--beta", -99)
    assert run(alibi, *words) == 0
    alone = read(alibi, "longppl")
    assert (alone["short"], alone["stride"], alone["alpha"], alone["beta"], alone["judge"]) == (4, 1, -9, -99, None)
    for row in alone["rows"]:  # whatever is chosen by such thresholds is all there is
        assert row["key_tokens"] == row["candidates"]
        assert row["long_ppl"] == pytest.approx(row["perplexity"])
    assert "LongPPL: key tokens chosen by the model itself, LSD > -9 beyond 4 tokens" in capsys.readouterr().out
    assert run(alibi, *words, "--judge", learned, "--alpha", 0) == 0
    judged = read(alibi, "longppl")
    assert judged["judge"] == open_run(learned).weights
    assert [row["perplexity"] for row in judged["rows"]] == [row["perplexity"] for row in alone["rows"]]
    assert [row["key_tokens"] for row in judged["rows"]] != [row["key_tokens"] for row in alone["rows"]]


def test_the_usual_lengths_are_those_that_fit(alibi: Path, learned: Path, data: str) -> None:
    assert run(alibi, "--data", data, "--what", "distance", "--tokens", 64) == 0
    assert [row["length"] for row in read(alibi, "distance")["rows"]] == [16, 32, 64, 128, 256]
    assert run(learned, "--data", data, "--tokens", 64) == 0  # reach is left out, and so are positions it never saw
    assert [row["length"] for row in read(learned, "resolution")["rows"]] == [16]
    assert read(learned, "positions")["curse"] is None
    assert not (learned / "analysis" / "reach.json").exists()
    assert [row["length"] for row in read(learned, "induction")["rows"]] == [8]
    (learned / "analysis" / "induction.json").unlink()
    assert run(learned, "--data", data, "--lengths", "8,16", "--tokens", 64) == 0  # 16 tokens twice are too many
    assert not (learned / "analysis" / "induction.json").exists()


def test_a_checkpoints_folder(alibi: Path, data: str) -> None:
    first = alibi / "checkpoints" / "step-00000001"
    assert run(first, "--data", data, "--what", "resolution", "--lengths", "16", "--tokens", 64) == 0
    assert read(alibi, "resolution")["checkpoint"] == "step-00000001"


def test_what_is_wrong_is_said(alibi: Path, learned: Path, data: str, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        with pytest.raises((ValueError, OSError)) as problem:
            run(*words)
        return str(problem.value)

    some = (alibi, "--data", data)
    validation = len(Corpus.open(data)["validation"])
    assert refused(*some, "--lengths", "16,5000") == (
        f"--lengths: 5,000 is longer than the text: split 'validation' of {data} has {validation:,} tokens"
    )
    assert refused(*some, "--lengths", "1") == "--lengths: expected at least 2, got 1"
    assert refused(*some, "--lengths", "[]") == "--lengths: expected at least one number, each at least 1, got []"
    assert refused(*some, "--tokens", "0") == "--tokens: expected a whole number of at least 1, got 0"
    assert "did you mean 'validation'?" in refused(*some, "--split", "validatoin")
    assert refused(learned, "--data", data, "--lengths", "16,17") == (
        "--lengths: 17 tokens are beyond the 16 positions that this model has learned vectors for"
    )
    assert refused(learned, "--data", data, "--what", "induction", "--lengths", "8,9") == (
        "--lengths: 17 tokens are beyond the 16 positions that this model has learned vectors for"
    )
    assert refused(*some, "--what", "induction", "--lengths", "1") == "--lengths: expected at least 2, got 1"
    assert refused(*some, "--seed", "-1") == "--seed: expected a whole number of at least 0, got -1"
    assert "got 'learned': nothing bounds how far" in refused(learned, "--data", data, "--what", "reach")
    (tmp_path / "checkpoints").mkdir()
    assert "checkpoint" in refused(tmp_path, "--data", data)
    assert "no such folder" in refused(tmp_path / "nowhere", "--data", data)
    assert "index.json: not there" in refused(alibi, "--data", tmp_path)
    assert not (tmp_path / "analysis").exists()


def test_encoders_are_refused_before_anything_is_read(data: str, tmp_path: Path) -> None:
    encoder = trained(data, tmp_path / "run", "--model.kind", "encoder")
    for words in ([], *(["--what", name] for name in analyse.NAMES)):
        with pytest.raises(
            ValueError, match=r"^model: expected a decoder, got an encoder: analyses look back, not ahead"
        ):
            run(encoder, "--data", data, *words)
    subject = open_run(encoder)
    for one in analyses.ANALYSES.values():
        with pytest.raises(ValueError, match="model: expected a decoder, got an encoder"):
            one.analyse(subject, Corpus.open(data), [16], tokens=64, progress=pytest.fail)
    assert not (encoder / "analysis").exists()


def test_a_wrong_word_is_said(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        run("x", "--what", "reach,resolutoin")
    assert "got 'resolutoin'; did you mean 'resolution'?" in re.sub(r"[│\s]+", " ", capsys.readouterr().err)


def test_results_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = analyses.write(tmp_path, {"kind": "reach", "rows": [1]})
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        analyses.write(tmp_path, {"kind": "reach", "rows": [2]})
    assert json.loads(path.read_text()) == {"kind": "reach", "rows": [1]}
    assert list(path.parent.iterdir()) == [path]


def test_help_has_every_name_and_an_example() -> None:
    assert analyse.__doc__ is not None
    assert all(re.search(rf"^  {name} ", analyse.__doc__, flags=re.MULTILINE) for name in analyse.NAMES)
    assert "\n  lengthen analyse " in analyse.__doc__
    assert tuple(analyses.ANALYSES) == analyse.NAMES
