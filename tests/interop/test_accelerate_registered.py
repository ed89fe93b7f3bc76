"""`attn_implementation="lengthen"`: Llama and its kin with this package's attention, against transformers' own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen
from lengthen.interop.accelerate import FILES, register

Make = Callable[..., Any]
KIN = sorted(family for family, file in FILES.items() if file == "registered")
SLIDING = ("mistral", "phi3", "starcoder2")


def logits(model: Any, ids: Tensor, mask: Tensor | None = None, **named: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **named).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KIN)
def test_logits(kind: str, make: Make, ids: Tensor, left: Tensor, right: Tensor, op_calls: list[str]) -> None:
    model = make(kind)
    masks = (None, left, right)
    theirs = [logits(model, ids, mask) for mask in masks]
    lengthen.accelerate(model)
    for mask, expected in zip(masks, theirs, strict=True):
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        torch.testing.assert_close(logits(model, ids, mask)[real], expected[real], atol=1e-4, rtol=1e-4)
    assert op_calls == ["registered"] * 2 * len(masks)
    found = model.generate(ids, attention_mask=left, do_sample=False, max_new_tokens=8)
    lengthen.restore(model)
    assert torch.equal(model.generate(ids, attention_mask=left, do_sample=False, max_new_tokens=8), found)
    for mask, expected in zip(masks, theirs, strict=True):
        assert torch.equal(logits(model, ids, mask), expected)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("kind", SLIDING)
def test_sliding_window(kind: str, options: dict[str, Any], make: Make, ids: Tensor, left: Tensor) -> None:
    plain, model = make(kind, sliding_window=None), make(kind, sliding_window=11)
    masks = (None, left)
    theirs = [logits(model, ids, mask) for mask in masks]
    assert not torch.allclose(theirs[0], logits(plain, ids), atol=1e-3)
    greedy = {"do_sample": False, "max_new_tokens": 20}
    sequences = model.generate(ids, attention_mask=left, **greedy)
    lengthen.accelerate(model)
    for mask, expected in zip(masks, theirs, strict=True):
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        torch.testing.assert_close(logits(model, ids, mask)[real], expected[real], atol=1e-4, rtol=1e-4)
    assert torch.equal(model.generate(ids, attention_mask=left, **greedy, **options), sequences)


def test_layers_of_two_kinds(make: Make, ids: Tensor, left: Tensor) -> None:
    """Qwen2 with a window in its second layer alone."""
    options = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    model = make("qwen2", **options)
    expected = logits(model, ids, left)
    greedy = {"do_sample": False, "max_new_tokens": 20}
    sequences = model.generate(ids, attention_mask=left, **greedy)
    lengthen.accelerate(model)
    torch.testing.assert_close(logits(model, ids, left)[left > 0], expected[left > 0], atol=1e-4, rtol=1e-4)
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(ids, attention_mask=left, **greedy, **options), sequences)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_documents(kind: str, make: Make, ids: Tensor) -> None:
    """Transformers finds them by position ids that begin again."""
    model = make(kind, **({"sliding_window": 11} if kind == "mistral" else {}))
    places = torch.cat([torch.arange(13), torch.arange(2), torch.arange(25)]).expand(3, -1)
    expected = logits(model, ids, position_ids=places, use_cache=False)
    assert not torch.allclose(expected, logits(model, ids), atol=1e-3)
    found = logits(lengthen.accelerate(model), ids, position_ids=places, use_cache=False)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_bidirectional(make: Make, ids: Tensor, left: Tensor) -> None:
    """A decoder that its config makes an encoder."""
    model = make("llama", is_causal=False, attn_implementation="eager")
    theirs = [logits(model, ids, mask) for mask in (None, left)]
    assert not torch.allclose(theirs[0], logits(make("llama"), ids), atol=1e-3)
    lengthen.accelerate(model)
    for mask, expected in zip((None, left), theirs, strict=True):
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        torch.testing.assert_close(logits(model, ids, mask)[real], expected[real], atol=1e-4, rtol=1e-4)


def test_gradients(make: Make, ids: Tensor, right: Tensor) -> None:
    model = make("llama").train()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, attention_mask=right, labels=ids.masked_fill(right == 0, -100)).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    lengthen.accelerate(model)
    for found, gradient in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_compiled(kind: str, make: Make, ids: Tensor, left: Tensor) -> None:
    model = make(kind, **({"sliding_window": 11} if kind == "mistral" else {}))
    expected = logits(model, ids, left)
    whole = logits(model, ids)
    lengthen.accelerate(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = logits(compiled, ids, left, use_cache=False)
    torch.testing.assert_close(found[left > 0], expected[left > 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(compiled, ids, use_cache=False), whole, atol=1e-4, rtol=1e-4)


def test_from_config(make: Make, ids: Tensor, left: Tensor, op_calls: list[str]) -> None:
    register()
    model = make("llama", attn_implementation="lengthen")
    torch.testing.assert_close(logits(model, ids, left)[left > 0], logits(make("llama"), ids, left)[left > 0])
    assert op_calls == ["registered"] * 2


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_families_that_ignore_it_say_so(kind: str, make: Make, ids: Tensor) -> None:
    """Without a word they would use their own attention, with no causal mask."""
    register()
    model = make(kind, attn_implementation="lengthen")
    with pytest.raises(ValueError, match=f"attn_implementation: {kind} ignores what is registered"):
        logits(model, ids)


def test_a_mask_of_all_pairs_is_refused(make: Make, ids: Tensor) -> None:
    model = lengthen.accelerate(make("llama"))
    with pytest.raises(ValueError, match=r"attention_mask: expected a padding mask \[batch, keys\]"):
        model(ids, attention_mask=torch.ones(3, 1, 40, 40, dtype=torch.bool))


def test_weights_are_refused(make: Make, ids: Tensor) -> None:
    model = lengthen.accelerate(make("llama"))
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        model(ids, output_attentions=True)


def test_softcap_is_refused() -> None:
    from lengthen.interop.accelerate.registered import attend

    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="softcap: expected None, got one from Linear"):
        attend(torch.nn.Linear(2, 2), q, q, q, None, softcap=30.0)
