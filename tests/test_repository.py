"""The repository keeps its promises: a light base install, exact pins, one command for CI, scripts that start."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = [
    line
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
]
SCRIPTS = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]


def canonical(requirement: str) -> str:
    """Return a package's name as package indexes compare it."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def test_the_base_needs_torch_alone() -> None:
    assert [canonical(requirement) for requirement in PROJECT["dependencies"]] == ["torch"]


def test_the_extras_are_there() -> None:
    assert {"cli", "train", "hf", "report", "dev"} <= set(PROJECT["optional-dependencies"])


def test_every_pin_is_exact() -> None:
    assert [pin for pin in PINS if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", pin)] == []
    names = [canonical(pin) for pin in PINS]
    assert len(names) == len(set(names))


def test_everything_that_is_asked_for_is_pinned() -> None:
    asked = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    others = {canonical(requirement) for requirement in asked} - {"lengthen"}  # an extra may name another extra
    assert others <= {canonical(pin) for pin in PINS}


def test_ci_runs_what_a_developer_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test$", script.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_importing_the_package_imports_nothing_but_torch() -> None:
    code = """
import json, sys
import torch
before = set(sys.modules)
import lengthen
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = set(json.loads(done.stdout)) - set(sys.stdlib_module_names)
    assert new == {"lengthen"}


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    somewhere = re.compile(r"(?<![\w.])/(?:home|root|Users|work)/[\w.]")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{name}: {line.strip()}" for line in text.splitlines() if somewhere.search(line)]
    assert found == []


def test_scripts_say_how_they_are_used() -> None:
    code = """
import contextlib, io, json, runpy, sys, traceback
found = {}
for script in sys.argv[1:]:
    sys.argv, said, sys.path[0] = [script, "--help"], io.StringIO(), script.rpartition("/")[0]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
        found[script] = "it did not end with its help"
    except SystemExit as end:
        found[script] = said.getvalue() if end.code in (0, None) else f"it ended with {end.code}"
    except BaseException:
        found[script] = traceback.format_exc()
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", code, *map(str, SCRIPTS)], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert len(said) == len(SCRIPTS) > 0
    assert {name: text for name, text in said.items() if not text.startswith("usage:")} == {}


def test_the_figures_are_of_the_committed_results(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "figure.py"), "--out", str(tmp_path)], check=True)
    for name, count in {"overview.svg": 11, "replication.svg": 10}.items():
        # The lines alone: how wide text is, and so where panels stand, depends on the fonts of a machine.
        lines = [
            re.findall(r'<path[^>]*line mark[^>]* d="([^"]+)"', (folder / name).read_text(encoding="utf-8"))
            for folder in (tmp_path, ROOT / "docs" / "figures")
        ]
        assert lines[0] == lines[1]
        assert len(lines[0]) == count
