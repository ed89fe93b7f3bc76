"""Small models of `transformers` with random weights, saved as it saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 67
SIZES: dict[str, dict[str, Any]] = {
    "Llama": {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8},
    "GPTNeoX": {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "Bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 8},
    "Mpt": {"d_model": 64, "n_layers": 2, "n_heads": 8},
    "Falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8},
}
for name in ("Mistral", "Qwen2", "Qwen3"):
    SIZES[name] = SIZES["Llama"]


def configured(name: str, **options: Any) -> Any:
    """Return the config of a small model of an architecture."""
    return getattr(transformers, f"{name}Config")(**{"vocab_size": VOCABULARY, **SIZES[name], **options})


def make(name: str, **options: Any) -> Any:
    """Return a model of an architecture, with every weight drawn: no bias 0, no scale 1."""
    config = configured(name, **options)
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def saved(thing: Any, folder: Path, **changes: Any) -> Path:
    """Save a model or a config, with keys of its config.json changed; a key that is given as ... goes."""
    thing.save_pretrained(folder)
    path = folder / "config.json"
    table = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not ...}))
    return folder
