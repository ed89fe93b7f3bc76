"""The launcher: one variant of a kernel for arguments alike, found again without Triton's help."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from lengthen.attention.kernels.launcher import Launcher, runtime


class Kernel:
    """Records launches as Triton would get them; needs more memory than there is above so many stages."""

    def __init__(self, most_stages: int = 9) -> None:
        self.most_stages = most_stages
        self.compiled: list[dict[str, Any]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def compile_and_launch(*arguments: Any, **options: Any) -> Any:
            if options["num_stages"] > self.most_stages:
                raise OutOfResources(300_000, 101_376, "shared memory")
            self.compiled.append(options)
            self.launched.append((grid, *arguments))
            return Compiled(self)

        return compile_and_launch


class Compiled:
    """A compiled kernel as far as the launcher knows it: `[grid]` lets profilers look on, `run` does not."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.watched = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        self.watched += 1
        return lambda *arguments: self.kernel.launched.append((grid, *arguments))

    def run(self, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        assert (stream, *arguments[:5]) == (7, "function", "metadata", None, None, None)
        self.kernel.launched.append(((x, y, z), *arguments[5:]))


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU's tensors be on a stream."""
    module = importlib.import_module("lengthen.attention.kernels.launcher")
    monkeypatch.setattr(module, "_current_stream", lambda device: 7)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def launch(
    launcher: Launcher,
    strides: tuple[int, ...] = (16, 3),
    sizes: tuple[int, ...] = (7,),
    offset: int = 0,
    **changed: Any,
) -> None:
    memory = torch.zeros(64).as_subclass(OnGpu)
    arguments: dict[str, Any] = {"grid": (1, 1, 1), "tensors": (memory[offset:],), "strides": strides, "sizes": sizes}
    launcher(**arguments | {"floats": (0.5,), "constants": (64, True), "warps": 4, "stages": 3} | changed)


def test_arguments_alike_are_compiled_once_and_all_arrive() -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    launch(launcher)
    launch(launcher, strides=(32, 5), sizes=(16,), grid=(2, 1, 1))
    launch(launcher, sizes=(1,))
    assert len(kernel.compiled) == 1
    assert [one[0] for one in kernel.launched] == [(1, 1, 1), (2, 1, 1), (1, 1, 1)]
    expected = [(16, 3, 7, 0.5, 64, True), (32, 5, 16, 0.5, 64, True), (16, 3, 1, 0.5, 64, True)]
    assert [one[2:] for one in kernel.launched] == expected


@pytest.mark.parametrize(
    "other",
    [
        {"strides": (17, 3)},  # no multiple of 16
        {"strides": (1, 3)},
        {"strides": (2**40, 3)},  # in 64 bits
        {"offset": 1},  # a pointer that is not aligned
        {"constants": (128, True)},
        {"warps": 8},
        {"stages": 2},
        {"registers": 128},
        {"tensors": (torch.zeros(4, dtype=torch.float16).as_subclass(OnGpu),)},
    ],
    ids=str,
)
def test_what_decides_over_a_variant_gives_another(other: dict[str, Any]) -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    launch(launcher)
    launch(launcher, **other)
    assert len(kernel.compiled) == 2


def test_facts_that_are_known_are_not_looked_for() -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    for strides, known in (((16, 3), ("a",)), ((17, 3), ("a",)), ((17, 3), ("b",))):
        launch(launcher, strides=strides, known=known)
    assert len(kernel.compiled) == 2


def test_a_gpu_with_less_memory_gets_fewer_stages() -> None:
    kernel = Kernel(most_stages=1)
    launcher = Launcher(kernel)
    launch(launcher)
    launch(launcher)
    assert [options["num_stages"] for options in kernel.compiled] == [1]
    assert len(kernel.launched) == 2


@pytest.mark.parametrize("early", [False, True])
def test_only_a_kernel_that_waits_itself_begins_early(early: bool) -> None:
    kernel = Kernel()
    launch(Launcher(kernel), early=early)
    assert kernel.compiled[0].get("launch_pdl", False) is early


def test_a_profiler_sees_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    launch(launcher)
    monkeypatch.setattr(runtime.launch_enter_hook, "calls", [print])
    launch(launcher)
    assert [one.watched for one in launcher.kept.values()] == [1]
    assert len(kernel.launched) == 2


def test_what_does_not_fit_at_all_is_said() -> None:
    with pytest.raises(OutOfResources):
        launch(Launcher(Kernel(most_stages=0)))


def test_on_a_cpu_nothing_is_kept() -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    for _ in range(2):
        launch(launcher, tensors=(torch.zeros(4),))
    assert len(kernel.compiled) == 2
