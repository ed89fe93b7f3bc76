"""The op beside other people's: the same projections through their attention and ours."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import MptConfig
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Window, alibi_slopes
from lengthen.positions import T5

BACKENDS = pytest.mark.parametrize("backend", [None, "chunked", "reference"])
CLOSE = {"rtol": 0, "atol": 2e-6}


@BACKENDS
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [8, 12])
def test_alibi_against_x_transformers(
    heads: int, causal: bool, backend: str | None, x_transformers: ModuleType
) -> None:
    q, k, v = torch.randn(2, heads, 50, 16), torch.randn(2, heads, 70, 16), torch.randn(2, heads, 70, 16)
    bias = x_transformers.AlibiPositionalBias(heads)(50, 70)
    expected, _ = x_transformers.Attend(causal=causal, heads=heads)(q, k, v, attn_bias=bias)
    ours = lengthen.attention(
        q, k, v, bias=Linear(alibi_slopes(heads)), mask=Causal() if causal else Bidirectional(), backend=backend
    )
    torch.testing.assert_close(ours, expected, **CLOSE)


@BACKENDS
@pytest.mark.parametrize("causal", [True, False])
def test_t5_against_x_transformers(causal: bool, backend: str | None, x_transformers: ModuleType) -> None:
    heads, length = 4, 300
    q, k, v = torch.randn(3, 2, heads, length, 16)
    method = T5(heads=heads, head_dim=16, width=64, bidirectional=not causal)
    nn.init.normal_(method.weight)
    peer = x_transformers.RelativePositionBias(scale=1.0, causal=causal, heads=heads)
    with torch.no_grad():
        peer.relative_attention_bias.weight.copy_(method.weight)
    mask = Causal() if causal else Bidirectional()
    grads = []
    for attend, weight in (
        (
            lambda: x_transformers.Attend(causal=causal, heads=heads)(q, k, v, attn_bias=peer(length, length))[0],
            peer.relative_attention_bias.weight,
        ),
        (
            lambda: lengthen.attention(q, k, v, bias=method.bias(length - 1), mask=mask, backend=backend),
            method.weight,
        ),
    ):
        out = attend()
        grads.append((out.detach(), torch.autograd.grad(out.square().sum(), weight)[0]))
    torch.testing.assert_close(grads[1][0], grads[0][0], **CLOSE)
    torch.testing.assert_close(grads[1][1], grads[0][1], rtol=1e-4, atol=1e-4)


@BACKENDS
def test_one_key_head_and_padding_against_x_transformers(backend: str | None, x_transformers: ModuleType) -> None:
    q, k, v = torch.randn(2, 8, 40, 16), torch.randn(2, 1, 40, 16), torch.randn(2, 1, 40, 16)
    start = torch.tensor([0, 13])
    bias = x_transformers.AlibiPositionalBias(8)(40, 40)
    keep = torch.arange(40) >= start[:, None]
    expected, _ = x_transformers.Attend(causal=True, heads=8)(q, k, v, mask=keep, attn_bias=bias)
    mask = Causal().padded(start)
    ours = lengthen.attention(q, k, v, bias=Linear(alibi_slopes(8)), mask=mask, backend=backend)
    torch.testing.assert_close(ours[0], expected[0], **CLOSE)
    torch.testing.assert_close(ours[1, :, 13:], expected[1, :, 13:], **CLOSE)  # what padding itself sees is no matter


@BACKENDS
@pytest.mark.parametrize("heads", [8, 12])  # 12: no power of two
def test_alibi_against_transformers_mpt(heads: int, backend: str | None) -> None:
    length, width = 60, heads * 16
    layer = MptAttention(MptConfig(d_model=width, n_heads=heads, n_layers=1)).eval()
    x = torch.randn(2, length, width)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        expected, _ = layer(x, build_mpt_alibi_tensor(heads, length), attention_mask=hidden)
        q, k, v = (part.unflatten(-1, (heads, 16)).transpose(1, 2) for part in layer.Wqkv(x).chunk(3, dim=-1))
        out = lengthen.attention(q, k, v, bias=Linear(alibi_slopes(heads)), backend=backend)
        ours = layer.out_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, expected, **CLOSE)


FLEX = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")  # as meant here


@FLEX
@BACKENDS
@pytest.mark.parametrize("mask", [Causal(), Window(20), Blockwise(16), Bidirectional()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("alibi", [False, True])
def test_against_flex_attention(alibi: bool, mask: Any, backend: str | None) -> None:
    q, k, v = torch.randn(1, 4, 128, 16), torch.randn(1, 2, 128, 16), torch.randn(1, 2, 128, 16)
    slopes = alibi_slopes(4)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if isinstance(mask, Bidirectional):
            return j >= 0
        if isinstance(mask, Window):
            return (j <= i) & (i - j < mask.size)
        if isinstance(mask, Blockwise):
            return (j <= i) & (i // mask.block - j // mask.block <= 1)
        return j <= i

    def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j).abs() if alibi else score

    blocks = create_block_mask(seen, None, None, 128, 128, device="cpu")
    expected = flex_attention(q, k, v, score_mod=bias, block_mask=blocks, enable_gqa=True)
    ours = lengthen.attention(q, k, v, bias=Linear(slopes) if alibi else None, mask=mask, backend=backend)
    torch.testing.assert_close(ours, expected, **CLOSE)
