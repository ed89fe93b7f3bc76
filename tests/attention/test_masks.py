from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes, attention
from lengthen.attention import Mask

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Around(Mask):
    """Each query sees `size` keys on either side, and itself."""

    size: int

    def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return position - self.size, position + self.size


@dataclass(frozen=True, eq=False)
class Behind(Around):
    """The same, but never ahead."""

    two_sided: ClassVar[bool] = False


@dataclass(frozen=True, eq=False)
class Lagging(Causal):
    """Causal, but blind to the last `lag` keys."""

    lag: int

    def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(position), position - self.lag


KINDS: dict[str, st.SearchStrategy[Any]] = {
    "causal": st.just(Causal()),
    "both": st.just(Bidirectional()),
    "window": st.builds(Window, st.integers(1, 15)),
    "blockwise": st.builds(Blockwise, st.integers(1, 9)),
    "around": st.builds(Around, st.integers(0, 7)),
    "behind": st.builds(Behind, st.integers(0, 7)),
    "lagging": st.builds(Lagging, st.integers(0, 7)),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def sees(mask: Any, i: int, j: int) -> bool:
    """Return whether position i of a sequence that stands alone sees its position j ≥ 0, in words, not formulas."""
    if isinstance(mask, Around):
        return abs(i - j) <= mask.size and (j <= i or not isinstance(mask, Behind))
    if isinstance(mask, Bidirectional):
        return True
    if isinstance(mask, Lagging):
        return i - j >= mask.lag
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
def test_padding_moves_where_a_sequence_begins_and_ends(data: st.DataObject, kind: str) -> None:
    mask = data.draw(KINDS[kind])
    keys, queries = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    batch = data.draw(st.integers(1, 3))
    q_start = data.draw(st.integers(-queries - 5, keys + 20))
    row = st.lists(st.integers(0, keys + 3), min_size=batch, max_size=batch)
    starts, ends = data.draw(st.one_of(st.none(), row)), data.draw(st.one_of(st.none(), row))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32, torch.uint8]))
    given = {
        name: torch.tensor(value, dtype=dtype)
        for name, value in (("key_start", starts), ("key_end", ends))
        if value is not None
    }
    rows = seen_keys(mask.padded(**given), queries, keys, q_start)
    assert len(rows) == (batch if given else 1)
    for b, seen in enumerate(rows):
        start, end = starts[b] if starts else 0, min(ends[b] if ends else keys, keys)
        for i, got in enumerate(seen, start=q_start):
            padding = 0 <= i < keys and not start <= i < end  # a query that stands among the keys, but is none of them
            assert got == ({j for j in range(start, end) if sees(mask, i - start, j - start)} if not padding else set())


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


EACH: dict[str, Any] = {
    "causal": Causal(),
    "both": Bidirectional(),
    "window": Window(6),
    "blockwise": Blockwise(4),
    "around": Around(3),
    "behind": Behind(3),
    "lagging": Lagging(2),
}
EACH_MASK = pytest.mark.parametrize("mask", EACH.values(), ids=EACH)
BACKENDS = pytest.mark.parametrize("backend", ["reference", "chunked", None])


@EACH_MASK
@BACKENDS
def test_padded_and_packed_sequences_give_what_they_give_alone(mask: Any, backend: str | None) -> None:
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
    right = [x.clone() for x in batch]
    for n, length in enumerate(lengths):
        torch.testing.assert_close(padded[n, :, 12 - length :], alone[n][0], rtol=1e-12, atol=1e-12)
        assert padded[n, :, : 12 - length].abs().sum() == 0
        for x in right:
            x[n] = x[n].roll(length - 12, dims=1)
    # And on the right.
    padded = attention(*right, mask=mask.padded(key_end=torch.tensor(lengths)), backend=backend)
    for n, length in enumerate(lengths):
        torch.testing.assert_close(padded[n, :, :length], alone[n][0], rtol=1e-12, atol=1e-12)
        assert padded[n, :, length:].abs().sum() == 0


@pytest.mark.parametrize("q_start", [-7, 0, 4, 12])
@BACKENDS
def test_no_padding_changes_nothing_wherever_queries_stand(q_start: int, backend: str | None) -> None:
    q, k, v = torch.randn(2, 2, 9, 4), *torch.randn(2, 2, 2, 12, 4)
    for mask in EACH.values():
        plain = attention(q, k, v, mask=mask, q_start=q_start, return_lse=True, backend=backend)
        none, ends = torch.zeros(2, dtype=torch.int64), torch.full((2,), 12)
        for same in (mask.padded(none), mask.padded(key_end=ends), mask.padded(none, ends)):
            padded = attention(q, k, v, mask=same, q_start=q_start, return_lse=True, backend=backend)
            for ours, theirs in zip(padded, plain, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@EACH_MASK
@pytest.mark.parametrize("q_start", [None, 2])
@pytest.mark.parametrize("moved", ["plain", "padded", "both ends", "packed"])
def test_listed_it_is_the_same(mask: Any, q_start: int | None, moved: str, gradients: Any) -> None:
    moved_mask = {
        "plain": mask,
        "padded": mask.padded(torch.tensor([4, 0])),
        "both ends": mask.padded(torch.tensor([4, 0]), torch.tensor([12, 9])),
        "packed": mask.packed(torch.arange(12).unsqueeze(0) // 5 * 5),
    }[moved]
    q, k, v = torch.randn(2, 4, 9, 3).double(), *torch.randn(2, 2, 2, 12, 3).double()
    listed = moved_mask.listed(9, 12, 3 if q_start is None else q_start, CPU)
    assert listed.listed(9, 12, 3, CPU) is listed
    assert listed.formula() is None
    assert listed.two_sided == mask.two_sided
    for options in ({"bias": Linear(alibi_slopes(4).double())}, {"decay": Decay(torch.full((3,), 0.9).double())}):
        call = {"q": q, "k": k, "v": v, "q_start": q_start} | options
        expected = gradients(call | {"mask": moved_mask}, "reference")
        for backend in ("reference", "chunked"):
            for name, got in gradients(call | {"mask": listed}, backend).items():
                torch.testing.assert_close(got, expected[name], rtol=1e-10, atol=1e-10, msg=name)
    with pytest.raises(ValueError, match=r"mask: expected one listed for 8 queries and 12 keys, got one for 9 queries"):
        attention(q[:, :, :8], k, v, mask=listed)
    if len(listed.first) > 1:
        with pytest.raises(ValueError, match=r"mask\.first: expected one row for each of 1 sequences, got .*\[2, 9\]"):
            attention(q[:1], k[:1], v[:1], mask=listed)


@EACH_MASK
def test_every_bias_with_every_mask(mask: Any, assert_as_defined: Any) -> None:
    q, k, v = torch.randn(2, 4, 12, 3).double(), *torch.randn(2, 2, 2, 12, 3).double()
    for options in (
        {},
        {"bias": Linear(alibi_slopes(4).double(), alibi_slopes(4).double().flip(0))},
        {"bias": Table(*torch.randn(2, 4, 12).double())},
        {"bias": Table(torch.randn(4, 3).double(), extended=True)},
        {"decay": Decay(0.5 + 0.5 * torch.rand(4, 3).double())},
    ):
        assert_as_defined({"q": q, "k": k, "v": v, "mask": mask} | options)
        out, lse = attention(q, k, v, mask=mask, **options, return_lse=True)
        expected = attention(q, k, v, mask=mask, **options, return_lse=True, backend="reference")
        torch.testing.assert_close(out, expected[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(lse, expected[1], rtol=1e-10, atol=1e-10)


@BACKENDS
@pytest.mark.parametrize("mask", [Around(3), Bidirectional()], ids=["around", "both"])
def test_a_decay_goes_by_distance_on_both_sides(mask: Any, backend: str | None) -> None:
    q, k, v = torch.randn(3, 1, 2, 12, 3).double()
    rates = torch.tensor([0.5, 0.9, 1.0]).double()
    distance = (torch.arange(12)[:, None] - torch.arange(12)).abs()
    score = (q[..., :, None, :] * k[..., None, :, :] * rates ** distance[..., None]).sum(-1) / 3**0.5
    hidden = distance > 3 if isinstance(mask, Around) else distance < 0
    expected = score.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    got = attention(q, k, v, decay=Decay(rates), mask=mask, backend=backend)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_formula_is_for_masks_that_nothing_moves() -> None:
    everything = Causal().formula()
    assert everything == Bidirectional().formula()
    assert Window(5).formula() == (4, 1)
    assert Blockwise(8).formula() == (8, 8)
    assert Around(3).formula() is None
    assert Lagging(2).formula() is None  # its own span, whatever its class says
    for moved in (Causal().padded(torch.tensor([0])), Causal().padded(key_end=torch.tensor([3]))):
        assert moved.moved
        assert moved.formula() is None
    assert Window(5).packed(torch.zeros(1, 3, dtype=torch.int64)).formula() is None


def test_where_sequences_begin() -> None:
    assert Causal().start(4, CPU).tolist() == [[0, 0, 0, 0]]
    documents = torch.tensor([[0, 0, 2, 2], [0, 1, 1, 1]])
    assert Causal().packed(documents).start(4, CPU).tolist() == documents.tolist()
    both = Causal().packed(documents).padded(torch.tensor([1, 3]))
    assert both.start(4, CPU).tolist() == [[1, 1, 2, 2], [3, 3, 3, 3]]


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
            lambda: Causal().padded(key_end=torch.tensor([3.0])),
            TypeError,
            r"key_end: expected an integer .*torch\.float32",
        ),
        (lambda: Causal().padded(key_end=torch.tensor([-1])), ValueError, r"key_end: expected at least 0, got -1"),
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
        (
            lambda: Causal().packed(torch.tensor([[0, 1, 0]], dtype=torch.uint8)),
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
            r"mask\.key_start: expected one row for each of 2 sequences, got .*\[3\]",
        ),
        (
            Causal().padded(key_end=torch.zeros(3, dtype=torch.int64)),
            r"mask\.key_end: expected one row for each of 2 sequences, got .*\[3\]",
        ),
        (
            Causal().packed(torch.zeros(3, 9, dtype=torch.int64)),
            r"mask\.document_starts: expected one row for each of 2 sequences, got .*\[3, 9\]",
        ),
        (
            Causal().packed(torch.zeros(2, 8, dtype=torch.int64)),
            r"mask\.document_starts: expected one start for each of the 9 keys, .*got .*\[2, 8\]",
        ),
    ],
)
@BACKENDS
def test_a_mask_must_fit_the_call(mask: Any, message: str, backend: str | None) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 4)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, mask=mask, backend=backend)


@pytest.mark.parametrize("q_start", [-1, 6])
def test_packed_queries_stand_among_the_keys(q_start: int) -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    mask = Causal().packed(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=rf"queries among them, got .* and queries at {q_start} … {q_start + 3}"):
        attention(q[:, :, :4], k, v, mask=mask, q_start=q_start)


def test_the_base_is_no_mask_of_its_own() -> None:
    with pytest.raises(NotImplementedError):
        Mask().interval(1, 1, 0, CPU)
