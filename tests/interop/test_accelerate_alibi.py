"""BLOOM, MPT and Falcon with this package's attention inside: what transformers computes, in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen

ALIBI = ("bloom", "mpt", "falcon")
Make = Callable[..., Any]
GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def logits(model: Any, ids: Tensor, mask: Tensor | None = None, **named: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **named).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("heads", [8, 12, 20])
@pytest.mark.parametrize("kind", ALIBI)
def test_logits(
    kind: str, heads: int, make: Make, ids: Tensor, left: Tensor, right: Tensor, op_calls: list[str]
) -> None:
    model = make(kind, heads)
    masks = (None, torch.ones_like(ids), left, right)
    theirs = [logits(model, ids, mask) for mask in masks]
    assert not op_calls
    assert lengthen.accelerate(model) is model
    for mask, expected in zip(masks, theirs, strict=True):
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        torch.testing.assert_close(logits(model, ids, mask)[real], expected[real], atol=1e-4, rtol=1e-4)
    assert op_calls == ["alibi"] * 2 * len(masks)
    lengthen.restore(model)
    for mask, expected in zip(masks, theirs, strict=True):
        assert torch.equal(logits(model, ids, mask), expected)
    assert len(op_calls) == 2 * len(masks)


@pytest.mark.parametrize(
    "options",
    [
        {"multi_query": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": True},
        {"parallel_attn": True, "bias": True},
    ],
)
def test_falcon_variants(options: dict[str, Any], make: Make, ids: Tensor, left: Tensor) -> None:
    model = make("falcon", 8, **options)
    expected = logits(model, ids, left)
    torch.testing.assert_close(logits(lengthen.accelerate(model), ids, left)[left > 0], expected[left > 0])


def test_mpt_clips_and_scales(make: Make, ids: Tensor) -> None:
    model = make("mpt", 8, attn_config={"clip_qkv": 0.2, "softmax_scale": 0.9})
    expected = logits(model, ids)
    torch.testing.assert_close(logits(lengthen.accelerate(model), ids), expected)


def test_mpt_alibi_bias_max_is_honoured(make: Make, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers reads it and uses 8."""
    from transformers.models.mpt import modeling_mpt

    model = make("mpt", 12, attn_config={"alibi_bias_max": 16})
    ignored, build = logits(model, ids), modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(
        modeling_mpt, "build_mpt_alibi_tensor", lambda heads, length, _, device: build(heads, length, 16, device)
    )
    expected = logits(model, ids)
    assert not torch.allclose(ignored, expected, atol=1e-3)
    torch.testing.assert_close(logits(lengthen.accelerate(model), ids), expected)


def test_mpt_beyond_max_seq_len(make: Make) -> None:
    long = torch.randint(3, 64, (1, 90))
    model = make("mpt", 8)
    with pytest.raises(RuntimeError):
        logits(model, long)
    wide = make("mpt", 8)
    wide.config.max_seq_len = 128
    torch.testing.assert_close(logits(lengthen.accelerate(model), long), logits(wide, long))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ALIBI)
def test_generate(kind: str, cache: str, make: Make, ids: Tensor, left: Tensor, op_calls: list[str]) -> None:
    if (kind, cache) == ("mpt", "static"):
        pytest.skip("transformers offers no static cache for MPT in generate")
    model = make(kind, 12)
    expected = model.generate(ids, attention_mask=left, **GREEDY)
    lengthen.accelerate(model)
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    assert torch.equal(model.generate(ids, attention_mask=left, **GREEDY, **options), expected)
    assert len(op_calls) == 2 * 12
    beams = {**GREEDY, "num_beams": 3, "max_new_tokens": 6}
    found = model.generate(ids, attention_mask=left, **beams, **options)
    lengthen.restore(model)
    assert torch.equal(model.generate(ids, attention_mask=left, **beams), found)


@pytest.mark.parametrize("kind", ALIBI)
def test_cache_in_chunks(kind: str, make: Make, ids: Tensor, left: Tensor) -> None:
    from transformers import DynamicCache, StaticCache

    model = make(kind, 12)
    expected = logits(model, ids, left)
    lengthen.accelerate(model)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=50)):
        start = 0
        for end in (17, 18, 40):
            found = logits(model, ids[:, start:end], left[:, :end], past_key_values=cache, use_cache=True)
            real = left[:, start:end] > 0
            torch.testing.assert_close(found[real], expected[:, start:end][real], atol=1e-4, rtol=1e-4)
            start = end


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ALIBI)
def test_gradients(kind: str, checkpointing: bool, make: Make, ids: Tensor, right: Tensor) -> None:
    model = make(kind, 12).train()
    labels = ids.masked_fill(right == 0, -100)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(ids, attention_mask=right, labels=labels, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    lengthen.accelerate(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    found = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_bfloat16_is_near_float32_at_length(kind: str, make: Make) -> None:
    """The defect: transformers holds the bias in bfloat16, where distances past 256 run together."""
    ids = torch.randint(3, 64, (1, 1500), generator=torch.Generator().manual_seed(0))
    model = make(kind, 8)
    expected = logits(model, ids)
    model.bfloat16()
    theirs = logits(model, ids)
    lengthen.accelerate(model)
    ours = logits(model, ids)
    off = [((x.float() - expected).norm() / expected.norm()).item() for x in (theirs, ours)]
    assert off[1] < 0.015 < off[0], off


@pytest.mark.parametrize("kind", ALIBI)
def test_slopes_stay_float32(kind: str, make: Make, ids: Tensor) -> None:
    model = lengthen.accelerate(make(kind, 12))
    expected = logits(model, ids)
    model.bfloat16().float()
    again = [m for m in model.modules() if hasattr(m, "_lengthen_slopes")]
    assert len(again) == 2
    for module in again:
        assert module._lengthen_slopes.dtype == torch.float32
        assert torch.equal(module._lengthen_slopes, next(iter(again))._lengthen_slopes)
    assert (logits(model, ids) - expected).norm() / expected.norm() < 0.05  # the weights were rounded


@pytest.mark.parametrize("kind", ALIBI)
def test_weights_are_refused(kind: str, make: Make, ids: Tensor) -> None:
    model = lengthen.accelerate(make(kind))
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        model(ids, output_attentions=True)


@pytest.mark.parametrize("kind", ALIBI)
def test_holes_are_refused(kind: str, make: Make, ids: Tensor) -> None:
    model = lengthen.accelerate(make(kind))
    mask = torch.ones_like(ids)
    mask[1, 5:8] = 0
    with pytest.raises(ValueError, match="attention_mask: expected each row's ones in one run"):
        model(ids, attention_mask=mask)


@pytest.mark.parametrize("kind", ALIBI)
def test_dropout_is_said_once(kind: str, make: Make, ids: Tensor) -> None:
    from lengthen.interop.accelerate import swap

    swap._warn_of_dropout.cache_clear()
    options: dict[str, Any] = {"attn_config": {"attn_pdrop": 1}} if kind == "mpt" else {"attention_dropout": 0.5}
    model = lengthen.accelerate(make(kind, **options))
    model(ids)
    model.train()
    with pytest.warns(UserWarning, match=r"attention dropout of .* is left out"):
        model(ids)
    model(ids)  # warnings are errors here


@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning"
)  # torch's
@pytest.mark.parametrize("kind", ALIBI)
def test_compiled(kind: str, make: Make, ids: Tensor, left: Tensor) -> None:
    model = make(kind)
    expected = logits(model, ids, left)
    lengthen.accelerate(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = logits(compiled, ids, left, use_cache=False)
    torch.testing.assert_close(found[left > 0], expected[left > 0], atol=1e-4, rtol=1e-4)
    hole = left.clone()
    hole[0, 5] = 0
    with pytest.raises(RuntimeError, match="expected each row's ones in one run"):
        logits(compiled, ids, hole, use_cache=False)


def test_falcon_adds_its_bias_once(make: Make, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' eager attention adds it twice: in the mask and to the scores."""
    from transformers.models.falcon import modeling_falcon

    once, eager = make("falcon"), make("falcon", attn_implementation="eager")
    expected, twice = logits(once, ids), logits(eager, ids)
    assert not torch.allclose(twice, expected, atol=1e-3)
    torch.testing.assert_close(logits(lengthen.accelerate(eager), ids), expected, atol=1e-4, rtol=1e-4)
    lengthen.restore(eager)
    build = modeling_falcon.build_alibi_tensor
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", lambda *given, **named: build(*given, **named) * 2)
    torch.testing.assert_close(logits(once, ids), twice, atol=1e-4, rtol=1e-4)
