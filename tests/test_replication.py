"""The campaign of the papers' claims: it can be stopped anywhere and goes on, and its table says what was found."""

import contextlib
import io
import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lengthen.io import read_toml
from lengthen.training import load

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CAMPAIGN = """
[scales.least]
preset = "tiny"
length = 16
batch = 2
steps = 20
vocabulary = 300
tokens = 300
set = { "model.layers" = 1, "model.width" = 32, "model.heads" = 4, "schedule.warmup" = 2 }
options = { t5 = { max_distance = 8 } }
[[runs]]
name = "wrong"
positions = "nope"
seeds = 1
claims = []
[[runs]]
name = "alibi"
seeds = 1
claims = ["C5"]
times = [1, 2]
sliding = [[2, 0.5]]
resolution = true
induction = true
[[runs]]
name = "encoder"
positions = "rotary"
kind = "encoder"
seeds = 1
claims = ["C14"]
times = [1]
protocols = ["nonoverlapping"]
"""


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(script: str, *words: str, code: int = 0) -> str:
    """Run a benchmark in this process, to this exit status; return what it printed."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [script, *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    assert end.value.code == code
    return said.getvalue()


@pytest.mark.slow
def test_a_campaign_that_is_stopped_goes_on(tmp_path: Path) -> None:
    (tmp_path / "campaign.toml").write_text(CAMPAIGN)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    text = "\0".join(" ".join(words[(i * j) % 9] for j in range(60)) for i in range(100))
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "test.txt").write_text(text[:8000])
    options = [
        *("--device", "cpu", "--scale", "least", "--campaign", str(tmp_path / "campaign.toml")),
        *("--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")),
        *("--train", str(tmp_path / "train.txt"), "--test", f"books={tmp_path / 'test.txt'}"),
    ]
    command = [sys.executable, str(BENCHMARKS / "replication.py"), *options]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    metrics, end = tmp_path / "work" / "least" / "runs" / "alibi-0" / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() and first.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)

    with subprocess.Popen(command, stdout=subprocess.DEVNULL):  # neither does what the other does
        run("replication.py", *options, code=1)
    records = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out" / "least").iterdir()}
    assert set(records) == {"alibi-0", "encoder-0"}
    one = records["alibi-0"]
    assert one["training"]["config"]["train"]["seed"] == 0
    assert one["training"]["tokens"] == 20 * 2 * 16
    assert {(x["length"], x["protocol"]) for x in one["readings"]} == {
        *((16, "nonoverlapping"), (16, "blockwise"), (32, "nonoverlapping"), (32, "blockwise"), (32, "sliding"))
    }
    assert [x["analysis"] for x in one["analyses"]] == ["resolution", *4 * ["induction"]]
    assert {x["task"] for x in records["encoder-0"]["readings"]} == {"masked tokens"}
    assert run("replication.py", *options, code=1) == "2 of 3 runs are done\n"  # one cannot be, and says so
    asked = ["--work", str(tmp_path / "work" / "least"), "--device", "cpu", "--quick", "--only", "alibi"]
    assert run("tasks_gpu.py", *asked).count("alibi    passkey") == 2
    assert run("replication.py", *options, "--plan").count("done  ") == 2


def reading(length: int, loss: float, protocol: str = "nonoverlapping", **more: Any) -> dict[str, Any]:
    sums = [100 * (loss + wiggle) for wiggle in (-0.1, 0.0, 0.1)]
    found = {"text": "books", "length": length, "protocol": protocol, "stride": length, "loss": loss}
    return {**found, "segment_losses": sums, "segment_counts": [100, 100, 100], **more}


def test_claims_are_of_paired_readings(tmp_path: Path) -> None:
    losses = {  # of run and seed at 512, 1,024 and 16,384
        ("sinusoidal", 0): (4.0, 4.5, 5.5),
        ("sinusoidal", 1): (4.1, 4.7, 5.5),
        ("rotary", 0): (3.9, 4.1, 5.0),
        ("alibi", 0): (3.9, 3.88, 3.85),
        ("xpos", 0): (3.95, 3.95, 4.2),
    }
    (tmp_path / "small").mkdir()
    for (name, seed), values in losses.items():
        readings = [reading(length, loss) for length, loss in zip((512, 1024, 16384), values, strict=True)]
        record = {"run": name, "seed": seed, "training": {}, "readings": readings, "analyses": []}
        (tmp_path / "small" / f"{name}-{seed}.json").write_text(json.dumps(record))
    speeds = {(method, length): 300 for method in ("alibi", "sinusoidal") for length in (512, 1024, 2048)}
    measured = [
        {"model": "small", "method": method, "length": length, "tokens_per_second": speed, "gigabytes": 20}
        for (method, length), speed in speeds.items()
    ]
    (tmp_path / "training.json").write_text(json.dumps({"rows": measured}))
    done = run("replication_claims.py", "--results", str(tmp_path), "--speeds", str(tmp_path / "training.json"))
    rows = {cells[1].strip(): cells for line in done.splitlines() if (cells := line.split("|"))[1:]}
    said = {line.split(",")[0].strip("*"): line for line in done.splitlines() if line.startswith("**")}
    small = {name: done.split(line)[1].split("\n")[2] for name, line in said.items()}
    assert "+74 % (+65 … +82, 2 seeds, s.e." in small["C1"]  # e^0.5 and e^0.6
    assert small["C3"] == "- `small`: not measured: t5 is missing"
    column = rows[""].index(" `small` ")
    cells = {name: rows[name][column].strip() for name in said}
    assert cells["C9"].startswith("**does not hold here**: xPos beside rotary: ")
    verdicts = {name: cell.strip("*").split("**")[0] for name, cell in cells.items()}
    assert {name: verdict for name, verdict in verdicts.items() if verdict != "–"} == {
        "C1": "holds",
        "C2": "holds",
        "C5": "holds",
        "C7": "holds",
        "C9": "does not hold here",
    }
    assert {rows[name][column + 1].strip() for name in said} == {"–"}  # of `tiny` there is nothing


def test_the_page_is_of_the_committed_results() -> None:
    page = (BENCHMARKS.parent / "docs" / "replication.md").read_text(encoding="utf-8")
    assert run("replication_claims.py", code=0).strip() in page


def test_the_committed_campaign_can_be_run() -> None:
    from replication import HERE, Campaign
    from replication_claims import CLAIMS

    campaign = read_toml(HERE / "replication.toml", Campaign)
    for scale in campaign.scales.values():
        for one in campaign.runs:
            config = load(scale.preset, one.overrides(scale, seed=0), scale.vocabulary)
            config.model.position_method()
            tokens = config.train.steps * config.train.batch * config.model.train_length
            assert tokens == pytest.approx(scale.steps * scale.batch * scale.length, rel=0.01)
    assert len({one.name for one in campaign.runs}) == len(campaign.runs)
    of_speed = {"C7"}
    assert {claim for one in campaign.runs for claim in one.claims} == set(CLAIMS) - of_speed
