"""What each process reads: the same global batch however many there are, and nothing but a function of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lengthen.config import Config, DataConfig, TrainConfig
from lengthen.data import Corpus, prepare
from lengthen.model import IGNORED, ModelConfig
from lengthen.model.score import Reading
from lengthen.training import World
from lengthen.training.batches import Batches, Work, scoring

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(f"Document {number} says: " + "abcdefghij" * (3 + number))
    return prepare(folder, tmp_path_factory.mktemp("corpus"), validation=0.2, workers=1)


def config(kind: str = "decoder", batch: int = 8, seed: int = 0, **data: Any) -> Config:
    model = ModelConfig(vocab_size=258, layers=1, width=16, heads=2, train_length=24, kind=kind)
    return Config(model, data=DataConfig(**data), train=TrainConfig(batch=batch, seed=seed, mask_fraction=0.3))


def batches(corpus: Corpus, rank: int = 0, size: int = 1, **changes: Any) -> Batches:
    return Batches(corpus, config(**changes), World(rank, size, CPU))


def parts(work: Work) -> list[torch.Tensor]:
    return [part for part in (work.ids, work.targets, work.document_starts) if part is not None]


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("data", [{}, {"order": "sample"}, {"document_mask": True}], ids=["pack", "sample", "mask"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_global_batch_is_the_same_for_any_number_of_processes(
    corpus: Corpus, kind: str, data: dict[str, Any], size: int
) -> None:
    alone = batches(corpus, kind=kind, **data)
    for step in (0, 1, 50):
        whole = alone.of(step)
        shares = [batches(corpus, rank, size, kind=kind, **data).of(step) for rank in range(size)]
        joined = [torch.cat(rows) for rows in zip(*(parts(share) for share in shares), strict=True)]
        assert len(joined) == (3 if data.get("document_mask") else 2)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(joined, parts(whole), strict=True))
        assert sum(share.scored.item() for share in shares) == whole.scored.item()
        assert whole.scored.item() == (whole.targets != IGNORED).sum().item()


def test_a_decoder_predicts_the_next_token(corpus: Corpus) -> None:
    work = batches(corpus).of(3)
    assert work.ids.shape == work.targets.shape == (8, 24)
    assert torch.equal(work.ids[:, 1:], work.targets[:, :-1])
    assert work.scored.item() == 8 * 24
    assert work.scored.dtype == torch.float64


def test_an_encoder_predicts_what_is_hidden(corpus: Corpus) -> None:
    plain, work = batches(corpus).of(3), batches(corpus, kind="encoder").of(3)
    chosen = work.targets != IGNORED
    assert 0.15 < chosen.double().mean().item() < 0.45
    assert torch.equal(work.targets[chosen], plain.ids[chosen]), "a target is the token itself, not the next"
    assert torch.equal(work.ids[~chosen], plain.ids[~chosen])
    assert (work.ids[chosen] == corpus.mask_id).double().mean().item() > 0.6
    assert work.scored.item() == chosen.sum().item()


def test_other_steps_and_seeds_hide_other_tokens(corpus: Corpus) -> None:
    made = batches(corpus, kind="encoder")
    chosen = [made.of(step).targets != IGNORED for step in (0, 1)]
    assert not torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0][0], chosen[0][1]), "rows are hidden alike"
    other = batches(corpus, kind="encoder", seed=1).of(0).targets != IGNORED
    assert not torch.equal(chosen[0], other)


def test_work_is_made_ahead_and_is_that_of_the_step(corpus: Corpus) -> None:
    for kind in ("decoder", "encoder"):
        made = batches(corpus, kind=kind, document_mask=True)
        seen = []
        for step, work in made(5, 9):
            seen.append(step)
            again = batches(corpus, kind=kind, document_mask=True).of(step)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts(work), parts(again), strict=True))
        assert seen == [5, 6, 7, 8]
    assert list(batches(corpus)(4, 4)) == []


def test_an_error_while_reading_ahead_is_raised(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    made = batches(corpus)
    of = made.of

    def fail(step: int) -> Work:
        if step == 2:
            raise OSError("the disk is gone")
        return of(step)

    monkeypatch.setattr(made, "of", fail)
    seen: list[int] = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(step for step, _ in made(0, 5))
    assert seen == [0, 1]


def test_passes_are_all_rows_once(corpus: Corpus) -> None:
    work = batches(corpus, document_mask=True).of(0)
    for rows, sizes in ((3, [3, 3, 2]), (8, [8]), (100, [8]), (1, [1] * 8)):
        found = list(work.passes(rows))
        assert [ids.shape[0] for ids, _, _ in found] == sizes
        for place, part in enumerate(parts(work)):
            joined = torch.cat([one[place] for one in found])  # type: ignore[misc]
            assert torch.equal(joined, part)
    assert all(starts is None for _, _, starts in batches(corpus).of(0).passes(3))


def test_a_text_is_scored_as_it_was_trained(corpus: Corpus) -> None:
    plain, hidden = scoring(config(), corpus), scoring(config(kind="encoder"), corpus)
    assert (plain.hide, plain.document_mask) == (None, False)
    group = [Reading(0, 12, 0), Reading(12, 24, 0)]
    ids, targets, _ = hidden.batch(group)
    chosen, text = targets != IGNORED, torch.from_numpy(corpus["validation"].read(0, 24)).view(2, 12)
    assert torch.equal(targets[chosen], text[chosen])
    assert torch.equal(hidden.batch(group[1:])[0], ids[1:]), "a piece is hidden alike whichever process reads it"


def test_what_cannot_be_is_named(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^train.batch: expected a multiple of the 3 processes, got 8 windows$"):
        batches(corpus, 0, 3)
    (tmp_path / "t.txt").write_text("too short")
    small = prepare(tmp_path / "t.txt", tmp_path / "small", workers=1, validation=0)
    with pytest.raises(ValueError, match=r"^length: a window of 24 tokens and its last target need 25 tokens, but"):
        batches(small)
    monkeypatch.setattr(corpus, "mask_id", None)
    with pytest.raises(ValueError, match=r"^model.kind = 'encoder': the tokenizer of .* has no mask token"):
        batches(corpus, kind="encoder")
