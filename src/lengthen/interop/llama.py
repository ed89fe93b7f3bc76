"""Llama, and what is made like it: Mistral (a sliding window), Qwen2 (biases of q, k and v), Qwen3 (q/k norm)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lengthen.config import Bias, ModelConfig
from lengthen.interop import rope
from lengthen.interop.architecture import Architecture, Key
from lengthen.interop.asked import Asked

GATES = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}


def keys(head_dim: int | None = None, length: int = 2048, key_heads: int | None = None) -> tuple[Key, ...]:
    """Return the keys, with the defaults in which the four differ."""
    return (
        Key(("vocab_size",), "vocab_size"),
        Key(("hidden_size",), "width"),
        Key(("intermediate_size",), "feed_forward"),
        Key(("num_hidden_layers",), "layers"),
        Key(("num_attention_heads",), "heads"),
        Key(("num_key_value_heads",), "key_heads", key_heads),
        Key(("head_dim",), "head_dim", head_dim),
        Key(("hidden_act",), "activation", "silu", GATES),
        Key(("max_position_embeddings",), "train_length", length),
        Key(("rms_norm_eps",), "norm_epsilon", 1e-6),
        Key(("tie_word_embeddings",), "tied", False),
    )


class Llama(Architecture):
    """RMSNorm, SwiGLU, rotary, grouped queries."""

    name = "LlamaForCausalLM"
    model_type = "llama"
    keys = keys()
    fixed: ClassVar[Mapping[str, Any]] = {"positions": "rotary", "norm": "rms", "scale_embeddings": False}
    ignored = ("pretraining_tp",)
    stem, block = "model.", "model.layers.{}"
    outer: ClassVar[Mapping[str, str]] = {"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    unused = r".*\.rotary_emb\.inv_freq"

    def inner(self, config: ModelConfig) -> Mapping[str, str | tuple[str, ...]]:
        """Return their names inside a block."""
        return {
            "attention_norm": "input_layernorm",
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm",
            "attention.out": "self_attn.o_proj",
            "feed_forward_norm": "post_attention_layernorm",
            "feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"),
            "feed_forward.down": "mlp.down_proj",
        }

    def biases(self, asked: Asked) -> list[Bias]:
        """Return where there are biases."""
        attention = asked.take("attention_bias", default=False, hint=bool)
        feed_forward = asked.take("mlp_bias", default=False, hint=bool)
        return [*(("qkv", "out") if attention else ()), *(("feed_forward",) if feed_forward else ())]

    def window(self, asked: Asked, layers: int) -> int | None:
        """Return how many tokens each sees."""
        return None

    def read_more(self, asked: Asked, found: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Return biases, the window and angles."""
        head_dim = found["head_dim"] or found["width"] // found["heads"]
        options = rope.read(asked, head_dim, found["train_length"], None, over)
        more = {"biases": self.biases(asked), "window": self.window(asked, found["layers"])}
        return {**more, "position_options": options}

    def write_more(self, config: ModelConfig) -> dict[str, Any]:
        """Return their keys for the same."""
        written = {"attention_bias": config.has_bias("qkv"), "mlp_bias": config.has_bias("feed_forward")}
        return written | rope.write(config)


class Mistral(Llama):
    """Llama with a sliding window in every layer."""

    name = "MistralForCausalLM"
    model_type = "mistral"
    keys = keys(length=131072, key_heads=8)

    def biases(self, asked: Asked) -> list[Bias]:
        """Return none."""
        return []

    def window(self, asked: Asked, layers: int) -> int | None:
        """Return the window, unless all layers are said to see everything."""
        kinds, size = _refuse_mixed(asked, layers), _window_size(asked)
        return None if kinds == {"full_attention"} else size

    def write_more(self, config: ModelConfig) -> dict[str, Any]:
        """Return the window and the angles."""
        return {"sliding_window": config.window} | rope.write(config)


class Qwen2(Llama):
    """Llama with biases of queries, keys and values."""

    name = "Qwen2ForCausalLM"
    model_type = "qwen2"
    keys = keys(length=32768, key_heads=32)

    def biases(self, asked: Asked) -> list[Bias]:
        """Return those that all models of the architecture have."""
        return ["qkv"]

    def window(self, asked: Asked, layers: int) -> int | None:
        """Return the window if all layers have it."""
        kinds = _refuse_mixed(asked, layers)
        used = asked.take("use_sliding_window", default=False, hint=bool)
        size = _window_size(asked)
        first = asked.take("max_window_layers", default=28, hint=int)  # with a window, where none are listed
        if "sliding_attention" in kinds and not used:
            raise asked.refusal("use_sliding_window", "True with sliding layers (layer_types)", used)
        if not used or size is None or kinds == {"full_attention"}:
            return None
        if not kinds and 0 < first < layers:
            raise asked.refusal("max_window_layers", f"0 or at least {layers}: one window for all layers", first)
        return size if kinds or first <= 0 else None

    def write_more(self, config: ModelConfig) -> dict[str, Any]:
        """Return the window and the angles."""
        sliding = config.window is not None
        kind = "sliding_attention" if sliding else "full_attention"
        written = {"use_sliding_window": sliding, "layer_types": [kind] * config.layers, "max_window_layers": 0}
        return {**written, "sliding_window": config.window} | rope.write(config)


class Qwen3(Qwen2):
    """Qwen2 with normalised queries and keys, and biases where the config says so."""

    name = "Qwen3ForCausalLM"
    model_type = "qwen3"
    keys = keys(length=32768, key_heads=32, head_dim=128)
    fixed: ClassVar[Mapping[str, Any]] = {**Llama.fixed, "qk_norm": True}

    def biases(self, asked: Asked) -> list[Bias]:
        """Return those of attention."""
        return ["qkv", "out"] if asked.take("attention_bias", default=False, hint=bool) else []

    def write_more(self, config: ModelConfig) -> dict[str, Any]:
        """Return biases, the window and the angles."""
        return {"attention_bias": config.has_bias("qkv")} | super().write_more(config)


def _window_size(asked: Asked) -> int | None:
    """Return the window that the config says, 4,096 where it says nothing."""
    default = None if "sliding_window" in asked.table else 4096
    found: int | None = asked.take("sliding_window", default=default, hint=int)
    if found is None and "sliding_attention" in (asked.table.get("layer_types") or ()):
        raise asked.refusal("sliding_window", "a number with sliding layers (layer_types)", found)
    return found


def _refuse_mixed(asked: Asked, layers: int) -> set[str]:
    """Return the one kind of attention that layers have, if they are listed."""
    kinds = set(asked.take("layer_types", default=[], hint=list[str]))
    if len(kinds) > 1 or kinds - {"full_attention", "sliding_attention"}:
        raise asked.refusal("layer_types", f"one kind of attention for all {layers} layers", sorted(kinds))
    return kinds
