"""What a 2-D padding mask says: real keys in one run, so each sequence has a first and a last.

Transformers makes a mask of all pairs from it. Here it stays O(length): a mask with holes (padding between real tokens,
as after decoding from a right-padded prompt) is no interval, and is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lengthen.attention.checks import can_read

HOLES = (
    "attention_mask: expected each row's ones in one run (padding left or right), got ones on both sides of a zero; "
    "pad prompts on the left (tokenizer.padding_side = 'left')"
)


def real_keys(attention_mask: Tensor | None) -> Tensor | None:
    """Return the mask `[batch, keys]` as booleans, or None if it hides nothing; refuse one with holes."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask: expected [batch, keys], got {list(attention_mask.shape)}")
    real = attention_mask.bool()
    runs = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
    whole = (runs <= 1).all()
    if not can_read(real):
        torch._assert_async(whole, HOLES)
        return real
    fits, full = torch.stack((whole, real.all())).tolist()  # one wait for the GPU, not two
    if not fits:
        raise ValueError(HOLES)
    return None if full else real


def key_start(real: Tensor) -> Tensor:
    """Return each sequence's first real key, `[batch]`; behind the last where there is none."""
    return (real.long().cumsum(1) == 0).sum(1)


def key_end(real: Tensor) -> Tensor:
    """Return the one after each sequence's last real key, `[batch]`."""
    return real.shape[1] - (real.flip(1).long().cumsum(1) == 0).sum(1)
