"""Who answers: one that copies is always right, one that cannot see far enough never; greedy generation agrees."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import ModelConfig, Transformer
from lengthen.attention import Window
from lengthen.evaluation.tasks import TASKS, Haystack, Sample, answered

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Copier:
    """Continues what it reads as it went on before: with what followed the longest match, seen in a window."""

    def __init__(self, vocabulary: int, window: int) -> None:
        self.vocabulary, self.window, self.as_tensor = vocabulary, window, True

    def __call__(self, ids: Tensor) -> Any:
        logits = torch.zeros(*ids.shape, self.vocabulary)
        for row, line in enumerate(ids.tolist()):
            for place in range(len(line) - 40, len(line)):  # answers are no longer
                logits[row, place, self.next(line[max(0, place + 1 - self.window) : place + 1])] = 1
        return logits if self.as_tensor else SimpleNamespace(logits=logits)

    def next(self, seen: list[int]) -> int:
        best = (0, 0)
        for end in range(1, len(seen)):
            same = 0
            while same < end and seen[end - 1 - same] == seen[-1 - same]:
                same += 1
            best = max(best, (same, seen[end]))
        return best[1]


def fraction(model: Any, samples: list[Sample], **how: Any) -> float:
    return sum(map(all, answered(model, samples, **how))) / len(samples)


@pytest.mark.parametrize("name", ["passkey", "needles"])
def test_one_that_copies_is_right(name: str, text: Haystack) -> None:
    model = Copier(text.tokenizer.vocab_size, window=10_000)
    samples = TASKS[name].samples(text, 320, DEPTHS, 10, seed=0)
    assert fraction(model, samples) == 1
    model.as_tensor = False  # logits as Hugging Face's models give them
    assert fraction(model, samples) == 1


@pytest.mark.parametrize("name", [name for name in TASKS if name != "recall"])
def test_one_that_knows_the_answers_is_right(name: str, text: Haystack) -> None:
    """Whatever the task: each token of an answer is asked for where the one before it stands."""
    samples = TASKS[name].samples(text, 400, DEPTHS, 5, seed=0)

    def oracle(ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, text.tokenizer.vocab_size)
        for row, line in enumerate(ids.tolist()):
            one = next(one for one in samples if one.prompt == line[: len(one.prompt)])
            for place, token in enumerate(one.answer, len(one.prompt) - 1):
                logits[row, place, token] = 1
        return logits

    assert fraction(oracle, samples) == 1
    wrong = Sample(samples[0].prompt, [*samples[0].answer[:-1], samples[0].answer[-1] ^ 1], samples[0].chance)
    assert fraction(oracle, [wrong, *samples[1:]]) == 1 - 1 / len(samples)


def test_one_that_does_not_see_it_is_at_chance(text: Haystack) -> None:
    """With a window of 120 the key is seen at the last depths alone; chance is one in 100,000."""
    model = Copier(text.tokenizer.vocab_size, window=120)
    for depth, expected in ((0.0, 0), (0.5, 0), (1.0, 1)):
        assert fraction(model, TASKS["passkey"].samples(text, 500, [depth], 10, seed=0)) == expected
    assert fraction(model, TASKS["passkey"].samples(text, 90, [0.0], 10, seed=0)) == 1


def test_a_window_changes_what_our_models_see(text: Haystack) -> None:
    """What stands before a window changes no answer; without the window it does."""
    torch.manual_seed(0)
    config = ModelConfig(text.tokenizer.vocab_size, layers=1, width=16, heads=2, train_length=32, positions="rotary")
    model = Transformer(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    one = TASKS["passkey"].samples(text, 200, [0.0], 1, seed=0)[0]

    def written(prompt: list[int], mask: Window | None) -> int:
        return int(model(torch.tensor([prompt]), mask=mask)[0, -1].argmax())

    changed = [prompt for n in range(1, 40) if (prompt := [n, *one.prompt[1:]])]
    assert {written(prompt, Window(64)) for prompt in changed} == {written(one.prompt, Window(64))}
    alike = [Sample(prompt, [written(one.prompt, Window(64))], 0) for prompt in changed]
    assert fraction(model, alike, mask=Window(64)) == 1
    likely = [Sample(prompt, [written(prompt, None)], 0) for prompt in changed]
    assert fraction(model, likely) == 1


def test_greedy_generation_writes_the_same(text: Haystack, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is right if and only if generation gives it: for what a model writes, and for one token changed."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(text.tokenizer.vocab_size, layers=2, width=16, heads=2, train_length=32)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    prompts = [one.prompt for one in TASKS["passkey"].samples(text, 150, DEPTHS, 10, seed=0)]
    for prompt, new in zip(prompts, model.generate(prompts, 5).tokens, strict=True):
        assert answered(model, [Sample(prompt, new, 0)]) == [[True] * 5]
        wrong = [*new[:2], new[2] ^ 1, *new[3:]]
        assert answered(model, [Sample(prompt, wrong, 0)])[0][:3] == [True, True, False]


def test_samples_of_any_lengths_together(text: Haystack, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Copier(text.tokenizer.vocab_size, window=150)
    samples = [one for n in (200, 300, 200) for one in TASKS["passkey"].samples(text, n, DEPTHS, 5, seed=0)]
    each = [answered(model, [one])[0] for one in samples]
    heard: list[int] = []
    monkeypatch.setattr("lengthen.evaluation.tasks.runner.BATCH_TOKENS", {"cpu": 700})
    assert answered(model, samples, tell=heard.append) == each
    assert heard == sorted(heard)
    assert heard[-1] == sum(len(one.ids) for one in samples)


def test_a_model_without_masks_and_one_without_logits(text: Haystack) -> None:
    samples = TASKS["passkey"].samples(text, 150, DEPTHS, 5, seed=0)
    with pytest.raises(TypeError, match=r"^model: expected one with a method `hidden` that takes a mask"):
        answered(Copier(300, 10), samples, mask=Window(4))
    silent: Callable[[Tensor], Tensor] = lambda ids: ids  # noqa: E731
    with pytest.raises(TypeError, match=r"^model: expected logits \[5, 149\] × vocabulary"):
        answered(silent, samples)
