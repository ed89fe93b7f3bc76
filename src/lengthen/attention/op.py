"""The one call: makes a problem of its arguments and takes the first backend that fits."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from lengthen.attention.backends import chunked, native, reference, triton
from lengthen.attention.biases import Bias, Decay
from lengthen.attention.masks import Causal, Mask
from lengthen.attention.problem import Problem, pose
from lengthen.attention.reach import Ball
from lengthen.checks import nearest

BACKENDS: dict[str, ModuleType] = {"reference": reference, "native": native, "chunked": chunked, "triton": triton}
# In the order of preference, by device; `chunked` takes everything, on any.
ORDER: dict[str, tuple[ModuleType, ...]] = {"cuda": (native, triton, chunked), "cpu": (native, chunked)}
AUTOCAST = tuple(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))
_CAUSAL = Causal()

# What people who come from torch's attention ask for, and what it is called here.
OF_TORCH = {
    "is_causal": "use mask=Causal(), which is the default, or mask=Bidirectional()",
    "attn_mask": "use mask= for what queries see, and bias=Linear(slopes) or Table(values) for what is added to scores",
    "dropout_p": "attention dropout is not offered; drop out the output instead",
    "enable_gqa": "leave it out: keys and values with fewer heads are shared by groups of query heads",
}


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = ...,
    decay: Decay | None = ...,
    mask: Mask = ...,
    scale: float | None = ...,
    q_start: int | Tensor | None = ...,
    tolerance: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
    ball: Ball | None = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = ...,
    decay: Decay | None = ...,
    mask: Mask = ...,
    scale: float | None = ...,
    q_start: int | Tensor | None = ...,
    tolerance: float | None = ...,
    *,
    return_lse: Literal[True],
    backend: str | None = ...,
    ball: Ball | None = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    decay: Decay | None = None,
    mask: Mask = _CAUSAL,
    scale: float | None = None,
    q_start: int | Tensor | None = None,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    ball: Ball | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax(scale·q·k + bias(distance)) · v over the keys that `mask` lets each query see.

    Args:
        q: queries `[batch, heads, queries, head_dim]`, float16, bfloat16, float32 or float64.
        k: keys `[batch, key_heads, keys, head_dim]`; key_heads divides heads (grouped queries).
        v: values `[batch, key_heads, keys, any width]`.
        bias: `Linear` (ALiBi) or `Table` (any function of distance), added to the scaled score.
        decay: `Decay` (xPos), a factor for each feature that falls with distance.
        mask: `Causal`, `Window`, `Blockwise` or `Bidirectional`, with `.padded` and `.packed`.
        scale: what q·k is multiplied by; None: 1/√head_dim.
        q_start: the first query's position among the keys, one number or one for each sequence; None: the last query
            stands at the last key, so the same call serves training and decoding with a cache.
        tolerance: the fraction of a row's softmax mass that a bias which falls with distance may leave unread (see
            `lengthen.reach`). None: half a unit in the last place of the output's dtype; 0 reads everything.
        return_lse: return (out, lse) with lse `[batch, heads, queries]`, as `merge` takes them.
        backend: "reference", "native", "chunked" or "triton" forces one; None picks.
        ball: a `Ball` around the keys, where one is kept (as a cache can while it grows). It bounds the scores of far
            keys without reading them.

    There is no attention dropout.

    Returns:
        out `[batch, heads, queries, value width]` in q's dtype. A query that sees no key gives 0 and lse −∞.

    Example:
        >>> import torch, lengthen
        >>> q, k, v = torch.randn(3, 1, 8, 1024, 64)
        >>> lengthen.attention(q, k, v, bias=lengthen.Linear(lengthen.alibi_slopes(8))).shape
        torch.Size([1, 8, 1024, 64])
    """
    if unknown:
        raise _not_taken(next(iter(unknown)))
    problem = pose(
        *(q, k, v, bias, decay, mask),
        scale=scale,
        q_start=q_start,
        tolerance=tolerance,
        ball=ball,
        needs_lse=return_lse,
    )
    chosen = pick(problem, backend)
    # Scores, distances and sums stay in float32 and more: autocast would put them into 16 bits.
    if q.device.type in AUTOCAST and torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            out, lse = chosen.run(problem)
    else:
        out, lse = chosen.run(problem)
    return (out, lse) if return_lse else out


def pick(problem: Problem, backend: str | None = None) -> Any:
    """Return the backend that was asked for, or the first that fits; the same under torch.compile."""
    if backend is None:
        for choice in ORDER.get(problem.q.device.type, (chunked,)):
            if choice.unfit(problem) is None:
                return choice
        return chunked
    if not isinstance(backend, str) or backend not in BACKENDS:
        hint = nearest(str(backend), BACKENDS)
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}{hint}")
    if reason := BACKENDS[backend].unfit(problem):
        raise ValueError(f"backend: {backend!r} cannot do this call: {reason}")
    return BACKENDS[backend]


def _not_taken(name: str) -> TypeError:
    """Return the error for an argument that there is not."""
    if name in OF_TORCH:
        return TypeError(f"{name}: not an argument of lengthen.attention; {OF_TORCH[name]}")
    known = ("bias", "decay", "mask", "scale", "q_start", "tolerance", "return_lse", "backend", "ball")
    return TypeError(
        f"{name}: not an argument of lengthen.attention, which takes {', '.join(known)}{nearest(name, known)}"
    )
