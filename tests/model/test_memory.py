"""The memory that there is, and sequences that cannot fit into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lengthen import Transformer, Window
from lengthen.model import memory

Make = Callable[..., Transformer]


def test_the_memory_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, limit = torch.device("cpu"), tmp_path / "memory.max"
    monkeypatch.setattr(memory, "LIMITS", ())
    there = memory.available(device)
    assert there > 1 << 28
    monkeypatch.setattr(memory, "LIMITS", (str(limit), str(tmp_path / "none")))
    for said, expected in (("max\n", there), ("1000\n", 1000), (f"{1 << 63}\n", there)):
        limit.write_text(said)
        assert memory.available(device) == expected


def test_a_token_takes_what_its_keys_and_values_take(make: Make) -> None:
    model = make(key_heads=2)
    cache = model.cache(room=64)
    model.extend(torch.zeros(1, 5, dtype=torch.int64), cache)
    assert cache.nbytes == 64 * memory.cached_token(model)


@pytest.mark.parametrize(
    ("prompt", "new", "options", "name"),
    [
        (200, 10, {}, "prompts"),
        (10, 200, {}, "max_new_tokens"),
        (60, 60, {"samples": 2}, "max_new_tokens"),
        (200, 10, {"cache": "reach"}, "prompts"),
        (10, 200, {"cache": "reach"}, None),
        (200, 10, {"cache": "reach", "mode": "certified"}, None),
        (200, 10, {"cache": "window", "mask": Window(8)}, None),
        (50, 50, {}, None),
    ],
)
def test_what_cannot_fit_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, prompt: int, new: int, options: dict[str, Any], name: str | None
) -> None:
    model = make()
    there = 150 * memory.cached_token(model)
    monkeypatch.setattr(memory, "available", lambda device: there)
    if name is None:
        model.stream([[1] * prompt], new, **options)
        return
    with pytest.raises(ValueError, match=rf"^{name}: expected keys and values that fit into memory, got \d × {prompt}"):
        model.stream([[1] * prompt], new, **options)


@pytest.mark.parametrize(("options", "refused"), [({}, True), ({"policy": "reach", "mode": "certified"}, False)])
def test_what_continues_a_prefix_is_counted_with_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], refused: bool
) -> None:
    model = make()
    prefix = model.prefix([1] * 100, **options)
    there = 150 * memory.cached_token(model)
    monkeypatch.setattr(memory, "available", lambda device: there)
    model.stream([[1] * 10], 40, prefix=prefix)
    if not refused:
        model.stream([[1] * 10], 41, prefix=prefix)
        return
    with pytest.raises(ValueError, match=r"^prompts: expected keys .* got 1 × 110 tokens with 41 new ones"):
        model.stream([[1] * 10], 41, prefix=prefix)
