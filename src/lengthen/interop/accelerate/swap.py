"""A module's class, replaced by one that attends with this package's op, and given back.

The replacement derives from the class that it replaces and adds no parameter or buffer: `state_dict`, `deepcopy`,
`save_pretrained` and hooks see the module that they knew. What it needs besides (slopes, buckets) is a plain attribute.
A model is told through its config which masks to make; what the config said before is kept on the model.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

BEFORE = "_lengthen_before"  # on a model: the attention implementation that its config named
SETTING = "_attn_implementation_internal"  # of a config: what transformers itself sets for one config alone


class Swapped:
    """What stands in for a class of transformers: the first base is this, the second the class."""

    needs: ClassVar[tuple[str, ...]]  # attributes of the module that are read
    takes: ClassVar[Mapping[str, tuple[str, ...]]]  # methods that are replaced, and their parameters in transformers

    @classmethod
    def replaced(cls) -> type[nn.Module]:
        """Return the class that this stands in for."""
        theirs: type[nn.Module] = cls.__bases__[1]
        return theirs

    @classmethod
    def check(cls, name: str, module: nn.Module) -> None:
        """Refuse a module that does not look as this class expects it."""
        for attribute in cls.needs:
            if not hasattr(module, attribute):
                raise TypeError(f"{name}: expected a {type(module).__name__} with `{attribute}`, got one without it")
        for method, parameters in cls.takes.items():
            if method in vars(module):
                raise TypeError(
                    f"{name}: expected the {method} of {type(module).__name__}, got one that was replaced on the "
                    "module (by hooks of a device_map, or another library)"
                )
            found = tuple(inspect.signature(getattr(type(module), method)).parameters)
            if found != parameters:
                raise TypeError(f"{name}.{method}: expected the parameters {parameters}, got {found}")


def configs_of(model: nn.Module) -> dict[str, Any]:
    """Return the config that each of a model's modules belongs to, by the module's name."""
    owners = {name: module.config for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    if not owners:
        raise TypeError(
            f"model: expected a transformers PreTrainedModel, which makes masks, got {type(model).__name__}"
        )
    found = {}
    for name, _ in model.named_modules():
        above = [owner for owner in owners if not owner or name == owner or name.startswith(f"{owner}.")]
        if above:
            found[name] = owners[max(above, key=len)]
    return found


def swap(module: nn.Module, cls: type[Swapped], **attributes: Any) -> None:
    """Put a class in the place of a module's own."""
    module.__class__ = cls  # type: ignore[assignment]
    for name, value in attributes.items():
        setattr(module, name, value)


def tell(model: nn.Module, implementation: str) -> None:
    """Name an attention implementation in every config of a model, and keep what was named before."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in models:
        if not hasattr(module.config, SETTING):
            raise TypeError(f"{type(module.config).__name__}: expected a config with `{SETTING}`, got one without it")
    before = {id(module.config): getattr(module.config, SETTING) for module in models}
    # Of a part that was accelerated earlier and shares its config, the config does not say any more.
    before |= {id(module.config): getattr(module, BEFORE) for module in models if hasattr(module, BEFORE)}
    for module in models:
        setattr(module, BEFORE, before[id(module.config)])
        setattr(module.config, SETTING, implementation)


def restore(model: nn.Module) -> None:
    """Give back every class and every config's setting; refuse a model that has nothing to give back."""
    changed = False
    for module in model.modules():
        if isinstance(module, Swapped):
            cls = type(module)
            for name in [name for name in vars(module) if name.startswith("_lengthen_") and name != BEFORE]:
                delattr(module, name)
            module.__class__ = cls.replaced()  # type: ignore[assignment]
            changed = True
        if hasattr(module, BEFORE):
            setattr(module.config, SETTING, getattr(module, BEFORE))
            delattr(module, BEFORE)
            changed = True
    if not changed:
        raise ValueError(f"model: expected one that lengthen.accelerate was called on, got {type(model).__name__}")


def refuse_weights(output_attentions: object) -> None:
    """Refuse a call that asks for attention weights, which are never held."""
    if output_attentions:
        raise ValueError(
            "output_attentions: expected False, got True: attention weights are not computed; lengthen.restore(model) "
            "gives back the attention that has them"
        )


def mind_dropout(training: bool, dropout: float) -> None:
    """Warn, once, of attention dropout that a model asks for in training and does not get."""
    if training and dropout > 0 and not torch.compiler.is_compiling():
        _warn_of_dropout(dropout)


@cache
def _warn_of_dropout(dropout: float) -> None:
    warnings.warn(
        f"the model's attention dropout of {dropout} is left out: lengthen's attention has none "
        "(all other dropout is as it was)",
        stacklevel=2,
    )
