"""The loss of each token of a text, window by window: one loop for validation, `eval` and the analyses of loss.

**A model** is anything that maps ids `[rows, length]` to logits `[rows, length, vocabulary]`, alone or as
`.logits`. One that has a method `losses(ids, targets, mask=…, document_starts=…)`, as `Transformer` does, computes them
itself; only such a model can be read under another mask, or with documents apart.

**Precision.** The forward pass runs as the device trains, unless it is told otherwise: under bfloat16 autocast on a
GPU, in the weights' own dtype elsewhere. Validation passes its run's `train.precision`. Logits are widened to float32,
if they are narrower, for the log-sum-exp; losses leave here in float64, and sums are float64.

The model is in `eval` mode, without gradients and uncompiled for the time of a pass, and afterwards as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthen.attention import Mask
from lengthen.checks import choice, describe
from lengthen.model.loss import IGNORED

BATCH_TOKENS = {"cpu": 16_384, "cuda": 131_072}  # read in one pass, if a window is shorter than that

Model = Callable[..., Any]  # ids → logits
Hide = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # ids and their places in the text → ids, and targets there


class Text(Protocol):
    """Tokens that are read by their place, as `lengthen.data.Tokens` are."""

    def read(self, start: int, stop: int) -> Any:
        """Return tokens start … stop − 1, an int64 array."""

    def document_starts(self, start: int, stop: int) -> Any:
        """Return where the document of each of these tokens starts, counted from `start`; 0 if before it."""


@dataclass(frozen=True)
class Reading:
    """One window: tokens start … stop − 1 are read, and what the first `context` of them predict is not scored."""

    start: int
    stop: int
    context: int

    @property
    def scored(self) -> int:
        """How many of its targets are scored."""
        return self.stop - self.start - self.context


@dataclass(frozen=True)
class Task:
    """A text, and what is asked of a window of it: the next token, or with `hide` the tokens that are hidden in it."""

    text: Text
    hide: Hide | None = None
    document_mask: bool = False  # documents do not see each other, and do not predict each other's first token

    def batch(self, group: list[Reading]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ids, targets and document starts of windows of one length, `[windows, length]`."""
        more = 0 if self.hide else 1  # the token after the last
        ids = torch.stack([torch.from_numpy(self.text.read(one.start, one.stop + more)) for one in group])
        starts = None
        if self.document_mask:
            begins = (self.text.document_starts(one.start, one.stop + more) for one in group)
            starts = torch.stack([torch.from_numpy(one) for one in begins])
        if self.hide:
            places = torch.stack([torch.arange(one.start, one.stop) for one in group])
            ids, targets = self.hide(ids, places)
        else:
            ids, targets = ids[:, :-1].contiguous(), ids[:, 1:].clone()
            if starts is not None:
                targets[starts[:, 1:] == torch.arange(1, starts.shape[1])] = IGNORED
                starts = starts[:, :-1].contiguous()
        for row, one in zip(targets, group, strict=True):
            row[: one.context] = IGNORED
        return ids, targets, starts


def window_losses(
    model: Model,
    task: Task,
    readings: Iterable[Reading],
    *,
    mask: Mask | None = None,
    precision: torch.dtype | None = None,
    most: int | None = None,
) -> Iterator[tuple[list[Reading], Tensor, Tensor]]:
    """Yield some windows of one length at a time, in order, the targets and their losses, float64: `[windows, length]`.

    Where a target is not scored it is IGNORED, and its loss 0. `most` tokens, or one window, are read in one pass.
    """
    most = most or BATCH_TOKENS.get(device_of(model).type, 1)
    for length, alike in groupby(readings, key=lambda one: one.stop - one.start):
        while group := list(islice(alike, max(1, most // length))):
            ids, targets, starts = task.batch(group)
            yield group, targets, losses(model, ids, targets, mask, starts, precision).cpu()


def losses(
    model: Model,
    ids: Tensor,
    targets: Tensor,
    mask: Mask | None = None,
    document_starts: Tensor | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    """Return the loss of each target `[rows, length]`, float64 on the model's device; 0 where the target is IGNORED."""
    device, own = device_of(model), getattr(model, "losses", None)
    own = own if callable(own) else None
    ids, targets = ids.to(device), targets.to(device)
    given: dict[str, Any] = {} if mask is None else {"mask": mask}
    if document_starts is not None:
        given["document_starts"] = document_starts.to(device)
    if given and own is None:
        raise TypeError(
            f"model: expected one with a method `losses` that takes {' and '.join(given)}, got {_named(model)}"
        )
    with evaluating(model), autocast(device, precision or usual_precision(device)):
        found: Tensor = own(ids, targets, **given) if own is not None else _from_logits(model(ids), targets)
    if not isinstance(found, Tensor) or found.shape != targets.shape:
        raise TypeError(f"model.losses: expected a loss of each target, {list(targets.shape)}, got {_named(found)}")
    return found.double()


def logits_at(
    model: Model, ids: Tensor, where: Tensor, mask: Mask | None = None, precision: torch.dtype | None = None
) -> Tensor:
    """Return the logits at each of the places `where` `[rows, length]`, row by row: `[places, vocabulary]`.

    Of a `Transformer` only these are computed.
    """
    device, hidden = device_of(model), getattr(model, "hidden", None)
    if mask is not None and hidden is None:
        raise TypeError(f"model: expected one with a method `hidden` that takes a mask, got {_named(model)}")
    with evaluating(model), autocast(device, precision or usual_precision(device)):
        if hidden is not None:
            return F.linear(hidden(ids.to(device), mask)[where.to(device)], model.output_weight)  # type: ignore[attr-defined]
        found = model(ids.to(device))
        return _checked(getattr(found, "logits", found), ids)[where.to(device)]


def _from_logits(found: Any, targets: Tensor) -> Tensor:
    logits = _checked(getattr(found, "logits", found), targets)
    if targets.max() >= logits.shape[-1]:
        raise ValueError(
            f"model: expected logits of at least {int(targets.max()) + 1} tokens, as the text has, got those of "
            f"{logits.shape[-1]}"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="none").view(targets.shape)


def _checked(logits: Any, ids: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or logits.shape[:-1] != ids.shape:
        raise TypeError(
            f"model: expected logits {list(ids.shape)} × vocabulary for ids of that shape, got {_named(logits)}"
        )
    return logits


def _named(value: Any) -> str:
    """Say what a model returned: a tensor by its shape, a container of tensors by its type alone."""
    return describe(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def usual_precision(device: torch.device) -> torch.dtype:
    """Return what a model is read in on a device: bfloat16 on a GPU; float32 stands for the weights' own dtype."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def precision_named(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products that "auto", "float32" or "bfloat16" stands for on a device."""
    choice("precision", name, ("auto", "float32", "bfloat16"))
    return usual_precision(device) if name == "auto" else getattr(torch, name)


def precision_of(model: Model, precision: torch.dtype) -> str:
    """Return the name of what a model's products are computed in: where nothing is narrowed, its weights' dtype."""
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    own = next((parameter.dtype for parameter in parameters), precision)
    return str(own if precision == torch.float32 else precision).removeprefix("torch.")


def autocast(device: torch.device, precision: torch.dtype) -> AbstractContextManager[Any]:
    """Compute matrix products in a narrower precision; float32 leaves them as they are."""
    return nullcontext() if precision == torch.float32 else torch.autocast(device.type, dtype=precision)


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Switch dropout and gradients off, and run uncompiled: compiling for lengths of one's own would slow training."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    training = [module for module in modules if module.training]
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
    for module in training:
        module.training = False
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        for module in training:
            module.training = True


def device_of(model: Model) -> torch.device:
    """Return where a model's parameters are; a function without any is on the CPU."""
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def device_name(device: torch.device) -> str:
    """Return what results call a device: the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
