"""Queries, keys and values may lie in memory as they like: transposed, side by side, repeated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen import Bidirectional, Causal, Decay, Linear, Table, Window, alibi_slopes, attention

BATCH, HEADS, KEY_HEADS, LENGTH, WIDTH = 2, 4, 2, 40, 8
Make = Callable[[torch.dtype], tuple[Tensor, Tensor, Tensor]]


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def transposed(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A cache that is stored `[batch, heads, head_dim, keys]`."""
    q, k, v = (randn(BATCH, heads, WIDTH, LENGTH, dtype=dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    return q.mT, k.mT, v.mT


def interleaved(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in turn, feature by feature."""
    k, v = randn(BATCH, KEY_HEADS, LENGTH, WIDTH, 2, dtype=dtype).unbind(-1)
    return randn(BATCH, HEADS, LENGTH, 2 * WIDTH, dtype=dtype)[..., ::2], k, v


def expanded(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """One number for all features."""
    shapes = ((BATCH, HEADS, LENGTH, 1), (BATCH, KEY_HEADS, LENGTH, 1), (BATCH, KEY_HEADS, LENGTH, 1))
    q, k, v = (randn(*shape, dtype=dtype).expand(-1, -1, -1, WIDTH) for shape in shapes)
    return q, k, v


def projected(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Heads side by side, as projections give them; one key head for all, every second value."""
    q, k, v = (randn(BATCH, LENGTH, HEADS, WIDTH, dtype=dtype).transpose(1, 2) for _ in range(3))
    return q, k[:, :1].expand(-1, KEY_HEADS, -1, -1), v[:, ::2]


def same_for_all(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence for the whole batch, from the middle of a longer one."""
    shapes = ((1, HEADS, LENGTH + 9, WIDTH), (1, KEY_HEADS, LENGTH + 9, WIDTH), (1, KEY_HEADS, LENGTH + 9, WIDTH))
    q, k, v = (randn(*shape, dtype=dtype)[:, :, 5 : 5 + LENGTH].expand(BATCH, -1, -1, -1) for shape in shapes)
    return q, k, v


LAYOUTS: dict[str, Make] = {
    make.__name__: make for make in (transposed, interleaved, expanded, projected, same_for_all)
}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "both": {"mask": Bidirectional()},
    "alibi": {"bias": Linear(alibi_slopes(2 * HEADS)[::2])},
    "table, window": {
        "bias": Table(torch.arange(1.0 * LENGTH * HEADS).sin().view(LENGTH, HEADS).mT),
        "mask": Window(9),
    },
    "decay": {"decay": Decay(torch.linspace(0.9, 1, 2 * WIDTH)[::2])},
}


def results(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, options: dict[str, Any], backend: str | None) -> Any:
    out = attention(q, k, v, **options, backend=backend)
    return out, *torch.autograd.grad((out * weight.to(out.dtype)).sum(), (q, k, v))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", [None, "chunked", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_layout_gives_the_same(layout: str, options: str, backend: str | None, dtype: torch.dtype) -> None:
    views = [x.requires_grad_() for x in LAYOUTS[layout](dtype)]
    plain = [x.detach().double().contiguous().requires_grad_() for x in views]
    weight = randn(BATCH, HEADS, LENGTH, WIDTH, dtype=dtype)
    given = {"mask": Causal()} | OPTIONS[options]
    got = results(*views, weight, given, backend)
    expected = results(*plain, weight, given, "reference")
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        assert ours.dtype == dtype
        within = max(2 * torch.finfo(dtype).eps, 5e-6) * theirs.abs().max().item()
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=within, msg=lambda text, n=name: f"{n}: {text}")
