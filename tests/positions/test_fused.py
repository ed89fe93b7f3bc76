"""Queries, keys and values rotated and split in one pass: as the rotation defines it, compiled or not, both ways."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from lengthen import ModelConfig, Transformer
from lengthen.positions import build, fused
from lengthen.positions.rotation import Rotated, rotate_pairs

SHAPES = [
    (2, 5, 4, 4, 8),
    (1, 7, 3, 1, 20),
    (2, 9, 12, 4, 64),
    (3, 1, 1, 1, 2),
]  # batch, length, heads, key heads, width


def tables_of(length: int, width: int) -> Tensor:
    """Return cos and sin of the queries, and of the keys, which have their own as in xPos."""
    placed = build("rotary", heads=1, head_dim=width, width=width).at(torch.arange(length), torch.float32, False)
    assert isinstance(placed, Rotated)
    return placed.tables * torch.tensor([1.0, 1.0, 1.5, 1.5]).view(4, 1, 1)


@pytest.mark.parametrize(("batch", "length", "heads", "key_heads", "width"), SHAPES)
def test_is_split_and_rotated_as_the_method_does(
    batch: int, length: int, heads: int, key_heads: int, width: int
) -> None:
    tables = tables_of(length, width)
    first = torch.randn(batch, length, heads + 2 * key_heads, width, requires_grad=True)
    second = first.detach().clone().requires_grad_()
    got = fused.split(first, heads, key_heads, tables)
    q, k, v = (part.transpose(1, 2) for part in torch.split(second, [heads, key_heads, key_heads], dim=2))
    expected = rotate_pairs(q, tables[0], tables[1], "halves"), rotate_pairs(k, tables[2], tables[3], "halves"), v
    pulls = [torch.randn_like(part) for part in got]
    torch.autograd.backward(got, pulls)
    torch.autograd.backward(expected, pulls)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-6, atol=1e-6)


def test_the_ops_are_registered_properly() -> None:
    tables = tables_of(6, 8)
    qkv = torch.randn(2, 6, 8, 8, requires_grad=True)
    torch.library.opcheck(fused.split_rotated, (qkv, 4, 2, tables))
    parts = (torch.randn(2, 6, heads, 8) for heads in (4, 2, 2))
    torch.library.opcheck(fused.join_rotated, (*parts, tables))


def test_it_is_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "split", lambda *_: pytest.fail("on the CPU, plain torch"))
    placed = build("rotary", heads=4, head_dim=8, width=32).at(torch.arange(6), torch.float32, False)
    assert [x.shape[1] for x in placed.split(torch.randn(2, 6, 8, 8), 4, 2)] == [4, 2, 2]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize("positions", ["rotary", "xpos"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_uses_it_is_the_same(positions: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(vocab_size=50, layers=2, width=32, heads=4, key_heads=2, train_length=16, positions=positions)
    model, ids = Transformer(config), torch.randint(50, (2, 41))

    def gradients() -> list[Tensor]:
        total = model(ids[:, :-1], ids[:, 1:])
        return [total, *torch.autograd.grad(total, list(model.parameters()))]

    expected = gradients()

    def split(placed: Rotated, qkv: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        return fused.split(qkv, heads, key_heads, placed.tables)  # as on a GPU

    monkeypatch.setattr(Rotated, "split", split)
    if compiled:
        torch.compiler.reset()
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


KERNEL = f"""
import torch
from lengthen.positions import fused, fused_kernel
for batch, length, heads, key_heads, width in {SHAPES}:
    tables = torch.randn(4, length, width // 2)
    qkv = torch.randn(batch, length, heads + 2 * key_heads, width)
    got = fused_kernel.split(qkv, heads, key_heads, tables)
    for ours, theirs in zip(got, fused.split_rotated(qkv, heads, key_heads, tables), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    parts = [torch.randn(batch, n, length, width).transpose(1, 2) for n in (heads, key_heads, key_heads)]
    torch.testing.assert_close(
        fused_kernel.join(*parts, tables), fused.join_rotated(*parts, tables), rtol=1e-6, atol=1e-6
    )
print("same")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_under_triton_s_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "same\n", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from lengthen.positions import fused_kernel

    batch, length, heads, key_heads, width = shape
    tables = torch.randn(4, length, width // 2)
    qkv = torch.randn(batch, length, heads + 2 * key_heads, width).to(dtype)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    got = fused_kernel.split(qkv.cuda(), heads, key_heads, tables.cuda())
    expected = fused.split_rotated(qkv, heads, key_heads, tables)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, **tolerance)
    parts = [torch.randn(batch, n, length, width).to(dtype).transpose(1, 2) for n in (heads, key_heads, key_heads)]
    joined = fused_kernel.join(*(part.cuda() for part in parts), tables.cuda())
    torch.testing.assert_close(joined.cpu(), fused.join_rotated(*parts, tables), **tolerance)
