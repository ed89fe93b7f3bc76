"""The Triton kernel that scores a chunk of logits: under its interpreter everywhere, compiled where there is a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from lengthen.model import IGNORED, linear_cross_entropy, loss

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

PROGRAM = """
import torch
from lengthen.model.loss import IGNORED, _score_and_pull
from lengthen.model.score_kernel import BLOCK, score

torch.manual_seed(0)
for rows, vocabulary in ((3, 5), (2, BLOCK), (2, BLOCK + 1), (4, 2 * BLOCK + 77), (1, 1)):
    logits = 4 * torch.randn(rows, vocabulary)
    targets = torch.randint(vocabulary, (rows,))
    targets[0] = vocabulary - 1
    if rows > 2:
        targets[1] = IGNORED
    expected, d_expected = _score_and_pull(logits.double(), targets)
    losses, d_logits = score(memory := logits.clone(), targets)
    assert d_logits.data_ptr() == memory.data_ptr(), "not in place"
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_logits.double(), d_expected, rtol=1e-4, atol=1e-6)
    print("compared", rows, vocabulary)

spread = torch.randn(3, 40)
wide = torch.zeros(3, 64)
wide[:, :40] = spread
targets = torch.tensor([0, 39, IGNORED])
losses, d_logits = score(wide[:, :40], targets)  # rows that do not touch
expected, d_expected = _score_and_pull(spread.double(), targets)
torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
torch.testing.assert_close(wide[:, :40].double(), d_expected, rtol=1e-4, atol=1e-6)
assert not wide[:, 40:].any(), "wrote past the vocabulary"
print("compared strides")

extreme = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4], [torch.nan, 1.0, 2.0], [1.0, 2.0, torch.nan]])
losses, _ = score(extreme, torch.tensor([2, 0, 1, 0]))
assert losses[0] == 2e4 and abs(losses[1] - 1.0986123) < 1e-3 and losses[2:].isnan().all(), losses
print("compared extremes")

logits = torch.randn(4, 9)
logits[3, 0] = torch.nan
losses, d_logits = score(logits, torch.tensor([9, -1, 4, IGNORED]))
assert losses[:2].isnan().all(), "a target that is no token went unnoticed"
assert losses[2].isfinite() and losses[3] == 0 and not d_logits[3].any(), "an ignored row counts"
print("compared odd targets")
"""


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device the compiled kernel is tested")
def test_the_interpreted_kernel_is_the_formula() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compared") == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 4096, 4097, 50304])
def test_the_kernel_on_a_gpu(dtype: torch.dtype, vocabulary: int) -> None:
    from lengthen.model.score_kernel import score

    torch.manual_seed(0)
    logits = (4 * torch.randn(300, vocabulary, device="cuda")).to(dtype)
    targets = torch.randint(vocabulary, (300,), device="cuda")
    targets[::7] = IGNORED
    expected, d_expected = loss._score_and_pull(logits.double(), targets)
    losses, d_logits = score(logits.clone(), targets)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-4)
    one_rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(d_logits.double(), d_expected, rtol=max(one_rounding, 1e-4), atol=1e-6)
    logits[1, -1] = torch.nan
    assert score(logits, targets)[0].isnan().tolist() == [row == 1 for row in range(300)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_loss_on_a_gpu_is_the_loss_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(loss, "_chunk_bytes", lambda _: 100_000)
    hidden, weight, targets = torch.randn(500, 16), torch.randn(300, 16), torch.randint(300, (500,))
    targets[::5] = IGNORED
    found = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device, copy=True).requires_grad_() for x in (hidden, weight)]
        total, losses = linear_cross_entropy(*leaves, targets.to(device))
        total.backward()
        found.append(
            [x.detach().cpu() for x in (total, losses, *(leaf.grad for leaf in leaves if leaf.grad is not None))]
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
