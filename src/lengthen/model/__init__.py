"""A language model that takes any position method.

transformer.py   the model; block.py is one of its blocks
loss.py          cross-entropy without all logits at once (score_kernel.py on a GPU)
score.py         the loss of each token of a text: one loop for validation, `eval` and the analyses
generation.py    batches, samples, streaming, over a cache; sampling.py picks the next token, stepping.py takes a step
weights.py       a model as one safetensors file
memory.py        what cannot fit into memory
"""

from lengthen.config import ModelConfig
from lengthen.model.loss import IGNORED, linear_cross_entropy
from lengthen.model.transformer import Transformer
from lengthen.model.weights import load, save

__all__ = ["IGNORED", "ModelConfig", "Transformer", "linear_cross_entropy", "load", "save"]
