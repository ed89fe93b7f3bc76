"""Train short, test long: every position method behind one exact, fast attention call.

>>> import torch, lengthen
>>> q, k, v = torch.randn(3, 1, 8, 1024, 64)
>>> out = lengthen.attention(q, k, v, bias=lengthen.Linear(lengthen.alibi_slopes(8)), mask=lengthen.Causal())

>>> method = lengthen.positions.build("alibi", heads=8, head_dim=64, width=512)

Start with `attention` (the op) and `positions` (the methods that give it its bias, decay and rotation).
"""

from lengthen import positions
from lengthen.attention import (
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

__version__ = "0.1.0"

__all__ = [
    "Bidirectional",
    "Blockwise",
    "Causal",
    "Decay",
    "Linear",
    "Table",
    "Window",
    "__version__",
    "alibi_slopes",
    "attention",
    "merge",
    "positions",
    "reach",
]
