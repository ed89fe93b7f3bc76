"""This package's attention inside a `transformers` model that is loaded already; everything else stays theirs.

    model = AutoModelForCausalLM.from_pretrained("bigscience/bloom-560m")
    lengthen.accelerate(model)      # in place: cache, generate, gradients and state_dict are as they were
    lengthen.restore(model)         # exactly as before

alibi.py        BLOOM, MPT, Falcon: their attention ignores what is registered with transformers, so it is replaced
t5.py           T5, mT5, UMT5: registered; the bias of all pairs becomes one of distances
registered.py   Llama and its kin: `attn_implementation="lengthen"`, as transformers offers it
swap.py         a module's class, replaced and given back
padding.py      what a padding mask says, as intervals of keys

This file imports no transformers: `import lengthen` needs torch alone.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from typing import Any, TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)

TESTED = ((5, 17), (5, 22))  # versions of transformers, first and last
# Which file serves the attention of which modeling file of transformers.
FILES = {
    **dict.fromkeys(("bloom", "mpt", "falcon"), "alibi"),
    **dict.fromkeys(("t5", "mt5", "umt5"), "t5"),
    **dict.fromkeys(("gemma", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi3"), "registered"),
    **dict.fromkeys(("qwen2", "qwen3", "smollm3", "starcoder2"), "registered"),
}


def accelerate(model: Model) -> Model:
    """Let a loaded transformers model use this package's attention, in place, and return it.

    BLOOM, MPT, Falcon with ALiBi, T5, mT5, UMT5 (self-attention), Llama and its kin (`FILES`). Anything else is refused
    by name, and so is a module that does not look as expected; then nothing was changed. A second call changes nothing.
    """
    file, modules = _attention_of(model)
    _warn_of_version()
    file.apply(model, modules)
    return model


def restore(model: Model) -> Model:
    """Undo `accelerate`, in place, and return the model: its outputs are bit-equal to those before."""
    from lengthen.interop.accelerate import swap

    swap.restore(model)
    return model


def register() -> None:
    """Make `attn_implementation="lengthen"` known to transformers, for `from_pretrained`; `accelerate` does it too."""
    _warn_of_version()
    importlib.import_module("lengthen.interop.accelerate.registered")


def _attention_of(model: nn.Module) -> tuple[Any, dict[str, nn.Module]]:
    """Return the file that serves a model, and the model's attention modules by their names."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
    modules = {name: module for name, module in model.named_modules() if _is_attention(module)}
    files = {name: _file_of(module) for name, module in modules.items()}
    for name, module in modules.items():
        if files[name] is None:
            raise TypeError(
                f"model: {type(model).__name__}.{name} is a {_named(module)}, which is not supported{_known()}"
            )
    if len(set(files.values())) != 1:
        what = " and ".join(sorted({type(module).__name__ for module in modules.values()})) or "no attention"
        raise TypeError(
            f"model: expected attention of one supported family, got {type(model).__name__} with {what}{_known()}"
        )
    return importlib.import_module(f"lengthen.interop.accelerate.{next(iter(files.values()))}"), modules


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is named an attention and holds no other that is."""
    inside = (type(m).__name__ for m in module.modules() if m is not module)
    return "Attention" in type(module).__name__ and not any("Attention" in name for name in inside)


def _file_of(module: nn.Module) -> str | None:
    """Return which file serves a module: one of transformers' own classes, or what this package put in its place."""
    home = type(module).__module__
    if home.startswith(f"{__name__}."):
        return home.removeprefix(f"{__name__}.")
    family = home.removeprefix("transformers.models.").partition(".")[0]
    return FILES.get(family) if home == f"transformers.models.{family}.modeling_{family}" else None


def _named(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _known() -> str:
    return f"; there is: {', '.join(FILES)}"


@cache
def _warn_of_version() -> None:
    """Warn, once, of a version of transformers that this was not tested with."""
    from transformers import __version__

    major, minor, *_ = __version__.split(".")
    if not TESTED[0] <= (int(major), int(minor)) <= TESTED[1]:
        first, last = (".".join(map(str, version)) for version in TESTED)
        warnings.warn(
            f"lengthen.accelerate was tested with transformers {first} to {last}, and this is {__version__}: "
            "compare the outputs with those before",
            stacklevel=3,
        )
