"""Decoding with a cache is the forward without one; batches, samples and prefixes give what each prompt gives alone."""

import copy
from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lengthen import Blockwise, Causal, ModelConfig, Transformer, Window
from lengthen.attention.cache import Cache
from lengthen.attention.reach_cache import ReachLayer
from lengthen.model.sampling import Sampling
from lengthen.positions import names

Make = Callable[..., Transformer]
METHODS = [*names(), "rotary+alibi", "xpos+alibi"]
BIASED = ("alibi", "kerple", "sandwich", "t5", "rotary+alibi", "xpos+alibi")
MASKS: dict[str, Callable[[], Any]] = {
    "causal": Causal,
    "window": lambda: Window(7),
    "blockwise": lambda: Blockwise(5),
}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "window": {"policy": "window"},
    "exact": {"policy": "reach", "mode": "exact", "page": 3},
    "certified": {"policy": "reach", "mode": "certified", "page": 3},
}
LENGTH = 23
STARTS = [0, 9, 22]  # where three sequences begin


def fitting(method: str, mask: str, policy: str) -> bool:
    if policy == "window":
        return mask != "causal"
    return policy not in ("exact", "certified") or method in BIASED


CASES = [one for one in product(METHODS, MASKS, POLICIES) if fitting(*one)]


def read_in_parts(model: Transformer, ids: Tensor, chunk: int, starts: list[int] | None, **options: Any) -> Tensor:
    cache = model.cache(starts=starts, **options)
    parts = [model.extend(ids[:, i : i + chunk], cache) for i in range(0, ids.shape[1], chunk)]
    assert cache.length == ids.shape[1]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("method", "mask", "policy"), CASES)
def test_with_a_cache_it_is_the_plain_forward(make: Make, method: str, mask: str, policy: str) -> None:
    steep = {"position_options": {"slopes": [16.0, 8.0, 4.0, 1.0]}} if "alibi" in method else {}  # heads forget early
    model = make(positions=method, layers=1, key_heads=2, **steep)
    ids = torch.randint(19, (3, LENGTH))
    plain = model.hidden(ids, MASKS[mask]())
    # A prefix of each sequence that is left out is padding to the cache; alone, the rest is a sequence of its own.
    alone = [model.hidden(ids[b : b + 1, start:], MASKS[mask]()) for b, start in enumerate(STARTS)]
    options = {**POLICIES[policy], "mask": MASKS[mask](), "tolerance": 1e-13}
    for chunk in (1, 3, 7, LENGTH):
        found = read_in_parts(model, ids, chunk, None, **options)
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
        padded = read_in_parts(model, ids, chunk, STARTS, **options)
        for b, start in enumerate(STARTS):
            torch.testing.assert_close(padded[b : b + 1, start:], alone[b], rtol=1e-10, atol=1e-10)


def expected(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Return the likeliest continuation, with the whole sequence read anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 5, 5, 0], [18, 2]]


@pytest.mark.parametrize("method", ["alibi", "rotary", "sinusoidal", "t5", "xpos+alibi"])
@pytest.mark.parametrize(("mask", "policy"), [("causal", "full"), ("window", "window"), ("blockwise", "window")])
def test_two_caches_become_one(make: Make, method: str, mask: str, policy: str) -> None:
    model, options = make(positions=method, layers=1), {"policy": policy, "mask": MASKS[mask]()}
    first, second = torch.randint(19, (2, 30)), torch.randint(19, (1, 30))
    a, b = model.cache(starts=[3, 0], **options), model.cache(**options)
    model.extend(first[:, :17], a)
    model.extend(second[:, :6], b)
    both = (b if policy == "full" else a).joined(a if policy == "full" else b)
    swapped = policy == "full"
    rows = [second[0, 6:14], *first[:, 17:25]] if swapped else [*first[:, 17:25], second[0, 6:14]]
    ids = torch.stack(rows)
    found = torch.cat([model.extend(ids[:, i : i + 1], both) for i in range(8)], dim=1)
    plain = [(first[0, 3:25], MASKS[mask]()), (first[1, :25], MASKS[mask]()), (second[0, :14], MASKS[mask]())]
    expected = [model.hidden(one[None], seen)[0, -8:] for one, seen in plain]
    order = [2, 0, 1] if swapped else [0, 1, 2]
    torch.testing.assert_close(found, torch.stack([expected[i] for i in order]), rtol=1e-10, atol=1e-10)
    left = both.rows([order.index(2)])  # slots before its first are forgotten, and those that are left renumbered
    model.extend(second[:, 14:15], left)
    again = left.joined(left)
    assert again.length < both.length or policy == "window"
    found = model.extend(second[:, 15:16].expand(2, -1), again)
    expected_last = model.hidden(second[:, :16], MASKS[mask]())[:, -1:].expand(2, -1, -1)
    torch.testing.assert_close(found, expected_last, rtol=1e-10, atol=1e-10)


def test_only_caches_of_one_kind_are_joined(make: Make) -> None:
    model = make()
    caches = {policy: model.cache(policy) for policy in ("full", "reach")}
    for cache in caches.values():
        model.extend(torch.tensor([[1]]), cache)
    for one, other in product(caches, caches):
        if (one, other) != ("full", "full"):
            with pytest.raises(ValueError, match="other: expected two caches of one policy"):
                caches[one].joined(caches[other])


@pytest.mark.parametrize("method", ["alibi", "rotary", "sinusoidal", "xpos"])
def test_a_ragged_batch_gives_what_each_prompt_gives_alone(make: Make, method: str) -> None:
    model = make(positions=method)
    found = model.generate([torch.tensor(one) for one in PROMPTS], 12, chunk=4)
    assert found.tokens == [expected(model, one, 12) for one in PROMPTS]
    assert found.ended == ["length"] * 4
    options = {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "samples": 3}
    drawn = model.generate(PROMPTS, 4, seed=4, stop=[7], **options)
    alone = [model.generate([one], 4, seed=4, stop=[7], **options) for one in PROMPTS]
    assert drawn.tokens == [tokens for one in alone for tokens in one.tokens]
    assert drawn.ended == [why for one in alone for why in one.ended]
    assert "stop" in drawn.ended
    assert "length" in drawn.ended
    assert all(7 not in tokens for tokens in drawn.tokens)
    assert len({tuple(tokens) for tokens in drawn.tokens[:3]}) > 1  # samples differ
    assert model.generate(PROMPTS, 4, seed=5, **options).tokens != drawn.tokens


@pytest.mark.parametrize("cache", ["full", "reach"])
def test_a_prefix_is_read_once_and_continued_in_many_ways(make: Make, cache: str) -> None:
    model = make()
    start = [4, 8, 15, 16, 2, 3]
    prefix = model.prefix(start, chunk=4, policy=cache)
    before = prefix.cache.length
    for rest in ([[1, 2], [3, 4]], [[7]], [[]]):
        found = model.generate(rest, 6, prefix=prefix)
        assert found.tokens == [expected(model, start + one, 6) for one in rest]
    assert prefix.cache.length == before
    with pytest.raises(ValueError, match=r"prefix: it has a cache already.*expected no 'mask'"):
        model.generate([[1]], 6, prefix=prefix, mask=Window(4))
    with pytest.raises(ValueError, match=r"prefix: it has a cache already.*expected no 'cache'"):
        model.generate([[1]], 6, prefix=prefix, cache="reach")
    with pytest.raises(ValueError, match="prompts: expected one length"):
        model.generate([[1], [1, 2]], 6, prefix=prefix)


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "window", "mask": Window(5)},
        {"cache": "window", "mask": Blockwise(4)},
        {"cache": "reach"},
        {"cache": "reach", "mode": "certified"},
    ],
)
def test_every_cache_generates_what_the_full_one_does(make: Make, options: dict[str, Any]) -> None:
    model = make()
    full = model.generate(PROMPTS, 20, mask=options.get("mask"))
    found = model.generate(PROMPTS, 20, **options)
    assert found.tokens == full.tokens
    assert found.bound < 1e-10
    assert found.cache_bytes > 0


def test_a_stream_yields_tokens_as_they_come_and_ends_when_told(make: Make) -> None:
    model = make()
    whole = model.generate([[1, 2], [3]], 8)
    steps = list(model.stream([[1, 2], [3]], 8, until=lambda one, tokens: one == 1 and len(tokens) == 3))
    assert [step.tokens.get(0) for step in steps] == whole.tokens[0]
    assert [step.tokens[1] for step in steps[:3]] == whole.tokens[1][:3]
    assert [1 in step.tokens for step in steps] == [True] * 3 + [False] * 5
    assert steps[2].ended == {1: "stop"}
    assert steps[-1].ended == {0: "length"}
    assert list(model.stream([[1]], 0)) == []
    assert model.generate([[1]], 0).tokens == [[]]


def test_prompts_may_be_any_sequences_of_whole_numbers(make: Make) -> None:
    model, prompts = make(), [[1, 2], [3, 4]]
    expected = model.generate(prompts, 3).tokens
    for given in (torch.tensor(prompts), torch.tensor(prompts, dtype=torch.int32), np.array(prompts), iter(prompts)):
        assert model.generate(given, 3).tokens == expected  # type: ignore[arg-type]


def test_prompts_that_do_not_fit_are_refused_by_name(make: Make) -> None:
    model = make()
    for prompts, message in (
        ([[1], []], r"prompts\[1\]: expected at least one token, got none"),
        ([[], [1] * 100], r"prompts\[0\]: expected at least one token, got none"),
        ([], "prompts: expected at least one, got none"),
        ([[1, 19]], r"prompts\[0\]: expected tokens 0 … 18, got 19"),
        ([torch.zeros(2, 2)], r"prompts\[0\]: expected integers of one dimension"),
        (torch.zeros(3, dtype=torch.int64), r"prompts: expected \[batch, length\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model.stream(prompts, 3)
    for options, message in (
        ({"temperature": -1.0}, "temperature: expected at least 0"),
        ({"top_p": 1.5}, "top_p: expected a fraction"),
        ({"top_k": 0}, "top_k: expected at least 1"),
        ({"samples": 0}, "samples: expected at least 1"),
        ({"seed": [1, 2]}, "seed: expected a number, or one for each of 1 prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            model.stream([[1]], 3, **options)
    for prompts, options, message in (
        ([1, 2], {}, r"prompts\[0\]: expected a sequence of tokens, got 1 \(int\)"),
        (["ab"], {}, r"prompts\[0\]: expected a sequence of tokens, got 'ab'"),
        ([[True]], {}, r"prompts\[0\]: expected tokens, which are whole numbers, got True"),
        ([[1.5]], {}, r"prompts\[0\]: expected tokens, which are whole numbers, got 1\.5"),
        ([[1]], {"stop": 5}, "stop: expected a sequence of tokens, got 5"),
        ([[1]], {"stop": ["a"]}, "stop: expected tokens, which are whole numbers, got 'a'"),
        ([[1]], {"seed": None}, "seed: expected a whole number, got None"),
    ):
        with pytest.raises(TypeError, match=message):
            model.stream(prompts, 3, **options)  # type: ignore[arg-type]
    learned = make(positions="learned")
    assert len(learned.generate([[1, 2]], 39).tokens[0]) == 39
    with pytest.raises(ValueError, match="max_new_tokens: expected prompt and new tokens of at most 41"):
        learned.generate([[1, 2]], 40)
    with pytest.raises(ValueError, match="model: expected a decoder"):
        make(kind="encoder").generate([[1]], 3)
    with pytest.raises(ValueError, match="model: expected one in eval mode"):
        make(dropout=0.5).generate([[1]], 3)


class TestSampling:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])

    def frequencies(self, **options: Any) -> Tensor:
        generator = Random(0)
        rows = self.logits.expand(4000, -1)
        drawn = Sampling(**options).choose(rows, None, [generator] * 4000)
        return drawn.bincount(minlength=5) / 4000

    def test_it_draws_from_the_softmax(self) -> None:
        for temperature in (0.5, 1.0, 3.0):
            chances = (self.logits[0] / temperature).softmax(0)
            torch.testing.assert_close(self.frequencies(temperature=temperature), chances, atol=0.03, rtol=0)

    def test_a_tiny_temperature_is_greedy(self) -> None:
        for options in ({}, {"top_p": 0.9}, {"min_p": 0.5}):
            for temperature in (1e-12, 1e-308, 5e-324):
                assert self.frequencies(temperature=temperature, **options)[0] == 1

    def test_filters_leave_the_likeliest(self) -> None:
        chances = self.logits[0].softmax(0)  # 0.64, 0.23, 0.09, 0.03, 0.01
        for options, left in (
            ({"top_k": 2}, 2),
            ({"top_p": 0.7}, 2),
            ({"top_p": 0.0}, 1),
            ({"min_p": 0.1}, 3),
            ({"top_k": 4, "top_p": 0.9, "min_p": 0.01}, 3),
            ({"top_k": 99}, 5),
        ):
            wanted = chances.where(torch.arange(5) < left, 0)
            found = self.frequencies(temperature=1.0, **options)
            torch.testing.assert_close(found, wanted / wanted.sum(), atol=0.03, rtol=0)

    def test_a_penalty_is_for_tokens_that_were_there(self) -> None:
        seen = torch.tensor([[True, False, False, True, False]])
        logits = torch.tensor([[2.0, 1.5, 0.0, -1.0, -2.0]])
        assert int(Sampling(repetition_penalty=2.0).choose(logits, seen, [])) == 1
        assert int(Sampling().choose(logits, seen, [])) == 0

    def test_what_is_not_finite_is_refused(self) -> None:
        with pytest.raises(FloatingPointError, match="logits: expected finite numbers"):
            Sampling().choose(torch.tensor([[1.0, torch.nan]]), None, [])


def test_qk_norm_bounds_scores_and_the_cache_promises(make: Make) -> None:
    options: dict[str, Any] = {"qk_norm": True, "position_options": {"slopes": [4.0, 3.0, 2.0, 1.0]}}
    model = make(**options)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.parameters
    cache = model.cache("reach", mode="certified", tolerance=1e-3, page=4)
    ids = torch.randint(19, (2, 150))
    for i in range(0, 150, 5):
        model.extend(ids[:, i : i + 5], cache)
    assert cache.bound <= 1e-3
    layer = cache.layers[0]
    assert isinstance(layer, ReachLayer)
    assert layer.highest is not None
    assert any(group.pages for group in layer.groups)
    captured: list[Tensor] = []
    model.blocks[0].attention.op.register_forward_hook(  # type: ignore[union-attr]
        lambda module, given, out: captured.append((given[0] @ given[1].mT).abs().max() / model.config.head_width**0.5)
    )
    with torch.no_grad():
        model.hidden(ids)
    assert float(captured[0]) <= layer.highest


@pytest.fixture(scope="module")
def trained() -> tuple[Transformer, Tensor]:
    """Return a small ALiBi model after a little training on a text with a pattern, and more of that text."""
    torch.manual_seed(0)
    slopes = {"slopes": [2.0, 1.0, 0.5, 0.25]}
    sizes: dict[str, Any] = {"vocab_size": 16, "layers": 2, "width": 32, "heads": 4, "train_length": 64}
    model = Transformer(ModelConfig(**sizes, position_options=slopes))
    text = (torch.arange(20_000) % 7 + (torch.arange(20_000) // 50) % 5 + torch.randint(3, (20_000,))) % 16
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        at = torch.randint(10_000, (16,))
        windows = torch.stack([text[i : i + 65] for i in at.tolist()])
        optimizer.zero_grad()
        model(windows[:, :-1], targets=windows[:, 1:]).backward()
        optimizer.step()
    return model.eval(), text[10_000:]


@pytest.mark.parametrize("mode", ["exact", "certified"])
def test_a_long_text_scored_through_the_cache_has_the_perplexity_of_the_plain_forward(
    mode: str, trained: tuple[Transformer, Tensor]
) -> None:
    model, text = trained
    ids, targets = text[None, :500], text[None, 1:501]
    plain = model.losses(ids, targets).double().mean().exp()
    cache = model.cache("reach", mode=mode, tolerance=1e-4, page=16)
    read = torch.cat([model.extend(ids[:, i : i + 1], cache) for i in range(500)], dim=1)
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(read[0] @ model.output_weight.T, targets[0])
    assert float(plain) < 8  # it has learned something
    torch.testing.assert_close(losses.double().exp(), plain, rtol=1e-3, atol=0)
    assert cache.bound <= 1e-3
    assert all(group.pages for layer in cache.layers for group in layer.groups)  # type: ignore[union-attr]
    full = model.cache()
    model.extend(ids, full)
    assert cache.nbytes < full.nbytes / 2


def test_a_trained_model_stays_within_the_bound_of_each_layer(trained: tuple[Transformer, Tensor]) -> None:
    model, text = copy.deepcopy(trained[0]).double(), trained[1]
    seen: list[tuple[Any, ...]] = []
    for block in model.blocks:
        block.attention.op.register_forward_hook(  # type: ignore[union-attr]
            lambda module, given, named, out: seen.append((*given, named, out)), with_kwargs=True
        )
    with torch.no_grad():
        model.hidden(text[None, :300])
    for q, k, v, named, out in seen:
        for tolerance in (1e-1, 1e-4):
            cache = Cache(1, "reach", mode="certified", tolerance=tolerance, page=8)
            parts = []
            for i in range(0, 300, 4):
                slots = cache.begin(4, q.device)
                new = [x[:, :, i : i + 4] for x in (q, k, v)]
                parts.append(cache.layers[0].attend(*new, named["bias"], None, slots.mask, slots.forget))
            error = float((torch.cat(parts, dim=2) - out).norm(dim=-1).amax())
            assert error <= 2 * cache.bound * float(v.norm(dim=-1).amax()) + 1e-9
            assert cache.bound < 1


def test_autocast_reads_as_without_a_cache(make: Make) -> None:
    model = make(dtype=torch.float32)
    ids = torch.randint(19, (2, 30))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        plain = model.hidden(ids)
        for policy in ("full", "reach"):
            found = read_in_parts(model, ids, 7, None, policy=policy)
            assert found.dtype == plain.dtype == torch.bfloat16
            assert float((found - plain).norm() / plain.norm()) < 0.02
