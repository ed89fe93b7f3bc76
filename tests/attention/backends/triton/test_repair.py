"""What the forward cannot be trusted with is found and done again: lost weights, steep slopes, rows of their own head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Bidirectional, Causal, Linear, Table, Window

Call = dict[str, Any]
Check = Callable[..., Any]
Flags = Callable[[Call], Tensor]


def with_scores(call: Call, scores: dict[int, float]) -> Call:
    """Return a call in which the last query scores so much at these distances, and about 0 elsewhere."""
    q, k = 0.01 * call["q"], 0.01 * call["k"]
    q[..., 0], k[..., 0] = 1.0, 0.0
    for distance, score in scores.items():
        k[:, :, k.shape[2] - 1 - distance, 0] = score
    return call | {"q": q, "k": k, "scale": 1.0}


@pytest.mark.parametrize("given", ["flagged", "trusted"])
def test_a_far_key_that_outweighs_all_before_it_gets_its_gradient(
    given: str, qkv: Callable[..., Call], check: Check, flags: Flags, gradients: Callable[..., dict[str, Tensor]]
) -> None:
    # Blocks read from the nearest key on: 160 is more than a weight can hold, and the 240 behind it wins.
    scores = {60: 160.0, 170: 240.0} if given == "flagged" else {60: 60.0, 170: 80.0}
    call = with_scores(qkv(1, 1, 192), scores) | {"bias": Linear(torch.tensor([0.02]))}
    assert bool(flags(call)[0].any()) == (given == "flagged")
    check(call, dslopes=1e-3, rest=5e-5)
    d_v = gradients(call, "triton")["dv"][0, 0]
    assert d_v.norm(dim=-1).argmax() == 192 - 1 - 170


@pytest.mark.parametrize("slope", [1e3, 1e6])
@pytest.mark.parametrize("mask", [Causal(), Bidirectional(), Window(9)], ids=["causal", "full", "window"])
def test_a_slope_may_be_steep(slope: float, mask: Any, qkv: Callable[..., Call], check: Check) -> None:
    # Each query sees itself alone, so dv is d_out; at 10⁶ the bias of its neighbours is past what float32 counts in ones.
    call = qkv(1, 2, 70) | {"bias": Linear(torch.tensor([slope, 0.1])), "mask": mask}
    check(call, dslopes=1e-3)


@pytest.mark.parametrize("bias", ["linear", "table"])
@pytest.mark.parametrize("q_start", [60, 4000])
def test_queries_that_stand_far_behind_all_keys_are_trusted(
    q_start: int, bias: str, qkv: Callable[..., Call], check: Check, flags: Flags
) -> None:
    call = qkv(1, 2, 40, keys=50) | {"q_start": q_start}
    slopes = torch.tensor([0.5, 0.01])
    call["bias"] = Linear(slopes) if bias == "linear" else Table(-slopes[:, None] * torch.arange(q_start + 40))
    assert not flags(call).any()
    check(call, rest=3e-4, dslopes=1e-2)  # scores of −2,000 are rounded


def test_queries_that_see_nothing_are_trusted(qkv: Callable[..., Call], flags: Flags) -> None:
    call = qkv(2, 2, 70) | {"bias": Linear(torch.tensor([0.5, 0.01]))}
    assert not flags(call | {"mask": Window(20).padded(torch.tensor([0, 55]))}).any()
    assert not flags(call | {"q_start": -50}).any()


def test_one_odd_row_repairs_only_its_head(
    qkv: Callable[..., Call], flags: Flags, spans: Callable[[Call], Tensor], check_forward: Check
) -> None:
    call = qkv(2, 3, 100) | {"bias": Linear(torch.tensor([3.0, 3.0, 3.0])), "tolerance": 1e-3}
    before = spans(call)
    call["q"][1, 2, 45, 3] = torch.nan
    lost, odd = flags(call)
    assert odd.nonzero().tolist() == [[1, 2, 1]]
    assert lost.nonzero().tolist() in ([], [[1, 2, 1]])
    after = spans(call)
    changed = (after != before).any(0).any(-1)  # who is repaired reads everything
    assert changed.nonzero().tolist() == [[1, 2]]
    check_forward(call, dtype=torch.float32)


def test_repaired_blocks_note_what_they_read(qkv: Callable[..., Call], spans: Callable[[Call], Tensor]) -> None:
    call = qkv(1, 1, 100) | {"bias": Linear(torch.tensor([3.0])), "mask": Window(90), "tolerance": 1e-3}
    assert bool((spans(call)[0, 0, 0, 2:] > 32).all())
    call["v"][0, 0, 99, 0] = torch.inf
    assert spans(call)[:, 0, 0].tolist() == [[0, 0, 0, 7], [32, 64, 96, 100]]
