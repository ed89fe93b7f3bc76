"""Cross-entropy of an output layer without all logits at once: a chunk of tokens at a time.

    loss[t] = log Σ_v exp(h_t·w_v) − h_t·w_target(t)

131,072 tokens with a vocabulary of 50,000 would be 26 GB of float32 logits, and as much again for their gradient.
Here a chunk's logits become its losses and then, in the same memory, their gradient, which is multiplied out into the
gradients of the hidden states and of the weight at once. So the backward pass only scales them, and no matmul is
computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # a target that is not scored, as in torch
CHUNK_BYTES = 1 << 25  # of one chunk's logits on a CPU: few fit its cache better
CHUNK_FRACTION = 16  # on a GPU a chunk may take 1/16 of its memory: few large products are the fastest


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, which gradients flow through, and each token's own, which they do not.

    Args:
        hidden: `[tokens, width]`.
        weight: `[vocabulary, width]`, the output layer.
        targets: `[tokens]`, integers; `IGNORED` (−100) is not scored, and has loss 0.

    Returns:
        The sum, a float32 scalar (float64 for float64 inputs), and the losses `[tokens]`.
    """
    if not torch.is_grad_enabled():  # inside the function below this cannot be seen, and gradients would be computed
        hidden, weight = hidden.detach(), weight.detach()
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        # The weight's gradient is a sum over chunks in float32: it goes back as such, not through 16 bits.
        total, losses = _LinearCrossEntropy.apply(hidden.to(dtype), weight, targets)  # type: ignore[no-untyped-call]
    return total, losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight_dtype, weight = weight.dtype, weight.to(hidden.dtype)
        learns_hidden, learns_weight, _ = ctx.needs_input_grad
        losses = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if learns_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if learns_weight else None
        chunks = -(-hidden.shape[0] * weight.shape[0] * hidden.element_size() // _chunk_bytes(hidden.device))
        rows = -(-hidden.shape[0] // max(1, chunks))  # chunks of one size: a short last one would waste a GPU's time
        score = _scorer(hidden.device.type, hidden.dtype) if learns_hidden or learns_weight else _score_only
        for start in range(0, hidden.shape[0], max(1, rows)):
            here = slice(start, start + rows)
            logits = hidden[here] @ weight.mT
            losses[here], d_logits = score(logits, targets[here])
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[here])
            if d_weight is not None:
                d_weight += d_logits.mT @ hidden[here]
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight_dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if torch.is_grad_enabled():  # create_graph=True: what the forward pass computed would pass for a constant
            raise RuntimeError("linear_cross_entropy: expected a first derivative, got create_graph=True")
        d_hidden, d_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            None if d_hidden is None else (d_hidden * d_total).to(hidden_dtype),
            None if d_weight is None else (d_weight * d_total).to(weight_dtype),
            None,
        )


def _chunk_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CHUNK_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory) // CHUNK_FRACTION


def _score_only(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of a chunk, and the logits as they were."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scored = targets != IGNORED
    picked = wide.gather(1, targets.where(scored, 0).unsqueeze(1)).squeeze(1)
    return (wide.logsumexp(dim=1) - picked).where(scored, 0), logits


def _score_and_pull(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of a chunk and their gradient by the logits: softmax − one at the target."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scored = (targets != IGNORED).unsqueeze(1)
    target = targets.unsqueeze(1).where(scored, 0)
    lse = wide.logsumexp(dim=1, keepdim=True)
    at_target = torch.arange(logits.shape[1], device=logits.device) == target
    d_logits = ((wide - lse).exp() - at_target.to(wide.dtype)).where(scored, 0)
    losses = (lse - wide.gather(1, target)).where(scored, 0).squeeze(1)
    return losses, d_logits.to(logits.dtype)


def _score_in_place(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As `_score_and_pull`, in the logits' own memory: for the CPU, where memory is what costs."""
    scored = targets != IGNORED
    target = targets.where(scored, 0).unsqueeze(1)
    picked = logits.gather(1, target)
    top = logits.amax(dim=1, keepdim=True)
    weights = logits.sub_(top).exp_()
    total = weights.sum(dim=1, keepdim=True, dtype=torch.promote_types(logits.dtype, torch.float32))
    losses = (total.log() + top - picked).squeeze(1).where(scored, 0)
    d_logits = weights.mul_(scored.unsqueeze(1) / total)
    d_logits.scatter_(1, target, d_logits.gather(1, target) - scored.unsqueeze(1).to(logits.dtype))
    return losses, d_logits


def _scorer(device: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the fastest way to score a chunk here."""
    if device == "cuda":
        from lengthen.model.score_kernel import score

        return score
    # In 16 bits, what is computed in place is rounded at every step.
    return _score_in_place if dtype in (torch.float32, torch.float64) else _score_and_pull


def perplexity(loss: float) -> float:
    """Return e^loss, ∞ where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.nan if math.isnan(loss) else math.inf
