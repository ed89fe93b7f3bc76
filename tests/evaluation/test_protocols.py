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
        readings = list(one.readings(targets))
        scored = [t for r in readings for t in range(r.start + r.context + 1, r.stop + 1)]
        assert scored == [*range(1, targets + 1)]
        assert len(readings) == one.count(targets)
        assert all(r.stop - r.start <= length and r.scored > 0 for r in readings)
        assert sum(r.scored for r in readings) == targets


@given(length=LENGTHS, targets=st.integers(1, 200))
def test_sliding_by_the_length_is_nonoverlapping(length: int, targets: int) -> None:
    sliding = protocol("sliding", length, 16, stride=length)
    assert list(sliding.readings(targets)) == list(protocol("nonoverlapping", length, 16).readings(targets))


@given(length=st.integers(2, 40), targets=st.integers(1, 200))
def test_sliding_by_one_gives_every_target_all_the_context_that_fits(length: int, targets: int) -> None:
    for reading in list(protocol("sliding", length, 16, stride=1).readings(targets))[1:]:
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
    assert [str(one) for one in (blockwise, window, protocol("sliding", 9, 16, stride=2))] == [
        "blockwise, 8",
        "window, 16",
        "sliding, stride 2",
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
    ],
)
def test_what_makes_no_sense_is_refused(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        protocol(name, 100, 16, **options)
    with pytest.raises(ValueError, match="length: expected at least 1, got 0"):
        protocol("nonoverlapping", 0, 16)
