"""Attention by distance: buckets, sums, and a softmax written out."""

from __future__ import annotations

import pytest
import torch

from lengthen import Blockwise, Causal, Linear, ModelConfig, Table, Transformer
from lengthen.attention import Mask
from lengthen.evaluation.analyses.distance import bucket_starts, of_model, weights
from lengthen.evaluation.capture import Call


@pytest.mark.parametrize(
    ("length", "starts"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2]), (5, [0, 1, 2, 4]), (17, [0, 1, 2, 4, 8, 16])],
)
def test_buckets(length: int, starts: list[int]) -> None:
    assert bucket_starts(length) == starts


@pytest.mark.parametrize("mask", [Causal(), Blockwise(4)], ids=["causal", "blockwise"])
@pytest.mark.parametrize("most", [1, 500, 10**6])
def test_against_a_softmax_written_out(mask: Mask, most: int) -> None:
    torch.manual_seed(2)
    batch, heads, length = 2, 3, 13
    q, k = torch.randn(2, batch, heads, length, 4, dtype=torch.float64)
    bias = Linear(torch.tensor([1.0, 0.25, 0.0]))
    found = weights(Call(0, q, k, k, bias, None, mask), most)
    right = torch.zeros(heads, 5, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                first = max(0, (i // 4 - 1) * 4) if isinstance(mask, Blockwise) else 0
                score = torch.stack(
                    [q[b, h, i] @ k[b, h, j] / 2 - bias.slopes[h] * (i - j) for j in range(first, i + 1)]
                )
                for j, weight in enumerate(score.softmax(0), start=first):
                    bucket = (i - j).bit_length()  # 0, 1, 2–3, 4–7, 8–15
                    right[h, bucket] += weight / (batch * length)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(found.sum(1), torch.ones(heads, dtype=torch.float64))


def test_a_head_that_looks_one_back() -> None:
    values = torch.full((1, 8), -100.0)
    values[0, 1] = 100
    q = torch.zeros(1, 1, 8, 4)
    found = weights(Call(0, q, q, q, Table(values)))
    assert found.tolist() == [pytest.approx([1 / 8, 7 / 8, 0, 0])]  # the first query has only itself


def test_a_model_over_batches() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(258, layers=2, width=32, heads=4, train_length=16, positions="rotary"))
    ids = torch.randint(258, (5, 20))
    one = of_model(model, [ids])
    assert one.shape == (2, 4, 6)
    torch.testing.assert_close(one.sum(-1), torch.ones(2, 4, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(of_model(model, [ids[:1], ids[1:]]), one, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="at least one text"):
        of_model(model, [])
