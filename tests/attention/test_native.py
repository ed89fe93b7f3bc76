"""Torch's own attention: what is given to it comes out as defined, and what it would get wrong is not given to it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes, attention
from lengthen.attention.backends import chunked, native
from lengthen.attention.op import pick
from lengthen.attention.problem import pose


def inputs(length: int = 12, dtype: torch.dtype = torch.float64, **other: int) -> dict[str, Any]:
    keys, key_heads, width = other.get("keys", length), other.get("key_heads", 4), other.get("width", 8)
    return {
        "q": torch.randn(2, 4, length, width).to(dtype),
        "k": torch.randn(2, key_heads, keys, width).to(dtype),
        "v": torch.randn(2, key_heads, keys, other.get("value_width", width)).to(dtype),
    }


def reason(call: dict[str, Any], return_lse: bool = False) -> str | None:
    return native.unfit(pose(**{"mask": Causal()} | call, needs_lse=return_lse))


FIT: dict[str, Any] = {
    "causal": lambda: inputs(),
    "causal, grouped": lambda: inputs(key_heads=2),
    "causal, one key": lambda: inputs(1),
    "both": lambda: inputs(key_heads=1) | {"mask": Bidirectional()},
    "both, fewer queries": lambda: inputs(5, keys=12) | {"mask": Bidirectional()},
    "both, queries before and after": lambda: inputs(5, keys=2) | {"mask": Bidirectional(), "q_start": -1},
    "both, places of their own": lambda: (
        inputs(3, keys=12) | {"mask": Bidirectional(), "q_start": torch.tensor([9, 2])}
    ),
    "alibi": lambda: inputs(key_heads=2) | {"bias": Linear(alibi_slopes(4))},
    "alibi, a window, fewer queries": lambda: inputs(5) | {"bias": Linear(alibi_slopes(4)), "mask": Window(3)},
    "alibi, both": lambda: (
        inputs(5, keys=12) | {"bias": Linear(alibi_slopes(4), torch.rand(4)), "mask": Bidirectional(), "q_start": 4}
    ),
    "a table, blocks": lambda: inputs() | {"bias": Table(torch.randn(4, 12)), "mask": Blockwise(4)},
}


@pytest.mark.parametrize("case", FIT)
@pytest.mark.parametrize("scale", [None, 0.7, -0.5, -3, 0])
def test_is_the_reference_wherever_it_is_fit(case: str, scale: float | None, assert_as_defined: Any) -> None:
    call = FIT[case]() | {"scale": scale}
    assert reason(call) is None
    assert_as_defined(call, backend="native", lse=False, dslopes=1e-6, dtable=1e-6, **{"dslopes ahead": 1e-6})
    assert pick(pose(**{"mask": Causal()} | call, needs_lse=False)) is native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "both"])
@pytest.mark.parametrize("scale", [None, -0.5, 0])
def test_low_precision_inputs_cost_one_rounding(dtype: torch.dtype, mask: Any, scale: float | None) -> None:
    call = inputs(60, dtype=dtype, key_heads=2) | {"mask": mask, "scale": scale}
    out = attention(**call, backend="native")
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in call.items()}
    expected = attention(**wide, backend="reference")
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=1.01 * torch.finfo(dtype).eps / 2, atol=2e-6)


class Lagging(Causal):
    """Causal, but blind to the last two keys."""

    def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(position), position - 2


def spoilt(name: str, odd: float) -> dict[str, Any]:
    call = inputs()
    call[name][0, 0, 11, 0] = odd
    return call


# Each call, what `backend="native"` says for refusing it, and whether lse is asked for.
ONLY = "it knows full attention, and causal attention of as many queries as keys"
PAIRS = "it knows a bias only as a matrix of all pairs"
BLIND = "a query may see nothing, for which it gives NaN"
ODD = "an input, a score or the sum of so many is not finite: a hidden NaN would leak"
UNFIT: dict[str, tuple[Any, str, bool]] = {
    "lse": (inputs, "it does not return lse", True),
    "a long call with a bias": (lambda: inputs(400) | {"bias": Linear(alibi_slopes(4))}, PAIRS, False),
    "a bias, queries before the keys": (
        lambda: inputs() | {"bias": Linear(alibi_slopes(4)), "q_start": -1},
        BLIND,
        False,
    ),
    "a bias, queries behind the keys": (
        lambda: inputs() | {"bias": Linear(alibi_slopes(4)), "q_start": 3, "mask": Window(2)},
        BLIND,
        False,
    ),
    "a bias, padding": (
        lambda: inputs() | {"bias": Linear(alibi_slopes(4)), "mask": Causal().padded(torch.tensor([2, 0]))},
        BLIND,
        False,
    ),
    "a table that hides": (
        lambda: inputs() | {"bias": Table(torch.randn(4, 12).masked_fill(torch.arange(12) > 3, -torch.inf))},
        ODD,
        False,
    ),
    "a decay": (lambda: inputs() | {"decay": Decay(torch.ones(8))}, "it knows no decay", False),
    "a window": (lambda: inputs() | {"mask": Window(5)}, ONLY, False),
    "blocks": (lambda: inputs() | {"mask": Blockwise(4)}, ONLY, False),
    "a causal mask of one's own": (lambda: inputs() | {"mask": Lagging()}, ONLY, False),
    "padding": (lambda: inputs() | {"mask": Bidirectional().padded(torch.tensor([2, 0]))}, ONLY, False),
    "documents": (lambda: inputs() | {"mask": Causal().packed(torch.zeros(1, 12, dtype=torch.int64))}, ONLY, False),
    "queries before the keys": (lambda: inputs() | {"q_start": -1}, ONLY, False),
    "fewer queries than keys": (lambda: inputs(1, keys=12), ONLY, False),
    "places of their own": (lambda: inputs() | {"q_start": torch.tensor([0, 0])}, ONLY, False),
    "no keys": (lambda: inputs(keys=0) | {"mask": Bidirectional()}, "there is nothing to read", False),
    "no queries": (lambda: inputs(0, keys=5) | {"mask": Bidirectional()}, "there is nothing to read", False),
    "another value width": (lambda: inputs(value_width=5), "the value width is not head_dim", False),
    "NaN in a hidden key": (lambda: spoilt("k", torch.nan), ODD, False),
    "∞ in a hidden value": (lambda: spoilt("v", torch.inf), ODD, False),
    "−∞ in a query": (lambda: spoilt("q", -torch.inf), ODD, False),
    "values that it would add to ∞": (
        lambda: inputs(100) | {"v": 1e307 * torch.ones(2, 4, 100, 8).double()},
        ODD,
        False,
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_it_would_get_wrong_is_refused_with_the_reason(case: str) -> None:
    make, why, return_lse = UNFIT[case]
    call = make()
    assert (reason(call, return_lse) or "").startswith(why)
    with pytest.raises(ValueError, match=f"backend: 'native' cannot do this call: {why}"):
        attention(**call, return_lse=return_lse, backend="native")
    assert pick(pose(**{"mask": Causal()} | call, needs_lse=return_lse)) is chunked
    got = attention(**call, return_lse=return_lse)  # left to itself, the call is made all the same
    expected = attention(**call, return_lse=return_lse, backend="reference")
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_elsewhere_nobody_looks_at_values() -> None:
    call = {name: x.to("meta") for name, x in inputs().items()}
    assert reason(call) == "it is not known to be exact on meta"


@pytest.mark.parametrize("key_heads", [4, 2])
def test_torch_compile_takes_plain_calls_into_one_graph(key_heads: int) -> None:
    call = inputs(40, key_heads=key_heads)

    def layer(q: Tensor) -> Tensor:
        return attention(q.sin(), call["k"], call["v"])

    got = torch.compile(layer, backend="eager", fullgraph=True)(call["q"])  # raises where the graph would break
    expected = attention(**call | {"q": call["q"].sin()}, backend="reference")
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_autocast_does_not_reach_it() -> None:
    call = inputs(100, torch.float32)
    expected = attention(**call, backend="native")
    with torch.autocast("cpu", torch.bfloat16):
        got = attention(**call, backend="native")
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
