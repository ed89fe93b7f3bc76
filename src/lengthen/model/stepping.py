"""Decoding steps of one token per sequence. On a GPU the host is slower than the kernels of a step, so a CUDA graph
replays them where every step launches the same kernels (`lengthen.attention.static`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen.attention.biases import Linear
from lengthen.attention.cache import Cache
from lengthen.attention.static import StaticCache

if TYPE_CHECKING:
    from lengthen.model.transformer import Transformer

CHUNK = 512  # tokens of a prompt that are read at once


def read(model: Transformer, ids: Tensor, cache: Cache | StaticCache, chunk: int = CHUNK) -> Tensor:
    """Read new tokens `[batch, new]` into a cache; return the logits of what follows them, float32 at least."""
    for i in range(0, ids.shape[1], chunk):
        hidden = model.extend(ids[:, i : i + chunk], cache)
    logits = F.linear(hidden[:, -1], model.output_weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Stepper:
    """Reads one token of each sequence of a cache per call: `stepper(tokens)` returns the logits of what follows."""

    def __init__(self, model: Transformer, cache: Cache) -> None:
        self.model, self.cache = model, cache
        device = model.embedding.weight.device
        self.static = StaticCache(cache, device) if device.type == "cuda" and repeats(model, cache) else None
        self.tokens: Tensor | None = None
        self.logits: Tensor | None = None
        self.where: tuple[int, ...] = ()  # storage at the last step
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, vocabulary]`, which the next call may write over, for tokens `[batch]`."""
        if self.static is None:
            return read(self.model, tokens.unsqueeze(1), self.cache)
        where = self.static.prepare()
        if where != self.where:  # the first step, or storage grew: kernels may have to be compiled
            self.where, self.graph = where, None
            self.tokens = tokens.unsqueeze(1).clone()
            self.logits = read(self.model, self.tokens, self.static)
        else:
            assert self.tokens is not None
            self.tokens.copy_(tokens.unsqueeze(1))
            if self.graph is None:
                self.graph = self._captured(self.tokens, self.static)
            self.graph.replay()
        self.static.advance()
        assert self.logits is not None
        return self.logits

    def _captured(self, tokens: Tensor, static: StaticCache) -> torch.cuda.CUDAGraph:
        """Return a graph of a step, whose logits `logits` then are; nothing is computed yet."""
        graph, device = torch.cuda.CUDAGraph(), tokens.device
        # torch's own stream for captures belongs to one device, and nothing of another's would be in the graph.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
            self.logits = read(self.model, tokens, static)
        return graph


def repeats(model: Transformer, cache: Cache) -> bool:
    """Return whether steps over this cache can be made the same work: with ALiBi, whose bias no length changes."""
    method = model.method
    alibi = method.places == ("bias",) and isinstance(method.bias(0), Linear)
    return alibi and not torch.is_autocast_enabled("cuda") and StaticCache.fits(cache)
