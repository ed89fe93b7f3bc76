"""Models of `transformers` here: the same logits, with a cache and without, with padding, at several shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from theirs import SIZES, VOCABULARY, configured, make, saved
from torch import Tensor

import lengthen
from lengthen import Transformer
from lengthen.interop.architecture import described
from lengthen.interop.architectures import ARCHITECTURES, find

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 500000.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "head_dim": 12}),
    ("Llama", {"hidden_size": 120, "num_attention_heads": 12, "num_key_value_heads": 4, "rope_parameters": YARN}),
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Llama", {"rope_parameters": LINEAR}),
    ("Llama", {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}}),
    ("Mistral", {"num_key_value_heads": 4, "sliding_window": 7}),
    ("Mistral", {"num_key_value_heads": 4, "sliding_window": None}),
    ("Qwen2", {"num_key_value_heads": 2}),
    ("Qwen2", {"num_key_value_heads": 8, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    ("Qwen3", {"num_key_value_heads": 4, "head_dim": 16}),
    ("Qwen3", {"num_key_value_heads": 8, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    ("GPTNeoX", {}),
    ("GPTNeoX", {"use_parallel_residual": False, "hidden_act": "gelu_new", "attention_bias": False}),
    ("GPTNeoX", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0}}),
    ("GPTNeoX", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}, "tie_word_embeddings": True}),
    ("GPT2", {}),
    ("GPT2", {"n_inner": 40, "scale_attn_weights": False, "activation_function": "relu"}),
    ("GPT2", {"tie_word_embeddings": False}),
    ("Bloom", {}),
    ("Bloom", {"hidden_size": 96, "n_head": 12}),
    ("Bloom", {"hidden_size": 80, "n_head": 20, "tie_word_embeddings": False}),
    ("Mpt", {}),
    ("Mpt", {"d_model": 96, "n_heads": 12, "attn_config": {"clip_qkv": 0.5}}),
    ("Mpt", {"d_model": 80, "n_heads": 20, "attn_config": {"softmax_scale": 0.3}}),
    ("Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("Falcon", {"alibi": True, "multi_query": False, "hidden_size": 96, "num_attention_heads": 12}),
    ("Falcon", {"alibi": True, "multi_query": False, "hidden_size": 80, "num_attention_heads": 20}),
    ("Falcon", {}),
    ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1, "bias": True}),
]
every = pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n} {', '.join(o)}" for n, o in CASES])


def exact_alibi(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Falcon's bias as its authors meant it: theirs multiplies in bfloat16, whatever the model is in."""
    slopes = lengthen.alibi_slopes(heads)
    where = ((mask.cumsum(dim=-1) - 1) * mask)[:, None, :]
    return (slopes[..., None] * where).reshape(mask.shape[0] * heads, 1, -1).to(dtype)


@pytest.fixture(autouse=True)
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.models.falcon.modeling_falcon, "build_alibi_tensor", exact_alibi)


@torch.no_grad()
def logits_of(model: Any, ids: Tensor, **more: Any) -> Tensor:
    found: Tensor = model(ids, **more).logits
    return found


@torch.no_grad()
def cached(
    model: Transformer, ids: Tensor, starts: list[int] | None = None, sizes: tuple[int, ...] = (7, 1, 9)
) -> Tensor:
    cache, parts, at = model.cache(starts=starts), [], 0
    for size in (*sizes, ids.shape[1]):
        if at < ids.shape[1]:
            parts.append(model.extend(ids[:, at : at + size], cache))
        at += size
    return torch.nn.functional.linear(torch.cat(parts, dim=1), model.output_weight)


def compare(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda said: f"{what}: {said}")


@every
@torch.no_grad()
def test_logits_are_theirs(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    theirs = make(name, **options)
    ours = lengthen.load(saved(theirs, tmp_path))
    assert not ours.training
    assert sum(weight.numel() for weight in ours.parameters()) == ours.config.parameters
    ids = torch.randint(VOCABULARY, (2, 40))
    expected = logits_of(theirs, ids)
    compare(ours(ids), expected, "without a cache")
    compare(cached(ours, ids), expected, "with a cache")


@every
@torch.no_grad()
def test_padding_is_not_seen(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    theirs = make(name, **options)
    ours = lengthen.load(saved(theirs, tmp_path))
    ids, short = torch.randint(VOCABULARY, (2, 30)), 11
    for left in (True, False):
        real = torch.ones_like(ids)
        real[1, slice(0, short) if left else slice(30 - short, 30)] = 0
        places = (real.cumsum(-1) - 1).clamp(min=0)
        more = {} if name in ("Bloom", "Mpt") else {"position_ids": places}
        expected = logits_of(theirs, ids, attention_mask=real, **more)
        ends = (torch.tensor([0, short]), None) if left else (None, torch.tensor([30, 30 - short]))
        found = ours(ids, mask=ours.usual_mask.padded(*ends))
        compare(found[real.bool()], expected[real.bool()], "left" if left else "right")
        if left:
            compare(cached(ours, ids, [0, short])[real.bool()], expected[real.bool()], "left, with a cache")


LONG: list[tuple[str, dict[str, Any]]] = [  # two heads of eight features: theirs hold a matrix of all pairs
    ("Llama", {"num_key_value_heads": 1}),
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Mistral", {"num_key_value_heads": 2, "sliding_window": 100}),
    ("Qwen2", {"num_key_value_heads": 1}),
    ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    ("GPTNeoX", {}),
    ("GPT2", {"n_positions": 4096}),
    ("Bloom", {}),
    ("Mpt", {"max_seq_len": 4096}),
    ("Falcon", {"alibi": True, "multi_query": False}),
    ("Falcon", {}),
]
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}


@pytest.mark.parametrize("length", [512, 4096])
@pytest.mark.parametrize(("name", "options"), LONG, ids=[f"{n} {', '.join(o)}" for n, o in LONG])
@torch.no_grad()
def test_long_texts(tmp_path: Path, name: str, options: dict[str, Any], length: int) -> None:
    theirs = make(name, **SMALL, **options)
    ours, ids = lengthen.load(saved(theirs, tmp_path)), torch.randint(VOCABULARY, (1, length))
    expected = logits_of(theirs, ids)
    # Their angles are products in float32, ours in float64: at 4,096 they differ by some 2e-4 radians.
    within = 5e-4 if length > 512 and ours.config.positions == "rotary" else 1e-4
    torch.testing.assert_close(ours(ids), expected, rtol=within, atol=within)
    torch.testing.assert_close(cached(ours, ids, sizes=(length // 2, 3)), expected, rtol=within, atol=within)


@pytest.mark.parametrize("heads", [8, 12, 20])
@torch.no_grad()
def test_mpts_alibi_bias_max_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """Theirs ignores it; mended, it is the same. (StoryWriter's config: 16, and queries, keys and values clipped.)"""
    module = transformers.models.mpt.modeling_mpt
    build = module.build_mpt_alibi_tensor
    monkeypatch.setattr(module, "build_mpt_alibi_tensor", lambda n, length, most, device: build(n, length, 16, device))
    attention = {"alibi_bias_max": 16, "clip_qkv": 0.6}
    theirs = make("Mpt", d_model=8 * heads, n_heads=heads, attn_config=attention, max_seq_len=600)
    ours, ids = lengthen.load(saved(theirs, tmp_path)), torch.randint(VOCABULARY, (1, 512))
    compare(ours(ids), logits_of(theirs, ids))


@torch.no_grad()
def test_falcons_own_bias_is_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared above is the bias in float32: theirs, in bfloat16, gives other logits in a float32 model."""
    monkeypatch.undo()
    theirs = make("Falcon", alibi=True, multi_query=False, num_hidden_layers=1)
    ours, ids = lengthen.load(saved(theirs, tmp_path)), torch.randint(VOCABULARY, (1, 512))
    assert (ours(ids) - logits_of(theirs, ids)).abs().max() > 1e-3


@torch.no_grad()
def test_dynamic_angles_go_by_the_length(tmp_path: Path) -> None:
    """Theirs too, in a pass of its own; in a cache, keys of earlier passes would keep other angles."""
    theirs = make("Llama", max_position_embeddings=32, rope_parameters={**LINEAR, "rope_type": "dynamic"})
    ours, ids = lengthen.load(saved(theirs, tmp_path)), torch.randint(VOCABULARY, (1, 90))
    for length in (20, 32, 33, 90):
        compare(ours(ids[:, :length]), logits_of(theirs, ids[:, :length]), f"{length} tokens")
    compare(cached(ours, ids[:, :32]), ours(ids[:, :32]))
    with pytest.raises(ValueError, match=r"at most 32 tokens in a cache with scaling='dynamic'.* scaling='ntk'"):
        cached(ours, ids)


# Configs.


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "GPTNeoX", "GPT2", "Bloom", "Mpt", "Falcon"])
def test_missing_keys_mean_what_they_mean_there(name: str) -> None:
    """A config.json with sizes alone is the same model as one with all keys written out."""
    whole = configured(name).to_dict()
    few = {"model_type": whole["model_type"], "vocab_size": VOCABULARY, **SIZES[name]}
    if name in ("Qwen2", "Qwen3"):  # whose default is 32 key heads
        few["num_key_value_heads"] = whole["num_key_value_heads"] = 8
    architecture = find(few, "config.json")
    assert described(architecture.read(few, "config.json")) == described(architecture.read(whole, "config.json"))
    assert architecture.read(few, "").train_length == architecture.read(whole, "").train_length


@every
def test_configs_go_out_as_they_came(name: str, options: dict[str, Any]) -> None:
    table = configured(name, **options).to_dict()
    architecture = find(table, "config.json")
    config = architecture.read(table, "config.json")
    assert architecture.lacks(config) == []
    others = [one for one in ARCHITECTURES if one.lacks(config) == []]
    assert architecture in others


# The configs of models that people use, as their config.json has them, and how many parameters those have.
REAL: dict[str, tuple[int, dict[str, Any]]] = {
    "bigscience/bloom-560m": (
        559_214_592,
        {
            **{"model_type": "bloom", "architectures": ["BloomForCausalLM"], "attention_softmax_in_fp32": True},
            **{
                "apply_residual_connection_post_layernorm": False,
                "attention_dropout": 0.0,
                "bias_dropout_fusion": True,
            },
            **{"bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0, "initializer_range": 0.02, "n_head": 16},
            **{"layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "n_embed": 1024, "n_inner": None},
            **{"n_layer": 24, "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048},
            **{"skip_bias_add": True, "skip_bias_add_qkv": False, "unk_token_id": 0, "use_cache": True},
            **{"vocab_size": 250880},
        },
    ),
    "mosaicml/mpt-7b-storywriter": (
        6_649_286_656,
        {
            **{"model_type": "mpt", "architectures": ["MPTForCausalLM"], "d_model": 4096, "emb_pdrop": 0},
            "attn_config": {
                **{"alibi": True, "alibi_bias_max": 16, "attn_impl": "torch", "attn_pdrop": 0, "clip_qkv": 6},
                **{"attn_type": "multihead_attention", "attn_uses_sequence_id": False, "prefix_lm": False},
                **{"qk_ln": False, "softmax_scale": None},
            },
            **{"auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}, "embedding_fraction": 1.0},
            **{"expansion_ratio": 4, "init_config": {"name": "kaiming_normal_"}, "init_device": "cpu", "verbose": 0},
            **{"learned_pos_emb": True, "logit_scale": None, "max_seq_len": 65536, "n_heads": 32, "n_layers": 32},
            **{"no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0, "vocab_size": 50432},
            **{"tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16", "use_cache": False},
        },
    ),
    "tiiuae/falcon-rw-1b": (
        1_311_625_216,
        {
            **{"model_type": "falcon", "architectures": ["FalconForCausalLM"], "alibi": True, "bias": True},
            **{"apply_residual_connection_post_layernorm": False, "hidden_size": 2048, "multi_query": False},
            **{"new_decoder_architecture": False, "num_attention_heads": 32, "num_hidden_layers": 24},
            **{"parallel_attn": False, "vocab_size": 50304, "layer_norm_epsilon": 1e-05},
        },
    ),
    "EleutherAI/pythia-70m": (
        70_426_624,
        {
            **{"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu"},
            **{"hidden_size": 512, "intermediate_size": 2048, "layer_norm_eps": 1e-05, "num_attention_heads": 8},
            **{"num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False},
            **{"max_position_embeddings": 2048, "use_parallel_residual": True, "vocab_size": 50304},
        },
    ),
    "meta-llama/Llama-3.1-8B": (
        8_030_261_248,
        {
            **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False},
            **{"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "mlp_bias": False},
            **{"max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32},
            **{"num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0},
            "rope_scaling": {
                **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"},
                **{"original_max_position_embeddings": 8192},
            },
            **{"tie_word_embeddings": False, "vocab_size": 128256},
        },
    ),
    "mistralai/Mistral-7B-v0.1": (
        7_241_732_096,
        {
            **{"model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "silu"},
            **{"hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768},
            **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05},
            **{"rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000},
        },
    ),
    "Qwen/Qwen2.5-0.5B": (
        494_032_768,
        {
            **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"},
            **{"hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768},
            **{"max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "use_mrope": False},
            **{"num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768},
            **{"tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936},
        },
    ),
    "Qwen/Qwen3-0.6B": (
        596_049_920,
        {
            **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False},
            **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072},
            **{"max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16},
            **{"num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None},
            **{"rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "vocab_size": 151936},
            **{"use_sliding_window": False},
        },
    ),
    "openai-community/gpt2": (
        124_439_808,
        {
            **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"},
            **{"attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "n_ctx": 1024},
            **{"layer_norm_epsilon": 1e-05, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
            **{"resid_pdrop": 0.1, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257},
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        },
    ),
}


@pytest.mark.parametrize(("parameters", "table"), REAL.values(), ids=REAL)
def test_configs_of_models_that_people_use(parameters: int, table: dict[str, Any]) -> None:
    architecture = find(table, "config.json")
    config = architecture.read(table, "config.json")
    assert config.parameters == parameters
    lacking = architecture.lacks(config)
    if table["model_type"] == "mpt":  # transformers would take 8
        assert config.position_options["slopes"][0] == pytest.approx(2**-0.5)
        assert [line.partition(":")[0] for line in lacking] == ["positions.initial_slopes"]
    else:
        assert lacking == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Mistral", {"layer_types": ["full_attention"] * 2}),
        ("Mistral", {"layer_types": ["sliding_attention"] * 2}),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}),
        ("Qwen2", {"layer_types": ["full_attention"] * 2, "use_sliding_window": True, "max_window_layers": 0}),
        ("Qwen2", {"layer_types": ..., "use_sliding_window": True, "max_window_layers": -1}),
        ("Qwen2", {"layer_types": ..., "use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}),
    ],
    ids=str,
)
@torch.no_grad()
def test_windows_are_those_of_the_file(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """However the layers with a window are named, it is in them that `transformers` has it when it opens the file."""
    folder = saved(make(name, num_key_value_heads=8), tmp_path, **{"sliding_window": 7, **changes})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(VOCABULARY, (1, 40))
    compare(lengthen.load(folder)(ids), logits_of(theirs, ids))
