"""A decay inside the kernels: the reference's results in any number of segments."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import lengthen
from lengthen import Decay
from lengthen.attention.backends import triton

Call = dict[str, Any]
Draw = Callable[..., Call]


def check_decayed(call: Call) -> None:
    """Check out, lse and all gradients but those of the rates, which the kernels have none for, in float64."""
    found = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [call[name].to(dtype).requires_grad_() for name in "qkv"]
        given: Call = call | dict(zip("qkv", leaves, strict=True))
        if isinstance(call["bias"], lengthen.Linear):
            leaves.append(call["bias"].slopes.to(dtype).requires_grad_())
            given["bias"] = replace(call["bias"], slopes=leaves[-1])
        out, lse = lengthen.attention(**given, backend=backend, return_lse=True)
        loss = out.square().sum() + lse.where(lse.isfinite(), 0).sum()
        found.append([out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*found, strict=True):
        largest = max(1.0, theirs[theirs.isfinite()].abs().max().item())
        allowed = 1e-4 if theirs.dim() == 1 else 1e-5  # slopes: times distances
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=allowed * largest)


@pytest.mark.parametrize(
    ("mask", "bias", "queries", "segment", "own"),
    [
        ("causal", "linear", 50, 32, False),  # 80 keys are in three
        ("window", "table", 50, 32, True),
        ("blockwise padded", "none", 50, 32, False),
        ("causal", "none", 50, 80, False),  # in one
        ("causal", "linear", 50, 80, True),
        ("causal", "none", 81, 80, False),  # in one, but the first query stands before it
        ("window", "linear", 50, 64, True),  # in two, the second of them short
    ],
)
def test_any_number_of_segments(
    mask: str, bias: str, queries: int, segment: int, own: bool, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "SEGMENT", segment)
    monkeypatch.setattr(triton, "SEGMENT_UNIT", 16)
    place = {"keys": 80, "q_start": 80 - queries, "mask": mask, "bias": bias}
    rates = 0.8 + 0.2 * torch.rand((2, 16) if own else (16,), dtype=torch.float64)
    check_decayed(draw(2 if " " in mask else 1, 2, queries, key_heads=1, **place) | {"decay": Decay(rates)})


def test_a_decay_nearly_too_fast_for_a_segment(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "SEGMENT_UNIT", 32)
    decay = Decay(torch.linspace(2**-0.98, 1, 16, dtype=torch.float64))
    assert triton.segment_of(decay, torch.float32) == 64  # over which a key grows by 2⁶²
    check_decayed(draw(1, 1, 90) | {"decay": decay})


def test_a_floor_below_all_rates_changes_nothing_but_the_segments(draw: Draw) -> None:
    rates = torch.linspace(0.9, 1, 16, dtype=torch.float64)
    assert triton.segment_of(Decay(rates, floor=0.75), torch.float32) < triton.segment_of(Decay(rates), torch.float32)
    check_decayed(draw(1, 1, 20, keys=140) | {"decay": Decay(rates, floor=0.75)})


def test_a_value_that_is_nan_shows_through_a_decay(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "SEGMENT", 32)
    monkeypatch.setattr(triton, "SEGMENT_UNIT", 16)
    call = draw(1, 1, 50) | {"decay": Decay(torch.linspace(0.9, 1, 16, dtype=torch.float64))}
    call["v"][0, 0, 40, 2] = torch.nan
    got, expected = (lengthen.attention(**call, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert got.isnan().nonzero()[:, 2:].tolist() == [[row, 2] for row in range(40, 50)]
