"""AdamW, fused, with weight decay on matrices alone."""

from __future__ import annotations

import torch

from lengthen.config import OptimizerConfig
from lengthen.model import Transformer


def adamw(model: Transformer, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW for a model.

    Scales, biases and whatever a position method learns are not pulled to 0: there 0 is not the simplest value. (Of a
    learned ALiBi slope it is the logarithm that is learned: 0 would be a slope of 1.)
    """
    decayed: list[torch.nn.Parameter] = []
    free: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() >= 2 and not name.startswith("method.") else free).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": free, "weight_decay": 0.0}]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.epsilon, fused=True)
