"""The loss of each token of a text, window by window: one way for validation, `eval` and the analyses of loss.

**Precision.** The forward pass runs as the device trains: under bfloat16 autocast on a GPU, in the weights' own dtype
elsewhere. Validation passes its run's `train.precision` instead. Logits are widened to float32, if they are narrower,
for the log-sum-exp; losses leave here in float64, and sums are float64.

The model is in `eval` mode, without gradients and uncompiled for the time of a pass, and afterwards as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor, nn

from lengthen.attention import Mask

BATCH_TOKENS = {"cpu": 16_384, "cuda": 131_072}  # read in one pass, if a window is shorter than that


Read = Callable[[int, int], Any]  # tokens start … stop − 1 as an int64 array: `Tokens.read`


@dataclass(frozen=True)
class Reading:
    """One window: tokens start … stop − 1 are read, each predicts the next, and the first `context` are not scored."""

    start: int
    stop: int
    context: int

    @property
    def scored(self) -> int:
        """How many of its targets are scored."""
        return self.stop - self.start - self.context


def window_losses(
    model: nn.Module, read: Read, readings: Iterable[Reading], mask: Mask | None = None
) -> Iterator[tuple[list[Reading], Tensor]]:
    """Yield some windows of one length at a time, in order, and the loss of each token: float64 `[windows, length]`."""
    most = BATCH_TOKENS.get(_device(model).type, 1)
    for group, both in batches(read, readings, most):
        yield group, losses(model, both[:, :-1].contiguous(), both[:, 1:].contiguous(), mask).cpu()


def batches(read: Read, readings: Iterable[Reading], most: int) -> Iterator[tuple[list[Reading], Tensor]]:
    """Yield windows of one length together, `most` tokens or one window, and their tokens, `[windows, length + 1]`."""
    for length, alike in groupby(readings, key=lambda one: one.stop - one.start):
        while group := list(islice(alike, max(1, most // length))):
            yield group, torch.stack([torch.from_numpy(read(one.start, one.stop + 1)) for one in group])


def losses(
    model: nn.Module, ids: Tensor, targets: Tensor, mask: Mask | None = None, precision: torch.dtype | None = None
) -> Tensor:
    """Return the loss of each target `[rows, length]`, float64 on the model's device; 0 where the target is IGNORED."""
    device = _device(model)
    if precision is None:
        precision = torch.bfloat16 if device.type == "cuda" else torch.float32
    with evaluating(model), autocast(device, precision):
        _, each = model(ids.to(device), targets.to(device), mask=mask)
    found: Tensor = each.double()
    return found


def autocast(device: torch.device, precision: torch.dtype) -> AbstractContextManager[Any]:
    """Compute matrix products in a narrower precision; float32 leaves them as they are."""
    return nullcontext() if precision == torch.float32 else torch.autocast(device.type, dtype=precision)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off, and run uncompiled: compiling for lengths of one's own would slow training."""
    training = [module for module in model.modules() if module.training]
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        for module in training:
            module.training = True


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
