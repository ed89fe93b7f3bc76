"""NaN and ±∞ go where the reference lets them go, forward and backward, and nowhere else; blind rows give nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Table, Window

Call = dict[str, Any]
Draw = Callable[..., Call]
Check = Callable[..., tuple[Tensor, Tensor]]
FLAT = Linear(torch.tensor([0.02, 0.01]))
MANY_OR_FEW = pytest.mark.parametrize("queries", [50, 3], ids=["many", "decoded"])


def results(call: Call, weight: Tensor) -> dict[str, Tensor]:
    """Return out and the gradients of q, k, v and the bias."""
    leaves = {name: call[name].detach().clone().requires_grad_() for name in "qkv"}
    given: Call = call | leaves
    if call["bias"] is not None:
        leaves["bias"] = call["bias"].tensors[0].detach().clone().requires_grad_()
        given["bias"] = type(call["bias"])(leaves["bias"])
    out = lengthen.attention(**given, backend="triton")
    return {"out": out.detach()} | dict(
        zip(leaves, torch.autograd.grad(out, list(leaves.values()), weight), strict=True)
    )


@pytest.mark.parametrize(
    ("mask", "kind", "bias", "odd"),
    [
        *((mask, "padded", "linear", torch.nan) for mask in (Causal(), Bidirectional())),
        *((mask, "packed", "none", torch.nan) for mask in (Causal(), Bidirectional())),
        (Causal(), "padded", "table", torch.inf),
        (Window(9), "packed", "linear", torch.inf),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Causal | Bidirectional | Window) else str(x),
)
def test_what_is_hidden_reaches_no_result_and_no_gradient(
    mask: Any, kind: str, bias: str, odd: float, draw: Draw
) -> None:
    # Padding, or the second of three documents, at places that blocks of 16 and 32 do not begin or end at.
    call, real = draw(1, 2, 50, key_heads=1, mask="full", bias=bias), torch.ones(50, dtype=torch.bool)
    if kind == "padded":
        call["mask"] = mask.padded(torch.tensor([21]), torch.tensor([44]))
        real[:21], real[44:] = False, False
    else:
        call["mask"] = mask.packed(torch.tensor([[0] * 19 + [19] * 8 + [27] * 23]))
        real[19:27] = False
    weight = torch.randn(1, 2, 50, 16) * real[:, None]
    expected = results(call, weight)
    for name in "qkv":
        call[name][:, :, ~real] = odd
    if kind == "padded":
        weight[:, :, ~real] = odd  # a loss of padding, too
    got = results(call, weight)
    for name in ("out", *"qkv"):
        torch.testing.assert_close(got[name][:, :, real], expected[name][:, :, real], rtol=1e-4, atol=1e-5, msg=name)
    if kind == "padded" and bias != "none":
        torch.testing.assert_close(got["bias"], expected["bias"], rtol=1e-4, atol=1e-5)


MASKS: dict[str, Any] = {
    "causal": Causal(),
    "window": Window(15),
    "full": Bidirectional(),
    "padded": Causal().padded(torch.tensor([30, 0, 17])),
    "packed": Bidirectional().packed((torch.arange(50) // 20 * 20).expand(3, -1)),
}


@pytest.mark.parametrize(("where", "mask"), [("q", "causal"), *((where, mask) for where in "kv" for mask in MASKS)])
def test_what_is_visible_shows(where: str, mask: str, draw: Draw, check_forward: Check) -> None:
    call = draw(3, 1, 50, mask="full", bias="table" if where == "k" else "linear") | {"mask": MASKS[mask]}
    # Behind some queries and ahead of others, inside and outside of windows, in padding and in another document.
    for b, odd in enumerate((torch.nan, torch.inf, -torch.inf)):
        call[where][b, 0, 25, 3] = call[where][b, 0, 33, 0] = odd
    out, _ = check_forward(call, dtype=torch.float32)
    assert not bool(out.isfinite().all())


@pytest.mark.parametrize(("where", "odd"), [("k", torch.nan), ("v", torch.nan), ("v", torch.inf)])
@pytest.mark.parametrize(
    "bias", [Linear(torch.tensor([3.0])), Table(-3.0 * torch.arange(90)[None])], ids=["linear", "table"]
)
def test_what_lies_beyond_reach_is_found(
    bias: Any, where: str, odd: float, draw: Draw, spans: Callable[[Call], Tensor], check_forward: Check
) -> None:
    call = draw(1, 1, 90) | {"tolerance": 1e-4, "bias": bias}
    assert spans(call)[0].max() > 32
    call[where][0, :, 2] = odd
    check_forward(call, dtype=torch.float32)


@MANY_OR_FEW
def test_a_key_that_is_nan_and_its_value_infinite(queries: int, draw: Draw, check_forward: Check) -> None:
    call = draw(1, 2, queries, keys=50, key_heads=1) | {"bias": FLAT}
    call["k"][0, 0, 48, 1], call["v"][0, 0, 48] = torch.nan, torch.inf
    out, lse = check_forward(call, dtype=torch.float32)
    assert bool(out[:, :, -2:].isnan().all() & lse[:, :, -2:].isnan().all())
    assert bool(out[:, :, :-2].isfinite().all())


@MANY_OR_FEW
def test_both_infinities_in_one_column_are_nan_only_for_who_sees_both(
    queries: int, draw: Draw, check_forward: Check
) -> None:
    call = draw(1, 1, queries, keys=50) | {"mask": Window(20)}
    call["v"][0, 0, 33, 1], call["v"][0, 0, 49, 1] = torch.inf, -torch.inf
    call["v"][0, 0, 45, 2] = -torch.inf
    out, _ = check_forward(call, dtype=torch.float32)
    assert out[0, 0, -1, 1].isnan()
    assert out[0, 0, -2, 1] == torch.inf
    assert bool((out[0, 0, -3:, 2] == -torch.inf).all())
    assert bool(out[..., 3:].isfinite().all())


PLACES: dict[str, tuple[Any, int, int]] = {  # a mask, where the first query stands, and which key is odd
    "far": (Causal(), 57, 2),
    "at the query": (Causal(), 57, 57),
    "beyond the last": (Causal(), 40, 43),  # of three queries the last stands at 42
    "in padding": (Causal().padded(torch.tensor([20])), 57, 19),
    "before the window": (Window(20), 57, 37),
    "before the block": (Blockwise(25), 57, 24),
}


@pytest.mark.parametrize("where", "kv")
@pytest.mark.parametrize("place", PLACES)
def test_odd_keys_and_values_when_decoding(place: str, where: str, draw: Draw, check_forward: Check) -> None:
    mask, q_start, key = PLACES[place]
    for queries, odd in ((1, torch.nan), (3, -torch.inf)):
        call = draw(1, 2, queries, keys=60, key_heads=1, q_start=q_start) | {"mask": mask, "bias": FLAT}
        call["q"][..., 3] = 1.0  # then a key of −∞ hides itself
        call[where][0, 0, key, 3] = odd
        out, _ = check_forward(call, dtype=torch.float32)
        hidden = place not in ("far", "at the query") or (where == "k" and odd == -torch.inf)
        assert bool(out.isfinite().all()) == hidden


@pytest.mark.parametrize(("key", "name"), [(52, "v"), (52, "k"), (32, "v")])
def test_of_several_decoded_queries_only_those_that_see_it_are_spoilt(
    key: int, name: str, draw: Draw, check_forward: Check
) -> None:
    call = draw(1, 2, 4, keys=60, key_heads=1, q_start=50) | {"mask": Window(20), "bias": FLAT}
    call[name][0, 0, key] = torch.nan  # ahead of two queries, or behind the window of two
    out, _ = check_forward(call, dtype=torch.float32)
    assert out.isnan().all(-1)[0, 0].tolist() == [key == 32, key == 32, key == 52, key == 52]


@MANY_OR_FEW
def test_an_odd_query_spoils_itself_alone(queries: int, draw: Draw, check_forward: Check) -> None:
    call = draw(1, 2, queries, keys=50, key_heads=1) | {"bias": Linear(torch.tensor([3.0, 1.0]))}
    call["q"][0, 0, 1, 3] = torch.nan
    out, _ = check_forward(call, dtype=torch.float32)
    assert (~out.isfinite()).any(-1).nonzero().tolist() == [[0, 0, 1]]


@MANY_OR_FEW
@pytest.mark.parametrize(
    ("case", "blind"),
    [
        ({"mask": Causal().padded(torch.tensor([0, 50]))}, [0, 1]),
        ({"q_start": -50}, [1, 1]),
        ({"q_start": 80, "mask": Window(20)}, [1, 1]),
        ({"q_start": 0, "mask": Window(9).padded(torch.tensor([0, 2]))}, [0, 2]),  # of the second, two rows
    ],
    ids=["all is padding", "before all keys", "past the window", "some are padding"],
)
def test_who_sees_nothing_gets_nothing(
    case: Call, blind: list[int], queries: int, draw: Draw, check_forward: Check
) -> None:
    out, lse = check_forward(draw(2, 1, queries, keys=50, bias="linear") | case)
    unseen = lse == -torch.inf
    assert unseen.sum((1, 2)).tolist() == [x if x == 2 else x * queries for x in blind]
    assert not out[unseen].any()
    assert bool((out[~unseen] != 0).any(-1).all())


@MANY_OR_FEW
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_table_may_hide_keys(mask: str, queries: int, draw: Draw, check_forward: Check) -> None:
    values = torch.randn(2, 50)
    values[0, 10:] = values[0, 3] = -torch.inf
    values[1, ::2] = -torch.inf
    out, lse = check_forward(draw(1, 2, queries, keys=50, mask=mask) | {"bias": Table(values)})
    assert bool(out.isfinite().all())
    if queries == 50 and mask == "causal":  # the second head's first query sees a hidden key alone
        assert bool((lse[:, 1, 0] == -torch.inf).all())
        assert not out[:, 1, 0].any()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf], ids=str)
def test_a_table_that_is_not_finite_spoils_those_distances(odd: float, draw: Draw, check_forward: Check) -> None:
    values = torch.randn(1, 60)
    values[0, 40] = odd
    out, _ = check_forward(draw(1, 1, 60) | {"bias": Table(values)}, dtype=torch.float32)
    assert bool(out[0, 0, :40].isfinite().all())
    assert not bool(out[0, 0, 40:].isfinite().any())


def test_the_mean_of_large_values_is_one_of_them(draw: Draw) -> None:
    call = draw(1, 1, 70) | {"bias": Linear(torch.tensor([0.01]))}
    call["v"] = torch.full_like(call["v"], 1e37)  # the sum of 70 is past what float32 holds
    torch.testing.assert_close(lengthen.attention(**call, backend="triton"), call["v"], rtol=1e-4, atol=0)
