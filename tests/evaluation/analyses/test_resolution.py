"""Attention resolution against its formula, on scores made by hand; and what training short does to it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lengthen import Bidirectional, Blockwise, Causal, Linear, ModelConfig, Transformer, Window
from lengthen.attention import Mask
from lengthen.data import Corpus, Windows, prepare
from lengthen.evaluation.analyses.resolution import Resolution, mean_scores, of_model, resolution, score_sums
from lengthen.evaluation.capture import CHUNK_SCORES, Call

SCORES = st.lists(st.floats(-30, 30), min_size=2, max_size=40)


def by_hand(s: list[float]) -> float:
    """Return R(s) as facts have it: sums to N over s[0 … N + 1]."""
    last = len(s) - 2
    top = math.fsum(math.exp(s[i]) * (math.exp(s[i]) - math.exp(s[i + 1])) for i in range(last + 1))
    return top / math.fsum(math.exp(s[i]) for i in range(last + 1)) ** 2


@given(SCORES)
def test_the_formula(s: list[float]) -> None:
    found = resolution(torch.tensor(s, dtype=torch.float64))
    assert found == pytest.approx(by_hand(s), rel=1e-9, abs=1e-12)
    assert found <= 1


def test_hand_made_values() -> None:
    half = torch.log(torch.tensor([1, 0.5, 0.25, 0.125], dtype=torch.float64))
    # (1·½ + ½·¼ + ¼·⅛) / 1.75²
    assert resolution(half) == pytest.approx((1 / 2 + 1 / 8 + 1 / 32) / 1.75**2, rel=1e-12)
    assert resolution(torch.tensor([0.0, 5.0])) == pytest.approx(1 - math.exp(5))  # a farther key that scores higher


@given(SCORES, st.floats(-2000, 2000))
def test_blind_to_a_shift(s: list[float], shift: float) -> None:
    """Also where e^s alone would overflow."""
    assert resolution(torch.tensor(s, dtype=torch.float64) + shift) == pytest.approx(by_hand(s), rel=1e-7, abs=1e-9)


def test_what_tells_nothing_apart_has_none_unless_the_end_is_counted() -> None:
    flat = torch.full((11,), 3.0)
    assert resolution(flat) == 0
    walled = torch.cat((flat, torch.tensor([-torch.inf])))
    assert resolution(walled) == pytest.approx(1 / 11**2)


@pytest.mark.parametrize("s", [torch.zeros(1), torch.zeros(0), torch.zeros(2, 2), [0.0, 1.0]])
def test_too_few_scores(s: object) -> None:
    with pytest.raises(ValueError, match="s: expected scores at two distances or more"):
        resolution(s)  # type: ignore[arg-type]


def scores_of(q: torch.Tensor, k: torch.Tensor, most: int = CHUNK_SCORES, **options: Any) -> torch.Tensor:
    return mean_scores(*score_sums(Call(0, q, k, k, **options), most))


def averages(scores: torch.Tensor, slopes: list[float], block: int | None) -> list[float]:
    """Return the mean score at each distance, pair by pair, of hand-made scores [batch, heads, length, length]."""
    sums: dict[int, list[float]] = {}
    batch, heads, length, _ = scores.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                start = 0 if block is None else max(0, (i // block - 1) * block)
                for j in range(start, i + 1):
                    sums.setdefault(i - j, []).append(float(scores[b, h, i, j]) - slopes[h] * (i - j))
    return [math.fsum(sums[n]) / len(sums[n]) for n in range(len(sums))]


@given(
    length=st.integers(2, 14),
    batch=st.integers(1, 3),
    block=st.none() | st.integers(1, 6),
    seed=st.integers(0, 2**16),
    most=st.sampled_from([1, 60, 10**6]),
)
def test_mean_scores_and_resolution_of_hand_made_scores(
    length: int, batch: int, block: int | None, seed: int, most: int
) -> None:
    """Keys that are the identity make a query's scores whatever one wants."""
    draw = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(batch, 2, length, length, generator=draw, dtype=torch.float64)
    keys = torch.eye(length, dtype=torch.float64).expand(batch, 2, -1, -1)
    slopes = [0.5, 0.0625]
    mask: Mask = Causal() if block is None else Blockwise(block)
    s = scores_of(scores, keys, most, bias=Linear(torch.tensor(slopes)), mask=mask, scale=1)
    right = averages(scores, slopes, block)
    assert s.tolist() == pytest.approx(right, rel=1e-9, abs=1e-12)
    if len(right) > 1:
        assert resolution(s) == pytest.approx(by_hand(right), rel=1e-9, abs=1e-12)


def test_how_far_scores_go() -> None:
    """To the farthest distance that is seen, and no farther: the last is the boundary's neighbour, s[N + 1]."""
    q = torch.randn(1, 2, 40, 8)
    assert len(scores_of(q, q)) == 40
    assert len(scores_of(q, q, mask=Blockwise(8))) == 16
    assert len(scores_of(q, q, mask=Blockwise(30))) == 40
    assert len(scores_of(q, q, mask=Window(5))) == 5
    torch.testing.assert_close(scores_of(q, q, mask=Bidirectional()), scores_of(q, q))  # what is ahead counts not


def small(positions: str, train_length: int = 16, heads: int = 2) -> Transformer:
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(258, layers=2, width=64, heads=heads, train_length=train_length, positions=positions)
    )


def test_a_models_resolution_over_batches() -> None:
    """However texts are spread over batches; a layer's scores are the mean over them, before the formula."""
    model = small("alibi").double()
    ids = torch.randint(258, (5, 24))
    one = of_model(model, [ids])
    two = of_model(model, [ids[:2], ids[2:]])
    assert len(one.layers) == 2
    assert two.layers == pytest.approx(one.layers, rel=1e-9)
    assert one.model == pytest.approx(sum(one.layers) / 2)
    assert of_model(model, [ids], Blockwise(24)).layers == one.layers
    assert of_model(model, [ids], Blockwise(4)).layers != one.layers
    with pytest.raises(ValueError, match="at least one text"):
        of_model(model, [])


def test_an_untrained_alibi_models_resolution_is_its_biass() -> None:
    """With no scores but the bias's, s[n] = −n·mean slope, the same in every layer."""
    model = small("alibi").double()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.zero_()
            block.attention.qkv.bias.zero_()
    slope = float(model.method.bias(0).slopes.mean())
    found = of_model(model, [torch.zeros(1, 30, dtype=torch.int64)])
    assert found == Resolution(found.layers)
    assert found.layers == pytest.approx([by_hand([-slope * n for n in range(30)])] * 2, rel=1e-9)


def trained(positions: str, corpus: Corpus, steps: int = 120) -> Transformer:
    """Return a model trained for a few seconds at 64 tokens."""
    model = small(positions, train_length=64, heads=4)
    rate, windows = 3e-3, Windows(corpus["train"], length=64, batch=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        batch = windows.batch(step)
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 20)
        model(batch.ids, batch.targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.slow
def test_beyond_its_training_length_rotary_loses_resolution_and_alibi_does_not(tmp_path: Path) -> None:
    """Trained at 64, read at 512; with blockwise attention rotary keeps it."""
    library = Path(os.__file__).parent
    sources = [library / f"{name}.py" for name in ("argparse", "doctest", "inspect", "pydoc", "tarfile", "typing")]
    corpus = prepare(sources, tmp_path, validation=[library / "pickle.py"], workers=1)
    text = corpus["validation"]

    def at(model: Transformer, length: int, mask: Mask | None = None) -> float:
        texts = [torch.from_numpy(text.read(p * length, (p + 1) * length)) for p in range(8192 // length)]
        return of_model(model, [torch.stack(texts)], mask).model

    rotary, alibi = trained("rotary", corpus), trained("alibi", corpus)
    short, long, blocks = at(rotary, 64), at(rotary, 512), at(rotary, 512, Blockwise(32))
    assert short > 2e-3, "nothing was learned that could be lost"
    assert long < 0.2 * short
    assert blocks == pytest.approx(short, rel=0.1)
    assert at(alibi, 512) > 0.98 * at(alibi, 64)
