"""`lengthen generate`: text as it comes, whole characters, stop texts, seeds, and what it refuses."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from lengthen.cli.generate import Speed, unescaped
from lengthen.cli.main import main
from lengthen.model import memory

Capture = pytest.CaptureFixture[str]


def generate(capsys: Capture, *words: object) -> tuple[str, str]:
    capsys.readouterr()
    status = main(["generate", *map(str, words), "--device", "cpu"])
    said = capsys.readouterr()
    assert status == 0, said.err
    return said.out, said.err


def test_the_same_seed_writes_the_same(model: str, capsys: Capture) -> None:
    first, told = generate(capsys, model, "--prompt", "the sea", "--tokens", 40, "--seed", 1)
    assert first.endswith("\n")
    assert told == ""
    assert generate(capsys, model, "--prompt", "the sea", "--tokens", 40, "--seed", 1, "--chunk", 2)[0] == first
    assert generate(capsys, model, "--prompt", "the sea", "--tokens", 40, "--seed", 2)[0] != first
    assert generate(capsys, model, "--tokens", 0)[0] == "\n"
    assert len(generate(capsys, model, "--tokens", 30)[0]) > 10  # no prompt: a document begins


def test_every_cache_writes_the_same_and_says_what_it_took(model: str, capsys: Capture) -> None:
    words = [model, "--prompt", "the sea", "--tokens", 50, "--seed", 1]
    plain, _ = generate(capsys, *words)
    for more in (["--cache", "reach"], ["--cache", "reach", "--mode", "certified"], ["--window", 1000]):
        assert generate(capsys, *words, *more)[0] == plain
    _, told = generate(capsys, *words, "--stats", "--cache", "window", "--window", 8)
    assert told.startswith("prompt read in ")
    assert "; 50 tokens in " in told
    assert " tokens/s; cache " in told
    assert "bound " in told


def test_the_time_of_a_prompt_is_no_part_of_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 90.0, 92.0])
    monkeypatch.setattr("lengthen.cli.generate.time", SimpleNamespace(monotonic=lambda: next(clock)))
    speed = Speed()
    for _ in range(5):
        speed.count(2)
    speed.stop()
    assert str(speed) == "prompt read in 90.0 s; 10 tokens in 2.0 s: 4.0 tokens/s"


def test_a_stop_text_ends_it_and_is_not_printed(model: str, capsys: Capture) -> None:
    words = [model, "--prompt", "the", "--tokens", 60, "--seed", 3]
    plain, _ = generate(capsys, *words)
    stop = plain[20:23]
    assert generate(capsys, *words, "--stop", stop, "--stop", "never")[0] == plain[: plain.index(stop)] + "\n"


def test_samples_are_printed_apart(model: str, capsys: Capture) -> None:
    found, _ = generate(capsys, model, "--prompt", "the", "--tokens", 20, "--samples", 2, "--seed", 3)
    assert found.startswith("--- 1 of 2 ---\n")
    one, _ = generate(capsys, model, "--prompt", "the", "--tokens", 20, "--seed", 3)
    assert found.split("--- 2 of 2 ---\n")[0] == "--- 1 of 2 ---\n" + one


def given(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def test_prompts_come_from_standard_input(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [model, "--tokens", 20, "--seed", 3]
    plain, _ = generate(capsys, *words, "--prompt", "naïve\n")
    given(monkeypatch, "naïve\n".encode())
    assert generate(capsys, *words, "--stdin")[0] == plain
    nothing, _ = generate(capsys, *words)
    given(monkeypatch, b"")
    assert generate(capsys, *words, "--stdin")[0] == nothing  # a document begins
    line, _ = generate(capsys, *words, "--prompt", "naïve")
    given(monkeypatch, "naïve\n".encode() + b"\xff\n" + "naïve".encode())
    found, told = generate(capsys, *words, "--interactive")
    assert found == line + line
    assert "--interactive: expected UTF-8, got the byte 0xff at 0" in told


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (["--stdin"], b"ab\xff", "--stdin: expected UTF-8, got the byte 0xff at 2"),
        (["--prompt", "a", "--stdin"], b"", "expected one of --prompt, --stdin and --interactive"),
        (["--temperature", "-1"], b"", "--temperature: expected at least 0"),
        (["--tokens", "-1"], b"", "--tokens: expected at least 0, got -1"),
        (["--cache", "window"], b"", "--cache: 'window' keeps what a mask can still see"),
        (["--window", "5", "--block", "5"], b"", "--window: expected one of --window and --block, got both"),
        (["--stop", ""], b"", "--stop: expected some text, got none"),
    ],
)
def test_what_does_not_fit_is_refused(
    words: list[str], text: bytes, message: str, model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, text)
    assert main(["generate", model, "--device", "cpu", *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--cache", "reach"]])
def test_a_prompt_longer_than_memory_is_one_line(
    more: list[str], model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 100_000)
    given(monkeypatch, b"x" * 5_000)
    assert main(["generate", model, "--device", "cpu", "--stdin", *more]) == 1
    said = capsys.readouterr().err
    assert "prompts: expected keys and values that fit into memory, got 1 × 5,000 tokens" in said
    assert said.endswith("--cache reach with --mode certified does not grow\n")
    assert said.count("\n") == 1
    given(monkeypatch, b"x" * 5_000)
    assert (
        main(["generate", model, "--device", "cpu", "--stdin", "--cache=reach", "--mode=certified", "--tokens=1"]) == 0
    )


def test_ctrl_c_ends_with_what_there_is(model: str) -> None:
    words = [sys.executable, "-m", "lengthen", "generate", model, "--prompt", "the", "--tokens", "1000000"]
    words += ["--temperature", "0", "--device", "cpu"]  # the likeliest token repeats, and does not end by itself
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        written, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert written.endswith(b"\n")
    lines = told.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("stopped after ")


def test_stops_may_be_escaped() -> None:
    assert unescaped(r"a\n\tb") == "a\n\tb"
    assert unescaped(r"a\\n") == r"a\n"
