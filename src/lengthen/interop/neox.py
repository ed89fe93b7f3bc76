"""GPT-NeoX (Pythia): LayerNorm, GELU, rotary of a part of each head, attention beside the feed-forward layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lengthen.config import ModelConfig
from lengthen.interop import rope
from lengthen.interop.architecture import Architecture, Key
from lengthen.interop.asked import Asked

# Their names of activations: what is written stands first.
GELUS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
}


class GPTNeoX(Architecture):
    """Two norms that read the same stream, or one after the other (`use_parallel_residual`)."""

    name = "GPTNeoXForCausalLM"
    aliases = ("GPTNeoXModel",)
    model_type = "gpt_neox"
    keys = (
        Key(("vocab_size",), "vocab_size"),
        Key(("hidden_size",), "width"),
        Key(("intermediate_size",), "feed_forward"),
        Key(("num_hidden_layers",), "layers"),
        Key(("num_attention_heads",), "heads"),
        Key(("hidden_act",), "activation", "gelu", GELUS),
        Key(("max_position_embeddings",), "train_length", 2048),
        Key(("layer_norm_eps",), "norm_epsilon", 1e-5),
        Key(("tie_word_embeddings",), "tied", False),
        Key(("use_parallel_residual",), "block", True, {True: "parallel", False: "pre"}),
    )
    fixed: ClassVar[Mapping[str, Any]] = {"positions": "rotary", "scale_embeddings": False}
    stem, block = "gpt_neox.", "gpt_neox.layers.{}"
    outer: ClassVar[Mapping[str, str]] = {
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    }
    unused = r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    grouped = True

    def inner(self, config: ModelConfig) -> Mapping[str, str | tuple[str, ...]]:
        """Return their names inside a block."""
        return {
            "attention_norm": "input_layernorm",
            "attention.qkv": "attention.query_key_value",
            "attention.out": "attention.dense",
            "feed_forward_norm": "post_attention_layernorm",
            "feed_forward.up": "mlp.dense_h_to_4h",
            "feed_forward.down": "mlp.dense_4h_to_h",
        }

    def read_more(self, asked: Asked, found: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Return biases and angles."""
        attention = asked.take("attention_bias", default=True, hint=bool)
        options = rope.read(asked, found["width"] // found["heads"], found["train_length"], 0.25, over)
        return {"biases": True if attention else ["feed_forward", "norm"], "position_options": options}

    def write_more(self, config: ModelConfig) -> dict[str, Any]:
        """Return their keys for the same."""
        angles = rope.write(config)
        angles["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
        return {"attention_bias": config.has_bias("qkv")} | angles
