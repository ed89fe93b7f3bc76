"""Induction: does a model copy what it reads a second time, and which layers have the two heads that it takes?

A sequence of n random tokens is read twice in a row. In the first half nothing can be known of the next token; in the
second it stands n − 1 tokens behind. A head that attends to the token before each token, and in a later layer one that
attends to the token after an earlier occurrence, find it there: an *induction head* (Olsson et al., 2022).

    difference  =  mean over t of  loss(t + n) − loss(t),    t = 1 … n − 1        the same tokens, the second time
    previous    =  mean over queries of the weight at distance 1                  of each head; the strongest of a layer
    induction   =  mean over queries of the second half of the weight at n − 1    of each head; the strongest of a layer

A model that copies has a difference far below 0, one that does not about 0. The standard error is over sequences.

Tokens are drawn uniformly from those that occur in the text, its end tokens left out: a model cannot copy what it never
saw in training, such as most bytes. Where n is larger than their number, tokens recur within a sequence, and one token
of context no longer tells which occurrence is meant: then no model comes as far below 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from lengthen.checks import describe
from lengthen.data import Corpus
from lengthen.evaluation.analyses.shared import (
    BATCH_TOKENS,
    TOKENS,
    WIDEST,
    Lengths,
    Progress,
    Row,
    header,
    line,
    silent,
)
from lengthen.evaluation.capture import CHUNK_SCORES, Call, each_layer
from lengthen.evaluation.runs import Subject
from lengthen.evaluation.tasks.sample import Draws
from lengthen.model import Transformer
from lengthen.model.loss import linear_cross_entropy

LENGTHS = Lengths(times=2, beside=-1, of_text=False)
LEAST_SEQUENCES = 4  # for a standard error


@dataclass(frozen=True)
class Copying:
    """What a model makes of sequences that it reads twice: losses in nats per token, weights of each layer."""

    sequences: int
    first: float  # the loss of tokens 1 … n − 1 of the first half
    second: float  # and of the same tokens in the second
    difference: float
    standard_error: float
    previous: list[float]
    induction: list[float]


def vocabulary(corpus: Corpus, split: str, tokens: int) -> list[int]:
    """Return the tokens that occur in the first `tokens` of a text, without the special ones."""
    text = corpus[split]
    special = {corpus.end_id, corpus.mask_id}
    found = [int(one) for one in np.unique(text.read(0, min(tokens, len(text)))) if int(one) not in special]
    if len(found) < 2:
        raise ValueError(
            f"tokens: expected a text of at least 2 different tokens, got {len(found)} in {tokens:,} of it"
        )
    return found


def sequences(known: list[int], length: int, count: int, seed: int) -> Tensor:
    """Return sequences of random tokens, each twice in a row, `[count, 2·length]`."""
    draws = Draws(seed)
    return torch.tensor([[known[draws.below(len(known))] for _ in range(length)] for _ in range(count)]).repeat(1, 2)


def weights(call: Call, length: int, most: int = CHUNK_SCORES) -> Tensor:
    """Return each head's mean weight at distance 1, and at distance length − 1 in the second half, `[2, heads]`."""
    batch, heads, queries, _ = call.q.shape
    places = ((1, 1), (length - 1, length))  # a distance, and the first query that is asked at it
    sums = torch.zeros(2, heads, dtype=torch.float64, device=call.q.device)
    for chunk in call.chunks(most):
        weight = chunk.score.softmax(dim=-1)
        query = chunk.distance[:, 0]
        for total, (distance, first) in zip(sums, places, strict=True):
            row = (query >= first).nonzero().squeeze(-1)
            total += weight[:, :, row, query[row] - distance].sum(dim=(0, 2), dtype=torch.float64)
    return sums / torch.tensor([[batch * (queries - first)] for _, first in places], device=sums.device)


def of_model(model: Transformer, ids: Tensor, progress: Progress = silent) -> Copying:
    """Return what a model makes of sequences `[count, 2n]` whose halves are equal."""
    count, length = ids.shape[0], ids.shape[1] // 2
    if count < 2 or length < 2 or not torch.equal(ids[:, :length], ids[:, length:]):
        raise ValueError(
            f"ids: expected two sequences or more, each of two equal halves, [count, 2n], got {describe(ids)}"
        )
    parts, done = [], 0
    for rows in torch.split(ids, max(1, BATCH_TOKENS // ids.shape[1])):
        parts.append(_read(model, rows, length))
        done += rows.numel()
        progress(f"induction, {length}", done, ids.numel())
    losses = torch.cat([each for each, _ in parts], dim=1)  # of the first half and the second, of each sequence
    apart, (first, second) = losses[1] - losses[0], losses.mean(dim=1).tolist()
    strongest = (torch.stack([weight for _, weight in parts]).sum(dim=0) / count).amax(dim=-1)  # [layers, 2]
    previous, after = strongest.T.tolist()
    return Copying(count, first, second, float(apart.mean()), float(apart.std()) / count**0.5, previous, after)


def _read(model: Transformer, ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the mean loss of each half, `[2, sequences]`, and each layer's weights, summed over sequences."""
    layers: list[Tensor] = []
    hidden = each_layer(model, ids[:, :-1], lambda call: layers.append(weights(call, length)))
    targets = ids[:, 1:].to(hidden.device)
    with torch.no_grad():
        _, each = linear_cross_entropy(hidden.flatten(0, 1), model.output_weight, targets.flatten())
    each = each.view(targets.shape).double()
    halves = torch.stack([half.mean(dim=1) for half in (each[:, : length - 1], each[:, length:])])
    return halves.cpu(), ids.shape[0] * torch.stack(layers).cpu()


def analyse(
    subject: Subject,
    corpus: Corpus,
    lengths: list[int],
    *,
    split: str = "validation",
    tokens: int = TOKENS,
    seed: int = 0,
    progress: Progress = silent,
) -> Row:
    """Return how much better a model predicts n random tokens when it reads them again, for each n of `lengths`."""
    head, rows = header("induction", subject, corpus), []
    known, most = vocabulary(corpus, split, tokens), min(tokens, len(corpus[split]))
    for length in lengths:
        ids = sequences(known, length, max(LEAST_SEQUENCES, most // (2 * length)), seed)
        rows.append({"length": length, **asdict(of_model(subject.model, ids, progress))})
    return head | {"vocabulary": len(known), "rows": rows}


def table(found: Row) -> Iterator[str]:
    """Yield the lines of a table for the terminal."""
    yield f"induction: n random tokens of {found['vocabulary']:,}, read twice (nats per token)"
    yield line("n", ["first", "second", "change", "± s.e."])
    for row in found["rows"]:
        cells = [row[key] for key in ("first", "second", "difference", "standard_error")]
        yield line(f"{row['length']:,}", [f"{cell:.3f}" for cell in cells])
    for key, words in (("previous", "the token before"), ("induction", "the token to copy")):
        yield f"  strongest weight on {words}, by layer"
        for row in found["rows"]:
            yield line(f"{row['length']:,}", [f"{weight:.3f}" for weight in row[key][:WIDEST]])
