"""One op: softmax(q·k·scale + bias(distance)) over an interval of keys, on any device.

op.py         the call: checks what comes in, picks a backend
biases.py     Linear, Table, Decay: functions of distance
masks.py      Causal, Window, Blockwise, Bidirectional: an interval of keys for each query
reference.py  the definition
chunked.py    plain torch in O(length) memory, over tiles.py
native.py     torch's own attention, where it does the job
kernels/      Triton kernels for GPUs
reach.py      how far an ALiBi head must look, with the proof
merge.py      joins partial results
"""

from lengthen.attention.biases import Bias, Decay, Linear, Table, alibi_slopes
from lengthen.attention.masks import Bidirectional, Blockwise, Causal, Mask, Window
from lengthen.attention.merge import merge
from lengthen.attention.op import attention
from lengthen.attention.reach import reach

__all__ = [
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
