from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lengthen import Bidirectional, Blockwise, Causal, Window, attention

CPU = torch.device("cpu")
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "causal": st.just(Causal()),
    "both": st.just(Bidirectional()),
    "window": st.builds(Window, st.integers(1, 15)),
    "blockwise": st.builds(Blockwise, st.integers(1, 9)),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def sees(mask: Any, i: int, j: int) -> bool:
    """Return whether position i of a sequence that stands alone sees its position j ≥ 0, in words, not formulas."""
    if isinstance(mask, Bidirectional):
        return True
    if j > i:
        return False
    if isinstance(mask, Window):
        return i - j < mask.size
    if isinstance(mask, Blockwise):
        return i // mask.block - j // mask.block in (0, 1)
    return True


def seen_keys(mask: Any, queries: int, keys: int, q_start: int) -> list[list[set[int]]]:
    first, last = mask.interval(queries, keys, q_start, CPU)
    assert first.dtype == last.dtype == torch.int64
    assert first.shape == last.shape
    assert first.shape[1] == queries
    rows = []
    for lows, highs in zip(first.tolist(), last.tolist(), strict=True):
        assert all(low > high or 0 <= low <= high < keys for low, high in zip(lows, highs, strict=True))
        rows.append([set(range(low, high + 1)) for low, high in zip(lows, highs, strict=True)])
    return rows


@EACH_KIND
@settings(max_examples=60)
@given(data=st.data())
def test_an_interval_is_what_the_mask_lets_a_query_see(data: st.DataObject, kind: str) -> None:
    mask = data.draw(KINDS[kind])
    keys, queries = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    q_start = data.draw(st.integers(-queries - 5, keys + 40))
    (row,) = seen_keys(mask, queries, keys, q_start)
    assert row == [{j for j in range(keys) if sees(mask, i, j)} for i in range(q_start, q_start + queries)]


@EACH_KIND
@settings(max_examples=60)
@given(data=st.data())
def test_padding_moves_where_a_sequence_begins(data: st.DataObject, kind: str) -> None:
    mask = data.draw(KINDS[kind])
    keys, queries = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    q_start = data.draw(st.integers(-queries - 5, keys + 20))
    starts = data.draw(st.lists(st.integers(0, keys + 3), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32, torch.uint8]))
    rows = seen_keys(mask.padded(torch.tensor(starts, dtype=dtype)), queries, keys, q_start)
    assert len(rows) == len(starts)
    for start, row in zip(starts, rows, strict=True):
        alone = [
            {j for j in range(start, keys) if sees(mask, i - start, j - start)} if i >= start else set()
            for i in range(q_start, q_start + queries)
        ]
        assert row == alone


@EACH_KIND
@settings(max_examples=60)
@given(data=st.data())
def test_packed_documents_are_each_alone(
    data: st.DataObject, kind: str, documents: Callable[..., st.SearchStrategy[Tensor]]
) -> None:
    mask = data.draw(KINDS[kind])
    keys = data.draw(st.integers(1, 30))
    q_start = data.draw(st.integers(0, keys - 1))
    queries = data.draw(st.integers(1, keys - q_start))
    starts = data.draw(documents(data.draw(st.integers(1, 3)), keys))
    padding = data.draw(st.one_of(st.none(), st.integers(0, keys)))
    packed = mask.packed(starts.to(data.draw(st.sampled_from([torch.int64, torch.int32]))))
    if padding is not None:
        packed = packed.padded(torch.tensor([padding]))
    rows = seen_keys(packed, queries, keys, q_start)
    for document, row in zip(starts.tolist(), rows, strict=True):
        for i, seen in enumerate(row, start=q_start):
            own = [j for j in range(keys) if document[j] == document[i] and j >= (padding or 0)]
            if i not in own:
                assert seen == set()
            else:
                assert seen == {j for j in own if sees(mask, i - own[0], j - own[0])}


@EACH_KIND
@pytest.mark.parametrize("backend", ["reference", "chunked", None])
def test_padded_and_packed_sequences_give_what_they_give_alone(kind: str, backend: str | None) -> None:
    mask = {"causal": Causal(), "both": Bidirectional(), "window": Window(6), "blockwise": Blockwise(4)}[kind]
    lengths = [7, 1, 12]
    q, k, v = torch.randn(3, 1, 2, sum(lengths), 4, dtype=torch.float64)
    pieces = list(zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True))
    alone = [attention(*piece, mask=mask, backend="reference") for piece in pieces]

    starts = torch.repeat_interleave(torch.tensor([0, 7, 8]), torch.tensor(lengths)).unsqueeze(0)
    packed = attention(q, k, v, mask=mask.packed(starts), backend=backend)
    torch.testing.assert_close(packed, torch.cat(alone, dim=2), rtol=1e-12, atol=1e-12)

    # Padded on the left to one length, with rubbish where the padding is.
    batch = [torch.full((3, 2, 12, 4), torch.nan, dtype=torch.float64) for _ in range(3)]
    for n, piece in enumerate(pieces):
        for x, part in zip(batch, piece, strict=True):
            x[n, :, 12 - lengths[n] :] = part[0]
    padded = attention(*batch, mask=mask.padded(torch.tensor([5, 11, 0])), backend=backend)
    for n, expected in enumerate(alone):
        torch.testing.assert_close(padded[n, :, 12 - lengths[n] :], expected[0], rtol=1e-12, atol=1e-12)
        assert padded[n, :, : 12 - lengths[n]].abs().sum() == 0


def test_a_view_of_documents_will_do() -> None:
    starts = (torch.arange(20) // 6 * 6).expand(2, -1)
    wide = torch.zeros(2, 40, dtype=torch.int64)
    wide[:, :20] = starts
    for view in (starts, wide[:, :20], starts.mT.contiguous().mT):
        first, last = Causal().packed(view).interval(20, 20, 0, CPU)
        assert torch.equal(first, starts)
        assert torch.equal(last, torch.arange(20).expand(2, -1))


def test_padded_and_packed_leave_the_mask_itself_as_it_is() -> None:
    mask = Window(5)
    padded = mask.padded(torch.tensor([3]))
    both = padded.packed(torch.zeros(1, 9, dtype=torch.int64))
    assert (mask.key_start, mask.document_starts) == (None, None)
    assert (type(both), both.size) == (Window, 5)
    assert both.key_start is padded.key_start
    assert padded.document_starts is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Window(0), ValueError, r"Window\.size: expected at least 1, got 0"),
        (lambda: Window(-3), ValueError, r"Window\.size: expected at least 1, got -3"),
        (lambda: Window(5.0), TypeError, r"Window\.size: expected a whole number, got 5\.0 \(float\)"),
        (lambda: Window(True), TypeError, r"Window\.size: expected a whole number, got True \(bool\)"),
        (lambda: Window(torch.tensor(5)), TypeError, r"Window\.size: expected a whole number, got a torch\.int64"),
        (lambda: Blockwise(0), ValueError, r"Blockwise\.block: expected at least 1, got 0"),
        (lambda: Blockwise(2.5), TypeError, r"Blockwise\.block: expected a whole number, got 2\.5 \(float\)"),
        (lambda: Causal().padded([3]), TypeError, r"key_start: expected an integer tensor, got \[3\] \(list\)"),
        (lambda: Causal().padded(torch.tensor([3.0])), TypeError, r"key_start: expected an integer .*torch\.float32"),
        (lambda: Causal().padded(torch.tensor([True])), TypeError, r"key_start: expected an integer .*torch\.bool"),
        (lambda: Causal().padded(torch.tensor(3)), ValueError, r"key_start: expected 1 dimension.*\[\]"),
        (lambda: Causal().padded(torch.tensor([3, -1])), ValueError, r"key_start: expected at least 0, got -1"),
        (
            lambda: Causal().packed(torch.zeros(1, 5)),
            TypeError,
            r"document_starts: expected an integer .*torch\.float32",
        ),
        (
            lambda: Causal().packed(torch.zeros(5, dtype=torch.int64)),
            ValueError,
            r"document_starts: expected 2 dimension.*\[5\]",
        ),
        (
            lambda: Causal().packed(torch.tensor([[0, 2, 2]])),
            ValueError,
            r"document_starts: expected 0 ≤ document_starts\[b, p\] ≤ p",
        ),
        (
            lambda: Causal().packed(torch.tensor([[-1, 0, 2]])),
            ValueError,
            r"document_starts: expected 0 ≤ document_starts\[b, p\] ≤ p",
        ),
        (
            lambda: Causal().packed(torch.tensor([[0, 1, 0]])),
            ValueError,
            r"document_starts: expected starts that never fall along a row",
        ),
    ],
)
def test_what_a_mask_is_made_of_is_checked(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            Causal().padded(torch.zeros(1, dtype=torch.int64, device="meta")),
            r"mask\.key_start: expected a tensor on cpu like q, got .* on meta",
        ),
        (
            Causal().packed(torch.zeros(1, 9, dtype=torch.int64, device="meta")),
            r"mask\.document_starts: expected a tensor on cpu like q, got .* on meta",
        ),
        (
            Causal().padded(torch.zeros(3, dtype=torch.int64)),
            r"mask\.key_start: expected one number for each of 2 sequences, got .*\[3\]",
        ),
        (
            Causal().packed(torch.zeros(3, 9, dtype=torch.int64)),
            r"mask\.document_starts: expected \[2, keys\], got .*\[3, 9\]",
        ),
        (
            Causal().packed(torch.zeros(2, 8, dtype=torch.int64)),
            r"mask\.document_starts: expected one start for each of the 9 keys, .*got .*\[2, 8\]",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "chunked", "native", None])
def test_a_mask_must_fit_the_call(mask: Any, message: str, backend: str | None) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 4)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, mask=mask, backend=backend)


@pytest.mark.parametrize("q_start", [-1, 6])
def test_packed_queries_stand_among_the_keys(q_start: int) -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    mask = Causal().packed(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=rf"queries at {q_start} … {q_start + 3} among them"):
        attention(q[:, :, :4], k, v, mask=mask, q_start=q_start)


def test_the_base_is_no_mask_of_its_own() -> None:
    from lengthen.attention.masks import Mask

    with pytest.raises(NotImplementedError):
        Mask().interval(1, 1, 0, CPU)
