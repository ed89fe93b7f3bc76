"""Available memory, and the memory of a cache: what cannot fit is refused before generation starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lengthen.model.transformer import Transformer

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def available(device: torch.device) -> int:
    """Return the bytes of memory that a device has, or that this process may have of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = [Path(path).read_text().strip() for path in LIMITS if Path(path).is_file()]
    return min([there, *(int(limit) for limit in said if limit.isdigit())])


def size(count: int) -> str:
    """Return a number of bytes for reading, in MB, GB or TB."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9)):
        if count >= scale:
            return f"{count // scale:,} {unit}"
    return f"{count // 10**6:,} MB"


def cached_token(model: Transformer) -> int:
    """Return the bytes of the keys and values of one token."""
    config = model.config
    return 2 * config.layers * config.key_value_heads * config.head_width * model.embedding.weight.element_size()


def refuse_long(model: Transformer, sequences: int, prompt: int, new: int, policy: str, mode: str) -> None:
    """Refuse sequences whose keys and values cannot fit into memory.

    "full" makes room for all tokens when it begins. "reach" in exact mode keeps a prompt in host memory, and whether
    there will be as many new tokens as it may make is not known. The others do not grow.
    """
    exact = policy == "reach" and mode == "exact"
    if policy != "full" and not exact:
        return
    device = torch.device("cpu") if exact else model.embedding.weight.device
    tokens = prompt if exact else prompt + new
    needed, there = sequences * tokens * cached_token(model), available(device)
    if needed > there:
        name = "prompts" if exact or prompt > new else "max_new_tokens"
        more = "" if exact else f" with {new:,} new ones"
        raise ValueError(
            f"{name}: expected keys and values that fit into memory, got {sequences:,} × {prompt:,} tokens{more}: they "
            f"take {size(needed)}, and there are {size(there)}; cache=reach with mode=certified does not grow"
        )
