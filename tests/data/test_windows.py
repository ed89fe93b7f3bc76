"""Windows: what stands in each batch, against the plain definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lengthen.data import Corpus, Tokens, Windows
from lengthen.data.windows import _permutation, mix


class Numbers:
    """Tokens that are their own positions, in documents of given lengths: what a window holds is plain to see."""

    name = "train"
    directory = "nowhere"

    def __init__(self, lengths: list[int]) -> None:
        self.documents = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.documents[-1])

    document_starts = Tokens.document_starts

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start < stop <= len(self)
        return np.arange(start, stop, dtype=np.int64)


shapes = st.tuples(
    st.lists(st.integers(0, 25), min_size=1, max_size=12),  # a document may have no tokens, where there is no end token
    st.integers(1, 17),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 3),
).filter(lambda shape: sum(shape[0]) > shape[1])


@given(shapes)
def test_pack_uses_each_token_as_a_target_once_an_epoch(shape: tuple[list[int], int, int, int]) -> None:
    lengths, length, batch, seed = shape
    tokens = Numbers(lengths)
    windows = Windows(tokens, length=length, batch=batch, seed=seed)  # type: ignore[arg-type]
    total, count = len(tokens), windows.per_epoch
    rows = [(i // batch, i % batch) for i in range(3 * count)]
    drawn = [windows.batch(step).targets[row].tolist() for step, row in rows]
    for epoch in range(3):
        seen = sorted(token for targets in drawn[epoch * count : (epoch + 1) * count] for token in targets)
        offset = windows.offset(epoch)
        assert 0 <= offset < length
        assert seen == list(range(offset + 1, offset + count * length + 1))  # each once, but for the two ends
        assert total - len(seen) < 2 * length
    assert count >= 1
    assert count >= total // length - 1


@given(shapes, st.sampled_from(["pack", "sample"]), st.booleans(), st.integers(0, 9))
def test_every_world_size_shares_out_the_same_batch(
    shape: tuple[list[int], int, int, int], order: str, apart: bool, step: int
) -> None:
    lengths, length, batch, seed = shape
    windows = Windows(Numbers(lengths), length=length, batch=batch, seed=seed, order=order, document_mask=apart)  # type: ignore[arg-type]
    whole = windows.batch(step)
    fresh = Windows(Numbers(lengths), length=length, batch=batch, seed=seed, order=order, document_mask=apart)  # type: ignore[arg-type]
    for world in (w for w in (1, 2, 4, 8) if batch % w == 0):
        parts = [fresh.batch(step, rank, world) for rank in range(world)]
        assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
        if apart:
            assert torch.equal(torch.cat([part.document_starts for part in parts]), whole.document_starts)  # type: ignore[misc]


@given(shapes, st.sampled_from(["pack", "sample"]), st.integers(0, 9))
def test_documents_kept_apart_against_a_loop(shape: tuple[list[int], int, int, int], order: str, step: int) -> None:
    lengths, length, batch, seed = shape
    owner = [number for number, size in enumerate(lengths) for _ in range(size)]
    first = {number: owner.index(number) for number in set(owner)}
    options = {"length": length, "batch": batch, "seed": seed, "order": order}
    apart = Windows(Numbers(lengths), document_mask=True, **options).batch(step)  # type: ignore[arg-type]
    joined = Windows(Numbers(lengths), document_mask=False, **options).batch(step)  # type: ignore[arg-type]
    assert joined.document_starts is None
    assert apart.document_starts is not None
    assert torch.equal(joined.ids, apart.ids)
    assert torch.equal(joined.targets, joined.ids + 1)  # the next token, always real
    for row in range(batch):
        start = int(joined.ids[row, 0])
        for place in range(length):
            token = start + place
            assert int(joined.ids[row, place]) == token
            assert int(apart.document_starts[row, place]) == max(0, first[owner[token]] - start)
            same = owner[token + 1] == owner[token]
            assert int(apart.targets[row, place]) == (token + 1 if same else -100)


@given(shapes, st.integers(0, 50))
def test_sample_stays_inside(shape: tuple[list[int], int, int, int], step: int) -> None:
    lengths, length, batch, seed = shape
    tokens = Numbers(lengths)
    sampled = Windows(tokens, length=length, batch=batch, seed=seed, order="sample")  # type: ignore[arg-type]
    assert int(sampled.batch(step).targets.max()) < len(tokens)  # Numbers.read refuses what lies outside


def test_sample_reaches_every_start_about_as_often() -> None:
    windows = Windows(Numbers([30]), length=10, batch=100, order="sample")  # type: ignore[arg-type]
    starts = torch.cat([windows.batch(step).ids[:, 0] for step in range(40)])
    counts = torch.bincount(starts)
    assert len(counts) == 20  # 0 … 19: the last window's target is the last token
    assert counts.min() > 140  # 200 each, give or take four standard deviations
    assert counts.max() < 260


def test_seeds_epochs_and_steps_differ() -> None:
    def ids(seed: int, step: int, order: str) -> list[int]:
        windows = Windows(Numbers([5000]), length=10, batch=499, seed=seed, order=order)  # type: ignore[arg-type]
        assert windows.per_epoch == 499
        return windows.batch(step).ids[:, 0].tolist()

    for order in ("pack", "sample"):
        assert ids(0, 0, order) != ids(1, 0, order)
        assert ids(0, 0, order) != ids(0, 1, order)
    assert ids(0, 0, "pack") != sorted(ids(0, 0, "pack"))


def test_the_order_is_pinned() -> None:
    """These numbers are SplitMix64's; if they change, runs that are resumed see other data."""
    assert [mix(1234567, i) for i in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    bits = [mix(99, i) for i in range(50)]
    assert _permutation(50, 99).tolist() == sorted(range(50), key=lambda i: bits[i])
    windows = Windows(Numbers([1000]), length=10, batch=8, seed=7)  # type: ignore[arg-type]
    assert windows.batch(3).ids[:, 0].tolist() == [windows.start(3, row) for row in range(8)]


def test_a_window_over_shards_and_the_smallest_split(corpus: Corpus) -> None:
    tokens = corpus["train"]
    whole = tokens.read(0, len(tokens))
    batch = Windows(tokens, length=2500, batch=3).batch(0)
    for row in range(3):
        start = Windows(tokens, length=2500, batch=3).start(0, row)
        assert batch.ids[row].tolist() == whole[start : start + 2500].tolist()
        assert batch.targets[row].tolist() == whole[start + 1 : start + 2501].tolist()
    assert batch.ids.dtype == batch.targets.dtype == torch.int64
    only = Windows(tokens, length=len(tokens) - 1, batch=2).batch(5)
    assert only.targets[1].tolist() == whole[1:].tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 10**9}, r"length: .* 1000000001 tokens, but split 'train' of .* has \d+"),
        ({"length": 0}, "length: expected at least 1"),
        ({"batch": 2.0}, "batch: expected a whole number"),
        ({"order": "packed"}, "order: expected 'pack' or 'sample', got 'packed'; did you mean 'pack'"),
        ({"document_mask": 1}, "document_mask: expected True or False"),
    ],
)
def test_wrong_options(corpus: Corpus, options: dict[str, object], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        Windows(corpus["train"], **{"length": 16, "batch": 4, **options})  # type: ignore[arg-type]


def test_a_corpus_is_no_split(corpus: Corpus) -> None:
    with pytest.raises(TypeError, match=r"tokens: expected one split of a corpus, as corpus\['train'\], got Corpus"):
        Windows(corpus, length=16, batch=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 0, 3), "world: expected a divisor of the batch of 4 windows, got 3"),
        ((0, 2, 2), "rank: expected 0 … 1, got 2"),
        ((-1,), "step: expected at least 0"),
    ],
)
def test_wrong_batches(corpus: Corpus, arguments: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Windows(corpus["train"], length=16, batch=4).batch(*arguments)


@given(shapes)
def test_iterating_gives_the_steps_of_one_epoch(shape: tuple[list[int], int, int, int]) -> None:
    lengths, length, batch, seed = shape
    windows = Windows(Numbers(lengths), length=length, batch=batch, seed=seed)  # type: ignore[arg-type]
    batches = list(windows)
    assert len(batches) == len(windows)
    assert (len(windows) - 1) * batch < windows.per_epoch <= len(windows) * batch
    for step, one in enumerate(batches):
        assert torch.equal(one.ids, windows.batch(step).ids)
    assert len(list(windows)) == len(batches)  # as often as one likes


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum), st.data())
def test_document_starts(lengths: list[int], data: st.DataObject) -> None:
    tokens = Numbers(lengths)
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    owners = [first for first, size in zip(tokens.documents, lengths, strict=False) for _ in range(size)]
    found = tokens.document_starts(start, stop)
    assert found.dtype == np.int64
    assert found.tolist() == [max(first - start, 0) for first in owners[start:stop]]


def test_document_starts_outside(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="start, stop: expected 0 ≤ start ≤ stop"):
        corpus["train"].document_starts(0, len(corpus["train"]) + 1)


def test_the_tokenizer_is_a_property(corpus: Corpus) -> None:
    assert corpus.tokenizer.encode("sea") == list(b"sea")
    assert corpus.tokenizer is corpus.tokenizer


@pytest.mark.parametrize("order", ["pack", "sample"])
def test_seeds_have_64_bits(corpus: Corpus, order: str) -> None:
    def ids(seed: int) -> torch.Tensor:
        return Windows(corpus["train"], length=16, batch=4, seed=seed, order=order).batch(3).ids

    assert torch.equal(ids(2**64 - 1), ids(2**64 - 1))
    assert not torch.equal(ids(2**64 - 1), ids(0))
    for wrong in (2**64, -1, 10**30):
        with pytest.raises(ValueError, match="seed: expected"):
            ids(wrong)
