"""When does a small model learn to copy, with which position method, and does it copy at four times the length?

    python benchmarks/copying_cpu.py                       # some twenty minutes of one core; writes benchmarks/results
    python benchmarks/copying_cpu.py --only rotary,alibi --seeds 1
    python benchmarks/copying_cpu.py --quick               # does the script work: a few steps, means nothing

Two layers × 128 with 8 heads are trained on windows of 64 random tokens of 64, which repeat after 8 to 32 of them, a
new number for each window: what comes next can be found only by what stood before it earlier (an induction head). Every
50 steps each model reads 256 sequences of 32 random tokens twice, and at the end 64 of 128 tokens, four times the
training length. All variants see the same windows; the seed is of windows and weights.

    what is recorded
    step               the first measurement at which the loss of the second reading is below a tenth of log 64
    nats at L, at 4L   that loss at the end of training

    section            what is trained
    rotary, alibi, rotary+alibi      the position method of that name
    alibi-flat         ALiBi whose flattest head has almost no slope
    alibi-learned      ALiBi with learned slopes, which take steps ten times as large as the weights'
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import torch
from records import Report, parsed, parser_of, software
from torch import Tensor

from lengthen import ModelConfig, Transformer, alibi_slopes
from lengthen.evaluation.analyses.induction import of_model

LAYERS, WIDTH, HEADS = 2, 128, 8
FLAT = [*alibi_slopes(HEADS)[:-1].tolist(), 1e-6]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary": ("rotary", {}),
    "alibi": ("alibi", {}),
    "alibi-flat": ("alibi", {"slopes": FLAT}),
    "alibi-learned": ("alibi", {"learned": True}),
    "rotary+alibi": ("rotary+alibi", {}),
}
VOCABULARY, LENGTH, BATCH, LR = 64, 64, 32, 2e-3
PERIODS = (8, 33)  # from, and below
STEPS, WARMUP, EVERY = 1_000, 50, 50
LEARNED = 0.1 * math.log(VOCABULARY)


def windows(draws: torch.Generator) -> Tensor:
    """Return training windows `[BATCH, LENGTH + 1]`, each of which repeats after a number of tokens of its own."""
    tokens = torch.randint(VOCABULARY, (BATCH, PERIODS[1]), generator=draws)
    periods = torch.randint(*PERIODS, (BATCH, 1), generator=draws)
    return tokens.gather(1, torch.arange(LENGTH + 1) % periods)


def twice(length: int, count: int) -> Tensor:
    """Return sequences of random tokens, each twice in a row; always the same ones."""
    return torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1)).repeat(1, 2)


def measure(report: Report, name: str, seeds: int, steps: int) -> None:
    """Train one variant with each seed, and record when it learned to copy."""
    positions, options = VARIANTS[name]
    for seed in range(seeds):
        torch.manual_seed(seed)
        shape: dict[str, Any] = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "train_length": LENGTH}
        config = ModelConfig(vocab_size=VOCABULARY, positions=positions, position_options=options, **shape)
        model, draws, learned = Transformer(config), torch.Generator().manual_seed(seed), None
        method = {id(one) for one in model.method.parameters()}
        own = [one for one in model.parameters() if id(one) in method]
        rest = [one for one in model.parameters() if id(one) not in method]
        groups = [{"params": rest, "lr": LR}, {"params": own, "lr": 10 * LR}]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.1)
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
        for step in range(1, steps + 1):
            ids = windows(draws)
            optimizer.zero_grad()
            model(ids[:, :-1], targets=ids[:, 1:]).backward()  # type: ignore[no-untyped-call]  # torch has no type for it
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm.step()
            if step % EVERY == 0 and learned is None and of_model(model, twice(32, 256)).second < LEARNED:
                learned = step
        at, slopes = {"seed": seed}, ""
        if name == "alibi-learned":
            found = getattr(model.method.bias(0), "slopes").detach().sort(descending=True).values  # noqa: B009
            slopes = "slopes " + ", ".join(f"{slope:.2g}" for slope in found.tolist())
        missing = f"not in {steps:,} steps" if learned is None else ""
        report.add(name, "step", at, learned, "", note=missing)
        report.add(name, "nats at L", at, of_model(model, twice(32, 256)).second, " nats", note=slopes)
        report.add(name, "nats at 4L", at, of_model(model, twice(128, 64)).second, " nats")


def main() -> int:
    parser = parser_of(__doc__, tuple(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3, help="of each variant (3)")
    options = parsed(parser, "copying_cpu", tuple(VARIANTS))
    torch.set_num_threads(1)
    steps = 2 if options.quick else STEPS
    shape = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "train_length": LENGTH, "steps": STEPS, "batch": BATCH}
    report = Report({"benchmark": "copying_cpu", **software(), **shape, "lr": LR}, options.out)
    seeds = 1 if options.quick else options.seeds
    return report.run({name: partial(measure, report, name, seeds, steps) for name in options.only}, options.strict)


if __name__ == "__main__":
    sys.exit(main())
