"""NaN and ±∞ go where the reference lets them go, forward and backward, and nowhere else; blind rows give nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Table, Window

Call = dict[str, Any]
Check = Callable[..., tuple[Tensor, Tensor]]
FLAT = Linear(torch.tensor([0.02, 0.01]))


def results(call: Call, weight: Tensor, backend: str = "triton") -> dict[str, Tensor]:
    """Return out and the gradients of q, k, v and the bias."""
    leaves = {name: call[name].detach().clone().requires_grad_() for name in "qkv"}
    given: Call = call | leaves
    if call["bias"] is not None:
        leaves["bias"] = call["bias"].tensors[0].detach().clone().requires_grad_()
        given["bias"] = type(call["bias"])(leaves["bias"])
    out = lengthen.attention(**given, backend=backend)
    grads = torch.autograd.grad(out, list(leaves.values()), weight)
    return {"out": out.detach()} | dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("bias", ["none", "linear", "table"])
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "full"])
def test_what_is_hidden_reaches_no_result_and_no_gradient(
    mask: Any, kind: str, bias: str, odd: float, qkv: Callable[..., Call], bias_of: Callable[..., Any]
) -> None:
    # Padding, or the second of three documents, at places that blocks of 16 and 32 do not begin or end at.
    real = torch.ones(50, dtype=torch.bool)
    if kind == "padded":
        mask = mask.padded(torch.tensor([21]), torch.tensor([44]))
        real[:21], real[44:] = False, False
    else:
        mask = mask.packed(torch.tensor([[0] * 19 + [19] * 8 + [27] * 23]))
        real[19:27] = False
    call = qkv(1, 2, 50, key_heads=1) | {"mask": mask}
    call["bias"], weight = bias_of(bias, call), torch.randn(1, 2, 50, 16)
    weight[:, :, ~real] = 0  # who is hidden gives nothing to the bias either
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


@pytest.mark.parametrize("where", "qkv")
@pytest.mark.parametrize("mask", MASKS)
def test_what_is_visible_shows(
    where: str, mask: str, qkv: Callable[..., Call], bias_of: Callable[..., Any], check_forward: Check
) -> None:
    call = qkv(3, 1, 50) | {"mask": MASKS[mask]}
    call["bias"] = bias_of("table" if where == "k" else "linear", call)
    # Behind some queries and ahead of others, inside and outside of windows, in padding and in another document.
    for b, odd in enumerate((torch.nan, torch.inf, -torch.inf)):
        call[where][b, 0, 25, 3] = call[where][b, 0, 33, 0] = odd
    out, _ = check_forward(call, dtype=torch.float32)
    assert not bool(out.isfinite().all())


@pytest.mark.parametrize("odd", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("where", "kv")
@pytest.mark.parametrize("bias", ["linear", "table"])
def test_what_lies_beyond_reach_is_found(
    odd: float, where: str, bias: str, qkv: Callable[..., Call], spans: Callable[[Call], Tensor], check_forward: Check
) -> None:
    call = qkv(1, 1, 90) | {"tolerance": 1e-4}
    call["bias"] = Linear(torch.tensor([3.0])) if bias == "linear" else Table(-3.0 * torch.arange(90)[None])
    assert spans(call)[0].max() > 32
    call[where][0, :, 2] = odd
    check_forward(call, dtype=torch.float32)


@pytest.mark.parametrize("queries", [40, 3], ids=["many", "decoded"])
def test_a_key_that_is_nan_and_its_value_infinite(queries: int, qkv: Callable[..., Call], check_forward: Check) -> None:
    call = qkv(1, 2, queries, keys=40, key_heads=1) | {"bias": FLAT}
    call["k"][0, 0, 38, 1], call["v"][0, 0, 38] = torch.nan, torch.inf
    out, lse = check_forward(call, dtype=torch.float32)
    assert bool(out[:, :, -2:].isnan().all() & lse[:, :, -2:].isnan().all())
    assert bool(out[:, :, :-2].isfinite().all())


@pytest.mark.parametrize("queries", [50, 3], ids=["many", "decoded"])
def test_both_infinities_in_one_column_are_nan_only_for_who_sees_both(
    queries: int, qkv: Callable[..., Call], check_forward: Check
) -> None:
    call = qkv(1, 1, queries, keys=50) | {"mask": Window(20)}
    call["v"][0, 0, 33, 1], call["v"][0, 0, 49, 1] = torch.inf, -torch.inf
    call["v"][0, 0, 45, 2] = -torch.inf
    out, _ = check_forward(call, dtype=torch.float32)
    assert out[0, 0, -1, 1].isnan()
    assert out[0, 0, -2, 1] == torch.inf
    assert bool((out[0, 0, -3:, 2] == -torch.inf).all())
    assert bool(out[..., 3:].isfinite().all())


PLACES: dict[str, tuple[Any, int, int]] = {  # a mask, where the first query stands, and which key is odd
    "far": (Causal(), 77, 2),
    "at the query": (Causal(), 77, 77),
    "beyond the last": (Causal(), 40, 43),  # of three queries the last stands at 42
    "in padding": (Causal().padded(torch.tensor([20])), 77, 19),
    "before the window": (Window(20), 77, 57),
    "before the block": (Blockwise(25), 77, 49),
}


@pytest.mark.parametrize("where", "kv")
@pytest.mark.parametrize("place", PLACES)
def test_odd_keys_and_values_when_decoding(
    place: str, where: str, qkv: Callable[..., Call], check_forward: Check
) -> None:
    mask, q_start, key = PLACES[place]
    for queries, odd in ((1, torch.nan), (3, torch.nan), (3, -torch.inf)):
        call = qkv(1, 2, queries, keys=80, key_heads=1) | {"mask": mask, "q_start": q_start, "bias": FLAT}
        call["q"][..., 3] = 1.0  # then a key of −∞ hides itself
        call[where][0, 0, key, 3] = odd
        out, _ = check_forward(call, dtype=torch.float32)
        hidden = place not in ("far", "at the query") or (where == "k" and odd == -torch.inf)
        assert bool(out.isfinite().all()) == hidden


def test_of_several_decoded_queries_only_those_that_see_it_are_spoilt(
    qkv: Callable[..., Call], check_forward: Check
) -> None:
    for where, name in ((62, "v"), (62, "k"), (42, "v")):  # ahead of two queries; behind the window of two
        call = qkv(1, 2, 4, keys=80, key_heads=1) | {"mask": Window(20), "q_start": 60, "bias": FLAT}
        call[name][0, 0, where] = torch.nan
        out, _ = check_forward(call, dtype=torch.float32)
        assert out.isnan().all(-1)[0, 0].tolist() == (
            [False, False, True, True] if where == 62 else [True, True] + [False] * 2
        )


@pytest.mark.parametrize("queries", [40, 3], ids=["many", "decoded"])
def test_an_odd_query_spoils_itself_alone(queries: int, qkv: Callable[..., Call], check_forward: Check) -> None:
    call = qkv(1, 2, queries, keys=60, key_heads=1) | {"bias": Linear(torch.tensor([3.0, 1.0]))}
    call["q"][0, 0, 1, 3] = torch.nan
    out, _ = check_forward(call, dtype=torch.float32)
    assert (~out.isfinite()).any(-1).nonzero().tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("queries", [40, 3], ids=["many", "decoded"])
def test_who_sees_nothing_gets_nothing(
    queries: int, qkv: Callable[..., Call], gradients: Callable[..., dict[str, Tensor]], check_forward: Check
) -> None:
    call = qkv(2, 2, queries, keys=50, key_heads=1) | {"bias": Linear(torch.tensor([0.5, 2.0]))}
    cases = {
        "all is padding": {"mask": Causal().padded(torch.tensor([0, 50]))},
        "before all keys": {"q_start": -queries},
        "the last alone sees": {"q_start": 1 - queries},
        "past the window": {"q_start": 80, "mask": Window(20)},
        "some are padding": {"q_start": 8, "mask": Window(9).padded(torch.tensor([8, 10]))},
    }
    blind = {}
    for name, case in cases.items():
        out, lse = check_forward(call | case)
        blind[name] = lse[:, 0] == -torch.inf
        assert not out[lse == -torch.inf].any()
        assert bool((out[lse != -torch.inf] != 0).any(-1).all())
    assert blind["all is padding"].tolist() == [[False] * queries, [True] * queries]
    assert bool(blind["before all keys"].all())
    assert blind["the last alone sees"].tolist() == [[True] * (queries - 1) + [False]] * 2
    assert bool(blind["past the window"].all())
    assert blind["some are padding"].sum(1).tolist() == [0, 2]
    found = gradients(call | cases["some are padding"], "triton")
    assert not found["dq"][1, :, :2].any()
    assert all(bool(x.isfinite().all()) for name, x in found.items() if name.startswith("d"))


@pytest.mark.parametrize("queries", [60, 3], ids=["many", "decoded"])
@pytest.mark.parametrize("mask", [Causal(), Bidirectional(), Window(30)], ids=["causal", "full", "window"])
def test_a_table_may_hide_keys(mask: Any, queries: int, qkv: Callable[..., Call], check_forward: Check) -> None:
    values = torch.randn(2, 60)
    values[0, 10:] = values[0, 3] = -torch.inf
    values[1, ::2] = -torch.inf
    out, lse = check_forward(qkv(1, 2, queries, keys=60) | {"bias": Table(values), "mask": mask})
    assert bool(out.isfinite().all())
    if queries == 60 and not isinstance(mask, Bidirectional):  # the second head's first query sees a hidden key alone
        assert bool((lse[:, 1, 0] == -torch.inf).all())
        assert not out[:, 1, 0].any()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf], ids=str)
def test_a_table_that_is_not_finite_spoils_those_distances(
    odd: float, qkv: Callable[..., Call], check_forward: Check
) -> None:
    values = torch.randn(1, 60)
    values[0, 40] = odd
    out, _ = check_forward(qkv(1, 1, 60) | {"bias": Table(values)}, dtype=torch.float32)
    assert bool(out[0, 0, :40].isfinite().all())
    assert not bool(out[0, 0, 40:].isfinite().any())


def test_the_mean_of_large_values_is_one_of_them(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 70) | {"bias": Linear(torch.tensor([0.01]))}
    call["v"] = torch.full_like(call["v"], 1e37)  # the sum of 70 is past what float32 holds
    torch.testing.assert_close(lengthen.attention(**call, backend="triton"), call["v"], rtol=1e-4, atol=0)
