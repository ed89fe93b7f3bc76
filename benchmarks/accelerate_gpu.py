"""Transformers' MPT and T5 with their own attention, compiled, and with `lengthen.accelerate`: tokens/s and memory.

    python benchmarks/accelerate_gpu.py                              # one GPU; writes benchmarks/results
    python benchmarks/accelerate_gpu.py --only t5 --lengths 4096,16384
    python benchmarks/accelerate_gpu.py --device cpu --quick         # does the script work: tiny, means little

The body of MPT in its 1B shape (24 layers × 2048, 16 heads) and T5-large's encoder (24 × 1024, 16 heads), without heads
or logits, random weights in bfloat16, one sequence. `forward` is without gradients; `training` is forward, backward and
an AdamW step on the mean square of the output. "Compiled" is block by block, as torch recommends for blocks that are
alike: one compilation serves all 24. A row's time is the median of several rounds after one that compiles and warms up;
memory is the most that torch had allocated in them, weights and optimizer included. Out of memory is a result: the row
says so, and longer sequences of the same kind are not tried.

Each row of `forward` also says how far its output is from that of transformers as it is, at the shortest length; with
random weights in bfloat16 that is not 0 for any two ways to compute.

    section     what is measured
    mpt, t5     the model of that name
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from records import Report, machine, parsed, parser_of, reason, software
from torch import Tensor

import lengthen

MODELS = ("mpt", "t5")
VARIANTS = {  # accelerated, compiled
    "transformers": (False, False),
    "transformers, compiled": (False, True),
    "accelerated": (True, False),
}
LENGTHS = (1024, 4096, 16384, 65536)
SEED = 0


class Setting(NamedTuple):
    """What holds for all rows."""

    device: torch.device
    rounds: int
    tiny: bool

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def model_of(name: str, length: int, setting: Setting) -> Any:
    """Return a model's body with random weights, made where it runs."""
    transformers.set_seed(SEED)
    with torch.device(setting.device):
        if name == "mpt":
            sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2} if setting.tiny else {}
            shape: dict[str, Any] = {"d_model": 2048, "n_heads": 16, "n_layers": 24, "vocab_size": 50432, **sizes}
            model: Any = transformers.MptModel(transformers.MptConfig(max_seq_len=length, use_cache=False, **shape))
        else:
            sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4} if setting.tiny else {}
            shape = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16, **sizes}
            # Without dropout: the op has none on attention weights, and what is compared would differ.
            model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=32128, dropout_rate=0.0, **shape))
    return model.to(torch.bfloat16)


def rounds_of(work: Callable[[], Any], setting: Setting) -> tuple[float, int | None]:
    """Return the median time of a round in seconds, and the peak of memory in bytes where a GPU counts it."""
    on_gpu = setting.device.type == "cuda"
    work()
    setting.wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(setting.rounds):
        began = time.perf_counter()
        work()
        setting.wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times), torch.cuda.max_memory_allocated() if on_gpu else None


def forward(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).last_hidden_state  # type: ignore[no-any-return]


def training_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    model(input_ids=ids).last_hidden_state.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def row(name: str, variant: str, what: str, length: int, setting: Setting) -> tuple[float, int | None, Tensor]:
    """Return the median time, the peak of memory, and the output before any training step."""
    accelerated, compiled = VARIANTS[variant]
    model = model_of(name, length, setting)
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(SEED)).to(setting.device)
    if accelerated:
        lengthen.accelerate(model)
    if compiled:
        backend = "aot_eager" if setting.tiny else "inductor"  # tiny: that it can be traced, in seconds
        for block in model.blocks if name == "mpt" else model.encoder.block:
            block.compile(dynamic=False, backend=backend)
    model.eval()
    if what == "forward":
        out = forward(model, ids).cpu()
        return *rounds_of(partial(forward, model, ids), setting), out
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return *rounds_of(partial(training_step, model, optimizer, ids), setting), torch.zeros(())


def section(report: Report, name: str, lengths: tuple[int, ...], setting: Setting) -> None:
    """Measure one model: every variant at every length."""
    for what in ("forward", "training"):
        expected: Tensor | None = None  # by transformers as it is, at the shortest length
        for variant in VARIANTS:
            for length in lengths:
                at = {"variant": variant, "length": length}
                torch.compiler.reset()
                failure, full = "", False
                try:
                    seconds, memory, out = row(name, variant, what, length, setting)
                except torch.OutOfMemoryError:
                    failure, full = "out of memory", True
                except Exception as error:  # a peer may fail; the others are worth having
                    failure = reason(error)
                gc.collect()
                if setting.device.type == "cuda":
                    torch.cuda.empty_cache()
                if failure:
                    report.add(name, f"{what}: tokens/s", at, None, "", note=failure)
                    if full:
                        break
                    continue
                note = ""
                if what == "forward" and length == lengths[0]:
                    if variant == "transformers":
                        expected = out.float()
                    elif expected is not None:
                        off = float((out.float() - expected).norm() / expected.norm())
                        note = f"output differs by {100 * off:.2g} %"
                report.add(name, f"{what}: tokens/s", at, length / seconds, "", ms={"round": 1000 * seconds}, note=note)
                if memory is not None:
                    report.add(name, f"{what}: peak memory", at, memory / 2**30, " GiB")


def main() -> int:
    parser = parser_of(__doc__, MODELS)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--lengths", help="tokens, with commas (default: 1,024 to 65,536)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of a row (default: 5)")
    options = parsed(parser, "accelerate_gpu", MODELS)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device: expected one that is there, got cuda, which is not; --device cpu --quick checks the script"
        )
    setting = Setting(device, 1 if options.quick else options.rounds, options.quick)
    lengths: tuple[int, ...] = (64, 128) if options.quick else LENGTHS
    if options.lengths:
        lengths = tuple(int(length) for length in options.lengths.split(","))
    facts = {"benchmark": "accelerate_gpu", **software(), "transformers": transformers.__version__}
    facts["machine"] = machine(device)
    facts |= {"dtype": "bfloat16", "batch": 1, "rounds": setting.rounds}
    report = Report(facts, options.out)
    work = {name: partial(section, report, name, lengths, setting) for name in options.only}
    return report.run(work, options.strict)


if __name__ == "__main__":
    sys.exit(main())
