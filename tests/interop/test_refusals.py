"""Folders that are damaged, or ask for what is not done here: one error that names the file, the key and what came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from theirs import SIZES, VOCABULARY, configured, make, saved

import lengthen
from lengthen.cli.main import main
from lengthen.interop.architectures import UnknownArchitectureError

KEYS: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"model_type": "mixtral"}, r"config\.json: model_type: expected one of bloom, .*, got 'mixtral'"),
    ("Llama", {"model_type": ...}, r"config\.json: model_type: expected one of bloom, .*, got None"),
    ("Llama", {"architectures": ["LlamaForQuestionAnswering"]}, r"architectures: expected \['LlamaForCausalLM'\], got"),
    ("Llama", {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config: expected none .* got 'gptq'"),
    ("Llama", {"num_local_experts": 8}, r"num_local_experts: expected a key whose meaning is known here, .* got 8"),
    ("Llama", {"hidden_size": "64"}, r"config\.json: hidden_size: expected a whole number, got '64'"),
    ("Llama", {"hidden_size": ...}, r"config\.json: hidden_size: expected a value, got none"),
    ("Llama", {"hidden_act": "quick_gelu"}, r"hidden_act: expected 'silu' or 'swish' or 'gelu', got 'quick_gelu'"),
    ("Llama", {"num_key_value_heads": 3}, r"config\.json: model.key_heads: expected a number that divides heads=8"),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}},
        r"rope_parameters\.rope_type: expected 'default' or 'linear' or 'dynamic' or .*, got 'longrope'",
    ),
    ("Llama", {"rope_scaling": {"type": "su"}}, r"rope_scaling\.rope_type: expected 'default' .*, got 'su'"),
    ("Llama", {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: expected a value, got none"),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        r"partial_rotary_factor: expected 1 for this architecture, got 0\.5",
    ),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}},
        r"rope_parameters\.mrope_section: expected a key whose meaning is known here",
    ),
    (
        "Qwen2",
        {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
        r"layer_types: expected one kind of attention for all 2 layers, got",
    ),
    ("Qwen2", {"layer_types": ["attention_sinks"] * 2}, r"layer_types: expected one kind of attention .*sinks"),
    (
        "Qwen2",
        {"layer_types": ..., "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        r"max_window_layers: expected 0 or at least 2: one window for all layers, got 1",
    ),
    ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx: expected a key whose"),
    ("GPT2", {"n_embd": 32, "hidden_size": 33}, r"hidden_size: expected 32 as n_embd says, got 33"),
    ("Bloom", {"apply_residual_connection_post_layernorm": True}, r"post_layernorm: expected False, got True"),
    ("Mpt", {"attn_config": {"alibi": False}}, r"attn_config\.alibi: expected True, got False"),
    ("Mpt", {"attn_config": {"qk_ln": True}}, r"attn_config\.qk_ln: expected a key whose meaning is known here"),
    ("Mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, r"attn_config\.attn_type: expected 'multihead_at"),
    ("Mpt", {"attn_config": 5}, r"attn_config: expected a table, got 5"),
    ("Mpt", {"logit_scale": 0.5}, r"logit_scale: expected a key whose meaning is known here"),
    ("Mpt", {"no_bias": False}, r"no_bias: expected True, got False"),
    ("Falcon", {"new_decoder_architecture": True, "parallel_attn": False}, r"parallel_attn: expected true with new"),
    (
        "Falcon",
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
        r"parallel_attn: expected 1 or 2, got 3",
    ),
    (
        "Falcon",
        {"multi_query": False, "num_kv_heads": 2},
        r"num_kv_heads: expected 8 without new_decoder_arch.*, got 2",
    ),
    ("Bloom", {"pretraining_tp": 2, "slow_but_exact": True}, r"slow_but_exact: expected a key whose meaning is known"),
    ("GPTNeoX", {"rope_parameters": ..., "rope_theta": 77.0}, r"rope_theta: expected 10000\.0 as rotary_emb_base says"),
    (
        "GPTNeoX",
        {"rope_parameters": ..., "rotary_pct": 0.25, "partial_rotary_factor": 0.5},
        r"partial_rotary_factor: expected 0\.25 as rotary_pct says, got 0\.5",
    ),
    ("Llama", {"rotary_emb_base": 77}, r"rotary_emb_base: expected a key whose meaning is known here"),
    (
        "Qwen2",
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
        r"use_sliding_window: expected True with sliding layers \(layer_types\), got False",
    ),
    (
        "Mistral",
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
        r"sliding_window: expected a number with sliding layers \(layer_types\), got None",
    ),
    ("Llama", {"is_causal": None}, r"config\.json: is_causal: expected True, got None"),
    *((name, {"is_causal": False}, r"config\.json: is_causal: expected True, got False") for name in SIZES),
]


@pytest.mark.parametrize(("name", "changes", "message"), KEYS, ids=[f"{name} {c}" for name, c, _ in KEYS])
def test_what_is_not_done_here_is_refused_by_its_key(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    more = {"num_key_value_heads": 8} if name in ("Mistral", "Qwen2", "Qwen3") else {}
    folder = saved(configured(name, **more), tmp_path, **changes)
    with pytest.raises((TypeError, ValueError), match=message):
        lengthen.load(folder)


def test_keys_that_change_nothing_are_passed_over(tmp_path: Path) -> None:
    changes = {"auto_map": {"AutoModel": "code.Model"}, "task_specific_params": {"a": 1}, "novel": None, "off": False}
    (tmp_path / "code.py").write_text("raise SystemExit('this ran')")
    assert lengthen.load(saved(make("Llama"), tmp_path, **changes)).config.layers == 2


def test_another_scaling_can_be_asked_for(tmp_path: Path) -> None:
    folder = saved(make("Llama"), tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    options = {"scaling": "ntk", "factor": 3.0}
    found = lengthen.load(folder, position_options=options).config.position_options
    assert found == {"base": 10000.0, **options}
    scaled = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = saved(make("Llama"), tmp_path, rope_parameters=scaled)
    options = {"scaling": "yarn", "factor": 4.0}
    found = lengthen.load(folder, position_options=options).config.position_options
    assert found == {"base": 10000.0, "original_length": 64, **options}


def test_old_configs_mean_the_same(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` are what `rope_parameters` were; NeoX had names of its own."""
    old = {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    found = lengthen.load(saved(make("Llama"), tmp_path / "a", **old)).config.position_options
    assert found == {"base": 500.0, "scaling": "linear", "factor": 2.0}
    old = {"rope_parameters": ..., "rotary_emb_base": 500, "rotary_pct": 0.5}
    old |= {"rope_theta": 500, "partial_rotary_factor": 0.5}  # written twice for a time
    found = lengthen.load(saved(make("GPTNeoX"), tmp_path / "b", **old)).config.position_options
    assert found == {"base": 500.0, "rotary_dim": 4}


# Weights.


def change(folder: Path, how: Any) -> Path:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    how(tensors)
    safetensors.torch.save_file(tensors, path)
    return folder


def test_tensors_are_checked_by_name_and_shape(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    folder = saved(make("Llama"), tmp_path)
    change(folder, lambda t: t.update({name: torch.zeros(7, 64), "model.layers.0.self_attn.sinks": torch.zeros(8)}))
    wrong = rf"{tmp_path.name}: expected the tensors of the LlamaForCausalLM that config\.json says, got others: "
    wrong += r"model\.layers\.1\.mlp\.up_proj\.weight: expected shape \[48, 64\], got \[7, 64\]; "
    with pytest.raises(ValueError, match=wrong + r"model\.layers\.0\.self_attn\.sinks has no place in it"):
        lengthen.load(folder)
    change(folder, lambda t: (t.pop(name), t.pop("model.layers.0.self_attn.sinks")))
    with pytest.raises(ValueError, match=r"up_proj\.weight is missing"):
        lengthen.load(folder)
    change(folder, lambda t: t.update({name: torch.zeros(48, 64, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=r"up_proj\.weight: expected F32 or F64 or F16 or BF16, got I8"):
        lengthen.load(folder)


def test_a_tied_output_may_be_there_twice_if_it_is_the_same(tmp_path: Path) -> None:
    theirs = make("Llama", tie_word_embeddings=True)
    folder, ids = saved(theirs, tmp_path), torch.randint(VOCABULARY, (1, 9))
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    torch.testing.assert_close(lengthen.load(folder)(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    change(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"lm_head\.weight: expected the same as model\.embed_tokens\.weight"):
        lengthen.load(folder)


def test_old_files_leave_the_first_part_of_names_out_and_hold_masks(tmp_path: Path) -> None:
    theirs, ids = make("GPT2"), torch.randint(VOCABULARY, (1, 9))

    def older(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)

    folder = change(saved(theirs, tmp_path), older)
    torch.testing.assert_close(lengthen.load(folder)(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_weights_in_several_files(tmp_path: Path) -> None:
    theirs, ids = make("Llama", num_key_value_heads=2), torch.randint(VOCABULARY, (1, 9))
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    torch.testing.assert_close(lengthen.load(tmp_path)(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    shards[1].rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=rf"index\.json: expected files of this folder, .* {shards[1].name}"):
        lengthen.load(tmp_path)
    (tmp_path / "gone").rename(shards[1])
    shards[1].write_bytes(shards[1].read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"{shards[1].name}: expected a whole safetensors file"):
        lengthen.load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"expected files of this folder.* \.\./a\.safetensors"):
        lengthen.load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="weight_map: expected a table"):
        lengthen.load(tmp_path)


def pickle_weights(folder: Path, parts: int = 1) -> None:
    """Write a folder's weights as earlier versions of transformers did."""
    state = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if parts == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    names = {name: f"pytorch_model-{number % parts}.bin" for number, name in enumerate(state)}
    for file in set(names.values()):
        torch.save({name: state[name] for name in names if names[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("parts", [1, 2])
def test_pickles_are_read_on_request_alone(tmp_path: Path, parts: int) -> None:
    folder, ids = saved(make("GPT2"), tmp_path), torch.arange(9)[None]
    expected = lengthen.load(folder)(ids)
    pickle_weights(folder, parts)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*: expected safetensors, got a pickle.*pickled=True"):
        lengthen.load(folder)
    assert torch.equal(lengthen.load(folder, pickled=True)(ids), expected)
    if parts == 1:
        assert main(["export", str(folder), str(tmp_path / "new")]) == 1
        assert main(["export", str(folder), str(tmp_path / "new"), "--pickled"]) == 0
        assert torch.equal(lengthen.load(tmp_path / "new")(ids), expected)
    next(folder.glob("*.bin")).unlink()
    with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors or|no such file: pytorch_model-"):
        lengthen.load(folder, pickled=True)


class Malice:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_runs_no_code_and_is_checked(tmp_path: Path) -> None:
    folder = saved(make("GPT2"), tmp_path / "model")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file, name = folder / "pytorch_model.bin", "transformer.ln_f.bias"
    for held, message in (
        ({**state, "more": Malice(tmp_path / "run")}, "expected tensors, and nothing else that is pickled, got"),
        ([1, 2], "expected a table of tensors, got"),
        ({**state, name: torch.zeros(7)}, rf"{name}: expected shape \[32\], got \[7\]"),
        ({**state, name: torch.zeros(32, dtype=torch.int8)}, rf"{name}: expected F32 or .*, got int8"),
    ):
        torch.save(held, file)
        with pytest.raises(ValueError, match=message):
            lengthen.load(folder, pickled=True)
    file.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: expected tensors"):
        lengthen.load(folder, pickled=True)
    assert not (tmp_path / "run").exists()


def test_a_dtype_is_kept_or_given(tmp_path: Path) -> None:
    folder = saved(make("Bloom").bfloat16(), tmp_path)
    assert lengthen.load(folder).embedding.weight.dtype == torch.bfloat16
    assert lengthen.load(folder, dtype=torch.float32).embedding.weight.dtype == torch.float32


def test_files_of_several_dtypes_are_read_in_the_widest(tmp_path: Path) -> None:
    theirs, ids = make("Llama"), torch.randint(VOCABULARY, (1, 9))

    def some(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if "norm" not in name:
                tensors[name] = tensors[name].to(torch.float16 if "k_proj" in name else torch.bfloat16)

    ours = lengthen.load(change(saved(theirs, tmp_path), some))
    assert {weight.dtype for weight in ours.parameters()} == {torch.float32}
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(ours(ids), expected, rtol=1e-4, atol=1e-4)


def test_paths_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a run's folder, got no such folder"):
        lengthen.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="expected a run with a checkpoint, got none"):
        lengthen.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(TypeError, match=r"config\.json: the file: expected a table"):
        lengthen.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnknownArchitectureError, match="model_type: expected one of"):
        lengthen.load(tmp_path)


def test_a_name_of_the_hub_is_downloaded_without_code_or_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = saved(make("GPT2"), tmp_path / "there"), []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert lengthen.load("somebody/gpt2").config.positions == "learned"
    assert asked == [("somebody/gpt2", ["*.safetensors", "*.json"])]
    (tmp_path / "runs").mkdir()
    with pytest.raises(FileNotFoundError, match="expected a run's folder"):  # a run that is not there is no name
        lengthen.load("runs/tiny")

    def fail(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no network\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match=r"or the name of a model on the Hugging Face hub.*: no network$"):
        lengthen.load("somebody/gpt2")
