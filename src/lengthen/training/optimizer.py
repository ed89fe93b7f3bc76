"""AdamW, fused, with weight decay on matrices alone."""

from __future__ import annotations

import torch

from lengthen.config import OptimizerConfig
from lengthen.model import Transformer


def adamw(model: Transformer, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW for a model.

    Scales, biases and whatever a position method learns are not pulled to 0: there 0 is not the simplest value. (Of a
    learned ALiBi slope it is the logarithm that is learned: 0 would be a slope of 1.) AdamW moves a number by about lr
    per step, whatever its size. What a position method learns is of size 1, where a matrix has entries of some
    hundredths: its steps are larger by `method_lr_factor`.
    """
    decayed: list[torch.nn.Parameter] = []
    free: list[torch.nn.Parameter] = []
    method: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (method if name.startswith("method.") else decayed if parameter.dim() >= 2 else free).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay, "lr_factor": 1.0},
        {"params": free, "weight_decay": 0.0, "lr_factor": 1.0},
        {"params": method, "weight_decay": 0.0, "lr_factor": config.method_lr_factor},
    ]
    betas = (config.betas[0], config.betas[1])
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=betas, eps=config.epsilon, fused=True
    )
    set_lr(optimizer, config.lr)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step; each group has it times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
