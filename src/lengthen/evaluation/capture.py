"""What each layer's attention is given in a forward pass, and its scores in pieces, without a change to the model.

`each_layer` makes one pass and hands every layer's call of the attention op to a function, as it happens, so that no
two layers of a long text are ever held together. The model calls the op through a module (`AttentionOp`), which a
forward hook observes for the time of the pass: what the model computes is what it always computes.

Queries and keys come as the op has them, rotated. On short texts xPos's decay may be in them already (then `decay` is
None): the scores are the same.

`Call.chunks` computes scores a few queries at a time:

    score[i, j] = scale · Σ_f q[i, f]·k[j, f]·rates[f]^(i − j)  +  bias(i − j)        for visible j ≤ i

so that an analysis of length L needs memory in proportion to L. Analyses look back: keys ahead of a query do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lengthen.attention import Causal, Mask
from lengthen.attention.biases import Bias, Decay
from lengthen.attention.problem import pose
from lengthen.model import Transformer
from lengthen.model.block import AttentionOp
from lengthen.model.score import evaluating

CHUNK_SCORES = 1 << 22  # scores held at once, over sequences and heads: 16 MB in float32
CHUNK_ROWS = 256  # queries in a chunk at most
SMALLEST = 345.0  # −log 1e−150: powers of a decay within a chunk stay above that


@dataclass(frozen=True, eq=False)
class Chunk:
    """The scores of some queries, with every key behind the last of them."""

    score: Tensor  # [batch, heads, rows, keys], float32 or float64; −∞ where a query does not see a key
    visible: Tensor  # [batch or 1, 1, rows, keys]
    distance: Tensor  # [rows, keys], i − j; negative ahead of the query


@dataclass(frozen=True, eq=False)
class Call:
    """One layer's call of the attention op."""

    layer: int
    q: Tensor  # [batch, heads, length, head_dim]
    k: Tensor  # [batch, key_heads, length, head_dim]
    v: Tensor
    bias: Bias | None = None
    decay: Decay | None = None
    mask: Mask = Causal()  # noqa: RUF009 (a frozen value)
    scale: float | None = None

    def chunks(self, most: int = CHUNK_SCORES) -> Iterator[Chunk]:
        """Yield the scores of all queries, some at a time: no more than `most` numbers, or one query's."""
        q, k = self.q, self.k
        call = pose(q, k, self.v, self.bias, self.decay, self.mask, scale=self.scale)
        wide = torch.promote_types(q.dtype, torch.float64 if self.decay is not None else torch.float32)
        k = k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        first, last = self.mask.interval(q.shape[2], k.shape[2], call.q_start, q.device)
        rows = max(1, min(CHUNK_ROWS, self._decays_within(), most // max(1, q.shape[0] * q.shape[1] * k.shape[2])))
        for start in range(0, q.shape[2], rows):
            here = slice(start, min(start + rows, q.shape[2]))
            i = torch.arange(here.start, here.stop, device=q.device) + call.q_start
            j = torch.arange(min(k.shape[2], int(i[-1]) + 1), device=q.device)
            distance = i[:, None] - j
            visible = (j >= first[:, here, None]) & (j <= last[:, here, None]) & (distance >= 0)
            left, right = q[:, :, here].to(wide), k[:, :, : len(j)]
            if self.decay is not None:
                left, right = self._decayed(left, right, i, j, self.decay)
            score = call.scale * (left @ right.mT)
            if self.bias is not None:
                score = score + self.bias.at(distance.where(visible.any(0), 0), wide)
            visible = visible[:, None]
            yield Chunk(score.masked_fill(~visible, -torch.inf), visible, distance)

    def _decays_within(self) -> int:
        """Return over how many positions a decay's powers stay well inside float64."""
        if self.decay is None:
            return CHUNK_ROWS
        steepest = -math.log(float(self.decay.rates.min()))
        return CHUNK_ROWS if steepest <= 0 else max(1, int(SMALLEST / steepest))

    def _decayed(self, q: Tensor, k: Tensor, i: Tensor, j: Tensor, decay: Decay) -> tuple[Tensor, Tensor]:
        """Return q·rate^(i − m) and k·rate^(m − j), m the chunk's first query: both stay well inside float64."""
        log_rate = decay.rates.double().log().reshape(-1, 1, decay.rates.shape[-1])
        by = (log_rate * (i - i[0])[:, None]).exp(), (log_rate * (i[0] - j)[:, None]).exp()
        return q * by[0], k * by[1]


def refuse_encoder(model: Transformer) -> None:
    """Raise an error if a model sees what stands ahead: it would be asked for what it sees."""
    if model.config.kind != "decoder":
        raise ValueError(f"model: expected a decoder, got an {model.config.kind}: analyses look back, not ahead")


def each_layer(model: Transformer, ids: Tensor, tell: Callable[[Call], None], mask: Mask | None = None) -> Tensor:
    """Read `ids` `[batch, length]`, telling of each layer's call as it happens; return the model's last hidden states.

    A model whose blocks are compiled runs uncompiled here.
    """
    refuse_encoder(model)
    seen = 0

    def observe(op: nn.Module, given: Any, named: Any) -> None:
        nonlocal seen
        tell(Call(seen, *given, **named))
        seen += 1

    ops = [module for module in model.modules() if isinstance(module, AttentionOp)]
    handles = [op.register_forward_pre_hook(observe, with_kwargs=True) for op in ops]
    try:
        with evaluating(model):
            hidden = model.hidden(ids.to(next(model.parameters()).device), mask)
    finally:
        for handle in handles:
            handle.remove()
    if seen != model.config.layers:
        raise RuntimeError(f"each_layer: expected {model.config.layers} calls of an AttentionOp, saw {seen}")
    return hidden


def summed(
    model: Transformer, batches: Iterable[Tensor], measure: Callable[[Call], Tensor], mask: Mask | None = None
) -> tuple[Tensor, int]:
    """Return the sum over batches of texts of what is measured in each layer, `[layers, …]`, and how many texts."""
    total, texts = torch.zeros(()), 0
    for ids in batches:
        layers: list[Tensor] = []
        each_layer(model, ids, lambda call, layers=layers: layers.append(measure(call)), mask)  # type: ignore[misc]
        total = total + torch.stack(layers).cpu()
        texts += ids.shape[0]
    if not texts:
        raise ValueError("batches: expected at least one text, got none")
    return total, texts
