"""Loss by position in the window, and how much of what longer inputs gain is context.

A text is cut into pieces of one length, each read by itself. The token at position p of its piece, counted from 1, is
predicted from p tokens: those early in a piece have little to go by, the *early token curse* (Press et al., 2022,
appendix B). Longer pieces have fewer such tokens, so their mean loss is lower even for a model that uses no more
context.

**The split.** Take a short length S, a long length L, and four measurements over the very same tokens:

    whole(n)     pieces of n tokens, each read by itself
    sliding(n)   windows of n tokens, `stride` apart, only the last `stride` tokens of each scored: at least n − stride
                 tokens of context for all of them
    curse(n)     whole(n) − sliding(n)                  what cutting into pieces of n costs

    gain         =  whole(S) − whole(L)
    from_context =  sliding(S) − sliding(L)             what more context gives a token that has its context in full
    from_curse   =  curse(S) − curse(L)                 the curse fading: fewer tokens stand early

gain = from_context + from_curse holds by these definitions, with nothing left over; either may be negative. The smaller
the stride the truer; a stride of 1 gives each token all of its n. The scored tokens begin L tokens into the text where
it is long enough, so that the first windows have all their context too. Documents are joined, and read across borders
unless the model was trained with a document mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch

from lengthen.attention import Mask
from lengthen.checks import whole_number
from lengthen.data import Corpus, Tokens
from lengthen.evaluation.analyses.shared import TOKENS, WIDEST, Progress, Row, header, line, silent
from lengthen.evaluation.runs import Subject
from lengthen.model import IGNORED, Transformer
from lengthen.model.score import Reading, Task, device_of, usual_precision, window_losses

Tell = Callable[[int, int], None]  # how many tokens were read, and how many there are to read


@dataclass(frozen=True)
class ByPosition:
    """Mean loss in buckets of positions: bucket b holds positions[b − 1] + 1 … positions[b], counted from 1."""

    positions: list[int]
    loss: list[float]
    count: list[int]


@dataclass(frozen=True)
class Curse:
    """The gain of a long length over a short one, in nats per token, and its two parts."""

    short: int
    long: int
    stride: int
    tokens: int
    whole: tuple[float, float]  # of the short length, and of the long
    sliding: tuple[float, float]

    @property
    def gain(self) -> float:
        """What the long length gains in all."""
        return self.whole[0] - self.whole[1]

    @property
    def from_context(self) -> float:
        """What more context gives to tokens that have their context in full."""
        return self.sliding[0] - self.sliding[1]

    @property
    def from_curse(self) -> float:
        """What comes of fewer tokens standing early in their piece."""
        return (self.whole[0] - self.sliding[0]) - (self.whole[1] - self.sliding[1])


def bucket_ends(length: int) -> list[int]:
    """Return where buckets of positions 1 … length end: 1, 2, 4, 8 … length."""
    whole_number("length", length, at_least=1)
    ends = [1 << power for power in range(length.bit_length())]
    return ends if ends[-1] == length else [*ends, length]


def whole_pieces(begin: int, count: int, length: int) -> Iterator[Reading]:
    """Yield pieces of a length over `count` tokens from `begin` on, the last one shorter where they do not fit."""
    for start in range(begin, begin + count, length):
        yield Reading(start, min(start + length, begin + count), 0)


def sliding_windows(begin: int, count: int, length: int, stride: int) -> Iterator[Reading]:
    """Yield windows of a length that score `stride` new tokens each; at the text's beginning they are shorter."""
    for first in range(begin, begin + count, stride):
        stop = min(first + stride, begin + count)
        start = max(0, stop - length)
        yield Reading(start, stop, first - start)


def by_position(
    model: Transformer,
    tokens: Tokens,
    length: int,
    limit: int,
    mask: Mask | None = None,
    tell: Tell = lambda *_: None,
    document_mask: bool = False,
) -> ByPosition:
    """Return the mean loss at each position of pieces of a length, over about `limit` tokens from the beginning."""
    count, done = scored(tokens, length, limit), 0
    sums, counts = torch.zeros(2, length, dtype=torch.float64)
    task = Task(tokens, document_mask=document_mask)
    for _, targets, each in window_losses(model, task, whole_pieces(0, count, length), mask=mask):
        sums += each.sum(dim=0)
        counts += (targets != IGNORED).sum(dim=0)
        done += each.numel()
        tell(done, count)
    ends = bucket_ends(length)
    buckets = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    means = [float(sums[here].sum() / counts[here].sum()) for here in buckets]
    return ByPosition(ends, means, [int(counts[here].sum()) for here in buckets])


def scored(tokens: Tokens, length: int, limit: int) -> int:
    """Return how many tokens whole pieces of a length hold: as many as the limit allows, and one piece at least."""
    whole_number("length", length, at_least=1)
    whole_number("limit", limit, at_least=1)
    if len(tokens) < length + 1:
        raise ValueError(
            f"length: {length} tokens and the one after them are more than split {tokens.name!r} of "
            f"{tokens.directory} has ({len(tokens)})"
        )
    return max(1, min(limit, len(tokens) - 1) // length) * length


def curse(
    model: Transformer,
    tokens: Tokens,
    short: int,
    long: int,
    limit: int,
    stride: int | None = None,
    tell: Tell = lambda *_: None,
    document_mask: bool = False,
) -> Curse:
    """Return the gain of a long length over a short one, split into context and the curse fading.

    `limit` is about how many tokens are scored, the same in all four measurements; `stride` is an eighth of the short
    length unless it is given. Reading costs about limit·(short + long)/stride tokens.
    """
    if not whole_number("short", short, at_least=1) < whole_number("long", long, at_least=1):
        raise ValueError(f"long: expected more than the short length {short}, got {long}")
    stride = max(1, short // 8) if stride is None else whole_number("stride", stride, at_least=1)
    if stride > short:
        raise ValueError(f"stride: expected at most the short length {short}, got {stride}")
    count, done, means = scored(tokens, long, limit), 0, []
    begin = min(long, len(tokens) - 1 - count)
    whole = [list(whole_pieces(begin, count, n)) for n in (short, long)]
    sliding = [list(sliding_windows(begin, count, n, stride)) for n in (short, long)]
    total = sum(one.stop - one.start for readings in whole + sliding for one in readings)
    task = Task(tokens, document_mask=document_mask)
    for readings in whole + sliding:
        loss, there = 0.0, 0
        for _, targets, each in window_losses(model, task, readings):
            loss, there = loss + float(each.sum()), there + int((targets != IGNORED).sum())
            done += each.numel()
            tell(done, total)
        means.append(loss / there)
    return Curse(short, long, stride, count, (means[0], means[1]), (means[2], means[3]))


def analyse(
    subject: Subject,
    corpus: Corpus,
    lengths: list[int],
    *,
    split: str = "validation",
    tokens: int = TOKENS,
    stride: int | None = None,
    progress: Progress = silent,
) -> Row:
    """Return the loss by position at each length, and the curse between the shortest and the longest."""
    model, text, rows, apart = subject.model, corpus[split], [], subject.config.data.document_mask
    head = header("positions", subject, corpus, usual_precision(device_of(model)))
    for length in lengths:
        tell = partial(progress, f"positions, {length}")
        found = by_position(model, text, length, tokens, tell=tell, document_mask=apart)
        rows.append({"length": length, **asdict(found)})
    between, short, long = None, min(lengths), max(lengths)
    if short < long:
        tell = partial(progress, f"curse, {short} to {long}")
        split_up = curse(model, text, short, long, tokens, stride, tell, apart)
        between = {"short": short, "long": long, "gain": split_up.gain, "from_context": split_up.from_context}
        between |= {"from_curse": split_up.from_curse, **asdict(split_up)}
    return head | {"rows": rows, "curse": between}


def table(found: Row) -> Iterator[str]:
    """Yield the lines of a table for the terminal."""
    yield "loss by position, nonoverlapping pieces (nats per token)"
    shown = found["rows"][-1]["positions"][-WIDEST:]
    yield line("length", [f"to {end:,}" for end in shown])
    for row in found["rows"]:
        by_end = dict(zip(row["positions"], row["loss"], strict=True))
        yield line(f"{row['length']:,}", [f"{by_end[end]:.3f}" if end in by_end else "" for end in shown])
    between = found["curse"]
    if between is not None:
        yield (
            f"  from {between['short']:,} to {between['long']:,}: gain {between['gain']:.4f} = context "
            f"{between['from_context']:.4f} + curse fading {between['from_curse']:.4f}  "
            f"({between['tokens']:,} tokens, sliding with stride {between['stride']:,})"
        )
