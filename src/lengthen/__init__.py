"""Train short, test long: every position method behind one exact, fast attention call.

>>> import torch, lengthen
>>> q, k, v = torch.randn(3, 1, 8, 1024, 64)
>>> out = lengthen.attention(q, k, v, bias=lengthen.Linear(lengthen.alibi_slopes(8)), mask=lengthen.Causal())

>>> method = lengthen.positions.build("alibi", heads=8, head_dim=64, width=512)

>>> config = lengthen.ModelConfig(vocab_size=258, layers=2, width=64, heads=4, train_length=32, positions="alibi")
>>> logits = lengthen.Transformer(config)(torch.randint(258, (1, 100)))

Start with `attention` (the op), `positions` (the methods that give it its bias, decay and rotation) and `model` (a
transformer that takes any of them). `lengthen.data` and `lengthen.training` are imported by name: they need more
packages.
"""

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
from lengthen.model import ModelConfig, Transformer

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
    "alibi_slopes",
    "attention",
    "merge",
    "positions",
    "reach",
]
