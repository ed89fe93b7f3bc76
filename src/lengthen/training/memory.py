"""How much memory a run needs at least, from its config alone, so that one that cannot fit is refused before it begins.

    weights, gradients and AdamW's two moments, in float32            16 bytes per parameter
    what the backward pass needs of the forward, a token and layer    inputs of norms, matrices and activations
    ids and targets of a step                                         16 bytes per token

Shards divide the first over processes. It is a lower bound: what it refuses cannot fit, and what it lets through may
still not.
"""

from __future__ import annotations

import os

import torch

from lengthen.config import GATED, Config, ModelConfig
from lengthen.model.memory import available, size
from lengthen.model.score import precision_named
from lengthen.training.parallel import World, spread_as

PER_PARAMETER = 16
USUAL = {"layers": 32, "width": 4096, "heads": 32, "head_dim": 128, "feed_forward": 16384, "vocab_size": 65536}


def refuse_what_cannot_fit(config: Config, here: World) -> None:
    """Refuse a model or a batch that needs more memory than the device has, by the key that is to blame."""
    there, model = available(here.device), needed_by_model(config, here)
    end = f"and {here.device} has {size(there)}; force=True tries it"
    if model > there:
        key = _largest(config.model)
        raise ValueError(
            f"model.{key}: expected a model that fits into memory, got {getattr(config.model, key)!r}: "
            f"{config.model.parameters:,} parameters, their gradients and AdamW's state take {size(model)}, {end}"
        )
    inputs, activations = needed_by_inputs(config, here), needed_by_activations(config, here)
    if model + inputs + activations > there:
        key = "batch" if config.train.micro_batch is None or inputs > activations else "micro_batch"
        raise ValueError(
            f"train.{key}: expected a batch that fits into memory, got {getattr(config.train, key)}: a pass takes "
            f"{size(inputs + activations)} at least beside the {size(model)} of the model and AdamW's state, {end}"
        )


def needed_by_model(config: Config, here: World) -> int:
    """Return the bytes that weights, gradients and AdamW's state take, all processes of a device together."""
    shards = {"replicate": 1, "shard": here.size, "hybrid": _local(here)}
    cut = shards[spread_as(config.model, config.distributed.mode)]
    return config.model.parameters * PER_PARAMETER * _beside(here) // cut


def needed_by_inputs(config: Config, here: World) -> int:
    """Return the bytes of the ids and targets of a step."""
    return 16 * config.train.batch * config.model.train_length * _beside(here) // here.size


def needed_by_activations(config: Config, here: World) -> int:
    """Return the bytes that one pass keeps of the blocks for its backward pass."""
    model, train = config.model, config.train
    narrow = precision_named(train.precision, here.device) == torch.bfloat16
    kept = {"parallel": 3, "shared": 2}.get(model.block, 4) * model.width
    kept += 2 * model.head_width * (model.heads + model.key_value_heads)
    kept += model.hidden_width * (3 if model.activation in GATED else 1 if model.activation == "relu" else 2)
    layer = model.width if train.checkpoint_activations else kept
    rows = -(-train.batch // here.size)
    tokens = min(train.micro_batch or rows, rows) * model.train_length
    return (2 if narrow else 4) * tokens * model.layers * layer * _beside(here)


def _local(here: World) -> int:
    """Return how many of the processes are on this machine."""
    return min(here.size, int(os.environ.get("LOCAL_WORLD_SIZE", here.size)))


def _beside(here: World) -> int:
    """Return how many processes share one device's memory."""
    return 1 if here.device.type == "cuda" else _local(here)


def _largest(model: ModelConfig) -> str:
    """Return the key of the model that is farthest beyond what is usual."""
    there = {key: getattr(model, key) or 0 for key in USUAL} | {"positions": model.method_parameters}
    usual = USUAL | {"positions": USUAL["vocab_size"] * USUAL["width"]}
    return max(there, key=lambda key: there[key] / usual[key])
