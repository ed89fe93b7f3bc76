"""LongPPL against a plain loop over tokens, with the model's own key tokens and with a judge's."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lengthen import ModelConfig, Transformer
from lengthen.data import Tokens, prepare
from lengthen.evaluation.analyses.longppl import key_tokens, long_ppl, of_model, soft_weights
from lengthen.evaluation.errors import standard_error


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("text")
    words = "\0".join(f"{n} crows and {n * n} foxes. " * 3 for n in range(30))
    (folder / "t.txt").write_text(words, encoding="utf-8")
    return prepare(folder / "t.txt", folder / "corpus", separator="\0", validation=0, workers=1)["train"]


def make(seed: int) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(258, layers=1, width=32, heads=2, train_length=16, positions="rotary")).double()
    with torch.no_grad():
        for parameter in model.parameters():  # so that what is read matters
            parameter.mul_(5)
    return model.eval()


@torch.no_grad()
def loss(model: Transformer, text: Tokens, begin: int, place: int) -> float:
    """The loss of the token after `place`, from tokens begin … place."""
    ids = torch.from_numpy(text.read(begin, place + 2))
    return float(nn.functional.cross_entropy(model(ids[None, :-1])[0, -1], ids[-1]))


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("stride", [1, 3])
def test_against_a_plain_loop(text: Tokens, judged: bool, stride: int) -> None:
    model = make(0)
    judge = make(1) if judged else model
    length, short, alpha, beta = 40, 6, 0.5, -30.0
    heard: list[tuple[int, int]] = []
    found = of_model(
        model,
        text,
        length,
        short,
        130,
        judge=judge if judged else None,
        stride=stride,
        alpha=alpha,
        beta=beta,
        tell=lambda done, total: heard.append((done, total)),
    )
    losses, keys, weights = [], [], []
    for place in range(120):
        if place % length < short:
            continue
        begin = place - place % length
        stop = (place // stride + 1) * stride  # of the window that scores it
        far, near = loss(judge, text, begin, place), loss(judge, text, stop - short, place)
        losses.append(loss(model, text, begin, place))
        keys.append(near - far > alpha and -far > beta)
        weights.append(min(math.exp(near - far), 5.0))
    chosen = [one for one, key in zip(losses, keys, strict=True) if key]
    assert found.candidates == len(losses) == 3 * 34
    assert found.key_tokens == len(chosen)
    assert 5 < len(chosen) < 90
    assert found.loss == pytest.approx(sum(chosen) / len(chosen), rel=1e-9)
    assert found.all_loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    soft = sum(weight * one for weight, one in zip(weights, losses, strict=True)) / sum(weights)
    assert found.soft_loss == pytest.approx(soft, rel=1e-9)
    assert heard[-1][0] == heard[-1][1]


def test_both_conditions() -> None:
    """The paper's thresholds: more than two nats gained, and a likelihood above e⁻²."""
    long, short = np.array([0.1, 1.9, 2.1, 0.1]), np.array([2.2, 4.0, 9.0, 2.0])
    assert key_tokens(long, short).tolist() == [True, True, False, False]
    assert soft_weights(long, short) == pytest.approx([5, 5, 5, 5])
    assert soft_weights(long[:1], long[:1] + 1) == pytest.approx([math.e])
    assert soft_weights(long[:1], long[:1] - 1) == pytest.approx([1 / math.e])


def test_errors_are_over_segments() -> None:
    losses = np.arange(640.0) % 7
    zero = np.zeros(640)
    found = long_ppl(losses, zero, zero + 3)
    sums = [float(part.sum()) for part in np.split(losses, 64)]
    assert found.error == standard_error(sums, [10] * 64)
    nothing = long_ppl(losses, zero, zero)
    assert math.isnan(nothing.loss)
    assert (nothing.key_tokens, nothing.error) == (0, None)
    assert nothing.soft_loss == pytest.approx(losses.mean())


def test_a_document_mask(text: Tokens) -> None:
    """The first token of a document is nobody's target, and is left out."""
    plain, apart = (of_model(make(0), text, 40, 6, 120, document_mask=mask) for mask in (False, True))
    assert apart.candidates < plain.candidates
    assert apart.all_loss != plain.all_loss


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short": 40}, r"^short: expected less than the length 40, got 40"),
        ({"stride": 9}, r"^stride: expected at most the short length 6, got 9"),
        ({"length": 10**6}, r"^length: 1000000 tokens and the one after them are more than"),
    ],
)
def test_what_is_refused(text: Tokens, change: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        of_model(make(0), text, **{"length": 40, "short": 6} | change)
