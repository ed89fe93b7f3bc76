"""Train short, test long: every position method behind one exact, fast attention call.

>>> import torch, lengthen
>>> q, k, v = torch.randn(3, 1, 8, 1024, 64)
>>> out = lengthen.attention(q, k, v, bias=lengthen.Linear(lengthen.alibi_slopes(8)), mask=lengthen.Causal())

>>> method = lengthen.positions.build("alibi", heads=8, head_dim=64, width=512)

>>> config = lengthen.ModelConfig(vocab_size=258, layers=2, width=64, heads=4, train_length=32, positions="alibi")
>>> logits = lengthen.Transformer(config)(torch.randint(258, (1, 100)))

>>> model = lengthen.load("runs/tiny")  # a run, or a model of Hugging Face  # doctest: +SKIP

Start with `attention` (the op), `positions` (the methods that give it its bias, decay and rotation) and `model` (a
transformer that takes any of them). `lengthen.data` and `lengthen.training` are imported by name: they need more
packages.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lengthen import positions
    from lengthen.attention import (
        Ball,
        Bidirectional,
        Blockwise,
        Causal,
        Decay,
        Linear,
        Table,
        Window,
        alibi_slopes,
        attention,
        merge,
        reach,
    )
    from lengthen.config import ModelConfig
    from lengthen.interop.accelerate import accelerate, restore
    from lengthen.interop.models import load
    from lengthen.model import Transformer

__version__ = "0.1.0"

__all__ = [
    "Ball",
    "Bidirectional",
    "Blockwise",
    "Causal",
    "Decay",
    "Linear",
    "ModelConfig",
    "Table",
    "Transformer",
    "Window",
    "__version__",
    "accelerate",
    "alibi_slopes",
    "attention",
    "load",
    "merge",
    "positions",
    "reach",
    "restore",
]

# Where a name is from, if not from `attention`.
_HOMES = {
    "ModelConfig": "config",
    "Transformer": "model",
    "accelerate": "interop.accelerate",
    "load": "interop.models",
    "restore": "interop.accelerate",
}


class _Package(ModuleType):
    """This package, whose names are imported when first used: the command line starts without torch."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "positions":
            return importlib.import_module("lengthen.positions")
        value = getattr(importlib.import_module(f"lengthen.{_HOMES.get(name, 'attention')}"), name)
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Whoever imports the folder `attention` binds it to this name, which is the op's.
        if name != "attention" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *__all__})


sys.modules[__name__].__class__ = _Package
