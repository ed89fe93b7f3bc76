"""Torch's own fused attention, where it does the job exactly and no slower: no bias, or short lengths.

Without a bias, causal and full attention go to `scaled_dot_product_attention` as they are. At short lengths any bias
and any mask go there too, as one dense float32 tensor of heads × queries × keys; past `DENSE` entries that tensor would
cost more than it saves. A decay goes into the queries and keys, where the call is short enough for its powers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen.attention.biases import Bias, Decay, Table
from lengthen.attention.checks import can_look, finite
from lengthen.attention.masks import Bidirectional, Causal, Mask
from lengthen.attention.sides import folded

DENSE = 1 << 20  # entries of a dense bias: 4 MB
FEW = 32  # for so few queries (decoding) a dense bias is small beside the keys, and may be larger by `MORE`
MORE = 16  # on a GPU too, where many small steps cost more than large ones
# How small a decay's power may get in a query or key, and so how large in another: far from what the dtype can hold.
LEAST_POWER = {torch.float16: 2.0**-5, torch.bfloat16: 2.0**-16, torch.float32: 2.0**-16, torch.float64: 2.0**-16}


def unfit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    decay: Decay | None,
    mask: Mask,
    scale: float,
    q_start: int,
    return_lse: bool,
    by_choice: bool,
) -> str:
    """Return why this call is not for torch's own attention; empty: it is."""
    if return_lse:
        return "it does not return lse"
    if decay is not None:
        if reason := _unfoldable(q, k, decay, mask, q_start):
            return reason
        if q.dtype in (torch.float16, torch.bfloat16) and q.device.type != "cpu":
            return "in 16 bits, queries and keys with the decay in them would be rounded twice"
        scale = scale / LEAST_POWER[q.dtype] ** 2  # what a hidden key ahead of its query grows by, at most
    if not (q.numel() and v.numel()):
        return "there is nothing to read"
    if bias is not None and any(t is not None and t.requires_grad for t in bias.tensors):
        return "the bias needs a gradient, and its own is not deterministic"
    if isinstance(bias, Table) and not all(t is None or bool(t.isfinite().all()) for t in bias.tensors):
        return "the bias is not finite: it hides keys, and it would not say which queries see none"
    if _plain(q, k, bias, mask, q_start) is None:
        first, last = mask.interval(q.shape[2], k.shape[2], q_start, q.device)
        limit = DENSE * (MORE if q.shape[2] <= FEW or q.device.type != "cpu" else 1)
        if by_choice and first.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] > limit:
            return f"a dense bias would have more than {limit} entries"
        if bool((first > last).any()):
            return "some query sees no key"
        everything = bool((first == 0).all() and (last == k.shape[2] - 1).all())
    else:
        everything = isinstance(mask, Bidirectional)
        if by_choice and v.shape[3] != q.shape[3]:
            return "the value width is not head_dim, for which it holds all scores at once"
    if not everything and not finite(q, k, v, scale, bias.tensors[0] if isinstance(bias, Table) else None):
        return "an input is not finite, and it would let hidden keys leak"
    return ""


def traceable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    decay: Decay | None,
    mask: Mask,
    q_start: int,
    return_lse: bool,
) -> bool:
    """Return whether torch.compile may take torch's own attention into its graph, where no value can be looked at.

    So a NaN in a key or value may there reach queries that do not see it. A compiler joins the decay to what made the
    queries and keys, and rounds once.
    """
    if return_lse or v.shape[3] != q.shape[3] or _plain(q, k, bias, mask, q_start) is None:
        return False
    return decay is None or not _unfoldable(q, k, decay, mask, q_start)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    decay: Decay | None,
    mask: Mask,
    scale: float,
    q_start: int,
) -> Tensor:
    """Return out; only for calls that `unfit` has no word against."""
    dtype = q.dtype
    plain = _plain(q, k, bias, mask, q_start)
    # A bias in 16 bits is wrong, and 16-bit floats are slow on most CPUs: there the call is made in float32.
    if dtype in (torch.float16, torch.bfloat16) and (plain is None or q.device.type == "cpu"):
        q, k, v = q.float(), k.float(), v.float()
    if decay is not None:
        q, k = folded(q, k, decay, q_start)
        if v.shape[1] != k.shape[1]:
            v = v.repeat_interleave(k.shape[1] // v.shape[1], dim=1)
    if plain is not None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=plain, scale=scale, enable_gqa=_grouped(q, k))
        return out.to(dtype)
    i = torch.arange(q.shape[2], device=q.device)[:, None] + q_start
    j = torch.arange(k.shape[2], device=q.device)
    first, last = mask.interval(q.shape[2], k.shape[2], q_start, q.device)
    visible = ((j >= first[..., None]) & (j <= last[..., None]))[:, None]
    dense = visible
    if bias is not None:
        distance = (i - j).where(visible.any(0)[0], 0)
        dense = bias.at(distance, q.dtype).masked_fill(~visible, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, scale=scale, enable_gqa=_grouped(q, k)).to(dtype)


def _plain(q: Tensor, k: Tensor, bias: Bias | None, mask: Mask, q_start: int) -> bool | None:
    """Return is_causal for a call that needs no dense bias; None for others."""
    if bias is not None or mask.key_start is not None or mask.document_starts is not None:
        return None
    if isinstance(mask, Bidirectional):
        return False
    return True if isinstance(mask, Causal) and q_start == 0 and q.shape[2] == k.shape[2] else None


def _unfoldable(q: Tensor, k: Tensor, decay: Decay, mask: Mask, q_start: int) -> str:
    """Return why the decay cannot go into queries and keys; empty: it can."""
    return unfoldable(decay, mask, q.shape[2], k.shape[2], q_start, q.dtype)


def unfoldable(decay: Decay, mask: Mask, queries: int, keys: int, q_start: int, dtype: torch.dtype) -> str:
    """As `_unfoldable`, for who has no queries and keys yet."""
    if isinstance(mask, Bidirectional):
        return "it knows no decay for keys ahead of the query"
    floor = decay.floor
    if floor is None and can_look(decay.rates):
        floor = float(decay.rates.detach().min())
    if floor is None:
        return "how fast the decay is cannot be looked at"
    middle = (q_start + queries) / 2
    farthest = max(abs(end - middle) for end in (0, keys, q_start, q_start + queries))
    if floor**farthest < LEAST_POWER[dtype]:
        return "the decay's powers would come too near to what the dtype can hold"
    return ""


def _grouped(q: Tensor, k: Tensor) -> bool:
    """Return whether heads share keys; by an `if`, since torch.compile would hand on a comparison as a symbol."""
    if q.shape[1] == k.shape[1]:  # noqa: SIM103
        return False
    return True
