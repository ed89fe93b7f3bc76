"""The forward kernel is the reference: out and lse, whatever the shapes, the mask, the bias and the queries' place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import lengthen
from lengthen import Bidirectional, Causal, Linear, Table, Window
from lengthen.attention import kernels

Call = dict[str, Any]


def assert_forward(call: Call) -> None:
    """Check out and lse against the reference in float64."""
    got = lengthen.attention(**call, backend="triton", return_lse=True)
    wide = call | {name: call[name].double() for name in "qkv"}
    expected = lengthen.attention(**wide, backend="reference", return_lse=True)
    assert got[0].dtype == call["q"].dtype
    assert got[1].dtype == torch.float32
    for name, ours, theirs in zip(("out", "lse"), got, expected, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=1e-6, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


# Examples take long here, and so would making a failing one smaller.
@settings(max_examples=30, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_is_the_reference_for_any_call(data: st.DataObject, any_call: Callable[..., Call]) -> None:
    assert_forward(any_call(data))


@pytest.mark.parametrize("head_dim", [1, 16, 17, 24, 40, 80, 130, 256])
def test_any_head_dim_up_to_256(head_dim: int, qkv: Callable[..., Call]) -> None:
    assert_forward(qkv(1, 1, 40, head_dim, value_dim=16) | {"bias": Linear(torch.tensor([0.3]))})
    assert_forward(qkv(1, 1, 40, 16, value_dim=head_dim) | {"bias": Table(torch.randn(1, 40)), "mask": Bidirectional()})


def test_of_16_bits_out_is_rounded_once(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 40, 16, dtype=torch.float16) | {"bias": Linear(torch.tensor([0.1]))}
    out = lengthen.attention(**call, backend="triton")
    wide = call | {name: call[name].double() for name in "qkv"}
    expected = lengthen.attention(**wide, backend="reference")
    assert out.dtype == torch.float16
    # Weights are rounded to 16 bits for their product with the values, and the result is again.
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("q_start", [-45, -39, -13, 0, 7, 59, 60, 61, 95, 400])
@pytest.mark.parametrize("mask", [Causal(), Window(25), Bidirectional()], ids=["causal", "window", "full"])
def test_queries_may_stand_anywhere(mask: Any, q_start: int, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 40, 16, keys=60) | {"mask": mask, "q_start": q_start}
    assert_forward(call | {"bias": Linear(torch.tensor([0.4]), torch.tensor([0.1]))})


def test_one_query_reads_a_cache(qkv: Callable[..., Call]) -> None:
    call = qkv(2, 4, 1, 16, keys=90, key_heads=2)
    for bias in (None, Linear(torch.tensor([2.0, 0.5, 0.1, 0.0])), Table(torch.randn(4, 90))):
        for mask in (Causal(), Window(33), Causal().padded(torch.tensor([0, 77]))):
            assert_forward(call | {"bias": bias, "mask": mask})


def test_a_table_needs_to_cover_only_what_is_seen(qkv: Callable[..., Call]) -> None:
    # Blocks hold distances that no query sees: nothing may be read there, not even past the table's own row.
    values = torch.full((3, 40), torch.nan)
    values[1, :9] = torch.randn(9)
    assert_forward(qkv(1, 1, 60, 16) | {"mask": Window(9), "bias": Table(values[1:2, :9])})


def test_many_documents_are_read_one_by_one(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 60, 16) | {"bias": Linear(torch.tensor([0.2]))}
    starts = torch.arange(60) // 13 * 13
    got = lengthen.attention(**call | {"mask": Bidirectional().packed(starts[None])}, backend="triton")
    for start in starts.unique().tolist():
        part = call | {name: call[name][:, :, start : start + 13] for name in "qkv"}
        alone = lengthen.attention(**part, mask=Bidirectional(), backend="reference")
        torch.testing.assert_close(got[:, :, start : start + 13], alone, rtol=0, atol=1e-5)


def test_only_blocks_with_something_to_see_are_read(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 96, 16)
    spans = kernels.spans(**call, mask=Window(20))[:, 0, 0].tolist()
    assert spans == [[0, 0, 32], [32, 64, 96]]  # first keys 0, 13, 45 in blocks of 16
    spans = kernels.spans(**call, mask=Causal().packed((torch.arange(96) // 48 * 48)[None]))[:, 0, 0].tolist()
    assert spans == [[0, 0, 48], [32, 64, 96]]
    assert kernels.spans(**call, mask=Bidirectional())[:, 0, 0].tolist() == [[0, 0, 0], [96, 96, 96]]
