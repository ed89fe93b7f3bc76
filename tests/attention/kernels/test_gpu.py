"""On a GPU the compiled kernels are the reference in every dtype, repeat to the bit, and never have the CPU wait."""

import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Causal, Decay, Linear, Table, Window, alibi_slopes
from lengthen.attention import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Call = dict[str, Any]
# How far out, gradients, and those of a bias may be off, relative to their norms.
WITHIN = {torch.bfloat16: (6e-3, 1.2e-2, 5e-2), torch.float16: (1e-3, 2e-3, 2e-2), torch.float32: (3e-6, 2e-5, 1e-4)}
DTYPES = tuple(WITHIN)
# A kernel is compiled for each dtype, mask, bias and head_dim, which takes seconds: one head_dim for each pair.
PAIRS = [
    ("causal", "none", 64),
    ("causal", "linear", 64),
    ("causal", "table", 128),
    ("window", "linear", 128),
    ("window", "table", 64),
    ("blockwise", "linear", 80),
    ("full", "none", 256),
    ("full", "linear ahead", 64),
    ("full", "table ahead", 32),
    ("causal padded", "linear", 64),
    ("full packed", "linear", 96),
]


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """Compute float32 products in full, not as TF32."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    yield
    matmul.allow_tf32 = before


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """Return a function from whose call on it is an error to wait for the GPU."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def alibi(qkv: Callable[..., Call]) -> Call:
    """Return a call with ALiBi in bfloat16, long enough for reach."""
    call = qkv(2, 4, 900, 64, key_heads=2, dtype=torch.bfloat16, device="cuda")
    return call | {"bias": Linear(alibi_slopes(4).cuda())}


def leaves(call: Call) -> list[Tensor]:
    """Return what gradients flow to."""
    parts = [call[name] for name in "qkv"] + [x for x in call["bias"].tensors if x is not None]
    return [x.requires_grad_() for x in parts]


def assert_off(found: dict[str, float], dtype: torch.dtype, length: int = 999) -> None:
    out, gradient, bias = WITHIN[dtype]
    if length < 16:  # of one or two keys, gradients are differences of numbers that are nearly the same
        gradient, bias = 8 * gradient, 8 * bias
    for name, error in found.items():
        allowed = bias if "bias" in name else gradient if name.startswith("d") else out
        assert error <= allowed, f"{name} is off by {error:.1e}, and {allowed:.1e} is allowed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mask", "bias", "head_dim"), PAIRS)
def test_is_the_reference_for_many_shapes(
    mask: str,
    bias: str,
    head_dim: int,
    dtype: torch.dtype,
    qkv: Callable[..., Call],
    mask_of: Callable[..., Any],
    bias_of: Callable[..., Any],
    off: Callable[..., dict[str, float]],
) -> None:
    draw = random.Random(f"{mask}, {bias}, {dtype}")
    for length in (1, 64, 128, 512, *(draw.randint(2, 700) for _ in range(5))):
        group, key_heads = draw.choice([(1, 2), (2, 1), (2, 2)])
        keys = length if "p" in mask.split()[-1] else draw.choice([length, length, draw.randint(length, 700)])
        call = qkv(2, group * key_heads, length, head_dim, keys=keys, key_heads=key_heads, dtype=dtype, device="cuda")
        if draw.random() < 0.5:  # heads beside each other in memory, as projections give them
            call["q"] = call["q"].transpose(1, 2).contiguous().transpose(1, 2)
        call["mask"] = mask_of(mask, keys, device="cuda")
        call["bias"] = bias_of(bias, call)
        call["tolerance"] = draw.choice([None, 0])
        assert_off(off(call), dtype, length)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("segment", [256, 1024])  # 700 keys are in three, or in one
@pytest.mark.parametrize(("mask", "head_dim"), [("causal", 64), ("window", 64), ("blockwise", 128)])
def test_a_decay_is_the_reference_s(
    mask: str,
    head_dim: int,
    segment: int,
    dtype: torch.dtype,
    qkv: Callable[..., Call],
    mask_of: Callable[..., Any],
    off: Callable[..., dict[str, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "SEGMENT", segment)
    for queries, heads, key_heads in ((700, 2, 2), (333, 4, 2), (3, 4, 2)):
        call = qkv(2, heads, queries, head_dim, keys=700, key_heads=key_heads, dtype=dtype, device="cuda")
        rates = torch.linspace(0.995, 1, head_dim, dtype=torch.float64, device="cuda")
        call |= {"mask": mask_of(mask, 700, device="cuda"), "decay": Decay(rates)}
        # Queries and keys are rounded once more, with the decay in them.
        assert all(error <= 3 * WITHIN[dtype][1] for error in off(call).values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [1, 64, 100, 449, 699])
def test_a_table_with_a_level_is_the_reference_s(level: int, dtype: torch.dtype, qkv: Callable[..., Call]) -> None:
    bucket = torch.arange(700, device="cuda").clamp(max=level)
    for queries in (700, 450):
        call = qkv(2, 2, queries, 64, keys=700, dtype=dtype, device="cuda")
        weight, d_out = torch.randn(2, level + 1, device="cuda"), torch.randn(call["q"].shape, device="cuda")
        found = []
        for backend, as_dtype in (("triton", dtype), ("reference", torch.float64)):
            leaves = [call[name].detach().to(as_dtype).requires_grad_() for name in "qkv"]
            leaves.append(weight.to(torch.float32 if backend == "triton" else as_dtype).requires_grad_())
            out = lengthen.attention(*leaves[:3], Table(leaves[3][:, bucket], level=level), backend=backend)
            found.append([out, *torch.autograd.grad(out, leaves, d_out.to(dtype).to(as_dtype))])
        for ours, theirs, within in zip(
            *found, (WITHIN[dtype][0], *[WITHIN[dtype][1]] * 3, WITHIN[dtype][2]), strict=True
        ):
            assert (ours.double() - theirs).norm() <= within * theirs.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bias", ["linear", "none", "table"])
def test_few_queries_against_many_keys_are_the_reference_s(
    bias: str, head_dim: int, dtype: torch.dtype, qkv: Callable[..., Call], bias_of: Callable[..., Any]
) -> None:
    for batch, heads, key_heads, queries, keys in ((1, 8, 8, 1, 5000), (3, 8, 2, 1, 3000), (2, 4, 2, 5, 777)):
        call = qkv(batch, heads, queries, head_dim, keys=keys, key_heads=key_heads, dtype=dtype, device="cuda")
        call["bias"] = Linear(alibi_slopes(heads).cuda()) if bias == "linear" else bias_of(bias, call)
        norm = torch.linalg.vector_norm(call["k"], dim=-1, dtype=torch.float32).amax(-1) * 1.001
        wide = call | {name: call[name].double() for name in "qkv"}
        expected, log_sum = lengthen.attention(**wide, backend="reference", return_lse=True)
        for known in ({}, {"key_norm": norm}, {"key_norm": 100 * norm}):  # the last: as if scores might be very high
            out, lse = lengthen.attention(**call, **known, backend="triton", return_lse=True)
            assert (out.double() - expected).norm() <= WITHIN[dtype][0] * expected.norm()
            torch.testing.assert_close(lse.double(), log_sum, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["forward", "measured", "window", "beside", "decoding", "decoding given"])
def test_a_call_like_two_before_is_not_worked_out_again(
    kind: str, dtype: torch.dtype, qkv: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, keys = (900, 900) if kind == "measured" else (2, 3000) if "decoding" in kind else (200, 200)
    bias = Linear(alibi_slopes(8).cuda())

    def one_more() -> Call:
        call = qkv(2, 8, queries, 64, keys=keys, key_heads=4, dtype=dtype, device="cuda") | {"bias": bias}
        if kind == "beside":
            call |= {name: call[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
        if kind == "window":
            call["mask"] = Window(50)
        if "given" in kind:
            call["key_norm"] = torch.linalg.vector_norm(call["k"], dim=-1, dtype=torch.float32).amax(-1) * 1.001
        return call

    monkeypatch.setattr(kernels.plans, "_kept", {})
    for _ in range(3):  # the first of all may have to be compiled
        lengthen.attention(**one_more())
    call = one_more()
    wide = call | {name: call[name].double() for name in "qkv"}
    expected, log_sum = lengthen.attention(**wide, backend="reference", return_lse=True)
    torch.cuda.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("lengthen.attention.op"), "check_call", None)
        out = lengthen.attention(**call)
    assert (out.double() - expected).norm() <= WITHIN[dtype][0] * expected.norm()
    for _ in range(3):
        first, lse = lengthen.attention(**call, return_lse=True)
    assert torch.equal(first, out)
    torch.testing.assert_close(lse.double(), log_sum, rtol=0, atol=2e-2)
    call["v"][0, 0, keys - 2] = torch.nan
    odd = lengthen.attention(**call)
    assert torch.equal(odd.isnan(), lengthen.attention(**call, backend="reference").isnan())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = lengthen.attention(**call)
    call["v"][0, 0, keys - 2] = 0.5
    graph.replay()
    torch.testing.assert_close(replayed, lengthen.attention(**call), rtol=0, atol=0)


@pytest.mark.parametrize("q_start", [-100, -17, 30, 300, 411, 900])
def test_queries_may_stand_anywhere(
    q_start: int, qkv: Callable[..., Call], off: Callable[..., dict[str, float]]
) -> None:
    call = qkv(1, 2, 150, 64, keys=400, dtype=torch.bfloat16, device="cuda") | {"q_start": q_start}
    call["bias"] = Linear(torch.tensor([0.3, 0.01], device="cuda"))
    out, gradient, _ = WITHIN[torch.bfloat16]
    for name, error in off(call).items():
        assert error <= (0.1 if "bias" in name else gradient if name.startswith("d") else out), name


def test_values_may_be_wider_than_keys(qkv: Callable[..., Call], off: Callable[..., dict[str, float]]) -> None:
    call = qkv(1, 2, 300, 24, value_dim=130, dtype=torch.bfloat16, device="cuda")
    assert_off(off(call | {"bias": Linear(torch.tensor([0.3, 0.01], device="cuda"))}), torch.bfloat16)


def test_a_long_sequence_is_read_in_part_and_within_tolerance(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 4, 4096, 64, dtype=torch.bfloat16, device="cuda") | {"bias": Linear(alibi_slopes(4).cuda())}
    first, end = kernels.spans(**call)
    read = (end - first).sum((0, 2)).float()
    assert bool((read.diff() >= 0).all())  # the steepest head is the first
    assert read[0] < read[3] / 4
    out = lengthen.attention(**call)
    exact = lengthen.attention(**call, tolerance=0)
    expected = lengthen.attention(
        *(call[name].double() for name in "qkv"), bias=Linear(alibi_slopes(4).cuda().double()), backend="reference"
    )
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-2)
    longest = call["v"].float().norm(dim=-1).max()
    tolerance = torch.finfo(torch.bfloat16).eps / 2
    rounding = 2 * torch.finfo(torch.bfloat16).eps * exact.float().norm(dim=-1)
    assert bool(((out - exact).float().norm(dim=-1) <= 2 * tolerance * longest + rounding).all())


@pytest.mark.parametrize("kind", ["linear", "table"])
def test_gradients_repeat_to_the_bit(
    kind: str, qkv: Callable[..., Call], gradients: Callable[..., dict[str, Tensor]]
) -> None:
    call = qkv(2, 4, 900, 64, key_heads=2, dtype=torch.bfloat16, device="cuda")
    tables = torch.rand(4, 900, device="cuda")
    call["bias"] = Linear(alibi_slopes(4).cuda()) if kind == "linear" else Table(tables)
    one = gradients(call, "triton")
    for _ in range(3):
        again = gradients(call, "triton")
        for name in one:
            assert torch.equal(one[name], again[name]), name


def test_a_cuda_graph_replays_forward_and_backward(alibi: Call) -> None:
    inputs = leaves(alibi)

    def step() -> tuple[Tensor, ...]:
        out, lse = lengthen.attention(**alibi, backend="triton", return_lse=True)
        return out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), inputs)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():  # other inputs at the same places
        for name in "qkv":
            alibi[name].copy_(torch.randn_like(alibi[name]))
    graph.replay()
    replayed = [x.detach().clone() for x in captured]
    for got, expected in zip(replayed, step(), strict=True):
        assert torch.equal(got, expected.detach())


@pytest.mark.parametrize("kind", ["linear", "table", "padded"])
def test_the_cpu_never_waits(kind: str, alibi: Call, no_waiting: Callable[[], None]) -> None:
    if kind == "table":
        alibi["bias"] = Table(torch.rand(4, 900, device="cuda"))
    if kind == "padded":
        alibi["mask"] = Causal().padded(torch.tensor([0, 333], device="cuda"))
    inputs = leaves(alibi)
    for attempt in range(2):
        if attempt:  # the first compiles
            no_waiting()
        out, lse = lengthen.attention(**alibi, return_lse=True)
        torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("where", "qkv")
@pytest.mark.parametrize("mask", [Causal(), Window(100), Bidirectional()], ids=["causal", "window", "full"])
def test_odd_inputs_reach_whom_they_would_reach_in_the_reference(
    mask: Any, where: str, odd: float, qkv: Callable[..., Call]
) -> None:
    call = qkv(2, 2, 600, 64, device="cuda") | {"mask": mask}
    # Weights vanish at a distance of 2, or nowhere: where they are almost 0, a GPU's arithmetic is not the reference's.
    call["bias"] = Linear(torch.tensor([60.0, 0.02], device="cuda"))
    call[where][0, 0, 7, 3] = call[where][0, 1, 301, 0] = call[where][0, 1, 420, 0] = odd
    got = lengthen.attention(**call, backend="triton", return_lse=True)
    expected = lengthen.attention(**call, backend="reference", return_lse=True)
    for name, ours, theirs in zip(("out", "lse"), got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3, equal_nan=True, msg=name)
    assert bool(got[0][1].isfinite().all())


@pytest.mark.filterwarnings("ignore")  # torch.compile's, which differ from version to version
def test_compiled_into_one_graph_for_all_lengths(qkv: Callable[..., Call]) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return lengthen.attention(q, k, v, bias=Linear(slopes)).sin()

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    slopes = alibi_slopes(4).cuda().requires_grad_()

    def step(length: int) -> None:
        call = qkv(1, 4, length, 64, dtype=torch.bfloat16, device="cuda")
        inputs = [call[name].requires_grad_() for name in "qkv"]
        outs = [function(*inputs, slopes) for function in (compiled, layer)]
        grads = [torch.autograd.grad(out.float().square().sum(), [*inputs, slopes]) for out in outs]
        for ours, theirs in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
            error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert error <= 2e-2

    step(200)
    step(333)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (256, 640, 1111):
            step(length)
    torch.compiler.reset()


def test_the_ops_are_what_torch_asks_of_ops(alibi: Call) -> None:
    q, k, v = (alibi[name].detach().requires_grad_() for name in "qkv")
    slopes, norm = alibi["bias"].slopes, torch.full((2, 2), 30.0, device="cuda")
    numbers = (0, 0, True, False, 0.125, 0, 1e-3, 0, -1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (q[:, :, :100], k[:, :, :100], v[:, :, :100], slopes, *[None] * 5, *numbers)
    torch.library.opcheck(torch.ops.lengthen.attend.default, arguments, test_utils=checks)
    few = (q[:, :, :1].detach(), k.detach(), v.detach(), slopes, *[None] * 4, norm, *numbers[:5], 899, *numbers[6:])
    torch.library.opcheck(torch.ops.lengthen.decode.default, few, test_utils=("test_schema", "test_faketensor"))


def test_autocast_changes_nothing_and_forward_mode_is_refused(alibi: Call) -> None:
    expected = lengthen.attention(**alibi)
    with torch.autocast("cuda", torch.float16):
        assert torch.equal(lengthen.attention(**alibi), expected)
    rest = {name: x for name, x in alibi.items() if name != "q"}
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: lengthen.attention(q, **rest), (alibi["q"],), (torch.ones_like(alibi["q"]),))


def test_the_call_picks_the_kernels(alibi: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = kernels.attention, []

    def spy(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(kernels, "attention", spy)
    lengthen.attention(**alibi)
    lengthen.attention(**alibi, mask=Bidirectional())
    assert len(calls) == 2
    plain = alibi | {"bias": None}
    lengthen.attention(**plain)  # for torch's own
    assert len(calls) == 2
    lengthen.attention(**plain, return_lse=True)
    lengthen.attention(**plain, mask=Window(100))
    assert len(calls) == 4
    lengthen.attention(**{name: x.double() if isinstance(x, Tensor) else x for name, x in alibi.items()})
    assert len(calls) == 4
