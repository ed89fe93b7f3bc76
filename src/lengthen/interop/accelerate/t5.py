"""T5, mT5 and UMT5: the registered attention, and the bias as a table of distances instead of a matrix of all pairs.

    softmax(q·k + weight[bucket(i − j), h])        one table for all layers; UMT5: one for each

The modules' `forward` stays theirs: it looks up the registered attention, and hands it what `compute_bias` returns.
That becomes `[sides, heads, distances]`, float32, with gradients to the embedding; both sides in an encoder, the keys
behind in a decoder. Attention to the encoder's output has no bias and stays as it is.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from lengthen.interop.accelerate.registered import NAME
from lengthen.interop.accelerate.swap import Swapped, configs_of, swap, tell
from lengthen.positions.method import widen
from lengthen.positions.t5 import spread


class TableAttention(Swapped):
    """What the three have in common."""

    _lengthen_starts: tuple[int, ...]
    config: Any
    is_decoder: bool
    relative_attention_bias: nn.Embedding

    needs = ("relative_attention_bias", "relative_attention_max_distance", "is_decoder", "config", "scaling")
    takes: ClassVar = {
        "compute_bias": ("self", "query_length", "key_length", "device", "past_seen_tokens"),
        "_relative_position_bucket": ("relative_position", "bidirectional", "num_buckets", "max_distance"),
    }

    @staticmethod
    def buckets(module: Any, relative_position: Tensor) -> Tensor:
        """Return the module's own buckets."""
        return module._relative_position_bucket(  # type: ignore[no-any-return]
            relative_position,
            bidirectional=not module.is_decoder,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=module.relative_attention_max_distance,
        )

    @classmethod
    def starts(cls, module: Any) -> tuple[int, ...]:
        """Return the first distance of each bucket behind a query; of those ahead it is the same."""
        distances = torch.arange(module.relative_attention_max_distance + 1)
        found = cls.buckets(module, -distances)
        count = int(found[-1]) + 1
        if bool((found.diff() < 0).any()) or int(found[0]) != 0:
            raise ValueError("relative_position_bucket: expected buckets that grow with distance from 0, got others")
        return tuple(torch.searchsorted(found, torch.arange(count)).tolist())

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int | Tensor = 0
    ) -> Tensor:
        """Return the bias of every distance, `[sides, heads, distances]`; the last goes on.

        After `model.set_attn_implementation(…)` it is another attention that gets it: then it is transformers' own.
        """
        if self.config._attn_implementation != NAME:
            theirs: Any = super()
            return theirs.compute_bias(query_length, key_length, device, past_seen_tokens)  # type: ignore[no-any-return]
        weight = widen(self.relative_attention_bias.weight)
        sides = (weight,) if self.is_decoder else weight.chunk(2)
        return torch.stack([spread(rows, self._lengthen_starts) for rows in sides])


class T5OpAttention(TableAttention, T5Attention):
    """T5's."""


class MT5OpAttention(TableAttention, MT5Attention):
    """mT5's."""


class UMT5OpAttention(TableAttention, UMT5Attention):
    """UMT5's."""

    takes: ClassVar = {**TableAttention.takes, "_relative_position_bucket": ("self", "relative_position")}

    @staticmethod
    def buckets(module: Any, relative_position: Tensor) -> Tensor:
        """Return the module's own buckets."""
        return module._relative_position_bucket(relative_position)  # type: ignore[no-any-return]


OURS: dict[type, type[TableAttention]] = {
    cls.replaced(): cls for cls in (T5OpAttention, MT5OpAttention, UMT5OpAttention)
}


def apply(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Replace the bias of a model; first all checks, then all changes."""
    configs_of(model)
    todo = []
    for name, module in modules.items():
        if isinstance(module, TableAttention) or not getattr(module, "has_relative_attention_bias", True):
            continue
        cls = OURS.get(type(module))
        if cls is None:
            raise TypeError(
                f"{name}: expected one of {', '.join(c.__name__ for c in OURS)}, got {type(module).__name__}"
            )
        cls.check(name, module)
        todo.append((module, cls, cls.starts(module)))
    tell(model, NAME)
    for module, replacement, starts in todo:
        swap(module, replacement, _lengthen_starts=starts)
