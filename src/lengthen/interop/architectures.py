"""The architectures that are read and written, and which of them a config.json is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lengthen.interop.architecture import Architecture
from lengthen.interop.bloom import Bloom
from lengthen.interop.falcon import Falcon
from lengthen.interop.gpt2 import GPT2
from lengthen.interop.llama import Llama, Mistral, Qwen2, Qwen3
from lengthen.interop.mpt import MPT
from lengthen.interop.neox import GPTNeoX
from lengthen.interop.own import Own

# In the order in which one is looked for that can hold a model of ours.
ARCHITECTURES: tuple[Architecture, ...] = (
    *(Bloom(), MPT(), Llama(), Mistral(), Qwen2(), Qwen3(), GPTNeoX(), Falcon(), GPT2(), Own()),
)
FALCONS = ("RefinedWeb", "RefinedWebModel")  # what Falcon's configs were called at first


class UnknownArchitectureError(ValueError):
    """The architecture is none of those that are read here."""


def find(table: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture of a config.json."""
    kind, named = table.get("model_type"), table.get("architectures") or []
    for one in ARCHITECTURES:
        if kind == one.model_type or (kind in FALCONS and one.model_type == "falcon"):
            if named and not set(named) & {one.name, *one.aliases}:
                raise UnknownArchitectureError(f"{where}: architectures: expected [{one.name!r}], got {named!r}")
            return one
    known = ", ".join(one.model_type for one in ARCHITECTURES)
    raise UnknownArchitectureError(f"{where}: model_type: expected one of {known}, got {kind!r}")
