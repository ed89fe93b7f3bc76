"""Falcon, with ALiBi (Falcon-RW) or rotary: LayerNorm, exact GELU, three forms of blocks and of grouped queries.

Their ALiBi is added before scores are divided by √head_dim, so the slopes are the paper's divided by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from lengthen.config import ModelConfig
from lengthen.interop import rope
from lengthen.interop.architecture import Architecture, Key
from lengthen.interop.asked import Asked
from lengthen.interop.neox import GELUS
from lengthen.positions.alibi import standard_slopes

NORMS = {"pre": ("input_layernorm", "post_attention_layernorm"), "shared": ("input_layernorm", "")}


class Falcon(Architecture):
    """Blocks in sequence, or attention and feed-forward side by side with one norm or two."""

    name = "FalconForCausalLM"
    aliases = ("RWForCausalLM", "FalconModel")
    model_type = "falcon"
    keys = (
        Key(("vocab_size",), "vocab_size"),
        Key(("hidden_size", "n_embed"), "width"),
        Key(("num_hidden_layers", "n_layer"), "layers"),
        Key(("num_attention_heads", "n_head"), "heads"),
        Key(("ffn_hidden_size",), "feed_forward", None),
        Key(("max_position_embeddings",), "train_length", 2048),
        Key(("activation",), "activation", "gelu", GELUS),
        Key(("layer_norm_epsilon",), "norm_epsilon", 1e-5),
        Key(("tie_word_embeddings",), "tied", True),
    )
    fixed: ClassVar[Mapping[str, Any]] = {"scale_embeddings": False}
    stem, block = "transformer.", "transformer.h.{}"
    outer: ClassVar[Mapping[str, str]] = {
        "embedding": "transformer.word_embeddings",
        "norm": "transformer.ln_f",
        "output": "lm_head",
    }
    unused = r".*\.rotary_emb\.inv_freq"
    grouped = True

    def inner(self, config: ModelConfig) -> Mapping[str, str | tuple[str, ...]]:
        """Return their names inside a block."""
        first, second = NORMS.get(config.block, ("ln_attn", "ln_mlp"))
        return {
            "attention_norm": first,
            "attention.qkv": "self_attention.query_key_value",
            "attention.out": "self_attention.dense",
            "feed_forward_norm": second,
            "feed_forward.up": "mlp.dense_h_to_4h",
            "feed_forward.down": "mlp.dense_4h_to_h",
        }

    def read_more(self, asked: Asked, found: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Return the form of blocks, the heads of keys, biases and positions."""
        asked.word("apply_residual_connection_post_layernorm", words={False: False}, default=False)
        new = asked.take("new_decoder_architecture", default=False, hint=bool)
        beside = asked.take("parallel_attn", default=True, hint=bool)
        one = asked.take("multi_query", default=True, hint=bool)
        key_heads = asked.take("num_kv_heads", "n_head_kv", default=None, hint=int | None)
        norms = asked.word("num_ln_in_parallel_attn", words={1: 1, 2: 2}, default=2 if new else 1)
        if new and not beside:
            raise asked.refusal("parallel_attn", "true with new_decoder_architecture", beside)
        if not new and not one and key_heads not in (None, found["heads"]):
            raise asked.refusal("num_kv_heads", f"{found['heads']} without new_decoder_architecture", key_heads)
        biases = True if asked.take("bias", default=False, hint=bool) else ["norm"]
        more: dict[str, Any] = {
            "block": ("parallel" if new and norms == 2 else "shared") if beside else "pre",
            "key_heads": key_heads if new else 1 if one else None,
            "biases": biases,
        }
        head_dim, alibi = found["width"] // found["heads"], asked.take("alibi", default=False, hint=bool)
        if alibi:
            asked.read |= {"rope_parameters", "rope_scaling", "rope_theta"}
            return {**more, "positions": "alibi", "position_options": {"slopes": divided(found["heads"], head_dim)}}
        options = rope.read(asked, head_dim, found["train_length"], None, over)
        return {**more, "positions": "rotary", "position_options": options}

    def write_more(self, config: ModelConfig) -> dict[str, Any]:
        """Return their keys for the same."""
        alibi, few = config.positions == "alibi", config.key_value_heads < config.heads
        new = config.block == "parallel" or (few and config.key_value_heads > 1)
        return {
            "alibi": alibi,
            "new_decoder_architecture": new,
            "num_ln_in_parallel_attn": 2 if config.block == "parallel" else 1,
            "parallel_attn": config.block != "pre",
            "multi_query": few and not new,
            "num_kv_heads": config.key_value_heads if new else None,
            "bias": config.has_bias("qkv"),
            **({} if alibi else rope.write(config)),
        }


def divided(heads: int, head_dim: int) -> list[float]:
    """Return the paper's slopes divided by √head_dim, in float32's numbers."""
    slopes = torch.tensor(standard_slopes(heads), dtype=torch.float64) / math.sqrt(head_dim)
    found: list[float] = slopes.float().tolist()
    return found
