"""Between one projection and its queries, keys and values, rotated on the way: one Triton kernel for both ways.

    a' = a·cos − b·sin,   b' = b·cos + a·sin        for features a and b = a + head_dim/2 of a pair

and with −sin on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, WARPS = 4, 4  # tokens per program: enough bytes in flight, few enough registers


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    source, target, cos, sin, sign, row, rows, length, sb, sl, sh, tb, tp, th, heads,
    half: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Turn, or just copy, all heads of some tokens; s… and t… are strides of a batch, a token and a head."""
    token = row[:, None, None]
    head = tl.arange(0, HEADS)[None, :, None]
    feature = tl.arange(0, HALF)[None, None, :]
    inside = (token < rows) & (head < heads) & (feature < half)
    sequence, place = token // length, token % length
    here = source + sequence * sb + place * sl + head * sh + feature
    there = target + sequence * tb + place * tp + head * th + feature
    a = tl.load(here, mask=inside, other=0.0)
    b = tl.load(here + half, mask=inside, other=0.0)
    if ROTATED:
        known = (token < rows) & (feature < half)
        c = tl.load(cos + place * half + feature, mask=known, other=0.0)
        s = tl.load(sin + place * half + feature, mask=known, other=0.0) * sign
        x, y = a.to(tl.float32), b.to(tl.float32)
        a, b = (x * c - y * s).to(a.dtype), (y * c + x * s).to(b.dtype)
    tl.store(there, a, mask=inside)
    tl.store(there + half, b, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(  # type: ignore[no-untyped-def]
    q, k, v, to_q, to_k, to_v, angles, sign, rows, length, heads, key_heads,
    qb, ql, qh, kb, kl, kh, vb, vl, vh, to_qb, to_ql, to_qh, to_kb, to_kl, to_kh, to_vb, to_vl, to_vh,
    half: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    table = length * half
    _move(q, to_q, angles, angles + table, sign, row, rows, length, qb, ql, qh, to_qb, to_ql, to_qh, heads,
          half, HEADS, HALF, True)  # fmt: skip
    _move(k, to_k, angles + 2 * table, angles + 3 * table, sign, row, rows, length, kb, kl, kh, to_kb, to_kl, to_kh,
          key_heads, half, KEY_HEADS, HALF, True)  # fmt: skip
    _move(v, to_v, angles, angles, sign, row, rows, length, vb, vl, vh, to_vb, to_vl, to_vh,
          key_heads, half, KEY_HEADS, HALF, False)  # fmt: skip


def split(qkv: Tensor, heads: int, key_heads: int, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the op `lengthen::split_rotated`."""
    parts = torch.split(qkv, [heads, key_heads, key_heads], dim=2)
    made = [torch.empty(part.shape, dtype=qkv.dtype, device=qkv.device) for part in parts]
    _launch(parts, made, angles, 1.0)
    return made[0], made[1], made[2]


def join(d_q: Tensor, d_k: Tensor, d_v: Tensor, angles: Tensor) -> Tensor:
    """As the op `lengthen::join_rotated`."""
    batch, length, heads, width = d_q.shape
    key_heads = d_k.shape[2]
    out = torch.empty(batch, length, heads + 2 * key_heads, width, dtype=d_q.dtype, device=d_q.device)
    _launch((d_q, d_k, d_v), torch.split(out, [heads, key_heads, key_heads], dim=2), angles, -1.0)
    return out


def _launch(sources: Sequence[Tensor], targets: Sequence[Tensor], angles: Tensor, sign: float) -> None:
    sources = [part if part.stride(3) == 1 else part.contiguous() for part in sources]
    batch, length, heads, width = sources[0].shape
    key_heads, rows, half = sources[1].shape[2], batch * length, width // 2
    strides = [part.stride(dim) for part in (*sources, *targets) for dim in (0, 1, 2)]
    with torch.cuda.device(angles.get_device()):  # Triton launches on the current one
        _rotated[(triton.cdiv(rows, TOKENS),)](
            *sources, *targets, angles.contiguous(), sign, rows, length, heads, key_heads, *strides, half=half,
            HEADS=triton.next_power_of_2(heads), KEY_HEADS=triton.next_power_of_2(key_heads),
            HALF=triton.next_power_of_2(half), TOKENS=TOKENS, num_warps=WARPS,
        )  # fmt: skip
