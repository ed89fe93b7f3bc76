"""T5, mT5 and UMT5 with this package's attention in encoder and decoder: what transformers computes, in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen

T5 = ("t5", "mt5", "umt5")
Make = Callable[..., Any]


@pytest.fixture
def answers() -> Tensor:
    return torch.randint(3, 64, (3, 30), generator=torch.Generator().manual_seed(4))


def logits(model: Any, ids: Tensor, answers: Tensor, mask: Tensor | None = None, **named: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, decoder_input_ids=answers, **named).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", T5)
def test_logits(
    kind: str,
    make: Make,
    ids: Tensor,
    answers: Tensor,
    left: Tensor,
    right: Tensor,
    op_calls: list[str],
) -> None:
    model = make(kind, 12)
    theirs = [logits(model, ids, answers, mask) for mask in (None, right, left)]
    lengthen.accelerate(model)
    for mask, expected in zip((None, right, left), theirs, strict=True):
        torch.testing.assert_close(logits(model, ids, answers, mask), expected, atol=1e-4, rtol=1e-4)
    assert op_calls == ["registered"] * 3 * 4  # two layers of encoder and decoder; not those across
    lengthen.restore(model)
    for mask, expected in zip((None, right, left), theirs, strict=True):
        assert torch.equal(logits(model, ids, answers, mask), expected)


@pytest.mark.parametrize("kind", T5)
def test_no_bias_of_all_pairs(kind: str, make: Make, right: Tensor, ids: Tensor) -> None:
    """The encoder's bias and mask stay in O(length)."""
    model = lengthen.accelerate(make(kind))
    biases, masks = [], []

    def look(module: Any, arguments: Any, named: Any, output: Any) -> None:
        masks.append(named.get("mask", named.get("attention_mask")))
        biases.extend(x for x in output if isinstance(x, Tensor) and x.dim() == 4 and x.shape[-1] == ids.shape[1])

    for module in model.encoder.modules():
        if "OpAttention" in type(module).__name__:
            module.register_forward_hook(look, with_kwargs=True)
    model.encoder(ids, attention_mask=right)
    assert len(masks) >= 1
    assert all(mask.shape == (3, 1, 40, 3) for mask in masks)
    assert not biases


@pytest.mark.parametrize("kind", T5)
def test_decoder_padding(kind: str, make: Make, ids: Tensor, answers: Tensor, left: Tensor) -> None:
    model = make(kind)
    mask = left[:, -answers.shape[1] :]
    expected = logits(model, ids, answers, decoder_attention_mask=mask)
    found = logits(lengthen.accelerate(model), ids, answers, decoder_attention_mask=mask)
    torch.testing.assert_close(found[mask > 0], expected[mask > 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3}])
@pytest.mark.parametrize("kind", T5)
def test_generate(
    kind: str, options: dict[str, Any], make: Make, ids: Tensor, right: Tensor, op_calls: list[str]
) -> None:
    model = make(kind, 12)
    greedy = {"do_sample": False, "max_new_tokens": 25}
    beams = {k: v for k, v in options.items() if k == "num_beams"}
    expected = model.generate(ids, attention_mask=right, **greedy, **beams)
    lengthen.accelerate(model)
    assert torch.equal(model.generate(ids, attention_mask=right, **greedy, **options), expected)
    assert len(op_calls) == 2 + 2 * 25


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", T5)
def test_gradients(kind: str, checkpointing: bool, make: Make, ids: Tensor, answers: Tensor, right: Tensor) -> None:
    """To the embedding of the buckets too."""
    model = make(kind, 12, std=0.1).train()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(ids, attention_mask=right, labels=answers, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    lengthen.accelerate(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    found = gradients()
    assert found.keys() == expected.keys()
    assert sum("relative_attention_bias" in name for name in found) == (4 if kind == "umt5" else 2)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("buckets", [(32, 128), (24, 889), (8, 20)])
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_every_distance_has_their_bucket(kind: str, buckets: tuple[int, int], make: Make) -> None:
    options = {"relative_attention_num_buckets": buckets[0], "relative_attention_max_distance": buckets[1]}
    model = make(kind, **options)
    stacks = (model.encoder, model.decoder)
    length = buckets[1] + 50
    attentions = [stack.block[0].layer[0].SelfAttention for stack in stacks]
    theirs = [a.compute_bias(length, length)[0] for a in attentions]
    lengthen.accelerate(model)
    for attention, expected in zip(attentions, theirs, strict=True):
        table = attention.compute_bias(length, length)
        bias = lengthen.Table(table[0], table[1] if len(table) == 2 else None, extended=True)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = torch.ones_like(distance).bool() if bias.ahead is not None else distance >= 0
        assert torch.equal(bias.at(distance)[:, seen], expected[:, seen])


def test_bfloat16(make: Make, ids: Tensor, answers: Tensor, right: Tensor) -> None:
    model = make("t5")
    expected = logits(model, ids, answers, right)
    model.bfloat16()
    found = logits(lengthen.accelerate(model), ids, answers, right)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() / expected.norm() < 0.03


def test_compiled(make: Make, ids: Tensor, answers: Tensor, right: Tensor) -> None:
    model = make("t5")
    expected = logits(model, ids, answers, right)
    lengthen.accelerate(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = logits(compiled, ids, answers, right, use_cache=False)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_registered_alone_is_refused(make: Make, ids: Tensor, answers: Tensor) -> None:
    from lengthen.interop.accelerate import register

    register()
    model = make("t5", attn_implementation="lengthen")
    with pytest.raises(ValueError, match=r"T5Attention has a bias of all pairs.*call lengthen.accelerate"):
        logits(model, ids, answers)


def test_another_implementation_is_transformers_own(
    make: Make, ids: Tensor, answers: Tensor, op_calls: list[str]
) -> None:
    model = make("t5")
    expected = logits(model, ids, answers)
    lengthen.accelerate(model).set_attn_implementation("sdpa")
    assert torch.equal(logits(model, ids, answers), expected)
    assert not op_calls


def test_weights_are_refused(make: Make, ids: Tensor, answers: Tensor) -> None:
    model = lengthen.accelerate(make("t5"))
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        logits(model, ids, answers, output_attentions=True)
