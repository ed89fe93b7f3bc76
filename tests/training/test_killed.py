"""A run that is killed at any moment and started again takes the very steps that it would have taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lengthen.data import Corpus
from lengthen.training import checkpoint as checkpoints
from lengthen.training import log
from lengthen.training.log import Record


def told(path: Path) -> list[Record]:
    """Return what a log says, without what depends on the time of day."""
    return [
        {key: value for key, value in record.items() if key != "tokens_per_second"}
        for record in log.read(path / "metrics.jsonl")
    ]


def trained(corpus: Corpus, out: Path, steps: int, kills: int, processes: int) -> list[dict[str, Any]]:
    """Train so many steps, with this many kills; return what is said of each."""
    script = str(Path(__file__).with_name("killing.py"))
    done = subprocess.run(
        [sys.executable, script, str(corpus.directory), str(out), str(steps), str(kills), "7", str(processes)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "steps", "kills"), [(1, 280, 24), (2, 90, 8)])
def test_killed_many_times_it_takes_the_same_steps_bit_for_bit(
    corpus: Corpus, tmp_path: Path, processes: int, steps: int, kills: int
) -> None:
    assert len(trained(corpus, tmp_path / "whole", steps, 0, processes)) == 1
    rounds = trained(corpus, tmp_path / "killed", steps, kills, processes)
    assert sum(one["killed"] for one in rounds) >= 0.8 * kills
    assert len({tuple(one["there"]) for one in rounds}) >= kills // 3  # kills at many stages of the run
    expected = told(tmp_path / "whole")
    assert [record["step"] for record in expected if record["kind"] == "step"] == [*range(1, steps + 1)]
    assert told(tmp_path / "killed") == expected
    left = checkpoints.folders(tmp_path / "killed" / "checkpoints")
    assert len(left) in (2, 3)
    for _, path in left:  # the same bytes as without a kill
        checkpoints.open_checkpoint(path).verify_all()
        for file in ("model.safetensors", "optimizer.safetensors", "state.json"):
            twin = tmp_path / "whole" / "checkpoints" / path.name / file
            assert (path / file).read_bytes() == twin.read_bytes()
    assert not [*(tmp_path / "killed" / "checkpoints").glob(".*")]
