"""Our architecture as classes of `transformers`: importing this module lets it open what `lengthen export` wrote.

    import lengthen.interop.huggingface
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("models/xpos")

The model inside is a `Transformer`: its attention, its masks, its cache. `generate` of `transformers` works with that
cache, beams included. An attention mask may hide padding before a text, or after it, and nothing between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lengthen import io
from lengthen.attention.cache import Cache
from lengthen.config import ModelConfig
from lengthen.interop.accelerate.padding import key_end, key_start, real_keys
from lengthen.model import IGNORED, Transformer

USUAL = {"vocab_size": 258, "layers": 2, "width": 64, "heads": 4, "train_length": 64}  # of a config without a model


class LengthenConfig(PretrainedConfig):
    """Our config, as the table `model` of config.json."""

    model_type = "lengthen"

    def __init__(self, model: dict[str, Any] | None = None, **others: Any) -> None:
        self.model = dict(USUAL) if model is None else dict(model)
        super().__init__(**others)
        told = self.ours
        self.vocab_size, self.hidden_size = told.vocabulary, told.width
        self.num_hidden_layers, self.num_attention_heads = told.layers, told.heads

    @property
    def ours(self) -> ModelConfig:
        """The config as this package has it."""
        return io.build(ModelConfig, self.model, "config.json", "model.")


class Past:
    """A cache of ours in the hands of `transformers`: it asks for its length, and for other rows of it."""

    is_compileable = False

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def get_seq_length(self, layer: int = 0) -> int:
        """Return how many tokens were read."""
        return self.cache.length

    def reorder_cache(self, rows: Tensor) -> None:
        """Go on with these rows, as beams do."""
        self.cache = self.cache.rows(rows)


class LengthenForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder of this package."""

    config_class = LengthenConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012 (as transformers declares it)

    def __init__(self, config: LengthenConfig) -> None:
        super().__init__(config)
        self.model = Transformer(config.ours)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """Leave the weights as `Transformer` drew them."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # but one of ours, which forward makes

    def get_input_embeddings(self) -> Any:
        """Return the embedding."""
        return self.model.embedding

    def get_output_embeddings(self) -> Any:
        """Return the output layer; None where it shares the embedding's weights."""
        return self.model.output

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Past | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        position_ids: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return the logits, and with labels the mean loss of each token from those before it."""
        for name in ("inputs_embeds", "output_attentions", "output_hidden_states"):
            if others.get(name) is not None and others[name] is not False:
                raise TypeError(f"forward: expected no {name}, which is not done here, got one")
        start, end = _padding(attention_mask)
        _refuse_other_positions(position_ids, input_ids, attention_mask, start)
        past, usual = past_key_values, self.model.usual_mask
        if past is None and use_cache and not torch.is_grad_enabled() and end is None:
            past = Past(self.model.cache(starts=None if start is None else start.tolist()))
        if past is None:
            hidden = self.model.hidden(input_ids, usual if start is end is None else usual.padded(start, end))
        else:
            hidden = self.model.extend(input_ids, past.cache)
        kept = hidden[:, -logits_to_keep:] if logits_to_keep else hidden
        logits = F.linear(kept, self.model.output_weight)
        loss = None
        if labels is not None:
            shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten(), ignore_index=IGNORED)
        found: Any = {"loss": loss, "logits": logits, "past_key_values": past}
        output = CausalLMOutputWithPast(**found)
        return output.to_tuple() if return_dict is False else output


def _padding(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the first real token of each sequence and the one after its last, or None where all begin or end alike."""
    real = real_keys(mask)
    if real is None:
        return None, None
    first, after = key_start(real), key_end(real)
    return first if bool(first.any()) else None, after if bool((after < real.shape[1]).any()) else None


def _refuse_other_positions(given: Tensor | None, ids: Tensor, mask: Tensor | None, start: Tensor | None) -> None:
    """Refuse positions that are not counted from each sequence's first real token, one by one."""
    if given is None or mask is None:  # without a mask, nobody says how many tokens there were before
        return
    place = torch.arange(mask.shape[1], device=mask.device) - (0 if start is None else start[:, None])
    new = slice(mask.shape[1] - ids.shape[1], None)
    same = (given == place[..., new]) | ~mask.bool()[:, new]
    if not bool(same.all()):
        raise ValueError("position_ids: expected positions counted from each sequence's start, got others")


AutoConfig.register("lengthen", LengthenConfig, exist_ok=True)
AutoModelForCausalLM.register(LengthenConfig, LengthenForCausalLM, exist_ok=True)
