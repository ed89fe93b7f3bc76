"""Decoding after a long context on one GPU: tokens/s and cache memory, ours beside transformers' MPT and its cache.

    python benchmarks/generate_gpu.py                                  # writes benchmarks/results
    python benchmarks/generate_gpu.py --only small --context 20000
    python benchmarks/generate_gpu.py --device cpu --quick             # does the script work: tiny shapes, mean nothing

Two shapes of ALiBi models with random weights in bfloat16: the preset `small` with a vocabulary of 50,368, and MPT-1B
(24 layers × 2048, 16 heads). Each is built here and in transformers, which is given the same tokens. The context,
100,000 random tokens, is read in chunks of 2,048 (prefill), once for each cache, after a tenth of it was read to
compile kernels. Then tokens are decoded greedily, one of each sequence per step; a batch is that context several times,
with copied caches. A number is the median over the steps after the first few. Our caches: `full`, and both modes of
`reach` at the recorded tolerance. Peak memory is what torch had allocated at the most while decoding, beside the
weights. What does not fit into memory leaves a record that says so.

With random weights scores are small, so that how far a head looks is its slope's doing alone. A trained model may look
farther, and keep more.

    section     what is measured
    small       the preset, batch 1 and 8
    mpt         the shape of MPT-1B, batch 1 and 8
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from records import Report, attempted, machine, parsed, parser_of, software
from torch import Tensor

from lengthen import ModelConfig, Transformer
from lengthen.model.stepping import Stepper, read

SHAPES: dict[str, dict[str, Any]] = {
    "small": {"layers": 12, "width": 768, "heads": 12},
    "mpt": {"layers": 24, "width": 2048, "heads": 16},
}
QUICK_SHAPE: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4}
VOCABULARY, QUICK_VOCABULARY = 50_368, 97
CACHES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "exact": {"policy": "reach", "mode": "exact"},
    "certified": {"policy": "reach", "mode": "certified"},
}
CONTEXT, QUICK_CONTEXT = 100_000, 600
BATCHES, QUICK_BATCHES = (1, 8), (1, 2)
STEPS, QUICK_STEPS = 128, 12  # tokens that are decoded
SKIPPED = 8  # steps that are not counted: they compile kernels and capture graphs
CHUNK, QUICK_CHUNK = 2048, 64
TOLERANCE, SEED = 1e-3, 0


@dataclass(frozen=True)
class Sizes:
    """How much is read and decoded, and where."""

    device: torch.device
    vocabulary: int
    context: int
    batches: tuple[int, ...]
    steps: int
    chunk: int
    caches: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """What one model did with one batch."""

    step: float  # seconds, the median
    cache: int  # bytes on the device
    host: int
    peak: int | None  # bytes beside the weights; none on a CPU, where it is not known
    note: str = ""


class Clock:
    """Seconds and memory of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def now(self) -> float:
        """Return the time, when everything that was asked for is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def peak(self) -> int | None:
        """Return the most that was allocated beside what was there before."""
        return torch.cuda.max_memory_allocated(self.device) - self.before if self.device.type == "cuda" else None


def decoded(clock: Clock, sizes: Sizes, logits: Tensor, step: Callable[[Tensor], Tensor]) -> float:
    """Decode greedily; return the median seconds of a step."""
    times = []
    for _ in range(sizes.steps):
        began = clock.now()
        logits = step(logits.argmax(dim=-1, keepdim=True))
        times.append(clock.now() - began)
    return statistics.median(times[SKIPPED:])


class Ours:
    """Our model with one of our caches, after a context."""

    def __init__(self, model: Transformer, ids: Tensor, sizes: Sizes, options: dict[str, Any]) -> None:
        self.model, self.sizes = model, sizes
        if options["policy"] == "full":
            options = {**options, "room": sizes.context + 2 * sizes.steps}
        read(model, ids[:, : sizes.context // 10], model.cache(tolerance=TOLERANCE, **options), sizes.chunk)
        self.cache, clock = model.cache(tolerance=TOLERANCE, **options), Clock(sizes.device)
        began = clock.now()
        self.logits = read(model, ids, self.cache, sizes.chunk)
        self.prefill = clock.now() - began

    @torch.no_grad()
    def decode(self, batch: int) -> Measured:
        """Decode this many copies of the context."""
        clock = Clock(self.sizes.device)
        cache = self.cache.rows([0] * batch)
        stepper = Stepper(self.model, cache)
        step = decoded(clock, self.sizes, self.logits.expand(batch, -1), lambda new: stepper(new.squeeze(1)))
        return Measured(step, cache.nbytes, cache.host_nbytes, clock.peak(), f"bound {cache.bound:.2g}")


class Theirs:
    """Transformers' model with its own cache, after a context."""

    def __init__(self, model: Any, ids: Tensor, sizes: Sizes) -> None:
        from transformers import DynamicCache

        self.model, self.sizes = model, sizes
        self.read(ids[:, : sizes.context // 10], DynamicCache(config=model.config))
        self.cache: Any = DynamicCache(config=model.config)
        clock = Clock(sizes.device)
        began = clock.now()
        self.logits = self.read(ids, self.cache)
        self.prefill = clock.now() - began

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        """Read a context; return the logits of what follows."""
        for i in range(0, ids.shape[1], self.sizes.chunk):
            logits = self.forward(ids[:, i : i + self.sizes.chunk], cache)
        return logits

    @torch.no_grad()
    def forward(self, new: Tensor, cache: Any) -> Tensor:
        """Return the logits of what follows the last of these tokens."""
        logits: Tensor = self.model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]

    def decode(self, batch: int) -> Measured:
        """Decode this many copies of the context."""
        clock = Clock(self.sizes.device)
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(batch)
        step = decoded(clock, self.sizes, self.logits.expand(batch, -1), lambda new: self.forward(new, cache))
        held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
        return Measured(step, held, 0, clock.peak())


def our_model(shape: dict[str, Any], sizes: Sizes) -> Transformer:
    """Return an ALiBi model of this shape."""
    config = ModelConfig(vocab_size=sizes.vocabulary, train_length=1024, biases=False, **shape)
    with torch.device(sizes.device):
        return Transformer(config).to(torch.bfloat16).eval()


def their_model(shape: dict[str, Any], sizes: Sizes) -> Any:
    """Return transformers' MPT of this shape."""
    from transformers import MptConfig, MptForCausalLM

    config = MptConfig(
        d_model=shape["width"],
        n_heads=shape["heads"],
        n_layers=shape["layers"],
        vocab_size=sizes.vocabulary,
        max_seq_len=sizes.context + sizes.steps,
    )
    with torch.device(sizes.device):
        model: Any = MptForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def section(report: Report, name: str, shape: dict[str, Any], sizes: Sizes) -> None:
    """Record one shape: our caches, then transformers'."""
    tokens = torch.Generator().manual_seed(SEED)
    ids = torch.randint(sizes.vocabulary, (1, sizes.context), generator=tokens).to(sizes.device)
    torch.manual_seed(SEED)
    mine = our_model(shape, sizes)
    for cache in sizes.caches:
        record(report, name, cache, sizes, partial(Ours, mine, ids, sizes, CACHES[cache]))
    del mine
    record(report, name, "transformers", sizes, lambda: Theirs(their_model(shape, sizes), ids, sizes))


def record(report: Report, name: str, cache: str, sizes: Sizes, make: Callable[[], Ours | Theirs]) -> None:
    """Record what was measured, or why it was not."""
    at = {"cache": cache, "context": sizes.context}
    made, problem = attempted(make)
    if made is None:
        report.add(name, "prefill", at, None, note=problem)
        return
    report.add(name, "prefill", at, sizes.context / made.prefill, " tokens/s")
    for batch in sizes.batches:
        at = {"cache": cache, "batch": batch, "context": sizes.context}
        found, problem = attempted(partial(made.decode, batch))
        if found is None:
            report.add(name, "decoding", at, None, note=problem)
            continue
        times = {"step": 1e3 * found.step}
        report.add(name, "decoding", at, batch / found.step, " tokens/s", ms=times, note=found.note)
        report.add(name, "cache on the device", at, found.cache / 1e6, " MB")
        report.add(name, "cache in host memory", at, found.host / 1e6, " MB")
        if found.peak is not None:
            report.add(name, "peak memory beside the weights", at, found.peak / 1e6, " MB")


def main() -> int:
    parser = parser_of(__doc__, tuple(SHAPES))
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--context", type=int, help=f"tokens that are read first ({CONTEXT})")
    parser.add_argument("--caches", default=",".join(CACHES), help="which of ours, with commas (all)")
    options = parsed(parser, "generate_gpu", tuple(SHAPES))
    caches = tuple(options.caches.split(","))
    if unknown := [cache for cache in caches if cache not in CACHES]:
        parser.error(f"--caches: expected some of {', '.join(CACHES)}, got {', '.join(unknown)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and torch sees none; --device cpu --quick tries the script")
    device, quick = torch.device(options.device), options.quick
    sizes = Sizes(
        device=device,
        vocabulary=QUICK_VOCABULARY if quick else VOCABULARY,
        context=options.context or (QUICK_CONTEXT if quick else CONTEXT),
        batches=QUICK_BATCHES if quick else BATCHES,
        steps=QUICK_STEPS if quick else STEPS,
        chunk=QUICK_CHUNK if quick else CHUNK,
        caches=caches,
    )
    facts = {**software(), "device": machine(device)}
    facts |= {"tolerance": TOLERANCE, "seed": SEED, "dtype": "bfloat16", "chunk": sizes.chunk}
    report = Report(facts, options.out)
    shapes = {name: QUICK_SHAPE if quick else SHAPES[name] for name in options.only}
    runs = {name: partial(section, report, name, shape, sizes) for name, shape in shapes.items()}
    return report.run(runs, options.strict)


if __name__ == "__main__":
    sys.exit(main())
