"""Our own architecture in a folder of theirs: every model that the others cannot hold, under our own names.

config.json has `model_type` "lengthen" and our config in `model`. `transformers` opens it once
`lengthen.interop.huggingface` is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from lengthen import io
from lengthen.config import ModelConfig
from lengthen.interop.architecture import Architecture, Place
from lengthen.model import Transformer


class Own(Architecture):
    """All that `ModelConfig` can say."""

    name = "LengthenForCausalLM"
    model_type = "lengthen"
    stem = "model."

    def read(self, table: Mapping[str, Any], where: str, over: Mapping[str, Any] | None = None) -> ModelConfig:
        """Return the config of a model from its config.json."""
        config = io.build(ModelConfig, table.get("model"), where, "model.")
        return replace(config, position_options={**config.position_options, **over}) if over else config

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return config.json for a model."""
        sizes = {"vocab_size": config.vocab_size, "train_length": config.train_length}
        return {"architectures": [self.name], "model_type": self.model_type, **sizes, "model": asdict(config)}

    def places(self, config: ModelConfig) -> list[Place]:
        """Return each tensor under its own name."""
        with torch.device("meta"):
            shapes = {name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()}
        return [Place(name, shape, (self.stem + name,), shape[:1]) for name, shape in shapes.items()]
