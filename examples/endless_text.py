"""Generate for as long as you like in constant memory.

    python examples/endless_text.py --tokens 20000

A model with ALiBi and normalised queries and keys (random weights here, so its text is noise) writes from two caches:
one that keeps every key, and one that keeps what each head can still reach. With `qk_norm` the scores have a bound
before anything is generated, so the second can promise how much attention it will ever leave out.
"""

from __future__ import annotations

import argparse
import time

import torch

from lengthen import ModelConfig, Transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    tokens = parser.parse_args().tokens
    part = max(tokens // 5, 1)
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=258, layers=2, width=64, heads=4, train_length=64, positions="alibi", qk_norm=True)
    model = Transformer(config).eval()
    for policy, mode in (("full", "exact"), ("reach", "certified")):
        print(f"{policy}\n{'tokens':>8} {'tokens/s':>10} {'cache':>10} {'left out':>10}")
        began = time.perf_counter()
        for made, step in enumerate(model.stream([[0]], tokens, temperature=1.0, cache=policy, mode=mode), start=1):
            if made % part == 0:
                speed = part / (time.perf_counter() - began)
                size = f"{step.cache.nbytes / 1e6:.2f} MB"
                print(f"{made:>8,} {speed:>10,.0f} {size:>10} {step.cache.bound:>10.1e}", flush=True)
                began = time.perf_counter()


if __name__ == "__main__":
    main()
