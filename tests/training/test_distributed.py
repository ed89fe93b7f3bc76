"""One process and two take the same steps to rounding, and finish each other's runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from together import HALF, KINDS, MODES, WHOLE, config

from lengthen.data import Corpus
from lengthen.model import load as load_model
from lengthen.training import World, log, train


def told(out: Path) -> dict[tuple[str, int, int], float]:
    """Return every loss in a log: of a step, and of a validation at a length."""
    records = log.read(out / "metrics.jsonl")
    return {(record["kind"], record["step"], record.get("length", 0)): record["loss"] for record in records}


@pytest.fixture(scope="module")
def runs(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs: those of one process, and then those of two."""
    out = tmp_path_factory.mktemp("runs")
    alone = World(0, 1, torch.device("cpu"))
    for kind in KINDS:
        train(config(kind, "auto", WHOLE), corpus, out / f"{kind}-alone", alone)
    train(config("plain", "auto", HALF), corpus, out / "begun-alone", alone)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launch, str(Path(__file__).with_name("together.py")), str(corpus.directory), str(out)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("run", [*(f"{kind}-replicate" for kind in KINDS), *(f"t5-{mode}" for mode in MODES[1:])])
def test_two_processes_take_the_steps_of_one(runs: Path, run: str) -> None:
    kind = run.partition("-")[0]
    expected, got = told(runs / f"{kind}-alone"), told(runs / run)
    assert len(expected) == WHOLE + 6
    assert list(got) == list(expected)
    torch.testing.assert_close([*got.values()], [*expected.values()], rtol=2e-5, atol=0)


@pytest.mark.slow
def test_each_mode_is_what_it_says(runs: Path) -> None:
    parts = json.loads((runs / "parts.json").read_text())
    whole = config("plain", "auto", WHOLE).model.parameters
    assert parts["replicate"] == ["DistributedDataParallel", whole]
    for mode in ("shard", "hybrid"):
        name, held = parts[mode]
        assert name == "FSDPTransformer"
        assert whole / 2 <= held < 0.6 * whole  # a half, and what does not divide evenly


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_what_two_began_one_ends(runs: Path, corpus: Corpus, mode: str) -> None:
    out = runs / f"begun-{mode}"
    expected, begun = told(runs / "plain-alone"), told(out)
    assert max(step for _, step, _ in begun) == HALF
    alone = World(0, 1, torch.device("cpu"))
    assert train(config("plain", "auto", WHOLE), corpus, out, alone).step == WHOLE
    got = told(out)
    assert set(got) >= set(expected)
    torch.testing.assert_close([got[key] for key in expected], [*expected.values()], rtol=2e-5, atol=0)
    load_model(out / "checkpoints" / f"step-{WHOLE:08d}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_what_one_began_two_end(runs: Path, mode: str) -> None:
    expected, got = told(runs / "plain-alone"), told(runs / f"ended-{mode}")
    assert min(step for _, step, _ in got) == HALF + 1
    torch.testing.assert_close([*got.values()], [expected[key] for key in got], rtol=2e-5, atol=0)
