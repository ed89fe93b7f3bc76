"""Reach: how far each head of a model with a bias looks on real text, and how much of the score matrix that is.

`lengthen.reach` proves, for each query, how many keys back may matter at all: what stands further weighs less than half
a unit in the last place together (`docs/reach.md`). With D_i that number for the query at i (never above i + 1),

    reach     =  mean of D_i over queries                 keys read by a query
    fraction  =  Σ D_i / Σ (i + 1)                        of the causal half of the score matrix

A method without a bias has no such bound: every key may matter, whatever its distance. So may it with a bias that does
not fall; then the reach is all that a query sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from lengthen.attention import reach
from lengthen.data import Corpus
from lengthen.evaluation.analyses.shared import TOKENS, WIDEST, Progress, Row, header, line, pieces, silent
from lengthen.evaluation.capture import Call, summed
from lengthen.evaluation.runs import Subject
from lengthen.model import Transformer


@dataclass(frozen=True, eq=False)
class Reaches:
    """For each layer and head, `[layers, heads]`: keys that a query reads on average, and their fraction of all."""

    reach: Tensor
    fraction: Tensor


def bounded(model: Transformer) -> bool:
    """Return whether a model's position method bounds how far its heads look."""
    return model.method.bias(0) is not None


def refuse_unbounded(model: Transformer) -> None:
    """Raise an error if a model's position method bounds no head's reach."""
    if not bounded(model):
        raise ValueError(
            f"reach: expected a model with a bias on its scores (alibi, t5, kerple, sandwich, or a method with one), "
            f"got {model.config.positions!r}: nothing bounds how far its heads look"
        )


def keys_read(call: Call, tolerance: float | None = None) -> Tensor:
    """Return how many keys back each head's queries must look on average, float64 `[heads]`."""
    if call.bias is None:
        raise TypeError("bias: expected Linear or Table, whose tail bounds how far a head looks, got None")
    if call.decay is not None:
        raise ValueError("decay: expected none: reach is not computed for ALiBi with a decay at this length")
    far = reach(call.q, call.k, call.bias, tolerance, mask=call.mask, scale=call.scale)
    return far.double().mean(dim=(0, 2))


def of_model(model: Transformer, batches: Iterable[Tensor], tolerance: float | None = None) -> Reaches:
    """Return the reach of every head over batches of texts `[texts, length]`, all of one length."""
    refuse_unbounded(model)
    length = 1

    def measure(call: Call) -> Tensor:
        nonlocal length
        length = call.q.shape[2]
        return call.q.shape[0] * keys_read(call, tolerance)

    total, texts = summed(model, batches, measure)
    mean = total / texts
    return Reaches(mean, mean / ((length + 1) / 2))


def analyse(
    subject: Subject,
    corpus: Corpus,
    lengths: list[int],
    *,
    split: str = "validation",
    tokens: int = TOKENS,
    progress: Progress = silent,
) -> Row:
    """Return how far each head must look, at each length."""
    head, rows = header("reach", subject, corpus), []
    for length in lengths:
        found = of_model(subject.model, pieces(corpus[split], length, tokens, "reach", progress))
        rows.append({"length": length, "reach": found.reach.tolist(), "fraction": found.fraction.tolist()})
    return head | {"rows": rows}


def table(found: Row) -> Iterator[str]:
    """Yield the lines of a table for the terminal."""
    yield "reach: keys read by a query on average, and of the causal score matrix"
    for row in found["rows"]:
        heads = range(len(row["reach"][0]))[:WIDEST]
        yield line(f"length {row['length']:,}", [f"head {head}" for head in heads])
        for layer, (keys, fraction) in enumerate(zip(row["reach"], row["fraction"], strict=True)):
            yield line(f"  layer {layer}", [f"{keys[head]:,.1f}" for head in heads])
            yield line("", [f"{100 * fraction[head]:.1f} %" for head in heads])
