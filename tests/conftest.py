"""How all tests run: one thread for each of pytest's workers, the same draws every time, and Ctrl-C that is heard."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; more threads than cores only wait for each other
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and CI's, are started without it

# Triton decides when it is imported whether its interpreter can run kernels, so it is imported here, before anything
# else does it. The variable is not left behind: tests and the processes that they start would take it for an order.
if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    with pytest.MonkeyPatch.context() as _patch:
        _patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton.language")
        if importlib.util.find_spec("triton.experimental.gluon") is not None:  # made of triton.language's functions
            importlib.import_module("triton.experimental.gluon.language")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too (`make slow` runs them alone)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: `make slow`, or pytest --slow, runs it"))


settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is remembered of checked files goes to a folder of the tests, in the processes that they start too."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
