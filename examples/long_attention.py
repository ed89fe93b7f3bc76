"""ALiBi attention at growing lengths, beside torch's causal attention without any bias.

    python examples/long_attention.py

Each head reads until what is unread is proven to weigh less than rounding, so time grows in proportion to the length,
not to its square. The table has the time, and how many keys a query reads on average. Half a minute on two cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen import Linear, alibi_slopes, attention, reach

HEADS, HEAD_DIM = 8, 64


def milliseconds(call: Callable[[], Tensor], repeats: int = 3) -> float:
    """Return the shortest of a few runs after a first one: what else the machine does only adds to it."""
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    lengths = parser.parse_args().lengths
    torch.manual_seed(0)
    bias = Linear(alibi_slopes(HEADS))
    print(f"{'':>8}   {'ALiBi, lengthen':^21}   {'no bias, torch':^21}")
    print(f"{'length':>8}   {'ms':>8} {'keys read':>12}   {'ms':>8} {'keys read':>12}")
    for length in lengths:
        q, k, v = torch.randn(3, 1, HEADS, length, HEAD_DIM)
        ours = milliseconds(partial(attention, q, k, v, bias=bias))
        torchs = milliseconds(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
        read = reach(q, k, bias).double().mean().item()
        print(f"{length:>8,}   {ours:>8.1f} {read:>12,.0f}   {torchs:>8.1f} {(length + 1) / 2:>12,.0f}", flush=True)


if __name__ == "__main__":
    main()
