"""The forward kernel is the reference: out and lse, whatever the shapes, the mask, the bias and the queries' place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Table, Window
from lengthen.attention import kernels

Call = dict[str, Any]
CLOSE = {"rtol": 1e-6, "atol": 1e-5}


def assert_forward(call: Call) -> None:
    """Check out and lse against the reference in float64."""
    got = lengthen.attention(**call, backend="triton", return_lse=True)
    wide = call | {name: call[name].double() for name in "qkv"}
    expected = lengthen.attention(**wide, backend="reference", return_lse=True)
    for name, ours, theirs in zip(("out", "lse"), got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def draw_call(
    data: st.DataObject,
    qkv: Callable[..., Call],
    documents: Callable[..., st.SearchStrategy[Tensor]],
    table_for: Callable[..., Table],
) -> Call:
    """Draw any call that the kernels take."""
    torch.manual_seed(data.draw(st.integers(0, 99), label="seed"))
    batch, key_heads, group = data.draw(st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 1, 2), (1, 1, 3), (3, 1, 1)]))
    head_dim = data.draw(st.sampled_from([16, 24, 40, 80, 1]), label="head_dim")
    value_dim = data.draw(st.sampled_from([None, 16, 24, 40, 3]), label="value_dim")
    queries = data.draw(st.one_of(st.just(1), st.integers(2, 75), st.sampled_from([16, 32, 64])), label="queries")
    keys = data.draw(st.one_of(st.just(queries), st.integers(1, 75), st.sampled_from([16, 32, 64])), label="keys")
    call = qkv(batch, key_heads * group, queries, head_dim, keys=keys, key_heads=key_heads, value_dim=value_dim)
    q_start = data.draw(
        st.one_of(st.none(), st.integers(-queries - 3, keys + 3), st.integers(keys + 20, keys + 60)), label="q_start"
    )
    mask: Any = data.draw(
        st.one_of(
            st.sampled_from([Causal(), Bidirectional()]),
            st.builds(Window, st.integers(1, 40)),
            st.builds(Blockwise, st.integers(1, 40)),
        ),
        label="mask",
    )
    stands = keys - queries if q_start is None else q_start
    kind = data.draw(st.sampled_from(["plain", "padded", "packed"]), label="kind")
    if kind == "packed" and stands >= 0 and stands + queries <= keys:
        mask = mask.packed(data.draw(documents(data.draw(st.sampled_from([1, batch])), keys)))
    elif kind == "padded":
        rows = data.draw(st.sampled_from([1, batch]))
        mask = mask.padded(torch.tensor([data.draw(st.integers(0, keys + 2)) for _ in range(rows)]))
    call |= {"mask": mask, "q_start": q_start}
    call["scale"] = data.draw(st.sampled_from([None, 0.3, -0.5, 0.0]), label="scale")
    call["tolerance"] = data.draw(st.sampled_from([None, 0, 1e-6]), label="tolerance")
    bias, ahead = data.draw(st.sampled_from(["none", "linear", "table"]), label="bias"), data.draw(st.booleans())
    wide = data.draw(st.sampled_from([torch.float32, torch.float64]), label="the bias's dtype")
    if bias == "linear":
        heads = key_heads * group
        slopes = 2.0 ** -torch.linspace(-1, 7, 2 * heads, dtype=wide)[torch.randperm(2 * heads)]
        call["bias"] = Linear(slopes[:heads], slopes[heads:] if ahead else None)
    elif bias == "table":
        call["bias"] = table_for(call, ahead, spare=data.draw(st.integers(0, 20)), dtype=wide)
    return call


# Examples take long here, and so would making a failing one smaller.
@settings(max_examples=1000, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_is_the_reference_for_any_call(
    data: st.DataObject,
    qkv: Callable[..., Call],
    documents: Callable[..., st.SearchStrategy[Tensor]],
    table_for: Callable[..., Table],
) -> None:
    assert_forward(draw_call(data, qkv, documents, table_for))


@settings(max_examples=50, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_its_gradients_are_the_reference_s_for_any_call(
    data: st.DataObject,
    qkv: Callable[..., Call],
    documents: Callable[..., st.SearchStrategy[Tensor]],
    table_for: Callable[..., Table],
    assert_as_defined: Callable[..., None],
) -> None:
    assert_as_defined(draw_call(data, qkv, documents, table_for), "triton", rest=1e-5)
