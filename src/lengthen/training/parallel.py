"""One process or many (torch.distributed): the processes that torchrun started, and how a model is sharded over them.

    replicate   every process holds the model, gradients are averaged (DistributedDataParallel)
    shard       weights, gradients and optimizer state are sharded over all processes (FSDP2, `fully_shard`)
    hybrid      sharded within a node, replicated over nodes

One process alone needs none of it, and the rest of the loop does not ask which it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from lengthen.config import ModelConfig
from lengthen.model import Transformer

T = TypeVar("T")

SHARD_FROM = 500_000_000  # parameters: from here on `auto` shards, since copies of AdamW's state would fill a GPU

# Dense bfloat16 peaks in FLOP/s, from the makers' data sheets (without sparsity); the first name that fits counts.
PEAKS = {
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


@dataclass(frozen=True)
class World:
    """The processes of this run, and this one's place among them."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, element by element."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def agree(self, problem: BaseException | None) -> None:
        """Raise on every process if any has a problem, so that none waits for one that has stopped."""
        failed = self.sum(torch.tensor(float(problem is not None), device=self.device))
        if problem is not None:
            raise problem
        if failed.item():
            raise OSError(f"{int(failed.item())} of {self.size} processes failed; their own messages say why")

    def all_or_none(self, action: Callable[[], T]) -> T:
        """Return what an action gives on this process once it has succeeded on every one; else raise on all of them."""
        try:
            result = action()
        except Exception as problem:
            self.agree(problem)
            raise
        self.agree(None)
        return result

    def peak_flops(self) -> float | None:
        """Return what one device could do in bfloat16, or None where it is not known."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((peak for known, peak in PEAKS.items() if known in name), None)


def pick_device(name: str | None = None) -> torch.device:
    """Return the device of this name; without one, the process's GPU where there is one. Others are refused."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if name is None else name
    try:
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
        if chosen.type == "cpu" and chosen.index is not None:
            raise RuntimeError("the CPU has no number")
        torch.ones((), device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as problem:  # of a device that torch lacks
        why = re.split(r"\n|\. ", str(problem))[0]
        raise ValueError(f"device: expected cpu, cuda or cuda:1, and one that is here, got {kind!r}: {why}") from None
    return chosen


@contextmanager
def world(device: str | None = None) -> Iterator[World]:
    """Join the processes that torchrun started, if it did, and leave them at the end."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    chosen = pick_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(0, 1, chosen)
        return
    if chosen.type == "cuda":
        dist.init_process_group("nccl", device_id=chosen)
    else:
        dist.init_process_group("gloo")
    try:
        yield World(rank, size, chosen)
    finally:
        dist.destroy_process_group()


def spread_as(config: ModelConfig, mode: str) -> str:
    """Return how a model is spread over several processes, where `auto` leaves it open."""
    if mode != "auto":
        return mode
    return "shard" if config.parameters >= SHARD_FROM else "replicate"


def spread(model: Transformer, here: World, mode: str, precision: torch.dtype) -> nn.Module:
    """Return what the loop calls in place of the model; the model itself holds this process's part of the weights."""
    if here.size == 1:
        return model
    mode = spread_as(model.config, mode)
    if mode == "replicate":
        ids = [here.device.index] if here.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    shape: tuple[int, ...] = (here.size,)
    if mode == "hybrid":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", here.size))
        shape = (here.size // local, local)
    mesh = init_device_mesh(here.device.type, shape, mesh_dim_names=("nodes", "local")[-len(shape) :])
    # Blocks travel in 16 bits. What is left at the root stays in 32: there are the position method's slopes and tables,
    # which 16 bits would round.
    narrow = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=narrow if precision != torch.float32 else MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "losses")  # validation's
    return model


@contextmanager
def last_pass(model: nn.Module, last: bool) -> Iterator[None]:
    """Let gradients travel between processes in the last of a step's passes alone."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield
