"""The definition itself, against torch's own attention and a loop that follows the formula word by word."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes, attention

BATCH, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 2, 4, 2, 3, 5


def inputs(queries: int, keys: int) -> list[Tensor]:
    return [
        torch.randn(BATCH, HEADS, queries, WIDTH, dtype=torch.float64),
        torch.randn(BATCH, KEY_HEADS, keys, WIDTH, dtype=torch.float64),
        torch.randn(BATCH, KEY_HEADS, keys, VALUE_WIDTH, dtype=torch.float64),
    ]


def by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Any, rates: Any, key_start: list[int], q_start: int) -> Any:
    """Causal attention with Python's own floats: for each sequence, head, query and key."""
    out, lse = torch.zeros(*q.shape[:3], v.shape[3]).double(), torch.full(q.shape[:3], -torch.inf).double()
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            shared = h * k.shape[1] // q.shape[1]
            for n in range(q.shape[2]):
                i = q_start + n
                weights = {}
                for j in range(key_start[b], min(i + 1, k.shape[2])):
                    score = 0.0
                    for f in range(q.shape[3]):
                        faded = 1.0 if rates is None else rates[h][f] ** (i - j)
                        score += q[b, h, n, f].item() * k[b, shared, j, f].item() * faded
                    weights[j] = math.exp(score / math.sqrt(q.shape[3]) + bias(h, i - j))
                if weights:
                    total = sum(weights.values())
                    lse[b, h, n] = math.log(total)
                    out[b, h, n] = sum(w / total * v[b, shared, j] for j, w in weights.items())
    return out, lse


@pytest.mark.parametrize("padding", [[0, 0], [3, 9], [8, 1]])
@pytest.mark.parametrize("q_start", [-2, 0, 3, 7])
@pytest.mark.parametrize("decay", [None, "shared", "each"])
@pytest.mark.parametrize("kind", ["none", "linear", "table"])
def test_is_the_formula(kind: str, decay: str | None, q_start: int, padding: list[int]) -> None:
    q, k, v = inputs(4, 9)
    slopes, values = torch.rand(HEADS).double(), torch.randn(HEADS, 11).double()
    rates = 0.3 + 0.7 * torch.rand(HEADS, WIDTH).double()
    rates = rates[:1].expand(HEADS, -1) if decay == "shared" else rates
    bias: Any = {
        "none": (None, lambda h, d: 0.0),
        "linear": (Linear(slopes), lambda h, d: -slopes[h].item() * d),
        "table": (Table(values), lambda h, d: values[h, d].item()),
    }[kind]
    given = {"shared": rates[0], "each": rates}
    out, lse = attention(
        q,
        k,
        v,
        bias=bias[0],
        decay=None if decay is None else Decay(given[decay]),
        mask=Causal().padded(torch.tensor(padding)),
        q_start=q_start,
        return_lse=True,
        backend="reference",
    )
    expected = by_hand(q, k, v, bias[1], None if decay is None else rates.tolist(), padding, q_start)
    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "both"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_against_torch(mask: Any, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs(12, 12))
    out = attention(q, k, v, mask=mask, backend="reference")
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=isinstance(mask, Causal), enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("scale", [0.25, -2, 0])
def test_against_torch_with_a_bias_and_a_scale(scale: float) -> None:
    q, k, v = inputs(6, 10)
    bias = Linear(alibi_slopes(HEADS).double(), alibi_slopes(HEADS).double().flip(0))
    out = attention(q, k, v, bias=bias, mask=Bidirectional(), scale=scale, backend="reference")
    distance = torch.arange(4, 10)[:, None] - torch.arange(10)  # the last query stands at the last key
    slopes = torch.where(distance >= 0, bias.slopes[:, None, None], bias.ahead[:, None, None])
    dense = -slopes * distance.abs()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, scale=scale, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_lse_is_the_logarithm_of_the_sum() -> None:
    q, k, v = inputs(6, 6)
    lse = attention(q, k, v, mask=Window(3), return_lse=True, backend="reference")[1]
    score = q @ k.repeat_interleave(2, dim=1).mT / math.sqrt(WIDTH)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    expected = score.exp().masked_fill((distance < 0) | (distance > 2), 0).sum(dim=-1).log()
    torch.testing.assert_close(lse, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "mask", [Window(4), Blockwise(3), Causal().padded(torch.tensor([3]))], ids=["window", "blockwise", "padded"]
)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_hidden_key_has_no_influence_whatever_it_holds(where: str, odd: float, mask: Any) -> None:
    q, k, v = inputs(10, 10)
    expected = attention(q, k, v, mask=mask, return_lse=True, backend="reference")
    first, last = mask.interval(10, 10, 0, torch.device("cpu"))
    for j in range(10):
        spoilt = {"k": k.clone(), "v": v.clone()}
        spoilt[where][0, 1, j, 0] = odd
        got = attention(q, **spoilt, mask=mask, return_lse=True, backend="reference")
        hidden = ((j < first[0]) | (j > last[0])).expand(BATCH, HEADS, -1).clone()
        hidden[1], hidden[0, :2] = True, True  # the other sequence, and the heads of the other key head
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours[hidden], theirs[hidden], rtol=0, atol=1e-14)
        seen = ~hidden
        if where == "v":
            assert bool((~got[0][seen][:, 0].isfinite()).all())
            assert bool(got[0][seen][:, 1:].isfinite().all())  # features stay apart
        elif math.isnan(odd):
            assert bool(got[0][seen].isnan().all())
            assert bool(got[1][seen].isnan().all())
        elif seen.any():
            # A score of ±∞: the row is lost where it is +∞, the key where it is −∞.
            positive = (q[..., 0] * odd > 0)[seen]
            assert bool(got[0][seen][positive].isnan().all())
            assert bool((got[1][seen][positive] == torch.inf).all())
            assert bool(got[0][seen][~positive].isfinite().all())


@pytest.mark.parametrize("kind", ["mask", "keys", "scores"])
def test_seeing_nothing_gives_zero_and_minus_infinity(kind: str) -> None:
    q, k, v = inputs(4, 4)
    bias = None
    mask: Any = Causal()
    if kind == "mask":
        mask = Causal().padded(torch.tensor([4, 4]))
    elif kind == "keys":
        k, v = k[:, :, :0], v[:, :, :0]
    else:
        bias = Table(torch.full((HEADS, 4), -torch.inf))
    out, lse = attention(q, k, v, bias=bias, mask=mask, return_lse=True, backend="reference")
    assert out.shape == (BATCH, HEADS, 4, VALUE_WIDTH)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_are_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs(20, 20))
    bias = Linear(alibi_slopes(HEADS))
    out, lse = attention(q, k, v, bias=bias, return_lse=True, backend="reference")
    wide, wide_lse = attention(q.double(), k.double(), v.double(), bias=bias, return_lse=True, backend="reference")
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(lse.double(), wide_lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.double(), wide, rtol=1.01 * torch.finfo(dtype).eps / 2, atol=1e-6)
