"""`lengthen serve`: it says where it listens, ends with one line, and refuses with one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from lengthen import ModelConfig, Transformer
from lengthen.cli.main import main
from lengthen.cli.serve import Arguments, is_loopback, limits_of
from lengthen.model import memory

Capture = pytest.CaptureFixture[str]


def test_it_serves_until_ctrl_c_also_in_the_middle_of_an_answer(model: str) -> None:
    words = [sys.executable, "-m", "lengthen", "serve", model, "--port", "0", "--device", "cpu", "--name", "it"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        said = process.stdout.readline().decode()
        assert said.startswith("serving it at http://127.0.0.1:")
        connection = HTTPConnection("127.0.0.1", int(said.partition(";")[0].rpartition(":")[2]), timeout=30)
        body = json.dumps({"prompt": "the", "max_tokens": 16_000, "temperature": 0, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.read(6) == b"data: "
        process.send_signal(signal.SIGINT)
        assert b"the server stops" in answer.read()
        answer.close()
        connection.close()
        _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert told.decode().strip() == "lengthen: stopped"


def test_a_port_that_is_taken_is_one_line(model: str, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", model, "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert said == f"lengthen serve: error: --port: cannot listen at 127.0.0.1:{port}: Address already in use\n"


def test_a_missing_extra_is_one_line(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lengthen.serving.app", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", model]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "lengthen serve: error: the server needs starlette and uvicorn: pip install starlette uvicorn"
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "--port: expected 0 … 65535, got 70000"),
        (["--host", "256.0.0.1"], "--port: cannot listen at 256.0.0.1:8000: "),
        (["--port", "0", "--max-context", "1"], "--max-context: expected at least 2, got 1"),
        (["--port", "0", "--max-context", "0"], "--max-context: expected at least 2, got 0"),
        (["--port", "0", "--max-sequences", "0"], "--max-sequences: expected at least 1, got 0"),
        (["--port", "0", "--cache", "window"], "--cache: 'window' keeps what a mask can still see"),
        (["--port", "0", "--window", "5", "--block", "5"], "--window: expected one of --window and --block"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], message: str, model: str, capsys: Capture) -> None:
    assert main(["serve", model, "--device", "cpu", *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_addresses_are_known(host: str, local: bool) -> None:
    assert is_loopback(host) == local


def test_limits_come_from_flags_the_model_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"vocab_size": 258, "layers": 1, "width": 16, "heads": 2, "train_length": 32}
    plain = Transformer(ModelConfig(**sizes))
    weights = sum(one.numel() * one.element_size() for one in plain.parameters())
    each = memory.cached_token(plain)
    monkeypatch.setattr(memory, "available", lambda device: weights + 4 * 1000 * each)

    def limits(model: Transformer = plain, **flags: Any) -> tuple[int, int | None]:
        found = limits_of(Arguments(Path("run"), **flags), model)
        return found.context, found.tokens

    assert limits(max_context=900) == (900, 1000)
    assert limits(cache="reach", mode="certified") == (16_384, None)
    for cache in ("full", "reach"):
        with pytest.raises(ValueError, match=r"--max-context: .* memory, got 16,384 tokens of .* room for 1,000;"):
            limits(cache=cache)
    learned = Transformer(ModelConfig(**sizes, positions="learned"))
    assert limits(learned)[0] == 33
    with pytest.raises(ValueError, match="--max-context: expected at most 33, which the model has positions for"):
        limits(learned, max_context=34)
