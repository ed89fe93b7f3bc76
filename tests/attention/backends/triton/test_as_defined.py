"""The kernels are the reference: out, lse and every gradient, whatever the mask, bias, widths and places."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Causal, Linear, Table, Window
from lengthen.attention.backends.triton import shapes
from lengthen.attention.backends.triton.shapes import Shape

Call = dict[str, Any]
Draw = Callable[..., Call]
Check = Callable[..., None]
Gradients = Callable[..., dict[str, Tensor]]
EVERY = [
    *((mask, bias) for mask in ("causal", "window") for bias in ("none", "linear", "table", "extended")),
    *(("full", bias) for bias in ("none", "linear")),
    *(("full", bias) for bias in ("linear ahead", "table ahead", "extended ahead")),
    *(("causal padded", bias) for bias in ("linear", "table", "extended")),
    *(("full padded", bias) for bias in ("none", "linear ahead", "extended ahead")),
    *((mask, "linear") for mask in ("blockwise packed", "full packed", "around", "second")),
    ("second padded", "table"),
]


@pytest.mark.parametrize(("mask", "bias"), EVERY)
def test_every_mask_and_bias(mask: str, bias: str, draw: Draw, check: Check) -> None:
    check(draw(2 if " " in mask else 1, 2, 37, key_heads=1, mask=mask, bias=bias))


# Examples take long here, and so would making a failing one smaller.
@settings(max_examples=10, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_any_call(data: st.DataObject, any_call: Draw, check: Check) -> None:
    check(any_call(data), dslopes=3e-4)  # queries may stand far beyond the keys


@pytest.mark.parametrize(("head_dim", "value_dim"), [(1, 16), (40, 64), (17, 3), (64, 64), (256, 130)])
def test_any_width_up_to_256(head_dim: int, value_dim: int, draw: Draw, check: Check) -> None:
    check(draw(1, 1, 36, head_dim, value_dim=value_dim, bias="linear"))


@pytest.mark.parametrize("q_start", [-36, -13, 47, 70, 400, [-9, 40]], ids=str)
@pytest.mark.parametrize("mask", ["causal", "window", "full"])
def test_queries_may_stand_anywhere(mask: str, q_start: Any, draw: Draw, check_forward: Check) -> None:
    q_start = q_start if isinstance(q_start, int) else torch.tensor(q_start)
    check_forward(draw(1 if isinstance(q_start, int) else 2, 1, 35, keys=48, mask=mask, bias="linear", q_start=q_start))


@pytest.mark.parametrize(("q_start", "bias"), [(10, "linear"), ([10, 30], "table")], ids=str)
def test_more_queries_than_keys(q_start: Any, bias: str, draw: Draw, check: Check) -> None:
    q_start = q_start if isinstance(q_start, int) else torch.tensor(q_start)
    check(draw(2, 2, 40, keys=20, key_heads=1, bias=bias, q_start=q_start))


def test_a_window_longer_than_any_sequence_is_the_sequence(draw: Draw) -> None:
    call = draw(1, 2, 70, bias="linear")
    outs = [lengthen.attention(**call | {"mask": x}, backend="triton") for x in (Window(9), Window(2**40), Causal())]
    assert torch.equal(outs[1], outs[2])
    assert not torch.equal(outs[0], outs[2])


def test_of_16_bits_out_is_rounded_once(draw: Draw, check_forward: Check) -> None:
    # Weights are rounded to 16 bits for their product with the values, and the result is again.
    check_forward(draw(1, 1, 40, bias="linear", dtype=torch.float16), within=1e-3)


def test_in_16_bits_gradients_survive_values_that_share_a_mean(draw: Draw, gradients: Gradients) -> None:
    # Σ_j p·dp = d_out·out is a difference of large numbers there, and out alone has 11 bits.
    call = draw(1, 2, 64, bias="linear", dtype=torch.float16)
    call["v"] = call["v"] + 10
    got, expected = gradients(call, "triton"), gradients(call, "reference", dtype=torch.float64)
    for name in ("dq", "dk", "dslopes"):
        off = (got[name].double() - expected[name]).norm() / expected[name].norm()
        assert off <= 5e-3, f"{name} is off by {off:.1e}"


@pytest.mark.parametrize(
    "blocks",
    [
        {"forward": Shape(16, 16, 4, 1)},
        {"forward": Shape(64, 16, 4, 1), "bwd_dq": Shape(64, 32, 4, 1), "bwd_dkv": Shape(64, 16, 4, 1)},
        {"bwd_dq": Shape(32, 16, 4, 1), "bwd_dkv": Shape(32, 16, 4, 1), "table_grad": Shape(32, 32, 4, 1)},
    ],
    ids=["short", "tall", "mixed"],
)
@pytest.mark.parametrize(("mask", "bias"), [("full", "linear"), ("window", "table")])
def test_blocks_may_have_any_shape(
    mask: str, bias: str, blocks: dict[str, Shape], draw: Draw, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in shapes.SHAPES:
        if key[0] in blocks:
            monkeypatch.setitem(shapes.SHAPES, key, blocks[key[0]])
    check(draw(1, 1, 70, mask=mask, bias=bias))


@pytest.mark.parametrize("programs", [1, 1000])
def test_a_table_s_gradient_is_summed_in_any_number_of_parts(
    programs: int, draw: Draw, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("lengthen.attention.backends.triton.launch"), "PROGRAMS", programs)
    check(draw(3, 1, 20, mask="full") | {"bias": Table(torch.randn(1, 20), torch.randn(1, 25))})


@pytest.mark.parametrize(("mask", "end"), [("causal", 1), ("blockwise", 20), ("causal", 200)])
def test_a_table_may_go_on_with_its_last_value(mask: str, end: int, draw: Draw, check: Check) -> None:
    check(draw(1, 1, 80, mask=mask) | {"bias": Table(torch.randn(1, end), extended=True)})


@pytest.mark.parametrize("ends", [(20, 1), (1, 5), (1,)])
def test_a_side_may_be_one_value(ends: tuple[int, ...], draw: Draw, check: Check) -> None:
    check(draw(1, 1, 80, mask="full") | {"bias": Table(*(torch.randn(1, end) for end in ends), extended=True)})


def test_a_table_needs_to_cover_only_what_is_seen(draw: Draw, check: Check) -> None:
    # Blocks hold distances that no query sees: what lies in memory beside the table must not count.
    values = torch.full((3, 40), torch.nan)
    values[1, :9] = torch.randn(9)
    check(draw(1, 1, 60) | {"mask": Window(9), "bias": Table(values[1:2, :9])})


@pytest.mark.parametrize(("bias", "through"), [("none", "lse"), ("linear", "out"), ("table", "lse")])
def test_a_gradient_may_come_through_one_result_alone(bias: str, through: str, draw: Draw) -> None:
    call, weight, grads = draw(1, 2, 40, bias=bias), torch.randn(1, 2, 40, dtype=torch.float64), []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [call[name].to(dtype).requires_grad_() for name in "qkv"[: 2 if through == "lse" else 3]]
        now: Call = call | {"v": call["v"].to(dtype)} | dict(zip("qkv", leaves, strict=False))
        if bias != "none":
            leaves.append(call["bias"].tensors[0].to(dtype).requires_grad_())
            now["bias"] = type(call["bias"])(leaves[-1])
        out, lse = lengthen.attention(**now, backend=backend, return_lse=True)
        result = lse if through == "lse" else out.square().sum(-1)
        grads.append(torch.autograd.grad((result * weight.to(dtype)).sum(), leaves))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * max(1.0, theirs.abs().max().item()))


def test_two_runs_are_equal_to_the_bit(draw: Draw, gradients: Gradients) -> None:
    call = draw(1, 2, 36, key_heads=1, mask="full", bias="table ahead")
    one, two = gradients(call, "triton"), gradients(call, "triton")
    assert len(one) == 7
    for name in one:
        assert torch.equal(one[name], two[name]), name


LAYOUTS: dict[str, Callable[[], list[Tensor]]] = {
    "of one product": lambda: list(torch.randn(2, 24, 3, 2, 16).permute(2, 0, 3, 1, 4)),
    "features apart": lambda: list(torch.randn(3, 2, 2, 16, 24).mT),
    "expanded": lambda: [torch.randn(2, 2, 24, 16), *torch.randn(2, 2, 1, 24, 16).expand(-1, -1, 2, -1, -1)],
    "unaligned": lambda: list(torch.randn(3, 2, 2, 24, 32)[..., 5:21]),
    "unaligned rows": lambda: list(torch.randn(3, 2, 2, 24, 17)[..., :16]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_make_no_difference(layout: str) -> None:
    strided, found = LAYOUTS[layout](), []
    weights = torch.randn(2, 2, 16, 24).mT, torch.randn(2, 24, 2).mT
    for made in (lambda x: x, Tensor.contiguous):
        leaves = [made(x).detach().requires_grad_() for x in strided]
        bias = (
            Table(made(torch.arange(48.0).sin().view(24, 2).mT)),
            Linear(made(torch.tensor([0.5, 9.0, 0.1, 9.0])[::2])),
        )
        out, lse = lengthen.attention(*leaves, bias=bias[layout == "expanded"], backend="triton", return_lse=True)
        grads = torch.autograd.grad((out, lse), leaves, [made(x) for x in weights])
        found.append([out.detach(), lse.detach(), *grads])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_out_has_its_heads_in_memory_as_the_queries_have_them(draw: Draw) -> None:
    call = draw(2, 3, 20, value_dim=24)
    assert lengthen.attention(**call, backend="triton").is_contiguous()
    call["q"] = call["q"].transpose(1, 2).contiguous().transpose(1, 2)
    assert lengthen.attention(**call, backend="triton").transpose(1, 2).is_contiguous()


def test_only_blocks_with_something_to_see_are_read(draw: Draw, spans: Callable[[Call], Tensor]) -> None:
    call = draw(1, 1, 96)
    assert spans(call | {"mask": Window(20)})[:, 0, 0].tolist() == [[0, 0, 32], [32, 64, 96]]  # from 0, 13, 45 on
    packed = Causal().packed((torch.arange(96) // 48 * 48)[None])
    assert spans(call | {"mask": packed})[:, 0, 0].tolist() == [[0, 0, 48], [32, 64, 96]]
    assert spans(call | {"mask": Bidirectional()})[:, 0, 0].tolist() == [[0, 0, 0], [96, 96, 96]]
