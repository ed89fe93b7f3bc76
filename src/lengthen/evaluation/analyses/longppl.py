"""LongPPL: perplexity over the tokens that a long context helps to predict (Fang et al., 2024, arXiv 2410.23771).

Most tokens need little context, so a mean over all of them hardly says whether a model uses more. A judge, the model
itself or another, reads a text with long and with short contexts:

    LSD(i)   =  log P(x_i | long) − log P(x_i | last K tokens)          long-short difference
    LCL(i)   =  log P(x_i | long)                                       long-context likelihood
    key tokens are those with LSD > α and LCL > β                       α = 2, β = −2
    LongPPL  =  exp(mean over key tokens of the model's loss with the long context)
    soft     =  exp(Σ w_i·loss_i / Σ w_i),   w_i = min(e^LSD(i), γ)     γ = 5; all candidates, LongCE's weights

The long context of a token is its piece of the text up to it, as in `positions`; the short one is that of windows of K
tokens, `stride` apart, of which the last `stride` tokens are scored: K − stride + 1 to K tokens, K with a stride of 1.
Tokens that stand less than K into their piece have no longer context than that, and are no candidates.

A model that chooses its own key tokens favours those that it predicts well. To compare models, give all of them the
same judge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from lengthen.checks import whole_number
from lengthen.data import Corpus, Tokens
from lengthen.evaluation.analyses.positions import Tell, scored, sliding_windows, whole_pieces
from lengthen.evaluation.analyses.shared import TOKENS, Progress, Row, header, line, silent
from lengthen.evaluation.errors import standard_error
from lengthen.evaluation.measure import SEGMENTS
from lengthen.evaluation.runs import Subject
from lengthen.model import IGNORED, Transformer
from lengthen.model.loss import perplexity
from lengthen.model.score import Model, Reading, Task, device_of, usual_precision, window_losses

ALPHA, BETA, GAMMA = 2.0, -2.0, 5.0
SHORT = 8  # the training length over K, as the paper's 32,768 and 4,096

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LongPPL:
    """A model's loss on the tokens that a long context helps to predict."""

    candidates: int  # tokens with more than K tokens before them in their piece
    key_tokens: int
    loss: float  # mean over the key tokens, nats; not a number where there are none
    error: float | None  # its standard error over segments of the text
    soft_loss: float  # mean over all candidates, weighted
    all_loss: float  # mean over all candidates


def key_tokens(long: Floats, short: Floats, alpha: float = ALPHA, beta: float = BETA) -> Bools:
    """Return which tokens are key tokens, from a judge's losses with long and with short contexts."""
    return (short - long > alpha) & (-long > beta)


def soft_weights(long: Floats, short: Floats, gamma: float = GAMMA) -> Floats:
    """Return min(e^LSD, γ) of each token, from a judge's losses."""
    return np.exp(np.minimum(short - long, math.log(gamma)))


def long_ppl(losses: Floats, long: Floats, short: Floats, alpha: float = ALPHA, beta: float = BETA) -> LongPPL:
    """Return a model's LongPPL from its losses and a judge's, of the same candidates."""
    key, weights = key_tokens(long, short, alpha, beta), soft_weights(long, short)
    segments = np.arange(len(losses)) * SEGMENTS // max(len(losses), 1)
    sums = np.bincount(segments[key], losses[key], minlength=SEGMENTS)
    counts = np.bincount(segments[key], minlength=SEGMENTS)
    return LongPPL(
        candidates=len(losses),
        key_tokens=int(key.sum()),
        loss=float(losses[key].mean()) if key.any() else math.nan,
        error=standard_error(sums.tolist(), counts.tolist()),
        soft_loss=float((weights * losses).sum() / weights.sum()),
        all_loss=float(losses.mean()),
    )


def token_losses(model: Model, task: Task, readings: Iterable[Reading], count: int, tell: Tell, done: int) -> Floats:
    """Return the loss of each of the first `count` targets, not a number where a target is not scored."""
    found, read = np.full(count, math.nan), done
    for group, targets, losses in window_losses(model, task, readings):
        for one, row, each in zip(group, targets.numpy(), losses.numpy(), strict=True):
            here = slice(one.start + one.context, one.stop)
            found[here] = np.where(row != IGNORED, each, math.nan)[one.context :]
        read += losses.numel()
        tell(read, 0)
    return found


def of_model(
    model: Model,
    tokens: Tokens,
    length: int,
    short: int,
    limit: int = TOKENS,
    *,
    judge: Model | None = None,
    stride: int | None = None,
    alpha: float = ALPHA,
    beta: float = BETA,
    document_mask: bool = False,
    tell: Tell = lambda done, total: None,
) -> LongPPL:
    """Return a model's LongPPL at a length, over about `limit` tokens; `short` is K, `judge` None the model itself."""
    if not whole_number("short", short, at_least=1) < whole_number("length", length, at_least=1):
        raise ValueError(f"short: expected less than the length {length}, got {short}")
    stride = max(1, short // 8) if stride is None else whole_number("stride", stride, at_least=1)
    if stride > short:
        raise ValueError(f"stride: expected at most the short length {short}, got {stride}")
    count, task = scored(tokens, length, limit), Task(tokens, document_mask=document_mask)
    pieces, windows = list(whole_pieces(0, count, length)), list(sliding_windows(0, count, short, stride))
    sizes = [sum(one.stop - one.start for one in readings) for readings in (pieces, windows)]
    total = sum(sizes) + (sizes[0] if judge else 0)

    def heard(done: int, _: int) -> None:
        tell(done, total)

    losses = token_losses(model, task, pieces, count, heard, 0)
    near = token_losses(judge or model, task, windows, count, heard, sizes[0])
    far = token_losses(judge, task, pieces, count, heard, sum(sizes)) if judge else losses
    chosen = (np.arange(count) % length >= short) & ~np.isnan(losses) & ~np.isnan(near)
    if not chosen.any():
        raise ValueError(f"short: expected tokens with more than {short} before them in their document, got none")
    return long_ppl(losses[chosen], far[chosen], near[chosen], alpha, beta)


def usual_short(model: Transformer) -> int:
    """Return K where none is given."""
    return max(1, model.config.train_length // SHORT)


def analyse(
    subject: Subject,
    corpus: Corpus,
    lengths: list[int],
    *,
    split: str = "validation",
    tokens: int = TOKENS,
    short: int | None = None,
    stride: int | None = None,
    alpha: float = ALPHA,
    beta: float = BETA,
    judge: Subject | None = None,
    progress: Progress = silent,
) -> Row:
    """Return LongPPL at each length; `short` is K, by default an eighth of the training length."""
    model, rows, apart = subject.model, [], subject.config.data.document_mask
    head = header("longppl", subject, corpus, usual_precision(device_of(model)))
    short = usual_short(model) if short is None else short
    stride = max(1, short // 8) if stride is None else stride
    for length in lengths:
        found = of_model(
            model,
            corpus[split],
            length,
            short,
            tokens,
            judge=None if judge is None else judge.model,
            stride=stride,
            alpha=alpha,
            beta=beta,
            document_mask=apart,
            tell=partial(progress, f"longppl, {length}"),
        )
        there = found.key_tokens > 0
        rows.append(
            {
                "length": length,
                "candidates": found.candidates,
                "key_tokens": found.key_tokens,
                "long_ppl": perplexity(found.loss) if there else None,
                "standard_error": perplexity(found.loss) * found.error if there and found.error is not None else None,
                "soft_long_ppl": perplexity(found.soft_loss),
                "perplexity": perplexity(found.all_loss),
            }
        )
    told = {"short": short, "stride": stride, "alpha": alpha, "beta": beta, "gamma": GAMMA}
    judged = {"judge": None if judge is None else judge.weights}
    return head | told | judged | {"rows": rows}


def table(found: Row) -> Iterator[str]:
    """Yield the lines of a table for the terminal."""
    judge = "chosen by the model itself" if found["judge"] is None else f"chosen by {found['judge'][:12]}"
    bounds = f"LSD > {found['alpha']:g} beyond {found['short']:,} tokens, LCL > {found['beta']:g}"
    yield f"LongPPL: key tokens {judge}, {bounds}"
    yield line("length", ["LongPPL", "±", "soft", "all", "key", "of"])
    for row in found["rows"]:
        cells = [row["long_ppl"], row["standard_error"], row["soft_long_ppl"], row["perplexity"]]
        counts = [f"{row[name]:,}" for name in ("key_tokens", "candidates")]
        yield line(f"{row['length']:,}", [*("–" if one is None else f"{one:.4g}" for one in cells), *counts])
