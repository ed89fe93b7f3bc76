"""The same weights in another package's model give the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lengthen.model import ModelConfig, Transformer

transformers = pytest.importorskip("transformers")


def drawn(model: nn.Module) -> dict[str, Tensor]:
    """Draw every weight of a model, make it exact, and return the weights."""
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.normal_(std=0.3)
    return dict(model.eval().state_dict())


def assert_same_logits(
    theirs: nn.Module, config: ModelConfig, state: dict[str, Tensor], length: int, within: float = 1e-10
) -> None:
    ours = Transformer(config).double().eval()
    ours.load_state_dict(state)
    ids = torch.randint(config.vocab_size, (2, length))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert expected.std() > 0.1, "weights so small that any model would agree"
        torch.testing.assert_close(ours(ids), expected, rtol=within, atol=within)


def test_against_gpt2() -> None:
    settings = transformers.GPT2Config(vocab_size=37, n_positions=30, n_embd=24, n_layer=3, n_head=4, n_inner=50)
    theirs = transformers.GPT2LMHeadModel(settings)
    weights = drawn(theirs)
    state = {"embedding.weight": weights["transformer.wte.weight"], "method.weight": weights["transformer.wpe.weight"]}
    names = {
        "ln_1": "attention_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "ln_2": "feed_forward_norm",
        "mlp.c_fc": "feed_forward.up",
        "mlp.c_proj": "feed_forward.down",
    }
    for layer in range(3):
        for name, ours in names.items():
            for kind in ("weight", "bias"):  # its matrices are stored the other way round
                found = weights[f"transformer.h.{layer}.{name}.{kind}"]
                state[f"blocks.{layer}.{ours}.{kind}"] = found.mT if found.dim() == 2 else found
    for kind in ("weight", "bias"):
        state[f"norm.{kind}"] = weights[f"transformer.ln_f.{kind}"]
    config = ModelConfig(
        vocab_size=37,
        layers=3,
        width=24,
        heads=4,
        train_length=30,
        feed_forward=50,
        positions="learned",
        scale_embeddings=False,
    )
    assert_same_logits(theirs, config, state, length=30)


@pytest.mark.parametrize("head_dim", [6, 8])
def test_against_llama(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    theirs = transformers.LlamaForCausalLM(settings)
    weights = drawn(theirs)
    state = {
        "embedding.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for layer in range(3):
        block = {name.removeprefix(f"model.layers.{layer}."): weight for name, weight in weights.items()}
        parts: dict[str, list[str]] = {
            "attention_norm": ["input_layernorm"],
            "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "attention.out": ["self_attn.o_proj"],
            "feed_forward_norm": ["post_attention_layernorm"],
            "feed_forward.up": ["mlp.gate_proj", "mlp.up_proj"],
            "feed_forward.down": ["mlp.down_proj"],
        }
        for ours, names in parts.items():
            state[f"blocks.{layer}.{ours}.weight"] = torch.cat([block[f"{name}.weight"] for name in names])
    config = ModelConfig(
        vocab_size=37,
        layers=3,
        width=24,
        heads=4,
        key_heads=2,
        head_dim=head_dim,
        train_length=64,
        feed_forward=40,
        positions="rotary",
        position_options={"base": 500.0},
        norm="rms",
        activation="swiglu",
        biases=False,
        tied=False,
        scale_embeddings=False,
    )
    assert_same_logits(theirs, config, state, length=50, within=1e-4)
    # What is left is that its angles and norms are computed in float32, whatever the model is. In float64:
    exact = 500.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def angles(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rotated = (position_ids[..., None] * exact).repeat(1, 1, 2)
        return rotated.cos(), rotated.sin()

    def norm(self: Any, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight

    monkeypatch.setattr(theirs.model.rotary_emb, "forward", angles)
    monkeypatch.setattr(type(theirs.model.norm), "forward", norm)
    assert_same_logits(theirs, config, state, length=50)


def test_against_mpt_with_alibi() -> None:
    """MPT has no biases, exact GELU and ALiBi; its bias is added before the softmax as ours is."""
    settings = transformers.MptConfig(d_model=24, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=37, no_bias=True)
    settings.attn_config.alibi = True
    theirs = transformers.MptForCausalLM(settings)
    weights = drawn(theirs)
    state = {"embedding.weight": weights["transformer.wte.weight"], "norm.weight": weights["transformer.norm_f.weight"]}
    names = {
        "norm_1": "attention_norm",
        "attn.Wqkv": "attention.qkv",
        "attn.out_proj": "attention.out",
        "norm_2": "feed_forward_norm",
        "ffn.up_proj": "feed_forward.up",
        "ffn.down_proj": "feed_forward.down",
    }
    for layer in range(2):
        for name, ours in names.items():
            state[f"blocks.{layer}.{ours}.weight"] = weights[f"transformer.blocks.{layer}.{name}.weight"]
    config = ModelConfig(
        vocab_size=37,
        layers=2,
        width=24,
        heads=4,
        train_length=64,
        feed_forward=96,
        positions="alibi",
        biases=False,
        activation="gelu",
        scale_embeddings=False,
    )
    assert_same_logits(theirs, config, state, length=40, within=1e-5)  # its softmax is always in float32
