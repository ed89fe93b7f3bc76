"""BLOOM, MPT and Falcon with ALiBi: their attention, with the bias as slopes in float32.

    softmax(scale · q·k − m_h·(i − j))

In transformers BLOOM and Falcon hold the bias in the model's dtype: in bfloat16, distances past 256 run together. All
three modules ignore a registered attention function, and the mask that comes with it, so `forward` is replaced. They
count key positions from the first key that is not padding; only differences matter, so `.padded` says the same.

    BLOOM    m_h: the paper's slopes
    MPT      m_h of interop/mpt.py; transformers has 8 for every alibi_bias_max, and fails beyond max_seq_len keys
    Falcon   m_h: the paper's / √head_dim (in transformers rounded to bfloat16, in any dtype)
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from lengthen.attention import Causal, Linear, alibi_slopes, attention
from lengthen.interop.accelerate.padding import key_start, real_keys
from lengthen.interop.accelerate.swap import Swapped, configs_of, mind_dropout, refuse_weights, swap, tell
from lengthen.interop.mpt import mpt_slopes

# A name for masks alone: transformers knows no attention of it, so it refuses to build a new model that names it.
NAME = "lengthen_in_place"


def begun(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Return the keys from each sequence's first real one on, bool `[batch, keys]`; `[batch, 0]`: nothing is padding.

    Booleans in two dimensions are the one form that the code of all three models hands on unchanged, and a padding mask
    still: `generate` makes it ahead of the model, which makes it once more. Padding on the right needs no mask: no real
    query sees it.
    """
    if mask_function is not causal_mask_function:
        raise ValueError("mask: expected a causal mask and padding alone, got another mask function")
    real = real_keys(attention_mask)
    if real is None:
        return torch.zeros(batch_size, 0, dtype=torch.bool, device=device)
    return torch.arange(real.shape[1], device=real.device) >= key_start(real).unsqueeze(1)


AttentionMaskInterface.register(NAME, begun)


class AlibiAttention(Swapped):
    """What the three have in common."""

    _lengthen_slopes: Tensor
    layer_idx: int

    @classmethod
    def slopes(cls, module: Any, config: Any) -> Tensor:
        """Return the slopes of a module's heads, float32."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, cache: Any, scale: float | None) -> Tensor:
        """Return the heads' outputs side by side, `[batch, queries, width]`, after the cache has taken k and v."""
        q_start: int | Tensor = 0
        if cache is not None:
            q_start = cache.get_seq_length(self.layer_idx)
            if isinstance(q_start, Tensor):  # of a static cache, which counts in place
                q_start = q_start.reshape(1).to(q.device, copy=True)
            k, v = cache.update(k, v, self.layer_idx)
        if real.dim() != 2 or real.dtype != torch.bool:
            raise ValueError(f"attention_mask: expected [batch, keys], got {list(real.shape)}")
        mask = Causal().padded((~real).sum(1)) if real.shape[1] else Causal()
        if self._lengthen_slopes.device != q.device:
            with torch.inference_mode(False):  # else a later training step could not use what was made here
                self._lengthen_slopes = self._lengthen_slopes.to(q.device)
        out = attention(q, k, v, bias=Linear(self._lengthen_slopes), mask=mask, scale=scale, q_start=q_start)
        return out.transpose(1, 2).flatten(2)


class BloomOpAttention(AlibiAttention, modeling_bloom.BloomAttention):  # type: ignore[misc]
    """BLOOM's."""

    needs = ("query_key_value", "dense", "attention_dropout", "hidden_dropout", "inv_norm_factor", "layer_idx")
    takes: ClassVar = {
        "forward": (
            *("self", "hidden_states", "residual", "alibi", "attention_mask", "layer_past", "use_cache"),
            *("output_attentions", "kwargs"),
        ),
        "_reshape": ("self", "fused_qkv"),
    }

    @classmethod
    def slopes(cls, module: Any, config: Any) -> Tensor:
        """Return the paper's."""
        if config.pretraining_tp > 1 and config.slow_but_exact:
            raise ValueError("slow_but_exact: expected False with pretraining_tp above 1, got True")
        return alibi_slopes(module.num_heads)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return the layer's output with the residual, and no weights."""
        refuse_weights(output_attentions)
        mind_dropout(self.training, self.attention_dropout.p)
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        out = self.dense(self.attend(q, k, v, attention_mask, layer_past, self.inv_norm_factor))
        return modeling_bloom.dropout_add(out, residual, self.hidden_dropout, self.training), None


class MptOpAttention(AlibiAttention, modeling_mpt.MptAttention):  # type: ignore[misc]
    """MPT's."""

    needs = ("Wqkv", "out_proj", "clip_qkv", "softmax_scale", "attn_dropout_p", "n_heads", "layer_idx")
    takes: ClassVar = {
        "forward": ("self", "hidden_states", "position_bias", "past_key_values", "attention_mask", "kwargs"),
    }

    @classmethod
    def slopes(cls, module: Any, config: Any) -> Tensor:
        """Return those of `alibi_bias_max`, in MPT's order."""
        if not config.attn_config.alibi:
            raise ValueError("attn_config.alibi: expected True, got False")
        slopes = mpt_slopes(module.n_heads, config.attn_config.alibi_bias_max)
        return torch.tensor(slopes, dtype=torch.float32)

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return the layer's output, and no weights."""
        mind_dropout(self.training, self.attn_dropout_p)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (x.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=2))
        assert attention_mask is not None
        return self.out_proj(self.attend(q, k, v, attention_mask, past_key_values, self.softmax_scale)), None


class MptBlock(Swapped, modeling_mpt.MptBlock):
    """MPT's block, which does not tell its attention that weights are asked for; wrappers know it by its name."""

    needs = ("attn",)
    takes: ClassVar = {
        "forward": (
            *("self", "hidden_states", "position_bias", "attention_mask", "layer_past", "use_cache"),
            *("output_attentions", "kwargs"),
        ),
    }

    def forward(self, *arguments: Any, output_attentions: bool = False, **named: Any) -> Any:
        """Return what MPT's returns."""
        refuse_weights(output_attentions)
        return super().forward(*arguments, **named)


class FalconOpAttention(AlibiAttention, modeling_falcon.FalconAttention):
    """Falcon's, with ALiBi."""

    needs = (
        *("query_key_value", "dense", "attention_dropout", "inv_norm_factor", "num_heads", "num_kv_heads", "head_dim"),
        *("new_decoder_architecture", "layer_idx"),
    )
    takes: ClassVar = {
        "forward": (
            *("self", "hidden_states", "alibi", "attention_mask", "position_ids", "layer_past", "use_cache"),
            *("output_attentions", "position_embeddings", "kwargs"),
        ),
        "_split_heads": ("self", "fused_qkv"),
    }

    @classmethod
    def slopes(cls, module: Any, config: Any) -> Tensor:
        """Return the paper's, divided as the scores are."""
        if not config.alibi:
            raise ValueError("alibi: expected a Falcon with alibi=True, got one with rotary positions (alibi=False)")
        return alibi_slopes(module.num_heads) / math.sqrt(module.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return the layer's output, and no weights."""
        refuse_weights(output_attentions)
        mind_dropout(self.training, self.attention_dropout.p)
        split = self._split_heads(self.query_key_value(hidden_states))
        q, k, v = (x.transpose(1, 2) for x in split)
        return self.dense(self.attend(q, k, v, attention_mask, layer_past, self.inv_norm_factor)), None


OURS: dict[type, type[AlibiAttention]] = {
    cls.replaced(): cls for cls in (BloomOpAttention, MptOpAttention, FalconOpAttention)
}


def apply(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Replace the attention of a model; first all checks, then all changes."""
    configs = configs_of(model)
    todo: list[tuple[Any, type[Swapped], dict[str, Any]]] = []
    for name, module in modules.items():
        if isinstance(module, AlibiAttention):
            continue
        cls = OURS.get(type(module))
        if cls is None:
            raise TypeError(
                f"{name}: expected one of {', '.join(c.__name__ for c in OURS)}, got {type(module).__name__}"
            )
        cls.check(name, module)
        slopes = cls.slopes(module, configs[name])
        todo.append((module, cls, {"_lengthen_slopes": slopes.to(next(module.parameters()).device)}))
    for name, module in model.named_modules():
        if type(module) is modeling_mpt.MptBlock:
            MptBlock.check(name, module)
            todo.append((module, MptBlock, {}))
    tell(model, NAME)
    for module, replacement, attributes in todo:
        swap(module, replacement, **attributes)
