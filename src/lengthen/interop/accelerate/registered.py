"""Attention as transformers lets others register it: `attn_implementation="lengthen"`, for models that look it up.

Two functions go together. One makes masks: three numbers per query instead of one per pair,

    first, last, position      int32 [batch or 1, 1, queries, 3]

(four dimensions, so that transformers hands it on as a mask that is ready), or None for plain causal attention. The
other attends. A model that uses the first without the second would have no mask at all where that is None, so None is
only for models that are known; for others the shape stops every sum with scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from lengthen.attention import Bidirectional, Causal, Table, attention
from lengthen.attention.masks import Listed, ListedBehind, Mask
from lengthen.interop.accelerate import FILES
from lengthen.interop.accelerate.padding import key_end, key_start, real_keys
from lengthen.interop.accelerate.swap import configs_of, mind_dropout, refuse_weights, tell

NAME = "lengthen"
KNOWN = {family for family, file in FILES.items() if file != "alibi"}  # families that look up what is registered
UNSUPPORTED = ("softcap", "s_aux", "head_mask", "cache")  # what some models ask of attention besides


def intervals(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """Return first, last and position of each query among the keys, or None: plain attention of a known model."""
    family = str(getattr(config, "model_type", None))
    if FILES.get(family) == "alibi":
        raise ValueError(
            f"attn_implementation: {family} ignores what is registered; load it without, and call "
            "lengthen.accelerate(model)"
        )
    if use_vmap:
        raise ValueError("mask: expected a causal, sliding or full mask, got a mask function of one's own")
    if mask_function is bidirectional_mask_function and getattr(config, "is_decoder", False):
        # Attention to an encoder's output, which stays as it is.
        return sdpa_mask(
            *(batch_size, q_length, kv_length),
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            device=device,
        )
    start = q_offset - kv_offset
    window = None
    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        window = kv_length
    elif allow_is_causal_skip and local_size is not None and local_size == getattr(config, "sliding_window", None):
        window = local_size  # with nothing else: transformers allows to leave it out, where the window is wide enough
    full = mask_function is bidirectional_mask_function
    real = real_keys(attention_mask)
    at_end = isinstance(start, int) and kv_length == start + q_length
    plain = FILES.get(family) == "t5" if full else at_end and window is not None and window >= kv_length
    if real is None and plain and family in KNOWN:
        return None
    place = (torch.arange(q_length, device=device) + start).unsqueeze(0)
    if window is None:
        first, last = searched(mask_function, batch_size, place, kv_length, kv_offset)
    else:
        first = torch.zeros_like(place) if full else (place - window + 1).clamp(min=0)
        last = torch.full_like(place, kv_length - 1) if full else place
    if real is not None:
        seen = real[:, kv_offset : kv_offset + kv_length]
        first = torch.maximum(first, key_start(seen).unsqueeze(1))
        last = torch.minimum(last, key_end(seen).unsqueeze(1) - 1)
    first, last, place = torch.broadcast_tensors(first, last, place)  # type: ignore[no-untyped-call]
    return torch.stack((first, last, place), dim=-1).int().unsqueeze(1)


def searched(
    mask_function: Callable[..., Tensor], batch: int, place: Tensor, keys: int, kv_offset: int
) -> tuple[Tensor, Tensor]:
    """Return first and last of any mask that is an interval around each query, by bisection: packed documents."""
    rows = torch.arange(batch, device=place.device).unsqueeze(1)
    place = place.expand(batch, -1)

    def visible(key: Tensor) -> Tensor:
        return mask_function(rows, rows.new_zeros(()), place + kv_offset, key + kv_offset)

    low, first, last, high = torch.zeros_like(place), place, place, torch.full_like(place, keys - 1)
    size = 1
    while size <= keys:
        size *= 2
        middle = (low + first) // 2
        hit = visible(middle)
        first, low = torch.where(hit, middle, first), torch.where(hit, low, torch.minimum(middle + 1, first))
        middle = (last + high + 1) // 2
        hit = visible(middle)
        last, high = torch.where(hit, middle, last), torch.where(hit, high, torch.maximum(middle - 1, last))
    return first, last


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output `[batch, queries, heads, head_dim]` and no weights, as transformers calls it."""
    refuse_weights(others.get("output_attentions"))
    if position_bias is not None and position_bias.dim() == 4:  # one of all pairs, which t5.py makes none of
        if attention_mask is None or attention_mask.dtype != torch.bool:
            raise ValueError(
                f"attn_implementation: {type(module).__name__} has a bias of all pairs; load the model without, and "
                "call lengthen.accelerate(model)"
            )
        return sdpa_attention_forward(
            *(module, query, key, value, attention_mask),
            dropout=dropout,
            scaling=scaling,
            is_causal=False,
            position_bias=position_bias,
        )
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise ValueError(f"{name}: expected None, got one from {type(module).__name__}, which is not supported")
    mind_dropout(module.training, dropout)
    bias, tolerance = None, None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if position_bias is not None:  # t5.py: the sides that the module's queries see, [sides, heads, distances]
        bias = Table(position_bias[0], position_bias[1] if len(position_bias) == 2 else None, extended=True)
        causal = bias.ahead is None
        tolerance = 0.0  # its last bucket has no end, so that looking for a reach would find none
    mask: Mask = Causal() if causal else Bidirectional()
    q_start: int | Tensor | None = None
    if attention_mask is not None:
        mask, q_start = listed(attention_mask, query, key, behind=bias is not None and causal)
    q, k = query.to(value.dtype), key.to(value.dtype)
    out = attention(q, k, value, bias=bias, mask=mask, scale=scaling, q_start=q_start, tolerance=tolerance)
    return out.transpose(1, 2).contiguous(), None


def listed(attention_mask: Tensor, query: Tensor, key: Tensor, behind: bool) -> tuple[Mask, Tensor]:
    """Return the mask that `intervals` made, and where the queries begin; `behind`: no query sees a key ahead of it."""
    if attention_mask.dtype != torch.int32 or attention_mask.dim() != 4 or attention_mask.shape[3] != 3:
        raise ValueError(
            f"attention_mask: expected a padding mask [batch, keys], got {attention_mask.dtype} "
            f"{list(attention_mask.shape)}"
        )
    if attention_mask.shape[2] != query.shape[2]:
        raise ValueError(f"attention_mask: expected {query.shape[2]} queries, got {attention_mask.shape[2]}")
    first, last, place = (x.contiguous() for x in attention_mask[:, 0].unbind(-1))
    kind = ListedBehind if behind else Listed
    return kind(first, last, key.shape[2]), place[:, 0]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, intervals)


def apply(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Have a model look up the registered attention."""
    configs_of(model)
    for name, module in modules.items():
        if not hasattr(module, "config") or not hasattr(module, "is_causal"):
            raise TypeError(
                f"{name}: expected a {type(module).__name__} with `config` and `is_causal`, got one without"
            )
    tell(model, NAME)
