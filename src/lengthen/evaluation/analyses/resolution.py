"""Attention resolution: how well a model's scores tell near from far (Sun et al., 2022, https://arxiv.org/abs/2212.10554).

    R(s)  =  Σ_{i=0}^{N} e^{s[i]}·(e^{s[i]} − e^{s[i+1]})  /  (Σ_{i=0}^{N} e^{s[i]})²

s[n] is a layer's mean score before the softmax, bias and decay included, over all its heads and over all pairs of a
query and the key n behind it that the query sees. R is taken for each layer, and the model's is the mean over layers.

**The boundary.** The sum to N needs s[N+1]. Here N + 1 is the farthest distance that any query sees: length − 1, or
with blockwise attention of block b, 2b − 1 once the text has two blocks. So every score in the formula was measured,
and none is made up: the farthest enters only as the neighbour of the one before. The other way, N the farthest and
e^{s[N+1]} = 0, would count the end of the text, or the wall of a block, as something that the model tells apart: with
p = e^s / Σe^s

    R  =  ½·(Σ_{i=0}^{N} (p[i] − p[i+1])²  +  p[0]²  −  p[N+1]²),

so a model that tells nothing apart (s constant) has R = 0 by the first and 1/(N+1)² by the second. For the
second, append −∞ to s. R does not change when a number is added to all of s, and is at most 1.

The mean at a distance is over fewer pairs the farther it is; at length − 1 there is one per text and head. Noise in s
raises R a little (the squares above), so several texts are better than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthen.attention import Blockwise, Mask
from lengthen.checks import describe
from lengthen.data import Corpus
from lengthen.evaluation.analyses.shared import TOKENS, WIDEST, Progress, Row, header, line, pieces, silent
from lengthen.evaluation.capture import CHUNK_SCORES, Call, summed
from lengthen.evaluation.runs import Subject
from lengthen.model import Transformer


@dataclass(frozen=True)
class Resolution:
    """R of each layer, and their mean."""

    layers: list[float]

    @property
    def model(self) -> float:
        """The mean over layers."""
        return sum(self.layers) / len(self.layers)


def score_sums(call: Call, most: int = CHUNK_SCORES) -> tuple[Tensor, Tensor]:
    """Return the sum of scores at each distance 0 … length − 1, and the number of pairs in it: float64 `[keys]`."""
    batch, heads, _, _ = call.q.shape
    sums = torch.zeros(call.k.shape[2], dtype=torch.float64, device=call.q.device)
    pairs = torch.zeros_like(sums)
    for chunk in call.chunks(most):
        together = chunk.score.masked_fill(~chunk.visible, 0).sum(dim=(0, 1), dtype=torch.float64)
        seen = chunk.visible.expand(batch, -1, -1, -1).sum(dim=(0, 1)).double() * heads
        bins = chunk.distance.clamp(min=0).flatten()  # what is ahead adds 0
        sums.index_add_(0, bins, together.flatten())
        pairs.index_add_(0, bins, seen.flatten())
    return sums, pairs


def mean_scores(sums: Tensor, pairs: Tensor) -> Tensor:
    """Return s, `[N + 2]`: the mean score at each distance that is seen."""
    seen = int((pairs > 0).sum())  # a query sees a run of keys that ends at itself: distances have no gap
    return sums[:seen] / pairs[:seen]


def resolution(s: Tensor) -> float:
    """Return R(s) of the mean scores s[0 … N + 1], in float64; the last is only the neighbour of the one before."""
    if not isinstance(s, Tensor) or s.dim() != 1 or s.shape[0] < 2:
        raise ValueError(f"s: expected scores at two distances or more, [N + 2], got {describe(s)}")
    s = s.double()
    weight = (s - s[:-1].max()).exp()  # R is blind to a shift; no sum below overflows
    near, next_one = weight[:-1], weight[1:]
    return float((near * (near - next_one)).sum() / near.sum() ** 2)


def of_model(model: Transformer, batches: Iterable[Tensor], mask: Mask | None = None) -> Resolution:
    """Return the resolution of a model over batches of texts `[texts, length]`, all of one length.

    `mask` is what the model reads with: None is `Causal()`, and blockwise attention is `Blockwise(train_length // 2)`.
    """
    total, _ = summed(model, batches, lambda call: torch.stack(score_sums(call)), mask)
    return Resolution([resolution(mean_scores(sums, pairs)) for sums, pairs in total])


def analyse(
    subject: Subject,
    corpus: Corpus,
    lengths: list[int],
    *,
    split: str = "validation",
    tokens: int = TOKENS,
    blockwise: bool = False,
    block: int | None = None,
    progress: Progress = silent,
) -> Row:
    """Return R of each layer and of the model at each length; `blockwise`: with blockwise attention too."""
    head, rows = header("resolution", subject, corpus), []
    block = max(1, subject.model.config.train_length // 2) if block is None else block
    for blocks in (False, True) if blockwise else (False,):
        stage, mask = ("blockwise resolution", Blockwise(block)) if blocks else ("resolution", None)
        for length in lengths:
            found = of_model(subject.model, pieces(corpus[split], length, tokens, stage, progress), mask)
            row: Row = {"length": length, "blockwise": blocks, "block": block if blocks else None}
            rows.append(row | {"resolution": found.model, "layers": found.layers})
    return head | {"rows": rows}


def table(found: Row) -> Iterator[str]:
    """Yield the lines of a table for the terminal."""
    yield "attention resolution (0: tells nothing apart)"
    layers = range(len(found["rows"][0]["layers"]))[: WIDEST - 1]
    yield line("length", ["model", *(f"layer {layer}" for layer in layers)])
    for row in found["rows"]:
        name = f"{row['length']:,}" + (f", blocks of {row['block']:,}" if row["blockwise"] else "")
        yield line(name, [f"{row['resolution']:.2g}", *(f"{row['layers'][layer]:.2g}" for layer in layers)])
