"""Decoding with a cache is the forward without one; batches, samples and prefixes give what each prompt gives alone."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Blockwise, Causal, Transformer, Window
from lengthen.positions import names

Make = Callable[..., Transformer]
METHODS = [*names(), "rotary+alibi", "xpos+alibi"]
BIASED = ("alibi", "kerple", "sandwich", "t5", "rotary+alibi", "xpos+alibi")
MASKS: dict[str, Callable[[], Any]] = {
    "causal": Causal,
    "window": lambda: Window(7),
    "blockwise": lambda: Blockwise(5),
}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "window": {"policy": "window"},
    "exact": {"policy": "reach", "mode": "exact", "page": 3},
    "certified": {"policy": "reach", "mode": "certified", "page": 3},
}
LENGTH = 23
STARTS = [0, 9, 22]  # where three sequences begin


def fitting(method: str, mask: str, policy: str) -> bool:
    if policy == "window":
        return mask != "causal"
    return policy not in ("exact", "certified") or method in BIASED


CASES = [one for one in product(METHODS, MASKS, POLICIES) if fitting(*one)]


def read_in_parts(model: Transformer, ids: Tensor, chunk: int, starts: list[int] | None, **options: Any) -> Tensor:
    cache = model.cache(starts=starts, **options)
    parts = [model.extend(ids[:, i : i + chunk], cache) for i in range(0, ids.shape[1], chunk)]
    assert cache.length == ids.shape[1]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("method", "mask", "policy"), CASES)
def test_with_a_cache_it_is_the_plain_forward(make: Make, method: str, mask: str, policy: str) -> None:
    steep = {"position_options": {"slopes": [16.0, 8.0, 4.0, 1.0]}} if "alibi" in method else {}  # heads forget early
    model = make(positions=method, layers=1, key_heads=2, **steep)
    ids = torch.randint(19, (3, LENGTH))
    plain = model.hidden(ids, MASKS[mask]())
    # A prefix of each sequence that is left out is padding to the cache; alone, the rest is a sequence of its own.
    alone = [model.hidden(ids[b : b + 1, start:], MASKS[mask]()) for b, start in enumerate(STARTS)]
    options = {**POLICIES[policy], "mask": MASKS[mask](), "tolerance": 1e-13}
    for chunk in (1, 3, 7, LENGTH):
        found = read_in_parts(model, ids, chunk, None, **options)
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
        padded = read_in_parts(model, ids, chunk, STARTS, **options)
        for b, start in enumerate(STARTS):
            torch.testing.assert_close(padded[b : b + 1, start:], alone[b], rtol=1e-10, atol=1e-10)
