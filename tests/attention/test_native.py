"""Torch's own attention: what is given to it comes out as defined, and what it would get wrong is not given to it."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes, attention
from lengthen.attention import chunked, native

MASKS: dict[str, Any] = {
    "causal": Causal(),
    "both": Bidirectional(),
    "window": Window(5),
    "blockwise": Blockwise(4),
    "padded": Bidirectional().padded(torch.tensor([2, 0])),
    "packed": Causal().packed(torch.tensor([[0, 0, 0, 3, 3, 3, 3, 7, 7, 7, 7, 7]])),
}


def inputs(length: int = 12, dtype: torch.dtype = torch.float64, **other: int) -> dict[str, Tensor]:
    keys, key_heads, width = other.get("keys", length), other.get("key_heads", 4), other.get("width", 8)
    return {
        "q": torch.randn(2, 4, length, width).to(dtype),
        "k": torch.randn(2, key_heads, keys, width).to(dtype),
        "v": torch.randn(2, key_heads, keys, other.get("value_width", width)).to(dtype),
    }


def reason(call: dict[str, Any], return_lse: bool = False, by_choice: bool = False) -> str:
    filled = {"bias": None, "decay": None, "mask": Causal(), "scale": 0.3} | call
    filled = {"q_start": filled["k"].shape[2] - filled["q"].shape[2]} | filled
    return native.unfit(**filled, return_lse=return_lse, by_choice=by_choice)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_is_the_reference_wherever_it_is_fit(data: st.DataObject, assert_as_defined: Any) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    queries, keys = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([12, 12, 9]))
    mask = MASKS[data.draw(st.sampled_from(list(MASKS)))]
    q_start = data.draw(st.one_of(st.none(), st.integers(-2, 14)))
    stands = keys - queries if q_start is None else q_start
    assume(mask.document_starts is None or (keys == 12 and stands >= 0 and stands + queries <= 12))
    sizes = {"keys": keys, "key_heads": data.draw(st.sampled_from([1, 2, 4])), "width": data.draw(st.integers(1, 4))}
    call: dict[str, Any] = inputs(queries, **sizes, value_width=data.draw(st.integers(1, 4))) | {"mask": mask}
    call |= {"q_start": q_start, "scale": data.draw(st.sampled_from([None, 0.7, -0.5]))}
    call["bias"] = data.draw(
        st.sampled_from([None, Linear(alibi_slopes(4), alibi_slopes(4).flip(0)), Table(torch.randn(4, 30))])
    )
    rates = torch.rand(*data.draw(st.sampled_from([(), (4,)])), sizes["width"], dtype=torch.float64) * 0.3 + 0.7
    call["decay"] = data.draw(st.sampled_from([None, Decay(rates)]))
    fit = call | {"scale": call["scale"] or 0.3, "q_start": stands}
    assume(not reason(fit))
    detached = call["bias"]  # gradients of a bias are for the chunked backend
    expected = attention(**call, backend="reference")
    torch.testing.assert_close(attention(**call, backend="native"), expected, rtol=1e-10, atol=1e-10)
    if detached is None:
        assert_as_defined(call, backend="native", lse=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", [None, Linear(alibi_slopes(4))], ids=["none", "alibi"])
def test_low_precision_inputs_cost_one_rounding(dtype: torch.dtype, mask: str, bias: Any) -> None:
    call = inputs(dtype=dtype, key_heads=2) | {"mask": MASKS[mask], "bias": bias}
    if mask == "padded":
        call["mask"] = Bidirectional().padded(torch.tensor([0, 0]))
    out = attention(**call, backend="native")
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in call.items()}
    expected = attention(**wide, backend="reference")
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=1.01 * torch.finfo(dtype).eps / 2, atol=1e-6)


# Each call, the word that `backend="native"` gives for refusing it, and whether lse is asked for.
NAN = inputs()
NAN["k"][0, 0, 11, 0] = torch.nan
INFINITE = inputs()
INFINITE["v"][0, 0, 11, 0] = torch.inf
HIDING = Table(torch.full((4, 12), -torch.inf))
HIDING.values[:, 3:] = 0
UNFIT: dict[str, tuple[dict[str, Any], str, bool]] = {
    "lse": (inputs(), "it does not return lse", True),
    "a decay ahead of the query": (
        inputs() | {"decay": Decay(torch.ones(8)), "mask": Bidirectional()},
        "it knows no decay for keys ahead of the query",
        False,
    ),
    "a fast decay": (
        inputs() | {"decay": Decay(torch.full((8,), 0.1))},
        "the decay's powers would come too near",
        False,
    ),
    "a decay and a key that would overflow with it": (
        inputs() | {"decay": Decay(torch.full((8,), 0.5)), "scale": 1e299},
        "an input is not finite, and it would let hidden keys leak",
        False,
    ),
    "slopes' gradient": (
        inputs() | {"bias": Linear(torch.ones(4, requires_grad=True))},
        "the bias needs a gradient, and its own is not deterministic",
        False,
    ),
    "ahead's gradient": (
        inputs() | {"bias": Table(torch.ones(4, 12), torch.ones(4, 12, requires_grad=True))},
        "the bias needs a gradient, and its own is not deterministic",
        False,
    ),
    "blind queries": (
        inputs() | {"mask": Causal().padded(torch.tensor([0, 1]))},
        "some query sees no key",
        False,
    ),
    "queries before the keys": (inputs() | {"q_start": -1}, "some query sees no key", False),
    "no keys": (inputs(keys=0), "there is nothing to read", False),
    "no queries": (inputs(length=0, keys=5), "there is nothing to read", False),
    "NaN in a hidden key": (NAN, "an input is not finite, and it would let hidden keys leak", False),
    "∞ in a hidden value": (INFINITE, "an input is not finite, and it would let hidden keys leak", False),
    "a table that hides": (inputs() | {"bias": HIDING}, "the bias is not finite", False),
    "NaN beside a bias": (
        NAN | {"bias": Linear(torch.ones(4))},
        "an input is not finite, and it would let hidden keys leak",
        False,
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_it_would_get_wrong_is_refused_with_the_reason(case: str) -> None:
    call, why, return_lse = UNFIT[case]
    assert reason(call, return_lse).startswith(why)
    assert reason(call, return_lse, by_choice=True).startswith(why)
    with pytest.raises(ValueError, match=f"backend: 'native' cannot do this call exactly: {why}"):
        attention(**call, return_lse=return_lse, backend="native")
    got = attention(**call, return_lse=return_lse)  # left to itself, the call is made all the same
    expected = attention(**call, return_lse=return_lse, backend="reference")
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_no_score_that_overflows_leaks_from_a_hidden_key() -> None:
    # Every input is finite, but q·k is not: the key is the last, and only the last query sees it.
    call = inputs(dtype=torch.float32)
    call["q"] *= 1e20
    call["k"][:, :, :-1] *= 1e-20
    call["k"][:, :, -1] *= 1e20
    for bias in (None, Linear(alibi_slopes(4)), Table(torch.randn(4, 12))):
        for mask in (Causal(), Window(12), Blockwise(12)):
            expected = attention(**call, bias=bias, mask=mask, backend="reference")
            assert bool(expected[:, :, :-1].isfinite().all())
            got = attention(**call, bias=bias, mask=mask)
            torch.testing.assert_close(got[:, :, :-1], expected[:, :, :-1], rtol=1e-5, atol=1e-6)


def test_everything_visible_may_hold_anything() -> None:
    call = inputs() | {"mask": Bidirectional()}
    call["v"][0, 0, 3, 2] = torch.nan
    assert reason(call) == ""
    got, expected = attention(**call, backend="native"), attention(**call, backend="reference")
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert bool(got[0, 0, :, 2].isnan().all())


LONG = {"q": torch.zeros(1, 4, 2048, 8), "k": torch.zeros(1, 4, 2048, 8), "v": torch.zeros(1, 4, 2048, 8)}
TOKEN = LONG | {"q": torch.zeros(1, 4, 1, 8)}
ALIBI = Linear(alibi_slopes(4))
CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "no bias, causal, long": (LONG, "native"),
    "no bias, both sides, long": (LONG | {"mask": Bidirectional()}, "native"),
    "no bias, one token of many": (TOKEN, "native"),
    "alibi, long": (LONG | {"bias": ALIBI}, "chunked"),
    "table, long": (LONG | {"bias": Table(torch.zeros(4, 2048))}, "chunked"),
    "window, long": (LONG | {"mask": Window(100)}, "chunked"),
    "other value width, long": (LONG | {"v": torch.zeros(1, 4, 2048, 5)}, "chunked"),
    "alibi, short": (inputs() | {"bias": ALIBI}, "native"),
    "alibi, one token of many": (TOKEN | {"bias": ALIBI}, "native"),
    "learned slopes, short": (inputs() | {"bias": Linear(torch.ones(4, requires_grad=True))}, "chunked"),
    "decay, short": (inputs() | {"decay": Decay(torch.ones(8))}, "native"),
    "decay, long": (LONG | {"decay": Decay(torch.full((8,), 0.9))}, "chunked"),
    "lse, short": (inputs() | {"return_lse": True}, "chunked"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_choice(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for module in (native, chunked):

        def spy(*args: Any, of: Any = module.attention, name: str = module.__name__, **options: Any) -> Any:
            called.append(name.rpartition(".")[2])
            return of(*args, **options)

        monkeypatch.setattr(module, "attention", spy)
    call, expected = CHOICES[case]
    attention(**call)
    assert called == [expected]


@pytest.mark.parametrize("backend", ["native", "chunked", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_neighbours_4000_keys_away_stay_apart_in_16_bits(backend: str | None, dtype: torch.dtype) -> None:
    # Held in bfloat16, distances around 4,000 are multiples of 16 (in float16, of 2): ties where e^(−m) lies between.
    q = torch.zeros(1, 8, 1, 16, dtype=dtype)
    k, v = torch.zeros(1, 8, 100, 16, dtype=dtype), torch.eye(100, 16, dtype=dtype).expand(1, 8, -1, -1).flip(2)
    out = attention(q, k, v, bias=Linear(alibi_slopes(8)), q_start=4_000, backend=backend)[0, :, 0].double()
    slopes = alibi_slopes(8).double().unsqueeze(1)
    weights = torch.softmax(-slopes * torch.arange(100), dim=1)[:, :16]  # nearest key first
    torch.testing.assert_close(out, weights, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("backend", ["native", "chunked", None])
def test_alibi_in_bfloat16_at_length_4096(backend: str | None) -> None:
    q, k, v = (torch.randn(1, 8, n, 32).bfloat16() for n in (48, 4096, 4096))
    bias = Linear(alibi_slopes(8))
    out = attention(q, k, v, bias=bias, tolerance=0, backend=backend).double()
    expected = attention(q.double(), k.double(), v.double(), bias=bias, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1.01 * 2**-8, atol=1e-5)


@pytest.mark.parametrize("decay", [None, Decay(torch.linspace(0.99, 1, 8, dtype=torch.float64), floor=0.99)])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_torch_compile_takes_plain_calls_into_one_graph(decay: Decay | None, key_heads: int) -> None:
    call: dict[str, Any] = inputs(40, key_heads=key_heads) | {"decay": decay}

    def layer(q: Tensor) -> Tensor:
        return attention(q.sin(), call["k"], call["v"], decay=decay)

    got = torch.compile(layer, backend="eager", fullgraph=True)(call["q"])  # raises where the graph would break
    expected = attention(**call | {"q": call["q"].sin()}, backend="reference")
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
