"""A run that is killed, at any moment, damages nothing and goes on to the same bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lengthen.data import Corpus, prepare

# One process imports the package and forks a child for every kill, which is far quicker than a process each.
DRIVER = r"""
import json, os, shutil, signal, sys, time
import lengthen.data.cuts, lengthen.data.documents
from lengthen.data import Corpus, prepare
sys.modules["lengthen.data.documents"].PART_BYTES = 9000
sys.modules["lengthen.data.cuts"].BLOCK = 2000
where, folder, how = sys.argv[1:4]
options = json.loads(sys.argv[4])

def child(out, kill=None):
    pid = os.fork()
    if pid == 0:
        calls = 0
        def counting(plain):
            def call(*arguments, **others):
                nonlocal calls
                calls += 1
                if kill is not None and calls == kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain(*arguments, **others)
            return call
        progress = None
        if how == "steps":  # before each thing that changes what is on the disk for good
            os.replace, os.fsync, os.unlink = counting(os.replace), counting(os.fsync), counting(os.unlink)
        else:
            progress = counting(lambda *said: None)
        prepare(folder, out, progress=progress, **options)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

moment, survived, states = 0, False, []
while not survived:
    moment += 1 if how == "steps" else 1 + moment // 2
    out = os.path.join(where, "killed")
    shutil.rmtree(out, ignore_errors=True)
    if options.get("force"):
        shutil.copytree(os.path.join(where, "old"), out)
    status = child(out, moment)
    survived = status == 0
    assert survived or status == -signal.SIGKILL, status
    if options.get("force"):
        states.append(Corpus.open(out, verify=True).fingerprint)
    assert child(out) == 0
    found = {name: open(os.path.join(out, name), "rb").read() for name in sorted(os.listdir(out))}
    wanted = os.path.join(where, "whole")
    assert found == {name: open(os.path.join(wanted, name), "rb").read() for name in sorted(os.listdir(wanted))}, moment
print(json.dumps([moment, states]))
"""


@pytest.fixture
def few(tmp_path: Path, folder: Path) -> Path:
    """A third of the stories: many kills, so little work each."""
    (tmp_path / "few").mkdir()
    for path in sorted(folder.iterdir())[::3]:
        shutil.copy(path, tmp_path / "few")
    return tmp_path / "few"


def drive(where: Path, folder: Path, how: str, options: dict[str, Any]) -> tuple[int, list[str]]:
    command = [sys.executable, "-W", "ignore", "-c", DRIVER, str(where), str(folder), how, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    moments, states = json.loads(done.stdout.splitlines()[-1])
    return moments, states


def test_killed_at_every_step_while_it_replaces_another_corpus(tmp_path: Path, few: Path) -> None:
    options: dict[str, Any] = {"workers": 1, "validation": 0.2, "shard_tokens": 20_000}
    new = prepare(few, tmp_path / "whole", **options)
    old = prepare(few, tmp_path / "old", workers=1, validation=0.4, seed=3)
    moments, states = drive(tmp_path, few, "steps", {**options, "force": True})
    assert moments > 20  # that many kills, and one run that lived
    assert set(states) == {old.fingerprint, new.fingerprint}  # always one or the other, whole
    assert states == sorted(states, key=lambda state: state == new.fingerprint)  # and never back
    Corpus.open(tmp_path / "killed", verify=True)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_killed_with_workers_in_the_middle_of_it(tmp_path: Path, few: Path, tokenizer: str) -> None:
    options: dict[str, Any] = {"workers": 2, "tokenizer": tokenizer, "validation": 0.2}
    if tokenizer == "bpe":
        options["vocab_size"] = 300
    prepare(few, tmp_path / "whole", **options)
    moments, _ = drive(tmp_path, few, "progress", options)
    assert moments > 15
