"""Loss by position, and the split of what long inputs gain: against models whose loss is known, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lengthen import ModelConfig, Transformer
from lengthen.data import Tokens, prepare
from lengthen.evaluation.analyses.positions import (
    bucket_ends,
    by_position,
    curse,
    scored,
    sliding_windows,
    whole_pieces,
)
from lengthen.model import IGNORED
from lengthen.model.score import BATCH_TOKENS


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("text")
    (folder / "t.txt").write_text("".join(f"{n} crows and {n * n} foxes. " for n in range(60)), encoding="utf-8")
    return prepare(folder / "t.txt", folder / "corpus", validation=0, workers=1)["train"]


class Known(nn.Module):
    """A model whose loss is a function of how many tokens it has read, and of the target."""

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.of = nn.Parameter(torch.zeros(1)), of
        self.rows: list[tuple[int, ...]] = []

    def losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        self.rows.append(tuple(ids.shape))
        read = torch.arange(1, ids.shape[1] + 1, dtype=torch.float64).expand(ids.shape)
        return self.of(read, targets.double()).where(targets != IGNORED, 0)


@pytest.mark.parametrize(("length", "ends"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_buckets(length: int, ends: list[int]) -> None:
    assert bucket_ends(length) == ends


def test_readings() -> None:
    pieces = [(one.start, one.stop, one.context) for one in whole_pieces(5, 10, 4)]
    assert pieces == [(5, 9, 0), (9, 13, 0), (13, 15, 0)]
    windows = [(one.start, one.stop, one.context) for one in sliding_windows(5, 10, 6, 4)]
    assert windows == [(3, 9, 2), (7, 13, 2), (9, 15, 4)]
    clipped = [(one.start, one.stop, one.context) for one in sliding_windows(0, 4, 3, 1)]
    assert clipped == [(0, 1, 0), (0, 2, 1), (0, 3, 2), (1, 4, 2)]


@pytest.mark.parametrize("length", [8, 6])
def test_positions_of_a_known_loss(text: Tokens, length: int) -> None:
    """The loss 1/p at position p."""
    found = by_position(Known(lambda read, target: 1 / read), text, length, 100)  # type: ignore[arg-type]
    assert found.positions == bucket_ends(length)
    pieces = 100 // length
    assert found.count == [(end - start) * pieces for start, end in pairwise([0, *found.positions])]
    right = [
        sum(1 / p for p in range(start + 1, end + 1)) / (end - start) for start, end in pairwise([0, *found.positions])
    ]
    assert found.loss == pytest.approx(right, rel=1e-12)


def test_positions_of_a_model(text: Tokens) -> None:
    """Piece by piece, with logits."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(258, layers=1, width=32, heads=2, train_length=16)).double().train()
    told: list[tuple[int, int]] = []
    found = by_position(model, text, 16, 200, tell=lambda *progress: told.append(progress))
    assert model.training
    assert told == [(192, 192)]
    sums = torch.zeros(16, dtype=torch.float64)
    with torch.no_grad():
        for piece in range(12):
            ids = torch.from_numpy(text.read(piece * 16, piece * 16 + 17))
            logits = model(ids[None, :-1])[0]
            sums += nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    for end, loss in zip(found.positions, found.loss, strict=True):
        assert loss == pytest.approx(float(sums[end // 2 : end].mean()) / 12, rel=1e-9)


def test_a_model_that_uses_eight_tokens_gains_from_the_curse_alone(text: Tokens) -> None:
    model = Known(lambda read, target: 1 / read.clamp(max=8) + target / 100)
    found = curse(model, text, 16, 128, 512, stride=4)  # type: ignore[arg-type]
    assert found.gain > 0.05
    assert found.from_context == pytest.approx(0, abs=1e-12)
    assert found.from_curse == pytest.approx(found.gain, rel=1e-9)


def test_a_model_without_a_curse_gains_from_context_alone(text: Tokens) -> None:
    """One that does as well wherever a token stands in its piece, and better on longer pieces."""
    model = Known(lambda read, target: 1 / read[:, -1:].expand(read.shape) + target / 100)
    found = curse(model, text, 16, 128, 512, stride=4)  # type: ignore[arg-type]
    assert found.gain == pytest.approx(1 / 16 - 1 / 128, rel=1e-9)
    assert found.from_context == pytest.approx(found.gain, rel=1e-9)
    assert found.from_curse == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("stride", [1, 3, None])
def test_the_parts_add_up_over_the_same_tokens(text: Tokens, stride: int | None) -> None:
    torch.manual_seed(1)
    model = Transformer(ModelConfig(258, layers=1, width=32, heads=2, train_length=16)).double()
    told: list[tuple[int, int]] = []
    found = curse(model, text, 8, 60, 130, stride, lambda *progress: told.append(progress))  # 60 is no multiple of 8
    assert (found.tokens, found.stride) == (120, stride or 1)
    assert found.from_context + found.from_curse == pytest.approx(found.gain, abs=1e-12)
    read = 2 * 120 + -(-120 // found.stride) * (8 + 60)
    assert told[-1] == (read, read)
    with torch.no_grad():
        for at, length in enumerate((8, 60)):
            whole, sliding = [], []
            for place in range(60, 180):  # from L tokens into the text on
                behind = (place - 60) % length
                past = length - 1 - (found.stride - 1 - (place - 60) % found.stride)
                for many, into in ((behind, whole), (past, sliding)):
                    ids = torch.from_numpy(text.read(place - many, place + 2))
                    logits = model(ids[None, :-1])[0, -1]
                    into.append(float(nn.functional.cross_entropy(logits, ids[-1])))
            assert found.whole[at] == pytest.approx(sum(whole) / 120, rel=1e-9)
            assert found.sliding[at] == pytest.approx(sum(sliding) / 120, rel=1e-9)


def test_batches_are_bounded(text: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 64)
    model = Known(lambda read, target: target)
    by_position(model, text, 16, 320)  # type: ignore[arg-type]
    assert model.rows == [(4, 16)] * 5


def test_what_does_not_fit_is_said(text: Tokens) -> None:
    model = Known(lambda read, target: target)
    size = len(text)
    assert scored(text, size - 1, 10) == size - 1  # one piece at least
    with pytest.raises(ValueError, match=f"length: {size} tokens and the one after them are more than split 'train'"):
        by_position(model, text, size, 100)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="long: expected more than the short length 16, got 16"):
        curse(model, text, 16, 16, 100)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stride: expected at most the short length 16, got 17"):
        curse(model, text, 16, 32, 100, stride=17)  # type: ignore[arg-type]


def test_a_short_text_has_shorter_first_windows(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 2, encoding="utf-8")
    text = prepare(tmp_path / "t.txt", tmp_path / "corpus", validation=0, workers=1)["train"]
    found = curse(Known(lambda read, target: 1 / read), text, 8, 48, 1000, stride=2)  # type: ignore[arg-type]
    assert found.tokens == 48
    assert found.gain == pytest.approx(found.from_context + found.from_curse, abs=1e-12)
