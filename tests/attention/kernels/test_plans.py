"""A call like one before is launched without being worked out again, and is right all the same."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Window, alibi_slopes
from lengthen.attention import kernels
from lengthen.attention.kernels import plans
from lengthen.attention.op import check_call

# The interpreter takes a maximum by NumPy's nanmax.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
Call = dict[str, Any]
DTYPE = torch.float16  # in which the interpreter's products are right
# What pointers point to; all others are q's.
DTYPES = dict.fromkeys(("lse", "slopes", "slopes_ahead", "centre", "key_norm", "parts"), torch.float32)
DTYPES |= dict.fromkeys(("spans", "notes", "lows"), torch.int32)


class Interpreted:
    """A kernel that has been compiled, as far as the launcher knows: it gets pointers as numbers."""

    function = packed_metadata = None
    repaired: ClassVar[list[bool]] = []  # whether the forward asked for it

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def run(self, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        values = [
            self.at(value, name) if name in DTYPES or name in ("q", "k", "v", "out", *UNREAD) else value
            for name, value in zip(self.kernel.arg_names, arguments[5:], strict=True)
        ]
        if self.kernel.__name__ == "repair":
            given = dict(zip(self.kernel.arg_names, values, strict=True))
            heads = given["batch"] * given["heads"]
            flag = given["notes"].data_ptr() + 4 * (heads // given["group"] + 2 * heads)
            self.repaired.append(bool(self.at(flag, "notes")[0]))
        self.kernel[(x, y, z)](*values)

    @staticmethod
    def at(pointer: int, name: str) -> Tensor:
        buffer = (ctypes.c_byte * 8).from_address(pointer)
        return torch.frombuffer(buffer, dtype=DTYPES.get(name, DTYPE))


UNREAD = ("table", "first", "last", "rates")


class Compiled(dict[Any, Any]):
    """All variants of a kernel."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.only = Interpreted(kernel)

    def get(self, key: Any, default: Any = None) -> Any:
        return self.only


@pytest.fixture(autouse=True)
def as_on_a_gpu(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have launches go the way that they go on a GPU, memory be full of NaN, and nothing be kept from other tests."""
    launcher = importlib.import_module("lengthen.attention.kernels.launcher")
    for one in vars(importlib.import_module("lengthen.attention.kernels.launch")).values():
        if isinstance(one, launcher.Launcher):
            monkeypatch.setattr(one, "kept", Compiled(one.kernel))
    for module in (launcher, plans):
        monkeypatch.setattr(module, "_current_stream", lambda device: 0)
    monkeypatch.setattr(plans, "_current_device", lambda: None)  # as a CPU tensor's device has no index
    monkeypatch.setattr(plans, "_capturing", lambda: False)
    monkeypatch.setattr(plans, "_kept", {})
    monkeypatch.setattr(plans, "_zeros", {})
    Interpreted.repaired.clear()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def call(qkv: Callable[..., Call]) -> Call:
    """Return a call with ALiBi."""
    return qkv(1, 2, 40, 16, key_heads=1, dtype=DTYPE) | {"bias": Linear(alibi_slopes(2))}


def key_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Linear,
    decay: Decay | None = None,
    mask: Any = Causal(),  # noqa: B008 (it is never changed)
    scale: Any = None,
    q_start: Any = None,
    tolerance: Any = None,
    return_lse: bool = True,
    backend: Any = None,
    key_norm: Tensor | None = None,
) -> plans.Key | None:
    return plans.key(q, k, v, bias, decay, mask, scale, q_start, tolerance, return_lse, backend, key_norm)


def attend(call: Call) -> tuple[tuple[Tensor, Tensor], bool]:
    """Return out and lse as `lengthen.attention` gets them on a GPU, and whether by a plan."""
    key = key_of(**call)
    assert key is not None
    q, k, v, bias, norm = (call.get(name) for name in ("q", "k", "v", "bias", "key_norm"))
    found: Any = plans.again(key, q, k, v, bias, norm, return_lse=True)  # type: ignore[arg-type]
    if found is not None:
        return found, True
    mask = call.get("mask", Causal())
    numbers = [call.get(name) for name in ("scale", "q_start", "tolerance")]
    settled = check_call(q, k, v, bias, None, mask, *numbers, norm)  # type: ignore[arg-type]
    place = settled.scale, settled.q_start, settled.tolerance
    return kernels.attention(q, k, v, bias, None, mask, *place, norm, key), False  # type: ignore[arg-type]


def assert_planned(call: Call, fresh: Callable[[Tensor], Tensor] = torch.randn_like, repaired: bool = False) -> None:
    """Check that the third of three such calls, each with numbers of its own, is made by a plan, and all are right."""
    for by_plan in (False, False, True):
        for name in "qkv":
            strides = call[name].stride()
            call[name] = torch.empty_strided(call[name].shape, strides, dtype=DTYPE).copy_(fresh(call[name]))
        call["bias"] = Linear(call["bias"].slopes * 1.1)
        if "key_norm" in call:
            call["key_norm"] = call["k"].float().norm(dim=-1).amax(dim=-1) * 1.001
        (out, lse), planned = attend(call)
        assert planned is by_plan
        expected = lengthen.attention(**call, backend="reference", return_lse=True)
        torch.testing.assert_close(out, expected[0], rtol=0, atol=3e-3, equal_nan=True)
        torch.testing.assert_close(lse, expected[1].float(), rtol=0, atol=3e-3, equal_nan=True)
        assert all(x is repaired for x in Interpreted.repaired)
        assert (out.stride(1) < out.stride(2)) is (call["q"].stride(1) < call["q"].stride(2))


@pytest.mark.parametrize(
    "changed",
    [{}, {"mask": Window(20), "scale": 0.3, "q_start": 1}, {"mask": Blockwise(16), "tolerance": 0}],
    ids=str,
)
def test_the_third_call_is_made_by_a_plan(call: Call, changed: Call) -> None:
    assert_planned(call | changed)


def test_heads_that_lie_beside_each_other(call: Call) -> None:
    assert_planned(call | {x: call[x].transpose(1, 2).contiguous().transpose(1, 2) for x in "qkv"})


@pytest.mark.parametrize("given", [False, True])
def test_decoding(call: Call, given: bool) -> None:
    call["q"] = call["q"][:, :, -2:].contiguous()
    assert_planned(call | ({"key_norm": torch.empty(1, 1)} if given else {}))


def test_what_is_not_finite_is_repaired(call: Call) -> None:
    def fresh(x: Tensor) -> Tensor:
        made = torch.randn_like(x)
        made[0, 0, 20] = float("nan")
        return made

    assert_planned(call, fresh, repaired=True)


def test_zeros_are_handed_out_once(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "FILLED", 100)
    seen: set[int] = set()
    kept = []  # so that no address comes again
    for stream in (0, 0, 0, 1, 0, 0):
        place = plans.zeros(call["q"], -1, stream, 160)
        memory = plans._zeros[-1, stream].memory
        kept.append(memory)
        first = (place - memory.data_ptr()) // 4
        here = memory[first : first + 40]
        assert len(here) == 40
        assert bool((here == 0).all())
        here.fill_(1)
        assert place not in seen
        seen.add(place)
    assert plans._zeros[-1, 0].memory is not plans._zeros[-1, 1].memory


@pytest.mark.parametrize("why", ["a graph", "many"])
def test_who_must_not_share_zeros_has_their_own(call: Call, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*((plans, "_capturing", lambda: True) if why == "a graph" else (plans, "FEW_ZEROS", 16)))
    assert_planned(call)
    assert not plans._zeros


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"q": torch.zeros(1, 2, 40, 16, dtype=DTYPE)[:, :, :39]}),  # with the same strides
        ({}, {"k": torch.zeros(1, 1, 40, 16, dtype=DTYPE)[:, :, :39]}),
        ({}, {"v": torch.zeros(1, 1, 40, 16, dtype=DTYPE)[..., :8]}),
        ({}, {"q": torch.zeros(1, 40, 2, 16, dtype=DTYPE).transpose(1, 2)}),
        ({}, {"k": torch.zeros(1, 1, 40, 32, dtype=DTYPE)[..., :16]}),
        ({}, {"v": torch.zeros(1, 1, 40, 32, dtype=DTYPE)[..., :16]}),
        *[({}, {x: torch.zeros(1, 2 if x == "q" else 1, 40, 16, dtype=torch.bfloat16)}) for x in "qkv"],
        *[({}, {x: torch.zeros(1, 2 if x == "q" else 1, 40, 16, dtype=DTYPE, device="meta")}) for x in "qkv"],
        ({}, {"bias": Linear(torch.ones(8))}),
        ({}, {"bias": Linear(torch.ones(2, device="meta"))}),
        ({}, {"mask": Window(9)}),
        ({"mask": Window(9)}, {"mask": Window(10)}),
        ({"mask": Window(9)}, {"mask": Blockwise(9)}),
        ({}, {"scale": 0.1}),
        ({}, {"q_start": 3}),
        ({}, {"tolerance": 0.01}),
        ({}, {"return_lse": False}),
        ({}, {"backend": "triton"}),
        ({}, {"key_norm": torch.ones(1, 1)}),
        ({"key_norm": torch.ones(1, 1)}, {"key_norm": torch.ones(1, 2)}),
        ({"key_norm": torch.ones(1, 1)}, {"key_norm": torch.ones(1, 1, dtype=torch.float64)}),
        ({"key_norm": torch.ones(1, 1)}, {"key_norm": torch.ones(1, 1, device="meta")}),
    ],
    ids=str,
)
def test_whatever_decides_over_launches_is_a_part_of_the_key(call: Call, one: Call, other: Call) -> None:
    keys = [key_of(**(call | one)), key_of(**(call | one | other))]
    assert None not in keys
    assert keys[0] != keys[1]
    assert keys == [key_of(**(call | one)), key_of(**(call | one | other))]


@pytest.mark.parametrize(
    "odd",
    [
        {"q": torch.zeros(1, 2, 40, 16)},
        {"k": [1]},
        {"q": torch.zeros(1, 2, 40, 16, dtype=DTYPE, requires_grad=True)},
        {"k": torch.zeros(1, 1, 16, 40, dtype=DTYPE).transpose(2, 3)},
        {"v": torch.zeros(1 + 40 * 16, dtype=DTYPE)[1:].view(1, 1, 40, 16)},  # not aligned
        {"bias": Linear(torch.ones(2), ahead=torch.ones(2))},
        {"bias": Linear(torch.ones(2, dtype=torch.float64))},
        {"bias": Linear(torch.ones(4)[::2])},
        {"bias": Linear(torch.ones(2, requires_grad=True))},
        {"decay": Decay(torch.full((16,), 0.9))},
        {"mask": Bidirectional()},
        {"mask": Causal().padded(torch.zeros(1, dtype=torch.int64))},
        {"mask": Causal().packed(torch.zeros(1, 40, dtype=torch.int64))},
        {"mask": "causal"},
        {"scale": [1]},
        {"scale": True},
        {"q_start": 1.0},
        {"tolerance": "0"},
        {"backend": "reference"},
        {"backend": ["triton"]},
        {"key_norm": torch.ones(1, 4)[:, ::4].expand(2, 1)},
        {"key_norm": torch.ones(5)[1:2].view(1, 1)},  # not aligned
        {"key_norm": 3.0},
    ],
    ids=str,
)
def test_calls_that_have_more_to_them_have_no_key(call: Call, odd: Call) -> None:
    assert key_of(**(call | odd)) is None


def test_no_key_while_something_looks_on(call: Call) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    with TorchDispatchMode():
        assert key_of(**call) is None
    with torch.autograd.forward_ad.dual_level():
        assert key_of(**call) is None
    with torch.no_grad():
        assert key_of(**(call | {"q": call["q"].clone().requires_grad_()})) is not None


def test_one_tensor_for_two_is_never_kept(call: Call) -> None:
    call = call | {"v": call["k"]}
    for _ in range(4):
        assert not attend(call)[1]


def test_large_calls_are_not_kept(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LARGEST", 50)
    for _ in range(4):
        assert not attend(call)[1]


def test_a_call_that_had_to_be_compiled_is_not_kept_yet(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = importlib.import_module("lengthen.attention.kernels.launch")
    compiled = launch._repair.kept
    attend(call)
    monkeypatch.setattr(launch._repair, "kept", {})
    attend(call)
    monkeypatch.setattr(launch._repair, "kept", compiled)
    assert [attend(call)[1] for _ in range(2)] == [False, True]


def test_a_profiler_sees_every_launch(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = importlib.import_module("lengthen.attention.kernels.launcher")
    for _ in range(2):
        attend(call)
    assert attend(call)[1]
    monkeypatch.setattr(Interpreted, "__getitem__", lambda self, grid: self.kernel[grid], raising=False)
    launcher.runtime.launch_enter_hook.add(print)
    try:
        assert not attend(call)[1]
    finally:
        launcher.runtime.launch_enter_hook.remove(print)


def test_old_plans_are_forgotten(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST", 3)
    for size in range(1, 9):
        key = key_of(**(call | {"mask": Window(size)}))
        assert key is not None
        assert not plans.due(key)
        assert plans.due(key)
        assert len(plans._kept) <= 3


def test_a_tensor_that_a_plan_does_not_know_is_an_error(call: Call) -> None:
    q, k = call["q"], call["k"]
    launch = plans.Launch(None, (1, 1, 1), (), (q, k, q.clone()), ())
    with pytest.raises(KeyError):
        plans.Plan((q, k), q.clone(), torch.zeros(1, 2, 40), [], [launch], zeroed=False)
