"""GPT-2: LayerNorm, tanh GELU, a learned vector for each position; matrices inside blocks are [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lengthen.config import ModelConfig
from lengthen.interop.architecture import Architecture, Key
from lengthen.interop.asked import Asked
from lengthen.interop.neox import GELUS


class GPT2(Architecture):
    """Learned positions: it cannot be stretched."""

    name = "GPT2LMHeadModel"
    aliases = ("GPT2Model",)
    model_type = "gpt2"
    keys = (
        Key(("vocab_size",), "vocab_size"),
        Key(("n_embd", "hidden_size"), "width"),
        Key(("n_layer", "num_hidden_layers"), "layers"),
        Key(("n_head", "num_attention_heads"), "heads"),
        Key(("n_inner",), "feed_forward", None),
        Key(("n_positions", "max_position_embeddings", "n_ctx"), "train_length", 1024),
        Key(("activation_function",), "activation", "gelu_new", GELUS),
        Key(("layer_norm_epsilon",), "norm_epsilon", 1e-5),
        Key(("tie_word_embeddings",), "tied", True),
    )
    fixed: ClassVar[Mapping[str, Any]] = {"positions": "learned", "scale_embeddings": False}
    ignored = (
        *("reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
        *("summary_proj_to_labels", "summary_first_dropout"),
    )
    stem, block = "transformer.", "transformer.h.{}"
    outer: ClassVar[Mapping[str, str]] = {
        "embedding": "transformer.wte",
        "method": "transformer.wpe",
        "norm": "transformer.ln_f",
        "output": "lm_head",
    }
    unused = r".*\.attn\.(bias|masked_bias)"
    transposed = True

    def inner(self, config: ModelConfig) -> Mapping[str, str | tuple[str, ...]]:
        """Return their names inside a block."""
        return {
            "attention_norm": "ln_1",
            "attention.qkv": "attn.c_attn",
            "attention.out": "attn.c_proj",
            "feed_forward_norm": "ln_2",
            "feed_forward.up": "mlp.c_fc",
            "feed_forward.down": "mlp.c_proj",
        }

    def read_more(self, asked: Asked, found: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scale of scores, and how many positions there are, whatever it was trained at."""
        scaled = asked.take("scale_attn_weights", default=True, hint=bool)
        options = {"max_length": found["train_length"]}
        return {"score_scale": None if scaled else 1.0, "position_options": options}

    def write_more(self, config: ModelConfig) -> dict[str, Any]:
        """Return their keys for the same."""
        return {"scale_attn_weights": config.score_scale is None, "n_positions": config.longest}
