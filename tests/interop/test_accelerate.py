"""accelerate and restore: what they take, what they refuse, and what they leave as it was."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lengthen
from lengthen.interop import accelerate as package

transformers = pytest.importorskip("transformers")
Make = Callable[..., Any]
ONE_EACH = ("bloom", "mpt", "falcon", "t5", "umt5", "llama")


def output(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            return model(ids, decoder_input_ids=ids).logits  # type: ignore[no-any-return]
        return model(ids).logits  # type: ignore[no-any-return]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return all that a model's modules are and hold, but for tensors' values."""
    found = {}
    for name, module in model.named_modules():
        held = {key: value for key, value in vars(module).items() if not key.startswith("_") or "lengthen" in key}
        found[name] = (
            type(module),
            sorted(held),
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
    return found


@pytest.mark.parametrize("kind", ONE_EACH)
def test_restore_undoes_everything(kind: str, make: Make, ids: Tensor) -> None:
    model = make(kind)
    before, config = snapshot(model), model.config.to_dict()
    lengthen.accelerate(model)
    assert snapshot(model) != before
    assert model.config.to_dict() == config
    lengthen.restore(model)
    assert snapshot(model) == before
    with pytest.raises(ValueError, match=r"expected one that lengthen.accelerate was called on"):
        lengthen.restore(model)


@pytest.mark.parametrize("kind", ONE_EACH)
def test_twice_is_once(kind: str, make: Make, ids: Tensor) -> None:
    model = make(kind)
    before, expected = snapshot(model), output(model, ids)
    lengthen.accelerate(model)
    once = snapshot(model)
    lengthen.accelerate(model)
    assert snapshot(model) == once
    torch.testing.assert_close(output(model, ids), expected, atol=1e-4, rtol=1e-4)
    lengthen.restore(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("kind", ONE_EACH)
def test_weights_are_theirs(kind: str, make: Make, ids: Tensor, tmp_path: Path) -> None:
    model = make(kind)
    expected, state = output(model, ids), {k: v.clone() for k, v in model.state_dict().items()}
    named = model.config._attn_implementation
    lengthen.accelerate(model)
    assert model.state_dict().keys() == state.keys()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=named).eval()
    assert not any("lengthen" in type(m).__module__ for m in loaded.modules())
    assert torch.equal(output(loaded, ids), expected)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    ours = output(model, ids)
    lengthen.restore(model)
    assert torch.equal(output(model, ids), expected)
    for other in (copied, pickled):  # still accelerated, and on its own
        assert torch.equal(output(other, ids), ours)
    assert torch.equal(output(lengthen.restore(copied), ids), expected)


def test_a_subclass_of_ones_own(make: Make, ids: Tensor) -> None:
    class Mine(transformers.BloomForCausalLM):  # type: ignore[misc]
        def forward(self, *arguments: Any, **named: Any) -> Any:
            found = super().forward(*arguments, **named)
            found.logits = found.logits * 2
            return found

    model = Mine(make("bloom").config).eval()
    expected = output(model, ids)
    torch.testing.assert_close(output(lengthen.accelerate(model), ids), expected)


def test_a_part_of_a_model(make: Make, ids: Tensor) -> None:
    model = make("bloom")
    expected = output(model, ids)
    before = snapshot(model)
    lengthen.accelerate(model.transformer)
    torch.testing.assert_close(output(model, ids), expected)
    lengthen.accelerate(model)
    assert torch.equal(output(lengthen.restore(model), ids), expected)
    assert snapshot(model) == before
    lengthen.accelerate(model)
    lengthen.restore(model.transformer)
    assert torch.equal(output(model, ids), expected)


def test_an_encoder_alone(make: Make, ids: Tensor) -> None:
    model = make("t5")
    expected = output(model, ids)
    lengthen.accelerate(model.encoder)
    assert model.decoder.config._attn_implementation != "lengthen"
    torch.testing.assert_close(output(model, ids), expected)
    assert torch.equal(output(lengthen.restore(model), ids), expected)


def test_inside_another_module(make: Make, ids: Tensor) -> None:
    outer = nn.ModuleDict({"model": make("falcon")})
    expected = output(outer["model"], ids)
    lengthen.accelerate(outer)
    torch.testing.assert_close(output(outer["model"], ids), expected)
    assert torch.equal(output(lengthen.restore(outer)["model"], ids), expected)


def test_other_models_are_refused(make: Make) -> None:
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9))
    with pytest.raises(
        TypeError, match=r"GPT2LMHeadModel.transformer.h.0.attn is a transformers.*GPT2Attention, which"
    ):
        lengthen.accelerate(gpt2)
    with pytest.raises(TypeError, match="one supported family, got Linear with no attention"):
        lengthen.accelerate(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="one supported family, got ModuleList with BloomAttention and LlamaAttention"):
        lengthen.accelerate(nn.ModuleList([make("bloom"), make("llama")]))
    with pytest.raises(TypeError, match="model: expected a transformers model, got str"):
        lengthen.accelerate("bloom")  # type: ignore[type-var]
    with pytest.raises(TypeError, match="expected a transformers PreTrainedModel"):
        lengthen.accelerate(make("bloom").transformer.h[0])


def test_rotary_falcon_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="alibi: expected a Falcon with alibi=True"):
        lengthen.accelerate(make("falcon", alibi=False))
    with pytest.raises(ValueError, match=r"attn_config.alibi: expected True"):
        lengthen.accelerate(make("mpt", attn_config={"alibi": False}))


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon", "t5"])
def test_modules_that_look_different_are_refused(kind: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(kind)
    attention = next(m for m in model.modules() if package._is_attention(m))
    before = snapshot(model)
    method = "compute_bias" if kind == "t5" else "forward"
    with monkeypatch.context() as patch:
        patch.setattr(type(attention), method, lambda self, other: other)
        with pytest.raises(TypeError, match=f"{method}: expected the parameters"):
            lengthen.accelerate(model)
    with monkeypatch.context() as patch:
        patch.setitem(vars(attention), method, lambda *a, **k: None)
        with pytest.raises(TypeError, match="replaced on the module"):
            lengthen.accelerate(model)
    if kind != "t5":
        del attention.layer_idx
        with pytest.raises(TypeError, match="with `layer_idx`, got one without it"):
            lengthen.accelerate(model)
        attention.layer_idx = 0
    assert snapshot(model) == before


def test_an_attention_of_ones_own_is_refused(make: Make) -> None:
    model = make("bloom")
    theirs = type(model.transformer.h[1].self_attention)
    model.transformer.h[1].self_attention.__class__ = type("MyAttention", (theirs,), {})
    with pytest.raises(TypeError, match=r"transformer.h.1.self_attention is a .*MyAttention, which is not supported"):
        lengthen.accelerate(model)


def test_other_versions_warn_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [make("bloom"), make("mpt")]
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.0")
    package._warn_of_version.cache_clear()
    with pytest.warns(UserWarning, match=r"tested with transformers 5.17 to 5.22, and this is 5.99.0"):
        lengthen.accelerate(models[0])
    lengthen.accelerate(models[1])
    package._warn_of_version.cache_clear()


def test_a_new_model_of_the_same_config_is_refused(make: Make) -> None:
    """It would have this package's masks without its attention."""
    model = lengthen.accelerate(make("bloom"))
    with pytest.raises(ValueError, match="lengthen_in_place"):
        type(model)(model.config)


def test_the_names_need_torch_alone() -> None:
    code = "import sys; sys.modules['transformers'] = None; from lengthen import *; print(accelerate, restore)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
