"""Windows by arithmetic: every target once, with the context that the protocol says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthen import Blockwise, Window
from lengthen.evaluation import protocol

LENGTHS = st.integers(1, 40)


@given(length=LENGTHS, targets=st.integers(1, 200), data=st.data())
def test_every_target_is_scored_exactly_once(length: int, targets: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    for one in (protocol("nonoverlapping", length, 16), protocol("sliding", length, 16, stride=stride)):
        readings = list(one.readings([(0, targets)]))
        scored = [t for r in readings for t in range(r.start + r.context + 1, r.stop + 1)]
        assert scored == [*range(1, targets + 1)]
        assert all(r.stop - r.start <= length and r.scored > 0 for r in readings)
        assert sum(r.scored for r in readings) == targets


@given(length=LENGTHS, counts=st.lists(st.integers(1, 60), min_size=1, max_size=5), data=st.data())
def test_stretches_are_read_apart(length: int, counts: list[int], data: st.DataObject) -> None:
    stride, stretches, begin = data.draw(st.integers(1, length)), [], 0
    for count in counts:
        stretches.append((begin, count))
        begin += count + 7
    one = protocol("sliding", length, 16, stride=stride, per_document=60)
    readings = list(one.readings(stretches))
    scored = [t for r in readings for t in range(r.start + r.context, r.stop)]
    assert scored == [t for begin, count in stretches for t in range(begin, begin + count)]
    assert all(any(begin <= r.start < r.stop <= begin + count for begin, count in stretches) for r in readings)


@given(length=LENGTHS, targets=st.integers(1, 200))
def test_sliding_by_the_length_is_nonoverlapping(length: int, targets: int) -> None:
    sliding = protocol("sliding", length, 16, stride=length)
    assert list(sliding.readings([(0, targets)])) == list(
        protocol("nonoverlapping", length, 16).readings([(0, targets)])
    )


@given(length=st.integers(2, 40), targets=st.integers(1, 200))
def test_sliding_by_one_gives_every_target_all_the_context_that_fits(length: int, targets: int) -> None:
    for reading in list(protocol("sliding", length, 16, stride=1).readings([(0, targets)]))[1:]:
        assert reading.scored == 1
        assert reading.stop - reading.start == length


def test_names_give_masks_and_defaults() -> None:
    blockwise, window = protocol("blockwise", 100, 16), protocol("window", 100, 16)
    assert (blockwise.block, window.block) == (8, 16)
    assert isinstance(blockwise.mask, Blockwise)
    assert isinstance(window.mask, Window)
    assert protocol("blockwise", 100, 16, block=5).mask.block == 5  # type: ignore[union-attr]
    assert protocol("nonoverlapping", 100, 16).mask is None
    assert protocol("sliding", 100, 16).stride == 50
    sliding, apart = protocol("sliding", 9, 16, stride=2), protocol("nonoverlapping", 9, 16, per_document=4096)
    assert [str(one) for one in (blockwise, window, sliding, apart)] == [
        "blockwise, 8",
        "window, 16",
        "sliding, stride 2",
        "nonoverlapping, first 4,096 of each document",
    ]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("slidng", {}, "protocol: expected .*, got 'slidng'; did you mean 'sliding'"),
        ("sliding", {"stride": 0}, "stride: expected at least 1, got 0"),
        ("sliding", {"stride": 101}, "stride: expected at most the length 100, .* got 101"),
        ("nonoverlapping", {"stride": 5}, "stride: expected only with the protocol 'sliding', got 5"),
        ("sliding", {"block": 5}, "block: expected only with the protocols 'blockwise' and 'window', got 5"),
        ("window", {"block": 0}, "block: expected at least 1, got 0"),
        ("window", {"per_document": 0}, "per_document: expected at least 1, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        protocol(name, 100, 16, **options)
    with pytest.raises(ValueError, match="length: expected at least 1, got 0"):
        protocol("nonoverlapping", 0, 16)
