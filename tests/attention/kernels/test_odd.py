"""What is not finite goes where the reference lets it go, and nowhere else; rows that see nothing give nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Table, Window

# The interpreter takes a maximum by NumPy's nanmax.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
Call = dict[str, Any]


def assert_like_reference(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Check out and lse against the reference in the same dtype, where weights vanish at the same distance."""
    got = lengthen.attention(**call, backend="triton", return_lse=True)
    expected = lengthen.attention(**call, backend="reference", return_lse=True)
    for name, ours, theirs in zip(("out", "lse"), got, expected, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    return got


MASKS: dict[str, Any] = {
    "causal": Causal(),
    "window": Window(15),
    "blockwise": Blockwise(12),
    "full": Bidirectional(),
    "padded": Causal().padded(torch.tensor([30, 0, 17])),
    "packed": Bidirectional().packed((torch.arange(50) // 20 * 20).expand(3, -1)),
}


@pytest.mark.parametrize("where", "qkv")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", ["linear", "table"])
def test_odd_inputs_reach_whom_they_would_reach_in_the_reference(
    where: str, mask: str, bias: str, qkv: Callable[..., Call], bias_of: Callable[..., Any]
) -> None:
    call = qkv(3, 1, 50, 16) | {"mask": MASKS[mask]}
    call["bias"] = bias_of(bias, call)
    # Behind some queries and ahead of others, inside and outside of windows, in padding and in another document.
    for b, odd in enumerate((torch.nan, torch.inf, -torch.inf)):
        call[where][b, 0, 25, 3] = call[where][b, 0, 33, 0] = odd
    out, _ = assert_like_reference(call)
    assert not bool(out.isfinite().all())


@pytest.mark.parametrize("odd", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("where", "kv")
@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "full"])
def test_odd_inputs_beyond_reach_are_found(
    odd: float, where: str, mask: Any, qkv: Callable[..., Call], share_read: Callable[..., Any]
) -> None:
    call = qkv(1, 1, 90, 16) | {"bias": Linear(torch.tensor([3.0])), "mask": mask, "tolerance": 1e-4}
    assert share_read(call).max() < 0.7
    call[where][0, :, 2] = odd
    assert_like_reference(call)


def test_both_infinities_in_one_column_are_nan_only_for_who_sees_both(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 50, 16) | {"mask": Window(20)}
    call["v"][0, 0, 10, 1], call["v"][0, 0, 20, 1] = torch.inf, -torch.inf
    out, _ = assert_like_reference(call)
    column = out[0, 0, :, 1]
    assert bool((column[10:20] == torch.inf).all())
    assert bool(column[20:30].isnan().all())
    assert bool((column[30:40] == -torch.inf).all())
    assert bool(column[40:].isfinite().all())
    assert bool(out[..., [0, *range(2, 16)]].isfinite().all())


def test_a_value_of_no_weight_is_nan_if_it_is_infinite_as_zero_times_infinity_is(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 150, 16) | {"bias": Linear(torch.tensor([2.0]))}
    call["v"][0, 0, 0, 0] = torch.inf
    out, _ = assert_like_reference(call)
    assert bool(out[0, 0, :20, 0].isinf().all())
    assert bool(out[0, 0, 80:, 0].isnan().all())


@pytest.mark.parametrize("bias", ["none", "linear", "table"])
@pytest.mark.parametrize("kind", [Causal(), Window(9), Blockwise(7), Bidirectional()], ids=["c", "w", "b", "f"])
def test_who_sees_nothing_gets_nothing(
    kind: Any, bias: str, qkv: Callable[..., Call], bias_of: Callable[..., Any], gradients: Callable[..., Any]
) -> None:
    call = qkv(2, 1, 40, 16) | {"mask": kind.padded(torch.tensor([40, 21]))}  # one sequence is nothing but padding
    call["bias"] = bias_of(bias, call)
    found = gradients(call, "triton")
    blind = torch.arange(40) < torch.tensor([40, 21])[:, None]
    blind = blind[:, None]
    assert bool((found["out"][blind] == 0).all())
    assert bool((found["lse"][blind] == -torch.inf).all())
    assert bool((found["out"][~blind] != 0).any(-1).all())
    assert bool(found["lse"][~blind].isfinite().all())
    for name in ("dq", "dk", "dv"):
        assert bool((found[name][blind] == 0).all()), name
        assert bool(found[name].isfinite().all()), name


@pytest.mark.parametrize("mask", [Causal(), Bidirectional(), Window(30)], ids=["causal", "full", "window"])
def test_a_table_may_hide_keys(mask: Any, qkv: Callable[..., Call]) -> None:
    values = torch.randn(2, 60)
    values[0, 10:] = values[0, 3] = -torch.inf
    values[1, ::2] = -torch.inf
    call = qkv(1, 2, 60, 16) | {"bias": Table(values), "mask": mask}
    out, lse = assert_like_reference(call)
    assert bool(out.isfinite().all())
    if not isinstance(mask, Bidirectional):  # the first query of the second head sees itself alone, and that is hidden
        assert bool((lse[:, 1, 0] == -torch.inf).all())
        assert bool((out[:, 1, 0] == 0).all())


@pytest.mark.parametrize("odd", [torch.nan, torch.inf], ids=str)
def test_a_table_that_is_not_finite_spoils_those_distances(odd: float, qkv: Callable[..., Call]) -> None:
    values = torch.randn(1, 60)
    values[0, 40] = odd
    out, _ = assert_like_reference(qkv(1, 1, 60, 16) | {"bias": Table(values)})
    assert bool(out[0, 0, :40].isfinite().all())
    assert not bool(out[0, 0, 40:].isfinite().any())
