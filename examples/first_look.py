"""A first look at lengthen's attention, in under a minute on two cores: `python examples/first_look.py`.

It prints the position methods, checks that decoding with a cache gives what one pass over the whole sequence gives, and
times ALiBi attention beside torch's causal attention without any bias, from 1,024 to 16,384 positions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import lengthen
from lengthen import Causal, Linear, alibi_slopes, attention, positions

HEADS, HEAD_DIM = 8, 64
SIZES = {"heads": HEADS, "head_dim": HEAD_DIM, "width": HEADS * HEAD_DIM}
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description="A first look at lengthen, in under a minute on two cores.")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="lengths to time attention at")
    lengths = parser.parse_args().lengths
    torch.manual_seed(0)
    began = time.perf_counter()
    print(f"lengthen {lengthen.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads on the CPU")
    with torch.no_grad():
        show_methods()
        show_decoding()
        show_growth(lengths)
    show_rest()
    print(f"\nThat took {time.perf_counter() - began:.0f} seconds.")


def show_methods() -> None:
    heading("Position methods", 'lengthen.positions.build("alibi", heads=8, head_dim=64, width=512)')
    for name, summary in positions.summaries().items():
        print(f"  {name:<11} {summary}")


def show_decoding(length: int = 384, prompt: int = 128) -> None:
    heading(
        "Decoding with a cache",
        f"{length} positions: all at once, and a prompt of {prompt} followed by one token at a time.",
        "The same call serves both: the last query stands at the last key.",
    )
    print(f"  {'method':<11} {'largest difference':>18}   largest output")
    for name in ("alibi", "rotary", "xpos"):
        method = positions.build(name, **SIZES)
        q, k, v = torch.randn(3, 1, HEADS, length, HEAD_DIM)
        place = torch.arange(length)
        q, k = method.rotate(q, place), method.rotate(k, place)
        bias, decay = method.bias(max_distance=length - 1), method.decay()
        whole = attention(q, k, v, bias=bias, decay=decay, mask=Causal())
        steps = [slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, length))]
        cached = torch.cat(
            [
                attention(q[:, :, new], k[:, :, : new.stop], v[:, :, : new.stop], bias=bias, decay=decay, mask=Causal())
                for new in steps
            ],
            dim=2,
        )
        print(f"  {name:<11} {(cached - whole).abs().max():>18.1e}   {whole.abs().max():.1f}", flush=True)


def show_growth(lengths: Sequence[int]) -> None:
    heading(
        "Reach: ALiBi attention need not be quadratic",
        f"{HEADS} heads × {HEAD_DIM}, float32, random normal inputs, forward. Each head reads until what is unread is",
        "proven to weigh less than rounding does; lengthen.reach says how far that is (the proof: docs/reach.md).",
    )
    print(f"  {'':>8} {'ALiBi, lengthen':>27}   {'no bias, torch is_causal':>27}")
    print(f"  {'length':>8} {'ms':>9} {'keys per query':>17}   {'ms':>9} {'keys per query':>17}")
    bias = Linear(alibi_slopes(HEADS))
    rows = []
    for length in lengths:
        q, k, v = torch.randn(3, 1, HEADS, length, HEAD_DIM)
        ours = milliseconds(partial(attention, q, k, v, bias=bias, mask=Causal()))
        torchs = milliseconds(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
        reads = lengthen.reach(q, k, bias).double().mean().item()
        rows.append((ours, torchs))
        print(f"  {length:>8,} {ours:>9.1f} {reads:>17,.0f}   {torchs:>9.1f} {(length + 1) / 2:>17,.0f}", flush=True)
    if len(rows) > 1:
        times = lengths[-1] / lengths[0]
        ours, torchs = (last / first for first, last in zip(rows[0], rows[-1], strict=True))
        print(f"\n  From {lengths[0]:,} to {lengths[-1]:,} positions the length grew {times:.0f}×.")
        print(f"  The time grew {ours:.0f}× with ALiBi and {torchs:.0f}× without a bias.")
        print(f"  In proportion to the length would be {times:.0f}×, to its square {times**2:.0f}×.")


def show_rest() -> None:
    heading("And then", "make demo trains six methods short, tests them long, and writes a report.")
    print("  docs/attention.md  the op: arguments, masks, biases, backends")
    print("  docs/methods.md    the methods: formulas, options, how far each extrapolates")
    print("  docs/reach.md      the proof")
    print("  docs/training.md   train short; docs/evaluation.md: test long")


def milliseconds(call: Callable[[], Tensor], repeats: int = 3, enough: float = 0.5) -> float:
    """Return the shortest of a few runs after a first one: what else the machine does only adds to it."""
    call()
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) < enough):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def heading(title: str, *lines: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}")
    for line in lines:
        print(f"  {line}")
    print(flush=True)


if __name__ == "__main__":
    main()
