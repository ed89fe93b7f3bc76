"""AdamW, fused, with weight decay on matrices alone."""

from __future__ import annotations

import torch

from lengthen.config import OptimizerConfig
from lengthen.model import Transformer


def adamw(model: Transformer, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW for a model.

    Norm scales, biases and the parameters of a position method get no weight decay: 0 is no natural value for them.
    (ALiBi learns the logarithm of a slope: 0 would be a slope of 1.) AdamW moves a number by about lr per step,
    whatever its size. The parameters of a position method are of size 1, where a matrix has entries of some
    hundredths: their lr is larger by `method_lr_factor`.
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
