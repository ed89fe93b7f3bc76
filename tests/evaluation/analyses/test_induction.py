"""Induction: what is drawn and from what, weights against a softmax written out, and a model that was made to copy."""

from __future__ import annotations

import math

import pytest
import torch

from lengthen import Blockwise, Causal, Decay, Linear, ModelConfig, Transformer
from lengthen.attention import Mask
from lengthen.data import Corpus
from lengthen.evaluation.analyses.induction import of_model, sequences, table, vocabulary, weights
from lengthen.evaluation.capture import Call

KNOWN = list(range(30))


def copier(length: int) -> Transformer:
    """Return a model of one layer whose only head looks length − 1 tokens back, and says what it finds there."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(30, layers=1, width=64, heads=1, train_length=16, positions="t5"))
    block = model.blocks[0]
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.zero_()
        model.embedding.weight.normal_()
        model.norm.weight.fill_(1)
        block.attention.qkv.weight[128:] = torch.eye(64)
        block.attention.out.weight.copy_(50 * torch.eye(64))
        model.method.weight.zero_()
        model.method.weight[length - 1] = 50  # buckets of up to 16 hold one distance each
    return model


def test_a_model_that_copies_is_far_below_zero() -> None:
    found = of_model(copier(9), sequences(KNOWN, 9, 40, seed=1))
    assert found.second < 0.01
    assert found.first > 3
    assert found.difference == pytest.approx(found.second - found.first)
    assert found.difference < -3
    assert 0 < found.standard_error < -found.difference / 10
    assert found.induction == [pytest.approx(1)]
    assert found.previous[0] < 0.2
    other = of_model(copier(9), sequences(KNOWN, 8, 40, seed=1))  # it looks at another distance
    assert other.difference > -0.5
    assert other.induction[0] < 1e-3
    before = of_model(copier(2), sequences(KNOWN, 9, 40, seed=1))  # of distance 1, the token before
    assert before.previous == [pytest.approx(1)]


@pytest.mark.parametrize("positions", ["alibi", "rotary", "none"])
def test_an_untrained_model_does_not_copy(positions: str) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(30, layers=2, width=32, heads=2, train_length=16, positions=positions)).train()
    found = of_model(model, sequences(KNOWN, 16, 60, seed=0))
    assert model.training
    assert found.first == pytest.approx(math.log(30), abs=0.2)
    assert abs(found.difference) < 0.05
    assert abs(found.difference) < 5 * found.standard_error
    assert [len(found.previous), len(found.induction)] == [2, 2]


def test_the_standard_error_and_the_losses_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(30, layers=2, width=32, heads=2, train_length=16)).double()
    ids = sequences(KNOWN, 7, 11, seed=3)
    loss = -model(ids).detach().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    first, second = loss[:, :6], loss[:, 7:]  # the token at which the second half begins is not one of the pairs
    apart = (second - first).mean(dim=1)
    monkeypatch.setattr("lengthen.evaluation.analyses.induction.BATCH_TOKENS", 3 * 14)
    told: list[tuple[str, int, int]] = []
    found = of_model(model, ids, lambda *words: told.append(words))
    assert found.sequences == 11
    assert found.first == pytest.approx(float(first.mean()), rel=1e-9)
    assert found.second == pytest.approx(float(second.mean()), rel=1e-9)
    assert found.difference == pytest.approx(float(apart.mean()), rel=1e-9)
    variance = float((apart - apart.mean()).square().sum()) / 10
    assert found.standard_error == pytest.approx(math.sqrt(variance / 11), rel=1e-9)
    assert told == [("induction, 7", done, 154) for done in (42, 84, 126, 154)]


@pytest.mark.parametrize("mask", [Causal(), Blockwise(6)], ids=["causal", "blockwise"])
@pytest.mark.parametrize("decay", [None, Decay(torch.tensor([0.9, 0.8, 1.0, 0.7]))], ids=["plain", "decay"])
@pytest.mark.parametrize("most", [1, 300, 10**6])
def test_against_a_softmax_written_out(mask: Mask, decay: Decay | None, most: int) -> None:
    torch.manual_seed(2)
    batch, heads, length = 2, 3, 7
    q, k = torch.randn(2, batch, heads, 2 * length - 1, 4, dtype=torch.float64)
    slopes = torch.tensor([20.0, 0.25, 0.0])
    found = weights(Call(0, q, k, k, Linear(slopes), decay, mask), length, most)
    i = torch.arange(2 * length - 1)
    distance = i[:, None] - i
    first = (i // 6 - 1).clamp(min=0) * 6 if isinstance(mask, Blockwise) else torch.zeros_like(i)
    factor = 1.0 if decay is None else decay.rates.double() ** distance.abs()[..., None]
    score = ((q[:, :, :, None] * k[:, :, None]) * factor).sum(-1) / 2
    score = score - slopes.double()[:, None, None] * distance.abs()
    weight = score.masked_fill((distance < 0) | (i < first[:, None]), -torch.inf).softmax(-1)
    previous = torch.stack([weight[:, :, t, t - 1] for t in range(1, 2 * length - 1)]).mean(dim=(0, 1))
    after = torch.stack([weight[:, :, t, t - length + 1] for t in range(length, 2 * length - 1)]).mean(dim=(0, 1))
    torch.testing.assert_close(found, torch.stack((previous, after)))


def test_a_steep_slope_leaves_little_for_the_token_before() -> None:
    q, slope = torch.zeros(1, 1, 19, 4, dtype=torch.float64), 3.0
    previous, after = weights(Call(0, q, q, q, Linear(torch.tensor([slope]))), 10).flatten().tolist()
    falls = [math.exp(-slope * d) for d in range(19)]
    assert previous == pytest.approx(sum(falls[1] / sum(falls[: i + 1]) for i in range(1, 19)) / 18)
    assert after == pytest.approx(sum(falls[9] / sum(falls[: i + 1]) for i in range(10, 19)) / 9)


def test_sequences_are_drawn_from_a_seed_and_read_twice() -> None:
    ids = sequences([5, 9, 200], 40, 6, seed=0)
    assert ids.shape == (6, 80)
    assert torch.equal(ids[:, :40], ids[:, 40:])
    assert set(ids.flatten().tolist()) == {5, 9, 200}
    assert torch.equal(sequences([5, 9, 200], 40, 6, seed=0), ids)
    assert not torch.equal(sequences([5, 9, 200], 40, 6, seed=1), ids)
    assert not torch.equal(ids[0], ids[1])


def test_tokens_are_those_of_the_text(corpus: Corpus) -> None:
    found = vocabulary(corpus, "validation", 10**6)
    assert "".join(map(chr, found)) == " 145acdfnorswx"  # of "a fox and 5 crows", without <|end|>
    assert "".join(map(chr, vocabulary(corpus, "validation", 4))) == " afo"
    with pytest.raises(ValueError, match="tokens: expected a text of at least 2 different tokens, got 1 in 1 of it"):
        vocabulary(corpus, "validation", 1)


def test_what_was_not_read_twice_is_refused() -> None:
    model = Transformer(ModelConfig(30, layers=1, width=16, heads=2, train_length=16))
    for ids in (torch.zeros(1, 8), torch.zeros(2, 2), torch.arange(16).view(2, 8), torch.zeros(2, 7)):
        with pytest.raises(
            ValueError, match=r"ids: expected two sequences or more, each of two equal halves, \[count, 2n\]"
        ):
            of_model(model, ids.long())


def test_the_table() -> None:
    row = {"length": 1024, "first": 5.5, "second": 3.25, "difference": -2.25, "standard_error": 0.0123}
    found = {"vocabulary": 97, "rows": [{**row, "previous": [0.5, 0.25], "induction": [0.0, 1.0]}]}
    assert list(table(found)) == [
        "induction: n random tokens of 97, read twice (nats per token)",
        "  n                         first   second   change   ± s.e.",
        "  1,024                     5.500    3.250   -2.250    0.012",
        "  strongest weight on the token before, by layer",
        "  1,024                     0.500    0.250",
        "  strongest weight on the token to copy, by layer",
        "  1,024                     0.000    1.000",
    ]
