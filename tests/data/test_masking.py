"""An encoder's task: how many tokens are hidden, how, and that a token's fate depends on its number alone."""

from __future__ import annotations

import pytest
import torch

from lengthen.data.masking import Masking
from lengthen.model import IGNORED

MASK, VOCABULARY = 257, 258


def test_fractions_are_80_10_10() -> None:
    """Over 200,000 tokens; bounds are five standard deviations."""
    torch.manual_seed(0)
    ids = torch.randint(250, (100, 2000))  # so that neither the mask nor 250 … 256 stand there by themselves
    hidden, targets = Masking(0.15, MASK, VOCABULARY)(ids, torch.arange(ids.numel()).view(ids.shape))
    chosen = targets != IGNORED
    count = int(chosen.sum())
    assert count / ids.numel() == pytest.approx(0.15, abs=5 * (0.15 * 0.85 / ids.numel()) ** 0.5)
    assert torch.equal(targets[chosen], ids[chosen])
    assert torch.equal(hidden[~chosen], ids[~chosen])
    masked = int((hidden[chosen] == MASK).sum()) / count
    stayed = int((hidden[chosen] == ids[chosen]).sum()) / count
    for fraction, expected in ((masked, 0.8), (stayed, 0.1), (1 - masked - stayed, 0.1)):
        assert fraction == pytest.approx(expected, abs=5 * (expected * (1 - expected) / count) ** 0.5 + 1 / VOCABULARY)
    other = hidden[chosen & (hidden != ids) & (hidden != MASK)]
    assert other.unique().numel() > 200, "random tokens are drawn from the whole vocabulary"
    assert int(other.max()) < VOCABULARY


def test_a_token_depends_on_the_seed_and_its_number_alone() -> None:
    torch.manual_seed(0)
    ids, numbers, masking = torch.randint(250, (4, 50)), torch.arange(200).view(4, 50), Masking(0.3, MASK, VOCABULARY)
    before, state = ids.clone(), torch.get_rng_state()
    whole = masking(ids, numbers)
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator was touched"
    assert torch.equal(ids, before)
    part = (slice(1, 3), slice(7, 30))
    for one, all_of_it in zip(masking(ids[part], numbers[part]), whole, strict=True):
        assert torch.equal(one, all_of_it[part])
    assert not torch.equal(masking(ids, numbers + 200)[1], whole[1])
    assert not torch.equal(Masking(0.3, MASK, VOCABULARY, seed=1)(ids, numbers)[1], whole[1])
