"""A language model that takes any position method."""

from lengthen.config import ModelConfig
from lengthen.model.loss import IGNORED, linear_cross_entropy
from lengthen.model.transformer import Transformer
from lengthen.model.weights import load, save

__all__ = ["IGNORED", "ModelConfig", "Transformer", "linear_cross_entropy", "load", "save"]
