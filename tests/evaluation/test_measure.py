"""Scores against the same arithmetic done another way: one token, one document, one pass at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lengthen import Blockwise, Transformer, Window
from lengthen.data import Corpus
from lengthen.evaluation import measure, protocol, score
from lengthen.model.score import BATCH_TOKENS


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
    tally = score(model, tokens, protocol("sliding", length, 16, stride=1), targets)
    expected = [alone(model, tokens.read(max(0, t - length), t + 1)) for t in range(1, targets + 1)]
    assert tally.counts.sum() == targets
    assert tally.losses.sum() == pytest.approx(sum(expected), rel=1e-10)


def test_nonoverlapping_is_each_token_with_what_stands_before_it_in_its_piece(
    corpus: Corpus, model: Transformer
) -> None:
    tokens, length = corpus["train"], 10
    targets = 57  # a ragged end: the last piece has seven
    tally = score(model, tokens, protocol("nonoverlapping", length, 16), targets)
    expected = [alone(model, tokens.read((t - 1) // length * length, t + 1)) for t in range(1, targets + 1)]
    assert tally.losses.sum() == pytest.approx(sum(expected), rel=1e-10)


def test_blockwise_and_window_read_with_their_masks(corpus: Corpus, model: Transformer) -> None:
    tokens, length = corpus["train"], 50
    ids = torch.from_numpy(tokens.read(0, length + 1))[None]
    for name, mask in (("blockwise", Blockwise(8)), ("window", Window(16))):
        tally = score(model, tokens, protocol(name, length, 16), length)
        total, _ = model(ids[:, :-1], ids[:, 1:], mask=mask)
        plain, _ = model(ids[:, :-1], ids[:, 1:])
        assert tally.losses.sum() == pytest.approx(float(total.detach()), rel=1e-10)
        assert abs(float(total.detach()) - float(plain.detach())) > 1e-6


def test_sliding_by_the_length_is_nonoverlapping_to_the_bit(corpus: Corpus, model: Transformer) -> None:
    tokens, targets = corpus["train"], len(corpus["train"]) - 1
    for length in (7, 16, 33):
        one = score(model, tokens, protocol("sliding", length, 16, stride=length), targets)
        other = score(model, tokens, protocol("nonoverlapping", length, 16), targets)
        assert np.array_equal(one.losses, other.losses)


@pytest.mark.parametrize("length", [5, 16, 37, 4096])
def test_tokens_are_counted_exactly_at_the_ends_of_documents(corpus: Corpus, model: Transformer, length: int) -> None:
    for split in ("train", "validation"):
        tokens = corpus[split]
        length_here = min(length, len(tokens) - 1)
        tally = score(model, tokens, protocol("nonoverlapping", length_here, 16), len(tokens) - 1)
        sizes = np.diff(tokens.documents)
        sizes[0] -= 1  # the first token of all is nobody's target
        assert tally.counts.tolist() == sizes.tolist()


def test_losses_are_attributed_to_the_document_of_the_target(corpus: Corpus, model: Transformer) -> None:
    tokens = corpus["train"]
    tally = score(model, tokens, protocol("sliding", 20, 16, stride=6), len(tokens) - 1)
    whole = score(model, tokens, protocol("sliding", 20, 16, stride=6), int(tokens.documents[1]) - 1)
    assert tally.losses[0] == pytest.approx(whole.losses[0], rel=1e-12)
    assert whole.losses[1:].sum() == 0


def test_the_standard_error_is_that_of_a_ratio_of_sums() -> None:
    losses, counts = np.array([10.0, 0.0, 30.0, 5.0]), np.array([5, 0, 12, 4])
    tally = measure.Tally(losses, counts)
    mean = 45 / 21
    off = [10 - mean * 5, 30 - mean * 12, 5 - mean * 4]
    assert tally.loss == mean
    assert tally.standard_error == pytest.approx(math.sqrt(1.5 * sum(x * x for x in off)) / 21)
    assert measure.Tally(np.array([3.0]), np.array([2])).standard_error is None


def test_a_document_counts_with_the_share_of_it_that_was_scored(corpus: Corpus, model: Transformer) -> None:
    tokens = corpus["train"]
    begins = tokens.documents
    targets = int(begins[2]) + 19  # two whole documents, and twenty tokens of the third
    tally = score(model, tokens, protocol("nonoverlapping", 16, 16), targets)
    share = 20 / int(begins[3] - begins[2])
    for units in (tokens.bytes, tokens.words):
        assert tally.per(tokens, units) == pytest.approx(
            tally.losses.sum() / (units[0] + units[1] + share * units[2]), rel=1e-12
        )
    whole = score(model, tokens, protocol("nonoverlapping", 16, 16), len(tokens) - 1)
    assert whole.per(tokens, tokens.bytes) == pytest.approx(whole.losses.sum() / tokens.bytes.sum(), rel=1e-12)


def test_an_interrupted_measurement_goes_on_where_it_was(
    corpus: Corpus, model: Transformer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, one = corpus["train"], protocol("sliding", 16, 16, stride=3)
    targets, partial = len(tokens) - 1, folder / "partial.json"
    monkeypatch.setattr(measure, "SAVE_SECONDS", -1.0)
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 64)
    whole = score(model, tokens, one, targets)

    class StoppedError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        assert total == targets
        if done > targets // 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        score(model, tokens, one, targets, tell=stop, partial=partial, name=["this"])
    kept = json.loads(partial.read_text())
    assert 0 < sum(kept["counts"]) < targets
    seen: list[int] = []
    again = score(
        model, tokens, one, targets, tell=lambda done, total: seen.append(done), partial=partial, name=["this"]
    )
    assert seen[0] > sum(kept["counts"])
    assert np.array_equal(again.losses, whole.losses)
    assert np.array_equal(again.counts, whole.counts)
    assert not partial.exists()
    with pytest.raises(StoppedError):
        score(model, tokens, one, targets, tell=stop, partial=partial, name=["this"])
    left = partial.read_bytes()
    other = score(model, tokens, one, targets, partial=partial, name=["another"])  # its tally is not ours
    assert np.array_equal(other.losses, whole.losses)
    for changed in (left, b"nothing"):  # of another text, or no tally at all
        partial.write_bytes(changed)
        text = corpus["validation"]
        assert score(model, text, one, 100, partial=partial, name=["this"]).counts.sum() == 100


def test_more_targets_than_there_are_is_refused(corpus: Corpus, model: Transformer) -> None:
    tokens = corpus["train"]
    with pytest.raises(ValueError, match=rf"targets: expected 1 … {len(tokens) - 1}, .* got {len(tokens)}"):
        score(model, tokens, protocol("nonoverlapping", 16, 16), len(tokens))
