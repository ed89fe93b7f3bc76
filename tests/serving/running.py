"""A small model in float64, and a running server as tests use it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import torch

from lengthen import ModelConfig, Transformer
from lengthen.serving.engine import Engine

LIMITS = {"context": 400, "sequences": 32, "waiting": 300}


def made(**changes: Any) -> Transformer:
    """Return a model of bytes with weights that are far from those that training begins with."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 258, "layers": 2, "width": 16, "heads": 2, "train_length": 32}
    model = Transformer(ModelConfig(**(sizes | changes))).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def waited(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Return whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@dataclass
class Running:
    """A server, its engine, and plain requests to it."""

    engine: Engine
    port: int

    def call(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, sent, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        kind = answer.headers.get("content-type", "")
        return answer.status, json.loads(said) if "json" in kind else said.decode(), dict(answer.headers)

    def complete(self, **body: Any) -> Any:
        status, found, _ = self.call("POST", "/v1/completions", body)
        assert status == 200, found
        return found


Start = Callable[..., Running]
