"""MPT: ALiBi, LayerNorm and matrices without biases, exact GELU.

Slopes are 2^(−h·alibi_bias_max/c), c the power of two that is not below the heads; if it is above them, every second
slope from the second, then every second from the first, until there are enough. `transformers` ignores
`alibi_bias_max` and takes 8, and a feed-forward width of 4·width: what is written keeps to these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from lengthen.config import ModelConfig
from lengthen.interop.architecture import Architecture, Key
from lengthen.interop.asked import Asked
from lengthen.positions.alibi import standard_slopes

FARTHER = 32  # times the training length: theirs stops at max_seq_len, since their bias is made for so many keys


class MPT(Architecture):
    """Queries, keys and values may be clipped."""

    name = "MptForCausalLM"
    aliases = ("MPTForCausalLM", "MptModel", "MPTModel")
    model_type = "mpt"
    keys = (
        Key(("vocab_size",), "vocab_size"),
        Key(("d_model", "hidden_size"), "width"),
        Key(("n_layers", "num_hidden_layers"), "layers"),
        Key(("n_heads", "num_attention_heads"), "heads"),
        Key(("max_seq_len",), "train_length", 2048),
        Key(("layer_norm_epsilon",), "norm_epsilon", 1e-5),
        Key(("tie_word_embeddings",), "tied", True),
    )
    fixed: ClassVar[Mapping[str, Any]] = {
        "positions": "alibi",
        "activation": "gelu",
        "biases": False,
        "scale_embeddings": False,
    }
    ignored = (
        *("embedding_fraction", "init_config", "init_device", "init_std", "learned_pos_emb", "param_init_fn"),
        *("tokenizer_name", "verbose"),
    )
    stem, block = "transformer.", "transformer.blocks.{}"
    outer: ClassVar[Mapping[str, str]] = {
        "embedding": "transformer.wte",
        "norm": "transformer.norm_f",
        "output": "lm_head",
    }

    def inner(self, config: ModelConfig) -> Mapping[str, str | tuple[str, ...]]:
        """Return their names inside a block."""
        return {
            "attention_norm": "norm_1",
            "attention.qkv": "attn.Wqkv",
            "attention.out": "attn.out_proj",
            "feed_forward_norm": "norm_2",
            "feed_forward.up": "ffn.up_proj",
            "feed_forward.down": "ffn.down_proj",
        }

    def read_more(self, asked: Asked, found: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `attn_config` says, and the feed-forward width."""
        asked.word("no_bias", words={True: True}, default=True)
        asked.word("norm_type", words=dict.fromkeys(("low_precision_layernorm", "layernorm"), 0), default="layernorm")
        asked.word("fc_type", words={"torch": 0}, default="torch")
        ratio = asked.take("expansion_ratio", default=4, hint=int)
        inside = asked.part("attn_config")
        inside.word("alibi", words={True: True}, default=True)
        inside.word("attn_type", words={"multihead_attention": 0}, default="multihead_attention")
        inside.word("sliding_window_size", words={-1: -1}, default=-1)
        clip = inside.take("clip_qkv", default=None, hint=float | None)
        scale = inside.take("softmax_scale", default=None, hint=float | None)
        most = inside.take("alibi_bias_max", default=8, hint=float)
        inside.finish(("attn_impl", "rope_theta", "rope_impl", "rope_dail_config", "rope_hf_config"))
        slopes, usual = mpt_slopes(found["heads"], most), standard_slopes(found["heads"])
        return {
            "feed_forward": ratio * found["width"],
            "clip_qkv": clip or None,
            "score_scale": scale,
            "position_options": {} if slopes == usual else {"slopes": list(slopes)},
        }

    def write_more(self, config: ModelConfig) -> dict[str, Any]:
        """Return their keys for the same."""
        inside = {"alibi": True, "clip_qkv": config.clip_qkv, "softmax_scale": config.score_scale}
        far = FARTHER * config.train_length
        return {"attn_config": inside, "expansion_ratio": 4, "no_bias": True, "max_seq_len": far}


def mpt_slopes(heads: int, most: float) -> tuple[float, ...]:
    """Return MPT's slopes, in float32's numbers."""
    above = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-most * h / above) for h in range(1, above + 1)]
    if above != heads:
        slopes = (slopes[1::2] + slopes[::2])[:heads]
    return tuple(torch.tensor(slopes, dtype=torch.float32).tolist())
