"""The backward kernels give the reference's gradients: of q, k, v, slopes and tables, through out and through lse."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Causal, Decay, Linear, Table, Window
from lengthen.attention import kernels
from lengthen.attention.kernels import shapes
from lengthen.attention.kernels.shapes import Shape

Call = dict[str, Any]
Check = Callable[..., None]
SLOPES = {"dslopes": 1e-4, "dslopes ahead": 1e-4}  # sums over distances lose a digit or two
EVERY = [
    (kind + more, bias)
    for kind in ("causal", "window", "blockwise", "full")
    for more in ("", " padded", " packed")
    for bias in ("none", "linear", "table", "linear ahead", "table ahead")
    if kind == "full" or "ahead" not in bias
]


@settings(max_examples=20, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_is_the_reference_for_any_call(
    data: st.DataObject, any_call: Callable[..., Call], assert_as_defined: Check
) -> None:
    assert_as_defined(any_call(data), "triton", rest=1e-5, **dict.fromkeys(SLOPES, 3e-4))  # queries beyond the keys


@pytest.mark.parametrize(("mask", "bias"), EVERY)
def test_is_the_reference_for_every_mask_and_bias(
    mask: str,
    bias: str,
    qkv: Callable[..., Call],
    mask_of: Callable[..., Any],
    bias_of: Callable[..., Any],
    assert_as_defined: Check,
) -> None:
    call = qkv(1 if " " not in mask else 2, 2, 37, 16, key_heads=1) | {"mask": mask_of(mask, 37)}
    call["bias"] = bias_of(bias, call)
    assert_as_defined(call, "triton", rest=1e-5, **SLOPES)


@pytest.mark.parametrize(
    "blocks",
    [
        {"forward": Shape(16, 16, 4, 1)},
        {"forward": Shape(64, 16, 4, 1), "of_queries": Shape(32, 32, 4, 1), "of_keys": Shape(64, 16, 4, 1)},
        {"of_queries": Shape(32, 16, 4, 1), "of_keys": Shape(32, 16, 4, 1), "of_table": Shape(32, 32, 4, 1)},
    ],
    ids=["short", "tall", "mixed"],
)
@pytest.mark.parametrize("bias", ["linear", "table"])
@pytest.mark.parametrize("mask", [Causal(), Bidirectional(), Window(21)], ids=["causal", "full", "window"])
def test_blocks_may_have_any_shape(
    mask: Any,
    bias: str,
    blocks: dict[str, Shape],
    qkv: Callable[..., Call],
    bias_of: Callable[..., Any],
    assert_as_defined: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in shapes.SHAPES:
        if key[0] in blocks:
            monkeypatch.setitem(shapes.SHAPES, key, blocks[key[0]])
    call = qkv(1, 1, 70, 16) | {"mask": mask}
    call["bias"] = bias_of(bias, call)
    assert_as_defined(call, "triton", rest=1e-5, **SLOPES)


@pytest.mark.parametrize("programs", [1, 20, 1000])
def test_a_table_s_gradient_is_summed_over_sequences_in_any_number_of_parts(
    programs: int, qkv: Callable[..., Call], assert_as_defined: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("lengthen.attention.kernels.launch"), "PROGRAMS", programs)
    call = qkv(3, 2, 20, 16, key_heads=1) | {"bias": Table(torch.randn(2, 20), torch.randn(2, 25))}
    assert_as_defined(call | {"mask": Bidirectional()}, "triton", rest=1e-5)


@pytest.mark.parametrize("own", [False, True], ids=["one decay", "a decay a head"])
@pytest.mark.parametrize(
    ("mask", "bias", "queries", "segment"),
    [
        ("causal", "none", 50, 32),  # 80 keys are in three
        ("causal", "linear", 50, 32),
        ("window", "linear", 50, 32),
        ("window", "table", 50, 32),
        ("blockwise padded", "none", 50, 32),
        ("causal", "none", 50, 80),  # in one
        ("window", "linear", 50, 80),
        ("causal", "none", 81, 80),  # in one, but the first query stands before it
        ("window", "linear", 50, 64),  # in two, the second of them short
    ],
)
def test_a_decay_is_the_reference_s(
    mask: str,
    bias: str,
    queries: int,
    segment: int,
    own: bool,
    qkv: Callable[..., Call],
    mask_of: Callable[..., Any],
    bias_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "SEGMENT", segment)
    monkeypatch.setattr(kernels, "SEGMENT_UNIT", 16)
    call = qkv(2 if " " in mask else 1, 2, queries, 16, keys=80, key_heads=1) | {"mask": mask_of(mask, 80)}
    call["bias"] = bias_of(bias, call)
    rates = 0.8 + 0.2 * torch.rand((2, 16) if own else (16,), dtype=torch.float64)
    assert_decayed(call | {"decay": Decay(rates)}, bias)


def test_a_decay_nearly_too_fast_for_a_segment_is_the_reference_s(
    qkv: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SEGMENT_UNIT", 32)
    call = qkv(1, 2, 150, 16) | {"decay": Decay(torch.linspace(2**-0.98, 1, 16, dtype=torch.float64)), "bias": None}
    assert kernels._segment(call["decay"], torch.float32) == 64  # over which a key grows by 2⁶²
    assert_decayed(call, "none")


def assert_decayed(call: Call, bias: str) -> None:
    """Check out, lse and the gradients of a call with a decay against the reference in float64."""
    grads, outs = [], []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [call[name].to(dtype).requires_grad_() for name in "qkv"]
        given: Call = call | dict(zip("qkv", leaves, strict=True))
        if bias == "linear":
            leaves.append(call["bias"].slopes.to(dtype).requires_grad_())
            given["bias"] = Linear(leaves[-1])
        out, lse = lengthen.attention(**given, backend=backend, return_lse=True)
        outs.append((out.detach(), lse.detach()))
        grads.append(torch.autograd.grad(out.square().sum() + lse.where(lse.isfinite(), 0).sum(), leaves))
    for ours, theirs in zip(*outs, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)
    for ours, theirs in zip(*grads, strict=True):
        largest = max(1.0, theirs.abs().max().item())
        within = 1e-4 if theirs.dim() == 1 else 1e-5
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=within * largest)


@pytest.mark.parametrize("through", ["out", "lse"])
@pytest.mark.parametrize("bias", ["none", "linear", "table"])
def test_a_gradient_may_come_through_one_result_alone(
    bias: str, through: str, qkv: Callable[..., Call], bias_of: Callable[..., Any]
) -> None:
    call = qkv(1, 2, 40, 16)
    call["bias"] = bias_of(bias, call)
    weight = torch.randn(1, 2, 40, dtype=torch.float64)
    grads: list[tuple[Tensor, ...]] = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [call[name].to(dtype).requires_grad_() for name in "qkv"[: 2 if through == "lse" else 3]]
        given: Call = call | dict(zip("qkv", leaves, strict=False))
        given["v"] = given["v"].to(dtype)
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
    call = qkv(2, 2, 40, 16, key_heads=1) | {"mask": Bidirectional()}
    call["bias"] = bias_of(bias, call)
    one, two = gradients(call, "triton"), gradients(call, "triton")
    assert len(one) == 7
    for name in one:
        assert torch.equal(one[name], two[name]), name


def test_only_what_asks_gets_a_gradient(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 40, 16)
    slopes, ahead = torch.tensor([0.5, 0.1]), torch.tensor([0.2, 0.3], requires_grad=True)
    out = lengthen.attention(**call, bias=Linear(slopes, ahead), mask=Bidirectional(), backend="triton")
    out.square().sum().backward()
    assert ahead.grad is not None
    assert ahead.grad.abs().min() > 0
    assert slopes.grad is None
    assert all(call[name].grad is None for name in "qkv")
    call["v"].requires_grad_()
    lengthen.attention(**call, bias=Linear(slopes), backend="triton").sum().backward()
    assert call["v"].grad is not None


def test_the_graph_may_be_used_twice(qkv: Callable[..., Call]) -> None:
    call, values = qkv(1, 2, 40, 16), torch.randn(2, 40, requires_grad=True)
    out, lse = lengthen.attention(**call, bias=Table(values), backend="triton", return_lse=True)
    loss = out.square().sum() + lse.sum()
    (first,) = torch.autograd.grad(loss, values, retain_graph=True)
    (second,) = torch.autograd.grad(loss, values)
    assert torch.equal(first, second)


def test_a_second_derivative_is_refused(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 20, 16)
    q = call.pop("q").requires_grad_()
    out = lengthen.attention(q, **call, backend="triton")
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentia|derivative"):
        grad.square().sum().backward()


@pytest.mark.parametrize(
    ("mask", "level"),
    [("causal", 1), ("causal", 32), ("causal", 200), ("window", 13), ("blockwise", 32), ("causal padded", 20)],
)
def test_a_table_may_be_level_from_some_distance_on(
    mask: str, level: int, qkv: Callable[..., Call], mask_of: Callable[..., Any]
) -> None:
    batch = 2 if "padded" in mask else 1
    call = qkv(batch, 2, 90, 16, key_heads=1) | {"mask": mask_of(mask, 90)}
    rows = torch.randn(2, min(level, 89) + 1)
    d_out, d_lse = torch.randn(batch, 2, 90, 16), torch.randn(batch, 2, 90)

    def results(backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: call[name].to(dtype).requires_grad_() for name in "qkv"}
        leaves["rows"] = rows.detach().to(dtype).requires_grad_()
        last = leaves["rows"][:, -1:].expand(-1, 90 - rows.shape[1])
        bias = Table(torch.cat((leaves["rows"], last), dim=1), level=level)
        out, lse = lengthen.attention(**call | leaves_of(leaves), bias=bias, backend=backend, return_lse=True)
        loss = (out * d_out).sum() + (lse.where(lse.isfinite(), 0) * d_lse).sum()
        return {"out": out, "lse": lse} | dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))

    def leaves_of(leaves: dict[str, Tensor]) -> Call:
        return {name: leaves[name] for name in "qkv"}

    expected = results("reference", torch.float64)
    for name, got in results("triton", torch.float32).items():
        torch.testing.assert_close(got.double(), expected[name], rtol=1e-4, atol=1e-4, msg=name)


def test_far_values_of_a_level_table_are_neither_read_nor_given_a_gradient(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 150, 16)
    values = torch.randn(2, 150)
    values[:, 20:] = values[:, 20:21]
    plain = lengthen.attention(**call, bias=Table(values), backend="triton")
    values = values.clone()
    values[:, 20 + 64 :] = torch.nan  # what a whole block of queries sees from afar
    values.requires_grad_()
    out = lengthen.attention(**call, bias=Table(values, level=20), backend="triton")
    torch.testing.assert_close(out, plain)
    (gradient,) = torch.autograd.grad(out.square().sum(), values)
    assert bool((gradient[:, :21] != 0).all())
    assert not gradient[:, 21:].any()
