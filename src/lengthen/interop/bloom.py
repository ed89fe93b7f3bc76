"""BLOOM: ALiBi with the paper's slopes, a LayerNorm after the embedding, tanh GELU, biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lengthen.config import ModelConfig
from lengthen.interop.architecture import Architecture, Key
from lengthen.interop.asked import Asked


class Bloom(Architecture):
    """The feed-forward layer is 4·width."""

    name = "BloomForCausalLM"
    aliases = ("BloomModel",)
    model_type = "bloom"
    keys = (
        Key(("vocab_size",), "vocab_size"),
        Key(("hidden_size", "n_embed"), "width"),
        Key(("n_layer", "num_hidden_layers"), "layers"),
        Key(("n_head", "num_attention_heads"), "heads"),
        Key(("seq_length",), "train_length", 2048),
        Key(("layer_norm_epsilon",), "norm_epsilon", 1e-5),
        Key(("tie_word_embeddings",), "tied", True),
    )
    fixed: ClassVar[Mapping[str, Any]] = {
        "positions": "alibi",
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "scale_embeddings": False,
    }
    ignored = (
        *("pretraining_tp", "attention_softmax_in_fp32", "bias_dropout_fusion"),
        *("masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
    )
    stem, block = "transformer.", "transformer.h.{}"
    outer: ClassVar[Mapping[str, str]] = {
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.ln_f",
        "output": "lm_head",
    }
    grouped = True

    def inner(self, config: ModelConfig) -> Mapping[str, str | tuple[str, ...]]:
        """Return their names inside a block."""
        return {
            "attention_norm": "input_layernorm",
            "attention.qkv": "self_attention.query_key_value",
            "attention.out": "self_attention.dense",
            "feed_forward_norm": "post_attention_layernorm",
            "feed_forward.up": "mlp.dense_h_to_4h",
            "feed_forward.down": "mlp.dense_4h_to_h",
        }

    def read_more(self, asked: Asked, found: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse a residual stream of normalised values."""
        asked.word("apply_residual_connection_post_layernorm", words={False: False}, default=False)
        return {}
