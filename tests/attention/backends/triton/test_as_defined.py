"""The kernels are the reference: out, lse and every gradient, whatever the mask, the bias, the widths and the places."""

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
Check = Callable[..., None]
BEHIND, BOTH = ("none", "linear", "table", "extended"), ("linear ahead", "table ahead", "extended ahead")
EVERY = [
    *((mask, bias) for mask in ("causal", "window", "full") for bias in BEHIND),
    *(("full", bias) for bias in BOTH),
    *(("causal padded", bias) for bias in BEHIND),
    *(("blockwise packed", bias) for bias in ("linear", "extended")),
    *(("full padded", bias) for bias in ("none", *BOTH)),
    *(("full packed", bias) for bias in ("linear ahead", "table")),
    *((mask, "linear") for mask in ("blockwise", "window packed", "around", "second", "second padded")),
    ("around padded", "table"),
]


@pytest.mark.parametrize(("mask", "bias"), EVERY)
def test_every_mask_and_bias(
    mask: str,
    bias: str,
    qkv: Callable[..., Call],
    mask_of: Callable[..., Any],
    bias_of: Callable[..., Any],
    check: Check,
) -> None:
    call = qkv(2 if " " in mask else 1, 2, 37, key_heads=1) | {"mask": mask_of(mask, 37)}
    check(call | {"bias": bias_of(bias, call)})


# Examples take long here, and so would making a failing one smaller.
@settings(max_examples=20, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_any_call(data: st.DataObject, any_call: Callable[..., Call], check: Check) -> None:
    check(any_call(data), dslopes=3e-4)  # queries may stand far beyond the keys


@pytest.mark.parametrize(("head_dim", "value_dim"), [(1, 16), (40, 64), (17, 3), (64, 64), (16, 130), (256, 256)])
def test_any_width_up_to_256(head_dim: int, value_dim: int, qkv: Callable[..., Call], check: Check) -> None:
    check(qkv(1, 1, 36, head_dim, value_dim=value_dim) | {"bias": Linear(torch.tensor([0.3]))})


@pytest.mark.parametrize("q_start", [-36, -13, 7, 47, 48, 70, 400, [3, 40], [-9, 90]], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Window(25), Bidirectional()], ids=["causal", "window", "full"])
def test_queries_may_stand_anywhere(
    mask: Any, q_start: int | list[int], qkv: Callable[..., Call], check_forward: Check
) -> None:
    batch, slopes = (1, torch.tensor([0.4])) if isinstance(q_start, int) else (2, torch.tensor([0.05]))
    call = qkv(batch, 1, 35, keys=48) | {"mask": mask, "bias": Linear(slopes, 2 * slopes)}
    check_forward(call | {"q_start": q_start if isinstance(q_start, int) else torch.tensor(q_start)})


@pytest.mark.parametrize("bias", ["linear", "table"])
@pytest.mark.parametrize("q_start", [10, [10, 30]], ids=str)
def test_more_queries_than_keys(
    q_start: Any, bias: str, qkv: Callable[..., Call], bias_of: Callable[..., Any], check: Check
) -> None:
    call = qkv(2, 2, 50, keys=20, key_heads=1)
    call["q_start"] = q_start if isinstance(q_start, int) else torch.tensor(q_start)
    check(call | {"bias": bias_of(bias, call)})


def test_a_window_longer_than_any_sequence_is_the_sequence(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 70) | {"bias": Linear(torch.tensor([0.5, 0.1]))}
    outs = [lengthen.attention(**call, mask=mask, backend="triton") for mask in (Window(9), Window(2**40), Causal())]
    assert torch.equal(outs[1], outs[2])
    assert not torch.equal(outs[0], outs[2])


def test_of_16_bits_out_is_rounded_once(qkv: Callable[..., Call], check_forward: Check) -> None:
    # Weights are rounded to 16 bits for their product with the values, and the result is again.
    check_forward(qkv(1, 1, 40, dtype=torch.float16) | {"bias": Linear(torch.tensor([0.1]))}, within=1e-3)


def test_in_16_bits_the_gradient_of_a_slope_survives_values_that_share_a_mean(
    qkv: Callable[..., Call], gradients: Callable[..., dict[str, Tensor]]
) -> None:
    # Σ_j p·dp = d_out·out is a difference of large numbers there, and out alone has 11 bits.
    call = qkv(1, 2, 64, dtype=torch.float16) | {"bias": Linear(torch.tensor([0.2, 0.02]))}
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
    mask: str,
    bias: str,
    blocks: dict[str, Shape],
    qkv: Callable[..., Call],
    mask_of: Callable[..., Any],
    bias_of: Callable[..., Any],
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in shapes.SHAPES:
        if key[0] in blocks:
            monkeypatch.setitem(shapes.SHAPES, key, blocks[key[0]])
    call = qkv(1, 1, 70) | {"mask": mask_of(mask, 70)}
    check(call | {"bias": bias_of(bias, call)})


@pytest.mark.parametrize("programs", [1, 20, 1000])
def test_a_table_s_gradient_is_summed_in_any_number_of_parts(
    programs: int, qkv: Callable[..., Call], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("lengthen.attention.backends.triton.launch"), "PROGRAMS", programs)
    call = qkv(3, 2, 20, key_heads=1) | {"bias": Table(torch.randn(2, 20), torch.randn(2, 25))}
    check(call | {"mask": Bidirectional()})


@pytest.mark.parametrize(("mask", "end"), [("causal", 1), ("causal", 33), ("causal", 200), ("blockwise", 33)])
def test_a_table_may_go_on_with_its_last_value(
    mask: str, end: int, qkv: Callable[..., Call], mask_of: Callable[..., Any], check: Check
) -> None:
    call = qkv(1, 2, 90, key_heads=1) | {"mask": mask_of(mask, 90)}
    check(call | {"bias": Table(torch.randn(2, end), extended=True)})


def test_a_table_needs_to_cover_only_what_is_seen(qkv: Callable[..., Call], check: Check) -> None:
    # Blocks hold distances that no query sees: what lies in memory beside the table must not count.
    values = torch.full((3, 40), torch.nan)
    values[1, :9] = torch.randn(9)
    check(qkv(1, 1, 60) | {"mask": Window(9), "bias": Table(values[1:2, :9])})


@pytest.mark.parametrize("through", ["out", "lse"])
@pytest.mark.parametrize("bias", ["none", "linear", "table"])
def test_a_gradient_may_come_through_one_result_alone(
    bias: str, through: str, qkv: Callable[..., Call], bias_of: Callable[..., Any]
) -> None:
    call = qkv(1, 2, 40)
    call["bias"], weight = bias_of(bias, call), torch.randn(1, 2, 40, dtype=torch.float64)
    grads: list[tuple[Tensor, ...]] = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [call[name].to(dtype).requires_grad_() for name in "qkv"[: 2 if through == "lse" else 3]]
        given: Call = call | {"v": call["v"].to(dtype)} | dict(zip("qkv", leaves, strict=False))
        if bias != "none":
            leaves.append(call["bias"].tensors[0].to(dtype).requires_grad_())
            given["bias"] = type(call["bias"])(leaves[-1])
        out, lse = lengthen.attention(**given, backend=backend, return_lse=True)
        result = lse if through == "lse" else out.square().sum(-1)
        grads.append(torch.autograd.grad((result * weight.to(dtype)).sum(), leaves))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("bias", ["linear ahead", "table ahead"])
def test_two_runs_are_equal_to_the_bit(
    bias: str, qkv: Callable[..., Call], bias_of: Callable[..., Any], gradients: Callable[..., dict[str, Tensor]]
) -> None:
    call = qkv(2, 2, 36, key_heads=1) | {"mask": Bidirectional()}
    call["bias"] = bias_of(bias, call)
    one, two = gradients(call, "triton"), gradients(call, "triton")
    assert len(one) == 7
    for name in one:
        assert torch.equal(one[name], two[name]), name


LAYOUTS: dict[str, Callable[[], list[Tensor]]] = {
    "heads beside each other": lambda: [x.transpose(1, 2) for x in torch.randn(3, 2, 24, 2, 16)],
    "of one product": lambda: list(torch.randn(2, 24, 3, 2, 16).permute(2, 0, 3, 1, 4)),
    "features apart": lambda: list(torch.randn(3, 2, 2, 16, 24).mT),
    "expanded": lambda: [torch.randn(2, 2, 24, 16), *torch.randn(2, 2, 1, 24, 16).expand(-1, -1, 2, -1, -1)],
    "unaligned": lambda: list(torch.randn(3, 2, 2, 24, 32)[..., 5:21]),
    "unaligned rows": lambda: list(torch.randn(3, 2, 2, 24, 17)[..., :16]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_inputs_make_no_difference(layout: str) -> None:
    call: Call = dict(zip("qkv", LAYOUTS[layout](), strict=True))
    bias, d_out, d_lse = Linear(torch.tensor([0.5, 0.1])), torch.randn(2, 2, 16, 24).mT, torch.randn(2, 24, 2).mT
    found = []
    for given in (call, {name: x.contiguous() for name, x in call.items()}):
        leaves = [given[name].detach().requires_grad_() for name in "qkv"]
        out, lse = lengthen.attention(*leaves, bias=bias, backend="triton", return_lse=True)
        strided = given is call
        weights = (d_out, d_lse) if strided else (d_out.contiguous(), d_lse.contiguous())
        found.append([out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, weights)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_strides_of_a_bias_make_no_difference(kind: str, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 40) | {"mask": Bidirectional(), "backend": "triton"}
    if kind == "slopes":
        parts = [torch.tensor([0.5, 9.0, 0.1, 9.0])[::2], torch.tensor([2.0]).expand(2)]
    else:
        parts = [torch.randn(40, 2).mT, torch.randn(2, 80)[:, ::2]]
    make: Any = Linear if kind == "slopes" else Table
    got = lengthen.attention(**call, bias=make(*parts))
    assert torch.equal(got, lengthen.attention(**call, bias=make(*(x.contiguous() for x in parts))))


def test_out_has_its_heads_in_memory_as_the_queries_have_them(qkv: Callable[..., Call]) -> None:
    call = qkv(2, 3, 20, value_dim=24)
    assert lengthen.attention(**call, backend="triton").is_contiguous()
    call["q"] = call["q"].transpose(1, 2).contiguous().transpose(1, 2)
    assert lengthen.attention(**call, backend="triton").transpose(1, 2).is_contiguous()


def test_only_blocks_with_something_to_see_are_read(qkv: Callable[..., Call], spans: Callable[[Call], Tensor]) -> None:
    call = qkv(1, 1, 96)
    assert spans(call | {"mask": Window(20)})[:, 0, 0].tolist() == [[0, 0, 32], [32, 64, 96]]  # from 0, 13, 45 on
    packed = Causal().packed((torch.arange(96) // 48 * 48)[None])
    assert spans(call | {"mask": packed})[:, 0, 0].tolist() == [[0, 0, 48], [32, 64, 96]]
    assert spans(call | {"mask": Bidirectional()})[:, 0, 0].tolist() == [[0, 0, 0], [96, 96, 96]]
