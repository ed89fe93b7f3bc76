"""On a GPU the compiled kernels are the reference in every dtype, repeat to the bit, and never have the CPU wait.

All that needs a card and the kernels stands in this one file: a card is rarely there, and then all of it is wanted.
"""

import importlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen
from lengthen import Ball, Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes
from lengthen.attention.backends import chunked, native, triton
from lengthen.attention.backends.ops import flat
from lengthen.attention.op import pick
from lengthen.attention.problem import pose

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
Call = dict[str, Any]
Draw = Callable[..., Call]
Flags = Callable[[Call], Tensor]
Compare = Callable[..., None]
Gradients = Callable[..., dict[str, Tensor]]
# How far out, gradients, and those of a bias may be off, relative to their norms.
WITHIN = {torch.bfloat16: (6e-3, 1.2e-2, 5e-2), torch.float16: (1e-3, 2e-3, 2e-2), torch.float32: (3e-6, 2e-5, 1e-4)}
DTYPES = pytest.mark.parametrize("dtype", WITHIN, ids=str)
# A kernel is compiled for each dtype, mask, bias and head_dim, which takes seconds: one head_dim for each pair.
PAIRS = [
    ("causal", "none", 64),
    ("causal", "linear", 64),
    ("causal", "table", 128),
    ("causal", "extended", 64),
    ("window", "linear", 128),
    ("window", "table", 64),
    ("blockwise", "linear", 80),
    ("full", "none", 256),
    ("full", "linear ahead", 64),
    ("full", "table ahead", 40),
    ("full padded", "extended ahead", 64),
    ("causal padded", "linear", 64),
    ("full packed", "linear", 96),
    ("second", "linear", 64),
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
def alibi(draw: Draw) -> Call:
    """Return a call with ALiBi in bfloat16, long enough for reach."""
    call = draw(2, 4, 900, 64, key_heads=2, dtype=torch.bfloat16, device="cuda")
    return call | {"bias": Linear(alibi_slopes(4).cuda())}


@pytest.fixture
def compare(gradients: Gradients) -> Callable[..., None]:
    """Return a function that checks the kernels' results of a call against the reference in float64, by their norms."""

    def check(call: Call, times: float = 1.0) -> None:
        got, expected = gradients(call, "triton"), gradients(call, "reference", dtype=torch.float64)
        out, gradient, bias = (times * x for x in WITHIN[call["q"].dtype])
        for name, theirs in expected.items():
            if name == "drates":
                continue
            ours, usual = got[name].double(), theirs.isfinite()
            torch.testing.assert_close(ours[~usual], theirs[~usual], rtol=0, atol=0, equal_nan=True, msg=name)
            error = (ours[usual] - theirs[usual]).norm() / theirs[usual].norm().clamp(min=1e-3)
            allowed = bias if "slopes" in name or "table" in name else gradient if name.startswith("d") else out
            assert error <= allowed, f"{name} is off by {error:.1e}, and {allowed:.1e} is allowed"

    return check


@DTYPES
@pytest.mark.parametrize(("mask", "bias", "head_dim"), PAIRS)
def test_is_the_reference_for_many_shapes(
    mask: str, bias: str, head_dim: int, dtype: torch.dtype, draw: Draw, compare: Compare
) -> None:
    dice = random.Random(f"{mask}, {bias}, {dtype}")
    made = {"mask": mask, "bias": bias, "dtype": dtype, "device": "cuda"}
    for length in (1, 64, 512, *(dice.randint(2, 700) for _ in range(4))):
        group, key_heads = dice.choice([(1, 2), (2, 1), (2, 2)])
        keys = length if "p" in mask.split()[-1] else dice.choice([length, length, dice.randint(length, 700)])
        call = draw(2, group * key_heads, length, head_dim, keys=keys, key_heads=key_heads, **made)
        if dice.random() < 0.5:  # heads beside each other in memory, as projections give them
            call["q"] = call["q"].transpose(1, 2).contiguous().transpose(1, 2)
        call["tolerance"] = dice.choice([None, 0])
        compare(call, times=8 if length < 16 else 1)  # of few keys, gradients are differences of like numbers


@DTYPES
@pytest.mark.parametrize("segment", [256, 1024])  # 700 keys are in three, or in one
@pytest.mark.parametrize(("mask", "head_dim"), [("causal", 64), ("blockwise", 128)])
def test_a_decay_is_the_reference_s(
    mask: str, head_dim: int, segment: int, dtype: torch.dtype, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "SEGMENT", segment)
    decay = Decay(torch.linspace(0.995, 1, head_dim, dtype=torch.float64, device="cuda"))
    for queries, heads in ((700, 2), (333, 4), (3, 4)):
        call, found = (
            draw(2, heads, queries, head_dim, keys=700, key_heads=2, mask=mask, dtype=dtype, device="cuda"),
            [],
        )
        for backend, wide in (("triton", dtype), ("reference", torch.float64)):
            leaves = [call[name].to(wide).requires_grad_() for name in "qkv"]
            out = lengthen.attention(*leaves, decay=decay, mask=call["mask"], backend=backend)
            found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
        for ours, theirs in zip(*found, strict=True):  # queries and keys are rounded once more, with the decay in them
            assert (ours.double() - theirs).norm() <= 3 * WITHIN[dtype][1] * theirs.norm()


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bias", ["linear", "none", "table", "extended"])
def test_few_queries_against_many_keys_are_the_reference_s(
    bias: str, head_dim: int, dtype: torch.dtype, draw: Draw
) -> None:
    for batch, heads, key_heads, queries, keys in ((1, 8, 8, 1, 5000), (3, 8, 2, 1, 3000), (2, 4, 2, 5, 777)):
        made = {"bias": bias, "dtype": dtype, "device": "cuda"}
        call = draw(batch, heads, queries, head_dim, keys=keys, key_heads=key_heads, **made)
        wide = call | {name: call[name].double() for name in "qkv"}
        expected, log_sum = lengthen.attention(**wide, backend="reference", return_lse=True)
        ball = Ball.around(call["k"])
        for known in ({}, {"ball": ball}, {"ball": Ball(ball.centre, 100 * ball.radius, keys)}):  # the last: a wide one
            out, lse = lengthen.attention(**call, **known, backend="triton", return_lse=True)
            assert (out.double() - expected).norm() <= WITHIN[dtype][0] * expected.norm()
            torch.testing.assert_close(lse.double(), log_sum, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("q_start", [-100, -17, 30, 300, 411, 900, 20_000])
def test_queries_may_stand_anywhere(q_start: int, draw: Draw, compare: Compare, flags: Flags) -> None:
    call = draw(1, 2, 150, 64, keys=400, q_start=q_start, dtype=torch.bfloat16, device="cuda")
    call["bias"] = Linear(torch.tensor([0.3, 0.01], device="cuda"))
    assert not flags(call).any()  # even all keys far behind are no reason to do it again
    compare(call, times=4)


def test_a_long_sequence_is_read_in_part_and_within_tolerance(draw: Draw, spans: Callable[[Call], Tensor]) -> None:
    call = draw(1, 4, 4096, 64, dtype=torch.bfloat16, device="cuda")
    slopes, eps = alibi_slopes(4).cuda(), torch.finfo(torch.bfloat16).eps
    tables = -slopes[:, None] * torch.arange(4096, device="cuda")
    for bias in (Linear(slopes), Table(tables)):
        call["bias"] = bias
        first, end = spans(call)
        read = (end - first).sum((0, 2)).float()
        assert bool((read.diff() >= 0).all())  # the steepest head is the first
        assert read[0] < read[3] / 4
        out, exact = lengthen.attention(**call), lengthen.attention(**call, tolerance=0)
        longest, rounding = call["v"].float().norm(dim=-1).max(), 2 * eps * exact.float().norm(dim=-1)
        assert bool(((out - exact).float().norm(dim=-1) <= eps * longest + rounding).all())


@pytest.mark.parametrize("kind", ["linear", "table"])
def test_gradients_repeat_to_the_bit(kind: str, alibi: Call, gradients: Gradients) -> None:
    if kind == "table":
        alibi["bias"] = Table(torch.rand(4, 900, device="cuda"))
    one = gradients(alibi, "triton")
    for _ in range(3):
        again = gradients(alibi, "triton")
        for name in one:
            assert torch.equal(one[name], again[name]), name


# Hard numbers.


def test_a_far_key_that_outweighs_all_before_it_gets_its_gradient(draw: Draw, flags: Flags, compare: Compare) -> None:
    # The weight of the key at 500 is too large for float32, so the block is done again; the one at 1,800 wins.
    call = draw(1, 1, 2048, 64, device="cuda") | {"bias": Linear(torch.tensor([0.02], device="cuda")), "scale": 1.0}
    call["q"], call["k"] = 0.01 * call["q"], 0.01 * call["k"]
    call["q"][..., 0], call["k"][..., 0] = 1.0, 0.0
    call["k"][0, 0, [2047 - 500, 2047 - 1800], 0] = torch.tensor([160.0, 240.0], device="cuda")
    assert bool(flags(call)[0].any())
    compare(call, times=20)  # scores of 240 are rounded


@pytest.mark.parametrize("slope", [1e3, 1e6])
@DTYPES
def test_a_slope_may_be_steep(
    slope: float, dtype: torch.dtype, draw: Draw, gradients: Gradients, compare: Compare
) -> None:
    call = draw(1, 2, 700, 64, dtype=dtype, device="cuda")
    call["bias"] = Linear(torch.tensor([slope, slope], device="cuda"))  # each query sees itself alone
    got, expected = gradients(call, "triton"), gradients(call, "reference", dtype=torch.float64)
    for name in ("out", "dv"):
        assert (got[name].double() - expected[name]).norm() <= WITHIN[dtype][0] * expected[name].norm(), name
    assert bool(got["dk"].isfinite().all() & got["dq"].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_gradients_survive_values_that_share_a_mean(
    dtype: torch.dtype, draw: Draw, gradients: Gradients
) -> None:
    call = draw(1, 4, 1024, 64, dtype=dtype, device="cuda") | {"bias": Linear(alibi_slopes(4).cuda())}
    call["v"] = call["v"] + 10
    got, expected = gradients(call, "triton"), gradients(call, "reference", dtype=torch.float64)
    for name in ("dq", "dk", "dslopes"):
        off = (got[name].double() - expected[name]).norm() / expected[name].norm()
        assert off <= 4 * WITHIN[dtype][1], f"{name} is off by {off:.1e}"


@pytest.mark.parametrize("odd", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "full"])
@pytest.mark.parametrize("bias", ["none", "linear", "table"])
def test_what_is_hidden_reaches_no_result_and_no_gradient(
    bias: str, mask: Any, kind: str, odd: float, draw: Draw
) -> None:
    real = torch.ones(600, dtype=torch.bool, device="cuda")
    if kind == "padded":
        mask = mask.padded(torch.tensor([101], device="cuda"), torch.tensor([555], device="cuda"))
        real[:101], real[555:] = False, False
    else:
        mask = mask.packed(torch.tensor([[0] * 203 + [203] * 97 + [300] * 300], device="cuda"))
        real[203:300] = False
    call = draw(1, 2, 600, 64, key_heads=1, mask="full", bias=bias, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(1, 2, 600, 64, device="cuda").bfloat16()

    def results() -> list[Tensor]:
        leaves = [call[name].detach().clone().requires_grad_() for name in "qkv"]
        out = lengthen.attention(*leaves, bias=call["bias"], mask=mask, backend="triton")
        return [out.detach(), *torch.autograd.grad(out, leaves, weight)]

    expected = results()
    for name in "qkv":
        call[name][:, :, ~real] = odd
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), results(), expected, strict=True):
        torch.testing.assert_close(ours[:, :, real], theirs[:, :, real], rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("where", "qkv")
@pytest.mark.parametrize("mask", [Causal(), Window(100), Bidirectional()], ids=["causal", "window", "full"])
def test_odd_inputs_reach_whom_they_would_reach_in_the_reference(mask: Any, where: str, odd: float, draw: Draw) -> None:
    call = draw(2, 2, 600, 64, device="cuda") | {"mask": mask}
    # Weights vanish at a distance of 2, or nowhere: where they are almost 0, a GPU's arithmetic is not the reference's.
    call["bias"] = Linear(torch.tensor([60.0, 0.02], device="cuda"))
    call[where][0, 0, 7, 3] = call[where][0, 1, 301, 0] = call[where][0, 1, 420, 0] = odd
    got = lengthen.attention(**call, backend="triton", return_lse=True)
    expected = lengthen.attention(**call, backend="reference", return_lse=True)
    for name, ours, theirs in zip(("out", "lse"), got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3, equal_nan=True, msg=name)
    assert bool(got[0][1].isfinite().all())


@pytest.mark.parametrize("queries", [600, 2], ids=["many", "decoded"])
def test_a_key_that_is_nan_and_its_value_infinite(queries: int, draw: Draw) -> None:
    call = draw(1, 2, queries, 64, keys=600, dtype=torch.bfloat16, device="cuda")
    call["bias"] = Linear(torch.tensor([0.02, 0.5], device="cuda"))
    call["k"][0, :, 599, 1], call["v"][0, :, 599] = torch.nan, torch.inf
    out = lengthen.attention(**call, backend="triton")
    assert bool(out[:, :, -1].isnan().all())
    assert bool(out[:, :, :-1].isfinite().all())


def test_one_odd_row_repairs_only_its_head(alibi: Call, flags: Flags) -> None:
    before = lengthen.attention(**alibi)
    alibi["q"][1, 2, 500, 3] = torch.nan
    assert flags(alibi)[1].any(-1).nonzero().tolist() == [[1, 2]]
    out = lengthen.attention(**alibi)
    assert out.isnan().any(-1).nonzero().tolist() == [[1, 2, 500]]
    others = torch.ones(2, 4, dtype=torch.bool)
    others[1, 2] = False
    assert torch.equal(out[others], before[others])


# What is compiled, where it runs, and what it takes.


def test_a_call_that_differs_in_no_constant_compiles_nothing(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(batch: int, length: int, key_heads: int, mask: Any, beside: bool = False) -> None:
        call = draw(batch, 4, length, 64, key_heads=key_heads, dtype=torch.bfloat16, device="cuda")
        if beside:
            call |= {name: call[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
        leaves = [call[name].requires_grad_() for name in "qkv"]
        bias = Linear(alibi_slopes(4).cuda())
        lengthen.attention(*leaves, bias=bias, mask=mask).sum().backward()
        with torch.no_grad():
            lengthen.attention(leaves[0][:, :, :1], *leaves[1:], bias=bias, mask=mask)

    step(2, 900, 2, Window(100))
    torch.cuda.synchronize()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(importlib.import_module("lengthen.attention.backends.triton.launch").Kernel, "compiled", refuse)
    step(1, 901, 2, Window(333))
    step(3, 1616, 1, Blockwise(64), beside=True)
    step(2, 700, 2, Causal().padded(torch.tensor([0, 9], device="cuda")))


def test_a_window_past_everything_is_the_sequence(alibi: Call) -> None:
    outs = [lengthen.attention(**alibi | {"mask": mask}) for mask in (Window(100), Window(2**40), Causal())]
    assert torch.equal(outs[1], outs[2])
    assert not torch.equal(outs[0], outs[2])


def test_plain_attention_in_float32_holds_no_matrix_of_scores(draw: Draw) -> None:
    call = draw(1, 8, 16_384, 64, key_heads=2, device="cuda")
    leaves = [call[name].requires_grad_() for name in "qkv"]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lengthen.attention(*leaves).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**29  # all scores of a head alone would take 2³⁰


def test_the_call_picks_the_kernels(alibi: Call, draw: Draw) -> None:
    def picked(**change: Any) -> Any:
        return pick(pose(**{"needs_lse": False} | alibi | change))

    assert picked() is triton
    assert picked(mask=Bidirectional()) is triton
    assert picked(mask=draw(1, 1, 900, mask="around")["mask"]) is triton  # a mask of one's own
    assert picked(mask=draw(1, 1, 900, mask="second padded", device="cuda")["mask"], bias=None) is triton
    assert picked(bias=None, needs_lse=True) is triton
    assert picked(bias=None) is native
    assert picked(bias=None, **{name: alibi[name].float() for name in "qkv"}) is triton
    assert picked(**{name: alibi[name].double() for name in "qkv"}) is chunked


def test_two_threads_on_one_stream_do_not_disturb_each_other(draw: Draw, gradients: Gradients) -> None:
    calls = []
    for length in (800, 1300):
        call = draw(2, 4, length, 64, key_heads=2, dtype=torch.bfloat16, device="cuda")
        calls.append(call | {"bias": Linear(alibi_slopes(4).cuda())})
    expected, wrong = [gradients(call, "triton") for call in calls], []

    def work(i: int) -> None:
        for _ in range(20):
            got = gradients(calls[i], "triton")
            wrong.extend(name for name in got if not torch.equal(got[name], expected[i][name]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_the_second_gpu(alibi: Call, gradients: Gradients) -> None:
    expected = gradients(alibi, "triton")
    there = {name: alibi[name].to("cuda:1") for name in "qkv"} | {"bias": Linear(alibi["bias"].slopes.to("cuda:1"))}
    for name, got in gradients(alibi | there, "triton").items():  # while the first is the current one
        assert torch.equal(got.to("cuda:0"), expected[name]), name


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_a_cuda_graph_replays_forward_and_backward(alibi: Call) -> None:
    inputs = [alibi[name].requires_grad_() for name in "qkv"]

    def step() -> tuple[Tensor, ...]:
        out, lse = lengthen.attention(**alibi, backend="triton", return_lse=True)
        return out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), inputs)

    assert_replayed(step, alibi)


@pytest.mark.parametrize("with_ball", [False, True], ids=["all keys", "ball"])
def test_a_cuda_graph_replays_decoding(with_ball: bool, alibi: Call) -> None:
    alibi["q"] = alibi["q"][:, :, :1].clone()
    wide = Ball(torch.zeros_like(alibi["k"][:, :, 0]), torch.full((2, 2), 20.0, device="cuda"), 900)
    known = {"ball": wide} if with_ball else {}
    assert_replayed(lambda: lengthen.attention(**alibi, **known, return_lse=True), alibi)


def assert_replayed(step: Callable[[], tuple[Tensor, ...]], call: Call) -> None:
    """Check that a graph of a step, with other inputs at the same places, gives what the step gives."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for name in "qkv":
            call[name].copy_(torch.randn_like(call[name]))
    graph.replay()
    replayed = [x.detach().clone() for x in captured]
    for got, expected in zip(replayed, step(), strict=True):
        assert torch.equal(got, expected.detach())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("kind", ["linear", "table", "extended", "padded", "own mask", "decoded"])
def test_the_cpu_never_waits(kind: str, alibi: Call, draw: Draw, no_waiting: Callable[[], None]) -> None:
    if kind in ("table", "extended"):
        alibi["bias"] = Table(torch.rand(4, 900 if kind == "table" else 50, device="cuda"), extended=kind == "extended")
    elif kind == "padded":
        alibi["mask"] = Causal().padded(torch.tensor([0, 333], device="cuda"))
    elif kind == "own mask":
        alibi["mask"] = draw(1, 1, 900, mask="second")["mask"]
    elif kind == "decoded":
        alibi["q"] = alibi["q"][:, :, :1].clone()
    learned = [x for x in alibi["bias"].tensors if x is not None]
    inputs = [] if kind == "decoded" else [x.requires_grad_() for x in (*(alibi[name] for name in "qkv"), *learned)]
    for attempt in range(2):
        if attempt:  # the first compiles
            no_waiting()
        out, lse = lengthen.attention(**alibi, return_lse=True)
        if inputs:
            torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)))


@pytest.mark.filterwarnings("ignore")  # torch.compile's, which differ from version to version
def test_compiled_into_one_graph_for_all_lengths(draw: Draw) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return lengthen.attention(q, k, v, bias=Linear(slopes)).sin()

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    slopes = alibi_slopes(4).cuda().requires_grad_()

    def step(length: int) -> None:
        call = draw(1, 4, length, 64, dtype=torch.bfloat16, device="cuda")
        inputs = [call[name].requires_grad_() for name in "qkv"]
        outs = [function(*inputs, slopes) for function in (compiled, layer)]
        grads = [torch.autograd.grad(out.float().square().sum(), [*inputs, slopes]) for out in outs]
        for ours, theirs in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
            assert (ours.double() - theirs.double()).norm() <= 2e-2 * theirs.double().norm()

    step(200)
    step(333)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (256, 640, 1111):
            step(length)
    torch.compiler.reset()


def test_the_ops_are_what_torch_asks_of_ops(alibi: Call) -> None:
    many = {name: alibi[name][:, :, :100].detach().requires_grad_() for name in "qkv"}
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    problem = pose(**alibi | many | {"mask": Window(50)})
    torch.library.opcheck(triton.attend_op.op, flat(problem), test_utils=checks)
    few = pose(**alibi | {"q": alibi["q"][:, :, :1]}, ball=Ball.around(alibi["k"]))
    torch.library.opcheck(triton.decode_op.op, flat(few), test_utils=("test_schema", "test_faketensor"))


def test_autocast_changes_nothing_and_forward_mode_is_refused(alibi: Call, gradients: Gradients) -> None:
    expected = gradients(alibi, "triton")
    with torch.autocast("cuda", torch.float16):
        got = gradients(alibi, "triton")
    for name in expected:
        assert torch.equal(got[name], expected[name]), name
    rest = {name: x for name, x in alibi.items() if name != "q"}
    with pytest.raises(NotImplementedError, match=r"no derivative by torch.func"):
        torch.func.jvp(lambda q: lengthen.attention(q, **rest), (alibi["q"],), (torch.ones_like(alibi["q"]),))
