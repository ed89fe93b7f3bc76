"""One op: softmax(q·k·scale + bias(distance)) over an interval of keys, on any device.

op.py         the call: makes a problem, takes the first backend that fits
problem.py    the call, checked once
biases.py     Linear, Table, Decay: functions of distance
masks.py      Causal, Window, Blockwise, Bidirectional: an interval of keys for each query
reach.py      how far a head must look, and the ball around its keys
merge.py      joins partial results
cache.py      keys and values while decoding: full, window, reach
reach_cache.py   the policy "reach": what heads keep (reach_group.py), and a bound on the rest
buffer.py     storage of keys and values; static.py: steps over it that a CUDA graph can replay
backends/     reference (the definition), native (torch's own), chunked (plain torch), triton (GPU kernels)
"""

from lengthen.attention.biases import Bias, Decay, Linear, Table, alibi_slopes
from lengthen.attention.masks import Bidirectional, Blockwise, Causal, Mask, Window
from lengthen.attention.merge import merge
from lengthen.attention.op import attention
from lengthen.attention.reach import Ball, reach

__all__ = [
    "Ball",
    "Bias",
    "Bidirectional",
    "Blockwise",
    "Causal",
    "Decay",
    "Linear",
    "Mask",
    "Table",
    "Window",
    "alibi_slopes",
    "attention",
    "merge",
    "reach",
]
