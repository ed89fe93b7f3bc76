"""One op: softmax(q·k·scale + bias(distance)) over an interval of keys, on any device."""

from lengthen.attention.biases import Bias, Decay, Linear, Table, alibi_slopes
from lengthen.attention.masks import Bidirectional, Blockwise, Causal, Mask, Window

__all__ = [
    "Bias", "Bidirectional", "Blockwise", "Causal", "Decay", "Linear", "Mask", "Table", "Window", "alibi_slopes",
]
