"""Attention by distance: what fraction of its attention each head spends at which distance.

    weight[layer][head][bucket]  =  mean over queries i of  Σ_j softmax(score[i])_j    for i − j in the bucket

Buckets begin at 0, 1, 2, 4, 8 …: the query itself, the key before it, the two before that, and so on, each to the
next one's beginning. A head's buckets add up to 1. Early queries count too, and see few keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from lengthen.attention import Mask
from lengthen.checks import whole_number
from lengthen.data import Corpus
from lengthen.evaluation.analyses.shared import TOKENS, WIDEST, Progress, Row, header, line, pieces, silent
from lengthen.evaluation.capture import CHUNK_SCORES, Call, summed
from lengthen.evaluation.runs import Subject
from lengthen.model import Transformer


def bucket_starts(length: int) -> list[int]:
    """Return where buckets begin for distances 0 … length − 1: 0, 1, 2, 4, 8 …"""
    whole_number("length", length, at_least=1)
    starts = [0]
    while max(1, 2 * starts[-1]) < length:
        starts.append(max(1, 2 * starts[-1]))
    return starts


def weights(call: Call, most: int = CHUNK_SCORES) -> Tensor:
    """Return the mean weight of each head in each bucket, float64 `[heads, buckets]`."""
    batch, heads, queries, _ = call.q.shape
    sums = torch.zeros(heads, call.k.shape[2], dtype=torch.float64, device=call.q.device)
    for chunk in call.chunks(most):
        fraction = chunk.score.softmax(dim=-1).masked_fill(~chunk.visible, 0).sum(dim=0, dtype=torch.float64)
        sums.index_add_(1, chunk.distance.clamp(min=0).flatten(), fraction.flatten(1))
    ends = [*bucket_starts(call.k.shape[2]), call.k.shape[2]]
    buckets = [sums[:, a:b].sum(dim=1) for a, b in pairwise(ends)]
    return torch.stack(buckets, dim=1) / (batch * queries)


def of_model(model: Transformer, batches: Iterable[Tensor], mask: Mask | None = None) -> Tensor:
    """Return the mean weights over batches of texts `[texts, length]` of one length, `[layers, heads, buckets]`."""
    total, texts = summed(model, batches, lambda call: call.q.shape[0] * weights(call), mask)
    return total / texts


def analyse(
    subject: Subject,
    corpus: Corpus,
    lengths: list[int],
    *,
    split: str = "validation",
    tokens: int = TOKENS,
    progress: Progress = silent,
) -> Row:
    """Return what each head spends at which distance, at each length."""
    head, rows = header("distance", subject, corpus), []
    for length in lengths:
        found = of_model(subject.model, pieces(corpus[split], length, tokens, "distance", progress))
        rows.append({"length": length, "distances": bucket_starts(length), "weight": found.tolist()})
    return head | {"rows": rows}


def table(found: Row) -> Iterator[str]:
    """Yield the lines of a table for the terminal: the longest length."""
    row = found["rows"][-1]
    starts = row["distances"]
    yield f"attention by distance at length {row['length']:,}, mean over heads (% of the weight; per head in the file)"
    shown = starts[:WIDEST]
    cut = len(shown) < len(starts)
    yield line("from distance", [*(f"{start:,}" for start in shown[:-1]), f"{shown[-1]:,}" + "+" * cut])
    for layer, heads in enumerate(row["weight"]):
        means = [sum(head[b] for head in heads) / len(heads) for b in range(len(starts))]
        cells = [*means[: len(shown) - 1], sum(means[len(shown) - 1 :])]
        yield line(f"  layer {layer}", [f"{100 * cell:.1f}" for cell in cells])
