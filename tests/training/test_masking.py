"""An encoder's task: how many tokens are hidden, how, and that a row depends on its seed alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lengthen.model import IGNORED
from lengthen.training.masking import hide

MASK, VOCABULARY = 257, 258


def test_shares_are_80_10_10() -> None:
    """Over 200,000 tokens; bounds are five standard deviations."""
    torch.manual_seed(0)
    ids = torch.randint(250, (100, 2000))  # so that neither the mask nor 250 … 256 stand there by themselves
    hidden, targets = hide(ids, 0.15, MASK, VOCABULARY, list(range(100)))
    chosen = targets != IGNORED
    count = int(chosen.sum())
    assert count / ids.numel() == pytest.approx(0.15, abs=5 * (0.15 * 0.85 / ids.numel()) ** 0.5)
    assert torch.equal(targets[chosen], ids[chosen])
    assert torch.equal(hidden[~chosen], ids[~chosen])
    masked = int((hidden[chosen] == MASK).sum()) / count
    stayed = int((hidden[chosen] == ids[chosen]).sum()) / count
    swapped = 1 - masked - stayed
    for share, expected in ((masked, 0.8), (stayed, 0.1), (swapped, 0.1)):
        assert share == pytest.approx(expected, abs=5 * (expected * (1 - expected) / count) ** 0.5 + 1 / VOCABULARY)
    other = hidden[chosen & (hidden != ids) & (hidden != MASK)]
    assert other.unique().numel() > 200, "random tokens are drawn from the whole vocabulary"
    assert int(other.max()) < VOCABULARY


def test_a_row_depends_on_its_seed_alone() -> None:
    torch.manual_seed(0)
    ids = torch.randint(250, (4, 50))
    state = torch.get_rng_state()
    whole = hide(ids, 0.3, MASK, VOCABULARY, [5, 6, 7, 8])
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator was touched"
    for row, seed in ((0, 5), (3, 8)):
        alone = hide(ids[row : row + 1], 0.3, MASK, VOCABULARY, [seed])
        assert torch.equal(alone[0][0], whole[0][row])
        assert torch.equal(alone[1][0], whole[1][row])
    same = hide(ids[:1].expand(2, -1), 0.3, MASK, VOCABULARY, [5, 5])
    assert torch.equal(same[1][0], same[1][1])
    other = hide(ids[:1], 0.3, MASK, VOCABULARY, [9])
    assert not torch.equal(other[1][0], whole[1][0])


def test_what_is_given_is_not_changed() -> None:
    ids = torch.randint(250, (2, 50))
    before = ids.clone()
    hide(ids, 0.5, MASK, VOCABULARY, [0, 1])
    assert torch.equal(ids, before)


@given(length=st.integers(1, 9), share=st.floats(0.001, 0.999), seed=st.integers(0, 2**63 - 1))
def test_every_row_has_a_target(length: int, share: float, seed: int) -> None:
    ids = torch.arange(2 * length).view(2, length)
    hidden, targets = hide(ids, share, MASK, VOCABULARY, [seed, max(0, seed - 1)])
    assert ((targets != IGNORED).sum(1) >= 1).all()
    assert hidden.shape == targets.shape == ids.shape
