"""The one call: checks what comes in, picks a backend, returns what the reference defines."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from lengthen.attention import chunked, kernels, native, reference
from lengthen.attention.biases import Bias, Decay, Linear, Table
from lengthen.attention.checks import describe, whole_number
from lengthen.attention.kernels import plans
from lengthen.attention.masks import Causal, Mask
from lengthen.attention.reach import default_tolerance

BACKENDS = ("reference", "chunked", "native", "triton")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CAUSAL = Causal()


@dataclass(frozen=True)
class Settled:
    """The call's numbers, with their defaults filled in."""

    scale: float
    q_start: int
    tolerance: float


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = ...,
    decay: Decay | None = ...,
    mask: Mask = ...,
    scale: float | None = ...,
    q_start: int | None = ...,
    tolerance: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
    key_norm: Tensor | None = ...,
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
    q_start: int | None = ...,
    tolerance: float | None = ...,
    *,
    return_lse: Literal[True],
    backend: str | None = ...,
    key_norm: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    decay: Decay | None = None,
    mask: Mask = _CAUSAL,
    scale: float | None = None,
    q_start: int | None = None,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    key_norm: Tensor | None = None,
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
        q_start: the first query's position among the keys; None: the last query stands at the last key,
            so the same call serves training and decoding with a cache.
        tolerance: the share of a row's softmax mass that `Linear` may leave unread (see `lengthen.reach`).
            None: half a unit in the last place of the output's dtype; 0 reads everything.
        return_lse: return (out, lse) with lse `[batch, heads, queries]`, as `merge` takes them.
        backend: "reference", "chunked", "native" or "triton" forces one; None picks.
        key_norm: a number that no key's norm is above, float32 `[batch, key_heads]`, where one is kept (as a cache can
            while it grows). With it the GPU kernels need not look at far keys to know that they may leave them unread.

    Returns:
        out `[batch, heads, queries, value width]` in q's dtype. A query that sees no key gives 0 and lse −∞.

    Example:
        >>> import torch, lengthen
        >>> q, k, v = torch.randn(3, 1, 8, 1024, 64)
        >>> lengthen.attention(q, k, v, bias=lengthen.Linear(lengthen.alibi_slopes(8))).shape
        torch.Size([1, 8, 1024, 64])
    """
    key = None
    if torch.compiler.is_compiling():
        if backend is None and isinstance(mask, Mask):
            settled = check_call(q, k, v, bias, decay, mask, scale, q_start, tolerance, key_norm)
            if native.traceable(q, k, v, bias, decay, mask, settled.q_start, return_lse):
                return native.attention(q, k, v, bias, decay, mask, settled.scale, settled.q_start)
            if q.is_cuda and not kernels.unfit(q, v, bias, decay, mask):
                call = (q, k, v, bias, decay, mask, settled.scale, settled.q_start)
                out, lse = kernels.attention(*call, settled.tolerance, key_norm)
                return (out, lse) if return_lse else out
        # How far to read depends on the data, so torch.compile works around other calls. (As a decorator, `disable`
        # would load the compiler with the package, and double the time that its import takes.)
        attend = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]
    else:
        attend = _attend
        if isinstance(bias, Linear) and isinstance(q, Tensor) and q.is_cuda:
            key = plans.key(q, k, v, bias, decay, mask, scale, q_start, tolerance, return_lse, backend, key_norm)
            if key is not None and (again := plans.again(key, q, k, v, bias, key_norm, return_lse)) is not None:
                return again
    out, lse = attend(q, k, v, bias, decay, mask, scale, q_start, tolerance, return_lse, backend, key_norm, key)
    return (out, lse) if return_lse and lse is not None else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    decay: Decay | None,
    mask: Mask,
    scale: float | None,
    q_start: int | None,
    tolerance: float | None,
    return_lse: bool,
    backend: str | None,
    key_norm: Tensor | None,
    key: plans.Key | None,
) -> tuple[Tensor, Tensor | None]:
    settled = check_call(q, k, v, bias, decay, mask, scale, q_start, tolerance, key_norm)
    call = (q, k, v, bias, decay, mask, settled.scale, settled.q_start)
    if backend is None and q.is_cuda:
        backend = _on_gpu(q, k, v, bias, decay, mask, settled.q_start, return_lse)
        if backend == "triton":
            return kernels.attention(*call, settled.tolerance, key_norm, key)
    elif backend is not None and backend not in BACKENDS:
        near = difflib.get_close_matches(str(backend), BACKENDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}{hint}")
    if backend == "triton":
        if reason := kernels.unfit(q, v, bias, decay, mask):
            raise ValueError(f"backend: 'triton' cannot do this call: {reason}")
        return kernels.attention(*call, settled.tolerance, key_norm, key)
    # Scores, distances and sums stay in float32 and more: autocast would put them into 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        if backend == "reference":
            return reference.attention(*call)
        if backend == "torch":
            return native.attention(*call), None
        reason = native.unfit(*call, return_lse=return_lse, by_choice=backend is None) if backend != "chunked" else "-"
        if backend == "native" and reason:
            raise ValueError(f"backend: 'native' cannot do this call exactly: {reason}")
        if not reason:
            return native.attention(*call), None
        return chunked.attention(*call, tolerance=settled.tolerance)


def _on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    decay: Decay | None,
    mask: Mask,
    q_start: int,
    return_lse: bool,
) -> str | None:
    """Return the backend for a call on a GPU, where looking at values would have the CPU wait; None: as elsewhere.

    Torch's own attention takes what it can, so that there, as under torch.compile, a key or value that is NaN may reach
    queries that do not see it.
    """
    if q.dtype == torch.float64 or not q.numel():
        return None
    if decay is None and native.traceable(q, k, v, bias, decay, mask, q_start, return_lse):
        return "torch"
    return None if kernels.unfit(q, v, bias, decay, mask) else "triton"


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    decay: Decay | None,
    mask: Mask,
    scale: float | None,
    q_start: int | None,
    tolerance: float | None,
    key_norm: Tensor | None = None,
) -> Settled:
    """Refuse what does not fit together, by name, and fill in the defaults."""
    _check_tensors(q, k, v)
    heads, head_dim = q.shape[1], q.shape[3]
    if not isinstance(mask, Mask):
        raise TypeError(f"mask: expected Causal(), Window(n), Blockwise(n) or Bidirectional(), got {describe(mask)}")
    if mask.key_start is not None and mask.key_start.shape[0] not in (1, q.shape[0]):
        raise ValueError(
            f"mask.key_start: expected one number for each of {q.shape[0]} sequences, got {describe(mask.key_start)}"
        )
    if mask.document_starts is not None and mask.document_starts.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"mask.document_starts: expected [{q.shape[0]}, keys], got {describe(mask.document_starts)}")
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    elif not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale):
        raise TypeError(f"scale: expected a finite number, got {describe(scale)}")
    q_start = k.shape[2] - q.shape[2] if q_start is None else whole_number("q_start", q_start)
    if tolerance is None:
        tolerance = default_tolerance(q.dtype)
    elif not isinstance(tolerance, int | float) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance: expected a number, got {describe(tolerance)}")
    elif not 0 <= tolerance < 1:
        raise ValueError(f"tolerance: expected a share from 0 to below 1, got {tolerance}")
    if bias is not None:
        _check_bias(bias, q, k, mask, q_start)
    if decay is not None:
        if not isinstance(decay, Decay):
            raise TypeError(f"decay: expected Decay, got {describe(decay)}")
        _like_q("decay.rates", decay.rates, q)
        if decay.rates.shape not in ((head_dim,), (heads, head_dim)):
            raise ValueError(
                f"decay.rates: expected [{head_dim}] or [{heads}, {head_dim}], got {describe(decay.rates)}"
            )
    if key_norm is not None:
        _check_key_norm(key_norm, q, k)
    return Settled(float(scale), q_start, float(tolerance))


def _check_key_norm(key_norm: object, q: Tensor, k: Tensor) -> None:
    if not isinstance(key_norm, Tensor):
        raise TypeError(f"key_norm: expected a tensor, got {describe(key_norm)}")
    if key_norm.dtype != torch.float32 or key_norm.shape != k.shape[:2]:
        raise ValueError(
            f"key_norm: expected a torch.float32 tensor of shape {list(k.shape[:2])}, got {describe(key_norm)}"
        )
    _like_q("key_norm", key_norm, q)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what is no set of queries, keys and values."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {describe(x)}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {describe(x)}")
        if x.dim() != 4:
            raise ValueError(f"{name}: expected [batch, heads, length, width], got {describe(x)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected {q.dtype} like q, got {describe(x)}")
        _like_q(name, x, q)
    if q.shape[3] == 0 or k.shape[3] != q.shape[3]:
        raise ValueError(f"k: expected head_dim {q.shape[3]} like q, at least 1, got {describe(k)}")
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        name, odd = ("k", k) if k.shape[0] != q.shape[0] else ("v", v)
        raise ValueError(f"{name}: expected batch {q.shape[0]} like q, got {describe(odd)}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"v: expected heads and length {list(k.shape[1:3])} like k, got {describe(v)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: expected a head count that divides q's {q.shape[1]}, got {describe(k)}")


def _check_bias(bias: Bias, q: Tensor, k: Tensor, mask: Mask, q_start: int) -> None:
    if not isinstance(bias, Linear | Table):
        raise TypeError(f"bias: expected Linear or Table, got {describe(bias)}")
    name = "bias.slopes" if isinstance(bias, Linear) else "bias.values"
    for part, tensor in ((name, bias.tensors[0]), ("bias.ahead", bias.tensors[1])):
        if tensor is not None:
            _like_q(part, tensor, q)
    if bias.heads != q.shape[1]:
        raise ValueError(
            f"{name}: expected one row for each of q's {q.shape[1]} heads, got {describe(bias.tensors[0])}"
        )
    if isinstance(bias, Table):
        _check_table(bias, q.shape[2], k.shape[2], mask, q_start)


def _check_table(table: Table, queries: int, keys: int, mask: Mask, q_start: int) -> None:
    """Refuse a table that ends before the farthest distance that a query sees."""
    behind, ahead = max(0, q_start + queries - 1), max(0, keys - 1 - q_start)  # were everything visible
    ends = table.values.shape[1], (table.values if table.ahead is None else table.ahead).shape[1]
    if behind >= ends[0] or ahead >= ends[1]:
        first, last = mask.interval(queries, keys, q_start, table.values.device)
        if not first.numel():
            return
        position = torch.arange(q_start, q_start + queries, device=first.device)
        seen = first <= last
        behind = int((position - first).where(seen, 0).amax())
        ahead = int((last - position).where(seen, 0).amax())
    for name, far, end in (
        ("values", behind, ends[0]),
        ("values" if table.ahead is None else "ahead", ahead, ends[1]),
    ):
        if far >= end and keys:
            raise ValueError(
                f"bias.{name}: expected distances 0 … {far}, the farthest that the mask lets a query see, "
                f"got a table for 0 … {end - 1}"
            )


def _like_q(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: expected a tensor on {q.device} like q, got {describe(x)}")
