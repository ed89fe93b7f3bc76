"""What the forward cannot be trusted with is found and done again; steep slopes and far places are no reason to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Linear, Table, Window

Call = dict[str, Any]
Draw = Callable[..., Call]
Check = Callable[..., Any]
Flags = Callable[[Call], Tensor]


@pytest.mark.parametrize(("near", "far"), [(160.0, 240.0), (60.0, 80.0)], ids=["flagged", "trusted"])
def test_a_far_key_that_outweighs_all_before_it_gets_its_gradient(
    near: float, far: float, draw: Draw, check: Check, flags: Flags
) -> None:
    # Blocks read from the nearest key on: 160 is more than a weight can hold, and the 240 behind it wins.
    call = draw(1, 1, 160) | {"bias": Linear(torch.tensor([0.02])), "scale": 1.0}
    call["q"], call["k"] = 0.01 * call["q"], 0.01 * call["k"]
    call["q"][..., 0], call["k"][..., 0] = 1.0, 0.0
    call["k"][0, 0, [100, 10], 0] = torch.tensor([near, far])
    assert bool(flags(call)[0].any()) == (far > 200)
    check(call, rest=5e-5, dslopes=1e-3)


@pytest.mark.parametrize("slope", [1e3, 1e6])
@pytest.mark.parametrize("mask", ["causal", "full", "window"])
def test_a_slope_may_be_steep(slope: float, mask: str, draw: Draw, check: Check) -> None:
    # Each query of the first head sees itself alone, so that its dv is d_out.
    check(draw(1, 2, 50, mask=mask) | {"bias": Linear(torch.tensor([slope, 0.1]))}, dslopes=1e-3)


@pytest.mark.parametrize(("q_start", "bias"), [(60, "table"), (60, "linear"), (4000, "linear")])
def test_queries_that_stand_far_behind_all_keys_are_trusted(
    q_start: int, bias: str, draw: Draw, check: Check, flags: Flags
) -> None:
    call = draw(1, 2, 40, keys=50) | {"q_start": q_start}
    slopes = torch.tensor([0.5, 0.01])
    call["bias"] = Linear(slopes) if bias == "linear" else Table(-slopes[:, None] * torch.arange(q_start + 40))
    assert not flags(call).any()
    check(call, rest=3e-4, dslopes=1e-2)  # scores of −2,000 are rounded


def test_queries_that_see_nothing_are_trusted(draw: Draw, flags: Flags) -> None:
    call = draw(2, 2, 70) | {"bias": Linear(torch.tensor([0.5, 0.01]))}
    assert not flags(call | {"mask": Window(20).padded(torch.tensor([0, 55]))}).any()
    assert not flags(call | {"q_start": -50}).any()


def test_one_odd_row_repairs_only_its_head(
    draw: Draw, flags: Flags, spans: Callable[[Call], Tensor], check_forward: Check
) -> None:
    call = draw(2, 3, 100) | {"bias": Linear(torch.tensor([3.0, 3.0, 3.0])), "tolerance": 1e-3}
    before = spans(call)
    call["q"][1, 2, 45, 3] = torch.nan
    lost, odd = flags(call)
    assert odd.nonzero().tolist() == [[1, 2, 1]]
    assert lost.nonzero().tolist() in ([], [[1, 2, 1]])
    after = spans(call)
    changed = (after != before).any(0).any(-1)  # who is repaired reads everything
    assert changed.nonzero().tolist() == [[1, 2]]
    check_forward(call, dtype=torch.float32)


def test_repaired_blocks_note_what_they_read(draw: Draw, spans: Callable[[Call], Tensor]) -> None:
    call = draw(1, 1, 100) | {"bias": Linear(torch.tensor([3.0])), "mask": Window(90), "tolerance": 1e-3}
    assert bool((spans(call)[0, 0, 0, 2:] > 32).all())
    call["v"][0, 0, 99, 0] = torch.inf
    assert spans(call)[:, 0, 0].tolist() == [[0, 0, 0, 7], [32, 64, 96, 100]]
