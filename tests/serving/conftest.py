"""Servers of a small model on free loopback ports."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running import LIMITS, Running, Start, made, waited

from lengthen import Transformer
from lengthen.data.tokenizer import Tokenizer
from lengthen.serving.app import Server, Service, application
from lengthen.serving.engine import Engine, Limits


@pytest.fixture(scope="session")
def model() -> Transformer:
    return made()


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Return a function that starts a server of a model."""
    ends: list[Callable[[], None]] = []

    def begin(model: Transformer, body: int = 1 << 16, chunk: int = 16, **options: Any) -> Running:
        limits = LIMITS | {key: options.pop(key) for key in LIMITS if key in options}
        engine = Engine(model, Limits(**limits), chunk, **options)
        server = Server(application(Service(engine, Tokenizer(), "tiny", body)), engine)
        door = socket.create_server(("127.0.0.1", 0), backlog=512)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
        thread.start()
        assert waited(lambda: server.started)

        def end() -> None:
            server.should_exit = True
            thread.join(20)
            door.close()
            assert not thread.is_alive()

        ends.append(end)
        return Running(engine, door.getsockname()[1])

    yield begin
    for end in ends:
        end()


@pytest.fixture(scope="module")
def running(start: Start, model: Transformer) -> Running:
    return start(model)
