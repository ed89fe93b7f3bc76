"""Decoding steps of fixed shapes over a cache: the same kernel launches at every token, so a CUDA graph can replay it.

A step over a `Cache` depends on how much is kept: views, masks and launches differ. Here storage is read whole, and
where the new key goes is a number on the device. The query stands there, so the causal mask hides what lies beyond.
Before each step the host makes room and sets the numbers (`prepare`), after it the host counts (`advance`). As long as
`prepare` returns the same, storage is where it was, and the step is the same work.

For causal attention with a `Linear` bias alone: other biases and decays need values on the host. With "reach" it is
for mode "certified" and sequences that begin together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lengthen.attention.biases import Bias, Decay
from lengthen.attention.buffer import Buffer
from lengthen.attention.cache import Cache, CachedLayer, Layer, Slots
from lengthen.attention.masks import Causal, Mask
from lengthen.attention.op import attention
from lengthen.attention.reach import Ball
from lengthen.attention.reach_cache import ReachLayer
from lengthen.attention.reach_group import Group


class StaticLayer:
    """A layer that keeps everything, in steps of one slot."""

    def __init__(self, layer: Layer, place: Tensor) -> None:
        self.layer, self.place = layer, place

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, decay: Decay | None, mask: Mask, forget: int = 0
    ) -> Tensor:
        """Return what `Layer.attend` does, for one slot; `mask` is of places in storage."""
        buffer = self.layer.buffer
        keys, values = _written(buffer, self.place, k, v)
        ball = buffer.grown(k)
        return attention(
            *(q, keys, values, bias, decay, mask),
            q_start=self.place.expand(q.shape[0]),
            tolerance=self.layer.tolerance,
            ball=None if ball is None else Ball(ball.centre, ball.radius, keys.shape[2]),
        )


class StaticReachLayer:
    """A layer that gives keys up for good, in steps of one slot."""

    def __init__(self, layer: ReachLayer, places: Tensor, logged: Tensor) -> None:
        self.layer, self.places, self.logged = layer, places, logged

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, decay: Decay | None, mask: Mask, forget: int = 0
    ) -> Tensor:
        """Return what `ReachLayer.attend` does, for one slot, and log the queries."""
        q, k, v = self.layer.ordered(q, k, v)
        parts = []
        for group, place in zip(self.layer.groups, torch.split(self.places, 1), strict=True):
            keys, values = _written(group.buffer, place, k[:, group.k], v[:, group.k])
            own, start = q[:, group.q], place.expand(q.shape[0])
            parts.append(attention(own, keys, values, group.bias, q_start=start, tolerance=0, return_lse=True))
        out, lse = self.layer.together(parts)
        self.layer.log.q.index_copy_(2, self.logged, q)
        self.layer.log.lse.index_copy_(2, self.logged, lse)
        return out


AnyLayer = CachedLayer | StaticLayer | StaticReachLayer


class StaticCache:
    """A cache that has read something, in steps of one token, with what a model's `extend` asks of a cache."""

    def __init__(self, cache: Cache, device: torch.device) -> None:
        self.cache, self.device = cache, device
        self.starts = None if cache.starts is None or not cache.starts.any() else cache.starts.to(device)
        held = [_groups(layer) for layer in cache.layers]
        self.buffers = [one.buffer for groups in held for one in groups]
        # Where each buffer's new key goes; then where the log's new query goes, the slot, and storage's first slot.
        self.numbers = torch.zeros(len(self.buffers) + 3, dtype=torch.int64, device=device)
        self.logged, self.slot, self.base = torch.split(self.numbers[-3:], 1)
        self.layers: list[StaticLayer | StaticReachLayer] = []
        own = torch.split(self.numbers[:-3], [len(groups) for groups in held])
        for layer, places in zip(cache.layers, own, strict=True):
            if isinstance(layer, ReachLayer):
                k, heads = layer.groups[0].buffer.k, len(layer.q_order)
                layer.log.reserve(k.new_empty(k.shape[0], heads, 0, k.shape[3]))
                self.layers.append(StaticReachLayer(layer, places, self.logged))
            else:
                self.layers.append(StaticLayer(layer, places))

    @staticmethod
    def fits(cache: Cache) -> bool:
        """Return whether such steps are possible over this cache."""
        if type(cache.mask) is not Causal or not cache.length:
            return False
        together = cache.starts is None or not bool(cache.starts.any())
        return cache.policy == "full" or (cache.policy, cache.mode, together) == ("reach", "certified", True)

    def prepare(self) -> tuple[int, ...]:
        """Make room for a slot and set the numbers; return where storage is."""
        for buffer in self.buffers:
            buffer.reserve(1)
        first = self.cache.layers[0]
        logged = first.log.count if isinstance(first, ReachLayer) else 0
        last = self.buffers[0]
        host = torch.tensor([*(one.place for one in self.buffers), logged, self.cache.length, last.end - last.place])
        self.numbers.copy_(host.pin_memory() if self.numbers.is_cuda else host, non_blocking=True)
        return tuple(x.data_ptr() for buffer in self.buffers for x in buffer.storage)

    def begin(self, new: int, device: torch.device) -> Slots:
        """Return where one token of each sequence stands, and the mask of places in storage."""
        if new != 1:
            raise ValueError(f"new: expected steps of one token, got {new}")
        if self.starts is None:
            return Slots(self.slot, Causal(), 0, 0)
        place = self.numbers[:1].expand(len(self.starts))
        mask = Causal().padded((self.starts - self.base).clamp(min=0))
        listed = mask.listed(1, self.buffers[0].storage[0].shape[2], place, device)
        return Slots((self.slot - self.starts.unsqueeze(1)).clamp(min=0), listed, 0, 0)

    def advance(self) -> None:
        """Count the step, once it is done; give up what is no longer in reach."""
        for layer in self.cache.layers:
            layer.advance()


def _groups(layer: CachedLayer) -> list[Group] | list[Layer]:
    """Return what holds a layer's buffers."""
    return layer.groups if isinstance(layer, ReachLayer) else [layer]


def _written(buffer: Buffer, place: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return storage, with these keys and values at a place in it."""
    for x, new in zip(buffer.storage, (k, v), strict=True):
        x.index_copy_(2, place, new)
    return buffer.storage
