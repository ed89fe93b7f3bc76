"""Scores against the same arithmetic done another way: one token, one document, one pass at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lengthen import Blockwise, Transformer, Window
from lengthen.data import Corpus, Tokens
from lengthen.data.masking import Masking
from lengthen.evaluation import Protocol, errors, measure, protocol, score
from lengthen.model.score import BATCH_TOKENS, Task


@torch.no_grad()
def alone(model: Transformer, tokens: np.ndarray) -> float:  # type: ignore[type-arg]
    """Return the loss of the last token, given those before it, by its logits."""
    ids = torch.from_numpy(tokens)
    logits = model(ids[None, :-1])[0, -1]
    return float(torch.logsumexp(logits, 0) - logits[ids[-1]])


@pytest.mark.parametrize("positions", ["alibi", "rotary", "sinusoidal"])
def test_sliding_by_one_is_each_token_alone_with_its_context(
    corpus: Corpus, make_model: Callable[..., Transformer], positions: str
) -> None:
    model, tokens = make_model(positions), corpus["train"]
    length, targets = 12, 60
    tally = score(model, tokens, protocol("sliding", length, 16, stride=1), tokens=targets)
    expected = [alone(model, tokens.read(max(0, t - length), t + 1)) for t in range(1, targets + 1)]
    assert tally.counts.sum() == targets
    assert tally.losses.sum() == pytest.approx(sum(expected), rel=1e-10)


def test_nonoverlapping_is_each_token_with_what_stands_before_it_in_its_piece(
    corpus: Corpus, model: Transformer
) -> None:
    tokens, length = corpus["train"], 10
    targets = 57  # a ragged end: the last piece has seven
    tally = score(model, tokens, protocol("nonoverlapping", length, 16), tokens=targets)
    expected = [alone(model, tokens.read((t - 1) // length * length, t + 1)) for t in range(1, targets + 1)]
    assert tally.losses.sum() == pytest.approx(sum(expected), rel=1e-10)


def test_blockwise_and_window_read_with_their_masks(corpus: Corpus, model: Transformer) -> None:
    tokens, length = corpus["train"], 50
    ids = torch.from_numpy(tokens.read(0, length + 1))[None]
    for name, mask in (("blockwise", Blockwise(8)), ("window", Window(16))):
        tally = score(model, tokens, protocol(name, length, 16), tokens=length)
        right, plain = model(ids[:, :-1], ids[:, 1:], mask=mask), model(ids[:, :-1], ids[:, 1:])
        assert tally.loss == pytest.approx(right.item(), rel=1e-10)
        assert abs(right.item() - plain.item()) > 1e-8


def test_sliding_by_the_length_is_nonoverlapping_to_the_bit(corpus: Corpus, model: Transformer) -> None:
    tokens, targets = corpus["train"], len(corpus["train"]) - 1
    for length in (7, 16, 33):
        one = score(model, tokens, protocol("sliding", length, 16, stride=length), tokens=targets)
        other = score(model, tokens, protocol("nonoverlapping", length, 16), tokens=targets)
        assert np.array_equal(one.losses, other.losses)


@pytest.mark.parametrize("length", [5, 16, 37, 4096])
def test_tokens_are_counted_exactly_at_the_ends_of_documents(corpus: Corpus, model: Transformer, length: int) -> None:
    for split in ("train", "validation"):
        tokens = corpus[split]
        length_here = min(length, len(tokens) - 1)
        tally = score(model, tokens, protocol("nonoverlapping", length_here, 16), tokens=len(tokens) - 1)
        sizes = np.diff(tokens.documents)
        sizes[0] -= 1  # the first token of all is nobody's target
        assert tally.counts.tolist() == sizes.tolist()


def test_losses_are_attributed_to_the_document_of_the_target(corpus: Corpus, model: Transformer) -> None:
    tokens = corpus["train"]
    tally = score(model, tokens, protocol("sliding", 20, 16, stride=6), tokens=len(tokens) - 1)
    whole = score(model, tokens, protocol("sliding", 20, 16, stride=6), tokens=int(tokens.documents[1]) - 1)
    assert tally.losses[0] == pytest.approx(whole.losses[0], rel=1e-12)
    assert whole.losses[1:].sum() == 0


def test_a_document_counts_with_the_fraction_of_it_that_was_scored(corpus: Corpus, model: Transformer) -> None:
    tokens = corpus["train"]
    begins = tokens.documents
    targets = int(begins[2]) + 19  # two whole documents but for the first token, and twenty tokens of the third
    tally = score(model, tokens, protocol("nonoverlapping", 16, 16), tokens=targets)
    sizes = np.diff(begins)
    for units in (tokens.bytes, tokens.words):
        amount = (sizes[0] - 1) / sizes[0] * units[0] + units[1] + 20 / sizes[2] * units[2]
        assert tally.per(tokens, units) == pytest.approx(tally.losses.sum() / amount, rel=1e-12)


def test_segments_are_the_same_tokens_at_every_length(corpus: Corpus, model: Transformer) -> None:
    tokens, targets = corpus["train"], 150
    tallies = [score(model, tokens, protocol("sliding", length, 16, stride=3), tokens=targets) for length in (4, 64)]
    tallies.append(score(model, tokens, protocol("blockwise", 40, 16), tokens=targets))
    for tally in tallies:
        assert tally.segment_counts.tolist() == np.bincount(np.arange(targets) * 64 // targets).tolist()
        assert tally.segment_losses.sum() == pytest.approx(tally.losses.sum(), rel=1e-12)
        right = errors.standard_error(tally.segment_losses.tolist(), tally.segment_counts.tolist())
        assert tally.standard_error == right


class Plain(torch.nn.Module):
    """A model of one's own: ids → logits, in a tensor or, as others have it, in an attribute."""

    def __init__(self, model: Transformer, wrapped: bool) -> None:
        super().__init__()
        self.inner, self.wrapped = model, wrapped

    def forward(self, ids: torch.Tensor) -> object:
        logits = self.inner(ids)
        return SimpleNamespace(logits=logits) if self.wrapped else logits


def test_anything_that_gives_logits_is_scored(corpus: Corpus, model: Transformer) -> None:
    right = score(model, corpus, "sliding", 24, stride=5, split="train", tokens=100)
    for other in (Plain(model, True), Plain(model, False), lambda ids: model(ids)):
        found = score(other, corpus, "sliding", 24, stride=5, split="train", tokens=100)
        assert found.perplexity == pytest.approx(right.perplexity, rel=1e-12)
        with pytest.raises(TypeError, match="model: expected one with a method `losses` that takes mask"):
            score(other, corpus, "blockwise", 24, tokens=50)
        with pytest.raises(ValueError, match="length: expected a number of tokens, as this model has no training len"):
            score(other, corpus)
    with pytest.raises(TypeError, match=r"model: expected logits \[4, 8\] × vocabulary .*, got a str"):
        score(lambda ids: "no", corpus, "nonoverlapping", 8, tokens=32)
    assert score(model, corpus).tokens == len(corpus["validation"]) - 1  # at the training length
    with pytest.raises(ValueError, match="expected none beside a Protocol"):
        score(model, corpus, protocol("nonoverlapping", 8, 16), 8)


class Own:
    """A model of one's own that gives losses, of a shape that is told."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def losses(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.shape)


def flat(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*ids.shape, 50)


@pytest.mark.parametrize(
    ("model", "given", "kind", "said"),
    [
        (flat, {"tokens": 0}, ValueError, "tokens: expected at least 1, got 0"),
        (flat, {"length": 0}, ValueError, "length: expected at least 1, got 0"),
        (flat, {"tokens": 31}, ValueError, "length: expected at most the 31 tokens that are scored .*, got 32"),
        (flat, {"length": 10**7}, ValueError, "length: expected at most the [0-9,]+ tokens .*, got 10,000,000"),
        (flat, {"how": None}, TypeError, "how: expected a protocol's name or a Protocol, got None"),
        (flat, {"text": "data/a"}, TypeError, "text: expected a corpus or .*, got 'data/a'"),
        (flat, {"precision": torch.float64}, TypeError, "precision: expected torch.float32, .*, got torch.float64"),
        (flat, {"precision": "float32"}, TypeError, "precision: expected torch.float32, .*, got 'float32'"),
        (flat, {}, ValueError, "model: expected logits of at least [0-9]+ tokens, .*, got those of 50"),
        ("runs/a", {}, TypeError, "model: expected what maps ids to logits, got 'runs/a'"),
        (Own(), {}, TypeError, r"model.losses: expected a loss of each target, \[1, 32\], got a .* of shape \[\]"),
    ],
)
def test_what_cannot_be_scored_is_named(
    corpus: Corpus, model: Any, given: dict[str, Any], kind: type[Exception], said: str
) -> None:
    given = {"text": corpus, "how": "nonoverlapping", "length": 32, "tokens": 32, **given}
    if given["length"] > 32:
        del given["tokens"]
    with pytest.raises(kind, match=said):
        score(model, **given)


def test_a_model_of_ones_own_that_gives_losses(corpus: Corpus) -> None:
    assert score(Own(1, 32), corpus, "nonoverlapping", 32, tokens=32).loss == 0


def test_each_document_from_its_start(corpus: Corpus, model: Transformer) -> None:
    """A plain loop over documents, and over pieces of each."""
    tokens, first, length = corpus["train"], 50, 16
    tally = score(model, tokens, protocol("nonoverlapping", length, 16, per_document=first))
    losses = np.zeros(len(tokens.documents) - 1)
    for number, start in enumerate(tokens.documents[:-1].tolist()):
        text = tokens.read(start, min(start + first + 1, int(tokens.documents[number + 1])))
        for begin in range(0, len(text) - 1, length):
            for t in range(begin + 1, min(begin + length, len(text) - 1) + 1):
                losses[number] += alone(model, text[begin : t + 1])
    assert np.allclose(tally.losses, losses, rtol=1e-10)
    assert tally.counts.tolist() == [min(first, size - 1) for size in np.diff(tokens.documents)]
    assert score(model, tokens, protocol("nonoverlapping", 8, 16, per_document=first), tokens=60).tokens == 60


def test_documents_apart(corpus: Corpus, model: Transformer) -> None:
    """Each is read as it would be alone, and the first token of none is predicted."""
    tokens, length = corpus["train"], 40
    tally = score(model, tokens, protocol("nonoverlapping", length, 16), document_mask=True)
    begins, losses = tokens.documents, np.zeros(len(tokens.documents) - 1)
    for t in range(1, len(tokens)):
        number = int(np.searchsorted(begins, t, side="right")) - 1
        start = max((t - 1) // length * length, int(begins[number]))
        if t > begins[number]:
            losses[number] += alone(model, tokens.read(start, t + 1))
    assert np.allclose(tally.losses, losses, rtol=1e-9)
    assert tally.counts.tolist() == (np.diff(begins) - 1).tolist()


def test_an_encoder_is_scored_on_masked_tokens(corpus: Corpus, make_model: Callable[..., Transformer]) -> None:
    model = make_model(kind="encoder")
    tokens = corpus["validation"]
    tallies = [score(model, corpus, "nonoverlapping", length) for length in (16, 64)]
    assert tallies[0].counts.tolist() == tallies[1].counts.tolist()  # the same tokens are hidden at every length
    fraction = tallies[0].tokens / (len(tokens) - 1)
    assert 0.05 < fraction < 0.25
    hide = Masking(0.15, 257, 258)
    ids, targets = hide(torch.from_numpy(tokens.read(0, 64))[None], torch.arange(64)[None])
    right = model.losses(ids, targets)
    first = score(model, corpus, "nonoverlapping", 64, tokens=64)
    assert first.losses.sum() == pytest.approx(right.sum().item(), rel=1e-10)
    assert first.tokens == (targets != -100).sum().item()
    with pytest.raises(ValueError, match="protocol: expected nonoverlapping or sliding for an encoder"):
        score(model, corpus, "blockwise", 64)
    with pytest.raises(ValueError, match="text: expected a corpus whose tokenizer has a mask token"):
        score(model, tokens, "nonoverlapping", 64)


@pytest.mark.parametrize(("most", "counted"), [(1 << 24, 10**9), (30, 61)])
def test_the_loss_of_the_unigram_distribution(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, most: int, counted: int
) -> None:
    """That of the whole text, or of its first part as far as it is scored."""
    monkeypatch.setattr(measure, "UNIGRAM_TOKENS", most)
    tokens = corpus["train"]
    text = tokens.read(0, len(tokens))
    frequency = np.bincount(text[:counted], minlength=258) / len(text[:counted])
    expected = -np.log(frequency[text[11:61]]).mean()
    monkeypatch.setattr(measure, "READ", 7)
    stretches = [(10, 20), (30, 30)]
    assert measure.unigram_loss(tokens, Task(tokens), 258, stretches) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("masked", [True, False])
def test_the_unigram_distribution_is_asked_for_what_is_scored(corpus: Corpus, masked: bool) -> None:
    """Of masked tokens, for those; with documents apart, for all but the first of each."""
    assert corpus.mask_id is not None
    tokens, hide = corpus["train"], Masking(0.15, corpus.mask_id, corpus.vocab_size)
    many = len(tokens) - 1
    text = torch.from_numpy(tokens.read(0, many + 1))
    if masked:
        _, targets = hide(text[None, :many], torch.arange(many)[None])
        asked = targets[targets >= 0].numpy()
    else:
        first = set(tokens.documents.tolist())
        asked = np.array([token for place, token in enumerate(text.tolist()) if place not in first])
    frequency = np.bincount(text.numpy(), minlength=258) / len(text)
    task = Task(tokens, hide) if masked else Task(tokens, document_mask=True)
    found = measure.unigram_loss(tokens, task, 258, [(0, many)])
    assert found == pytest.approx(-np.log(frequency[asked]).mean(), rel=1e-12)


def measured(model: Transformer, tokens: Tokens, how: Protocol, targets: int, **more: Any) -> measure.Tally:
    return measure.measure(model, tokens, Task(tokens), how, how.stretches(tokens, targets), **more)


def test_an_interrupted_measurement_goes_on_where_it_was(
    corpus: Corpus, model: Transformer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, one = corpus["train"], protocol("sliding", 16, 16, stride=3)
    targets, partial = len(tokens) - 1, folder / "partial.json"
    monkeypatch.setattr(measure, "SAVE_SECONDS", -1.0)
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 64)
    whole = measured(model, tokens, one, targets)

    class StoppedError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        assert total == targets
        if done > targets // 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        measured(model, tokens, one, targets, tell=stop, partial=partial)
    kept = json.loads(partial.read_text())
    assert 0 < sum(kept["counts"]) < targets
    seen: list[int] = []
    again = measured(model, tokens, one, targets, tell=lambda done, total: seen.append(done), partial=partial)
    assert seen[0] > sum(kept["counts"])
    assert np.array_equal(again.losses, whole.losses)
    assert np.array_equal(again.counts, whole.counts)
    assert not partial.exists()
    with pytest.raises(StoppedError):
        measured(model, tokens, one, targets, tell=stop, partial=partial)
    left = partial.read_bytes()
    for changed in (left, b"nothing"):  # of another text, or no tally at all
        partial.write_bytes(changed)
        text = corpus["validation"]
        assert measured(model, text, one, 100, partial=partial).counts.sum() == 100
