"""Attention on one GPU beside its peers: what `lengthen.attention` costs, with its targets beside what was measured.

    python benchmarks/attention_gpu.py                                # every section; writes benchmarks/results
    python benchmarks/attention_gpu.py --only lengths,decode --out out.json
    python benchmarks/attention_gpu.py --only trained --model-run runs/alibi --corpus data/books
    python benchmarks/attention_gpu.py --only acp --acp forgetting-transformer
    python benchmarks/attention_gpu.py --quick --device cpu           # does the script work: tiny, means nothing

It is one long file because it is one run: sections share the peers, the clock and the machine, and a ratio means
something only within it.

    section   what is measured (bf16, 16 heads, ALiBi's slopes, causal, random normal inputs unless it says otherwise)
    lengths   forward and backward against cuDNN's causal attention, which has no bias, and forward against
              FlexAttention with the same bias; the fraction of keys read; the distance from reading everything
    acp       forward and backward at tolerance e^−10 against adaptive computation pruning (Lin et al., 2025, arXiv
              2504.06949) at its own threshold, which is e^−10 too, and with its own bound ("auto"): `--acp` names a
              checkout of github.com/zhixuan-lin/forgetting-transformer, which needs einops; without one, ours alone
    growth    time at 1,048,576 tokens over that at 131,072
    trained   as `lengths`, on the queries, keys and values of a trained model
    kerple    a table of Kerple's power kernel, −r₁·d^r₂, at 131,072 tokens, against the same call at tolerance 0
    masks     Blockwise(512) and Window(512) against the kernel's own speed on as many visible pairs
    decode    one query and a cache of 131,072 keys, against torch's attention over the whole cache; bandwidth
    memory    the peak of forward and backward over the bytes of inputs, outputs and gradients
    xpos      a decay, against the same call without it: causal, and in a window
    overhead  the host's time for a tiny eager call, beside that of torch's own attention
    first     the first forward and backward of a process that finds an empty Triton cache
    variants  120 calls that differ in lengths, batch, strides, group size, window and padding, forward and backward, in
              such a process: kernels compiled, and seconds after the first call
    table     T5's bias, forward and backward with the table's gradient, against FlexAttention; and as a table of every
              distance

Times are the GPU's, between CUDA events, with the host let run ahead so that no launch is waited for (`overhead`,
`first`, `variants` and the eager times of `decode` are the host's). Contestants take turns, and medians are reported.
Backward is the time of `torch.autograd.grad` alone. Ratios against a peer are above 1 where `lengthen` is faster. The
JSON is written after every record. `table` comes last, since FlexAttention may leave the GPU in a state where nothing
runs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from records import Report, attempted, machine, parsed, parser_of, software
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lengthen import Ball, Blockwise, Causal, Linear, Table, Transformer, Window, alibi_slopes, attention, positions
from lengthen.attention import Bias, Mask
from lengthen.attention.backends import triton as kernels
from lengthen.attention.problem import pose

HEADS, SEED, DTYPE = 16, 0, torch.bfloat16
BUDGET = 60.0  # ms that one contestant is timed for, in all rounds
ROUNDS, MOST = 3, 10  # rounds of turns, and calls in a turn at most
LEAD = 10_000_000  # GPU cycles, about 5 ms: longer than the host takes to launch one turn
GRAPH_CALLS = 20  # in one CUDA graph, as a model of so many layers makes them
CACHE_BYTES = 20e9  # of the different caches that those calls go round, so that no keys wait in the L2 cache
HOST_CALLS = 200
FLEX_LIMIT = 20_000.0  # ms: past this FlexAttention is not asked again
# Blocks of FlexAttention's backward that leave room for a captured table's gradient.
SMALL_BLOCKS = {"BLOCK_M1": 32, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 32, "num_stages": 1}
ACP_TOLERANCE = math.exp(-10)  # of "auto"

# Length: at least so many times the speed.
TARGETS = {
    "forward": {1024: 0.95, 2048: 1.1, 8192: 2.5, 32768: 8.0, 131072: 30.0},
    "backward": {1024: 0.85, 2048: 1.0, 8192: 2.0, 32768: 6.0, 131072: 25.0},
    "flex": {1024: 1.5, 2048: 1.7, 8192: 4.0, 32768: 12.0, 131072: 45.0},
}

cuda: Any = torch.cuda  # in parts it has no types

Call = Callable[[], Any]
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    tokens: int = 32768  # in a batch of short sequences
    lengths: tuple[int, ...] = (1024, 2048, 8192, 32768, 131072)
    growth: tuple[int, int] = (131072, 1048576)
    trained: tuple[int, ...] = (2048, 8192, 32768)
    table: tuple[int, ...] = (8192, 32768)
    kerple: int = 131072
    masks: tuple[int, ...] = (8192, 32768, 131072)
    interval: int = 512
    rate_at: int = 16384
    cache: int = 131072
    batches: tuple[int, int] = (1, 16)
    memory: int = 131072
    xpos: tuple[tuple[int, int | None], ...] = ((2048, None), (8192, None), (32768, 4096))  # length, window
    copied: int = 4 << 30  # bytes
    variants: int = 120
    varied: int = 4096  # the longest of those calls


QUICK = Sizes(
    tokens=256,
    lengths=(128, 256),
    growth=(128, 256),
    trained=(128, 256),
    table=(128, 256),
    kerple=640,  # past what is read without asking how far
    masks=(256,),
    interval=64,
    rate_at=256,
    cache=1024,
    batches=(1, 2),
    memory=256,
    xpos=((256, None), (256, 64)),
    copied=1 << 20,
    variants=6,
    varied=128,
)


@dataclass(frozen=True)
class Bench:
    """The machine, how large everything is, and where results go."""

    device: torch.device
    sizes: Sizes
    report: Report
    options: argparse.Namespace

    @property
    def cuda(self) -> bool:
        """Whether this is the real thing; on a CPU it is only seen to work."""
        return self.device.type == "cuda"

    def normal(self, *shape: int, grad: bool = False) -> Tensor:
        """Return random normal numbers."""
        return torch.randn(shape, device=self.device, dtype=DTYPE).requires_grad_(grad)

    def inputs(self, length: int, head_dim: int, batch: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v that want gradients."""
        shape = (max(1, self.sizes.tokens // length) if batch is None else batch, HEADS, length, head_dim)
        q, k, v = (self.normal(*shape, grad=True) for _ in range(3))
        return q, k, v

    def alibi(self, heads: int = HEADS) -> Linear:
        """Return ALiBi's bias."""
        return Linear(alibi_slopes(heads, self.device))

    def ours(self, bias: Bias | None = None, mask: Mask | None = None, **rest: Any) -> Forward:
        """Return `lengthen.attention` with what is not q, k and v."""
        return partial(attention, bias=bias, mask=mask or Causal(), **rest)

    # --- time ---------------------------------------------------------------------------------------------------------

    def together(self, calls: dict[str, Call], ahead: bool = True) -> dict[str, float]:
        """Return each call's median time in ms; they take turns, so that whatever drifts meets all of them."""
        turn = {}
        for name, call in calls.items():
            call()
            once = self._timed(call, 1, ahead)[0]
            turn[name] = max(1, min(MOST, int(BUDGET / ROUNDS / max(once, 1e-3))))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name] += self._timed(call, turn[name], ahead)
        return {name: statistics.median(found) for name, found in times.items()}

    def measure(self, call: Call, ahead: bool = True) -> float:
        """Return a call's median time in ms; without `ahead` the host's time shows where it is the longer."""
        return self.together({"": call}, ahead)[""]

    def _timed(self, call: Call, times: int, ahead: bool) -> list[float]:
        if not self.cuda:
            marks = [time.perf_counter()]
            for _ in range(times):
                call()
                marks.append(time.perf_counter())
            return [1000 * (after - before) for before, after in pairwise(marks)]
        events = [cuda.Event(enable_timing=True) for _ in range(times + 1)]
        torch.cuda.synchronize()
        if ahead:
            cuda._sleep(LEAD)
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(events)]

    def replayed(self, calls: Sequence[Call]) -> float:
        """Return the ms of one of these calls in a CUDA graph of them all: what it costs without the host."""
        if not self.cuda:
            return self.measure(lambda: [call() for call in calls]) / len(calls)
        aside = cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return self.measure(graph.replay) / len(calls)

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Give back what nobody holds."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


# --- the contestants --------------------------------------------------------------------------------------------------


def with_torch(inputs: tuple[Tensor, Tensor, Tensor], d_out: Tensor) -> tuple[str, Forward]:
    """Return torch's fastest causal attention that takes these, forward and backward, and which it is."""

    def run(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    problems = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        forward = partial(run, backend)
        _, problem = attempted(both_call(forward, inputs, d_out))
        if not problem:
            return backend.name.split("_")[0].lower(), forward
        problems.append(f"{backend.name}: {problem}")
    raise RuntimeError("; ".join(problems))


def with_flex(
    bench: Bench,
    length: int,
    score_mod: Callable[..., Tensor],
    options: Any = None,  # FlexAttention's own
) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def behind(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    torch._dynamo.reset()  # else it would compile for any length, not for this one, and at last give up
    made = torch.compile(create_block_mask, dynamic=False) if bench.cuda else create_block_mask  # else it holds length²
    seen = made(behind, None, None, length, length, device=str(bench.device))
    run = torch.compile(flex_attention, dynamic=False) if bench.cuda else flex_attention
    return lambda q, k, v: run(q, k, v, score_mod=score_mod, block_mask=seen, kernel_options=options)


def flex_alibi(bench: Bench, inputs: tuple[Tensor, Tensor, Tensor], d_out: Tensor) -> Call:
    """Return FlexAttention's forward pass with ALiBi's bias, compiled."""
    slopes = bench.alibi().slopes

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[head] * (i - j)

    call = forward_call(with_flex(bench, inputs[0].shape[2], score_mod), inputs, d_out)
    call()
    return call


def with_acp(bench: Bench, inputs: tuple[Tensor, Tensor, Tensor], d_out: Tensor) -> Forward:
    """Return the Forgetting Transformer's attention with adaptive computation pruning; a constant gate is ALiBi."""
    folder = bench.options.acp
    if folder is None:
        raise RuntimeError("no --acp")
    source = str(folder / "src" if (folder / "src").is_dir() else folder)
    sys.path[:0] = [source] if source not in sys.path else []
    run = importlib.import_module("forgetting_transformer").forgetting_attention
    batch, heads, length, _ = inputs[0].shape
    log_gate = -bench.alibi(heads).slopes.view(1, -1, 1).expand(batch, -1, length).contiguous()
    forward = partial(run, log_fgate=log_gate, head_first=True, adaptive_threshold="auto")
    both_call(forward, inputs, d_out)()
    return forward


def forward_call(forward: Forward, inputs: Sequence[Tensor], d_out: Tensor) -> Call:
    q, k, v = (x.detach() for x in inputs[:3])
    return lambda: forward(q, k, v)


def backward_call(forward: Forward, inputs: Sequence[Tensor], d_out: Tensor) -> Call:
    """Return the backward pass alone, of a forward pass that is made here."""
    out = forward(*inputs[:3])
    return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True)


def both_call(forward: Forward, inputs: Sequence[Tensor], d_out: Tensor) -> Call:
    """Return forward and backward; inputs after the first three get their gradients too."""
    return lambda: torch.autograd.grad(forward(*inputs[:3]), inputs, d_out)


PASSES = {"forward": forward_call, "backward": backward_call}


# --- how much is read, and how far that is from reading everything ----------------------------------------------------


@torch.no_grad()
def fraction_read(q: Tensor, k: Tensor, v: Tensor, bias: Linear) -> float | None:
    """Return the keys read over those that reading everything reads; only the kernels say."""
    if not q.is_cuda:
        return None
    first, end = kernels.spans(pose(q, k, v, bias, None, Causal())).long().unbind(0)
    return float((end - first).sum() / end.sum())  # everything, for a causal block, is from 0 to its end


@torch.no_grad()
def apart(found: Tensor, exact: Tensor) -> tuple[float, str]:
    """Return the largest difference in roundings of the dtype, and in words without them.

    A rounding is eps·|exact|, and no less than that of the median number.
    """
    size, difference = exact.float().abs(), (found.float() - exact.float()).abs()
    median = size.flatten()[:: max(1, size.numel() >> 20)].median()
    roundings = float((difference / size.clamp(min=median)).max() / torch.finfo(DTYPE).eps)
    return roundings, f"at most {float(difference.max()):.2g}"


def compare(
    bench: Bench,
    section: str,
    at: dict[str, Any],
    inputs: tuple[Tensor, Tensor, Tensor],
    bias: Linear,
    flex: bool = False,
    targets: bool = False,
    roundings: float | None = None,
) -> None:
    """Measure ALiBi attention against torch's without a bias and, if asked, FlexAttention's; add the records."""
    length, add = inputs[0].shape[2], partial(bench.report.add, section)
    ours, d_out = bench.ours(bias), torch.randn_like(inputs[0])
    peer, theirs = with_torch(inputs, d_out)
    for which, make in PASSES.items():
        calls = {"lengthen": make(ours, inputs, d_out), peer: make(theirs, inputs, d_out)}
        asked = flex and which == "forward"
        call, problem = attempted(partial(flex_alibi, bench, inputs, d_out)) if asked else (None, "")
        ms = bench.together(calls | ({} if call is None else {"flex": call}))
        least = TARGETS[which].get(length) if targets else None
        ratio = ms[peer] / ms["lengthen"]
        add(f"{which} against torch", at, ratio, at_least=least, ms=ms, note=f"torch's {peer}")
        if asked:
            ratio_flex = ms["flex"] / ms["lengthen"] if "flex" in ms else None
            least = TARGETS["flex"].get(length) if targets else None
            add("forward against flex", at, ratio_flex, at_least=least, ms=ms, note=problem)
    add("fraction of keys read", at, fraction_read(*inputs, bias), "")
    out, exact = (forward_call(bench.ours(bias, tolerance=t), inputs, d_out)() for t in (None, 0))
    far, note = apart(out, exact)
    add("from reading everything", at, far, " roundings", at_most=roundings, note=note)


# --- the sections -----------------------------------------------------------------------------------------------------


def lengths(bench: Bench) -> None:
    for head_dim in (64, 128):
        for length in bench.sizes.lengths:
            inputs = bench.inputs(length, head_dim)
            at = {"length": length, "head_dim": head_dim, "batch": inputs[0].shape[0]}
            compare(bench, "lengths", at, inputs, bench.alibi(), flex=head_dim == 64, targets=True)
            del inputs
            bench.clear()


def acp(bench: Bench) -> None:
    for head_dim in (64, 128):
        for length in bench.sizes.lengths:
            inputs = bench.inputs(length, head_dim)
            d_out, at = torch.randn_like(inputs[0]), {"length": length, "head_dim": head_dim}
            at["batch"] = inputs[0].shape[0]
            contestants = {"lengthen": bench.ours(bench.alibi(), tolerance=ACP_TOLERANCE)}
            theirs, problem = attempted(partial(with_acp, bench, inputs, d_out))
            contestants |= {} if theirs is None else {"acp": theirs}
            for which, make in PASSES.items():
                ms = bench.together({name: make(forward, inputs, d_out) for name, forward in contestants.items()})
                ratio = ms["acp"] / ms["lengthen"] if "acp" in ms else None
                bench.report.add("acp", f"{which} against acp", at, ratio, ms=ms, note=problem)
            exact = forward_call(bench.ours(bench.alibi(), tolerance=0), inputs, d_out)()
            for name, forward in contestants.items():
                far, note = apart(forward_call(forward, inputs, d_out)(), exact)
                bench.report.add("acp", f"{name} from reading everything", at, far, " roundings", note=note)
            del inputs, contestants, theirs, exact, d_out
            bench.clear()


def growth(bench: Bench) -> None:
    found = []
    for length in bench.sizes.growth:
        found.append(pass_times(bench, bench.ours(bench.alibi()), length))
        bench.clear()
    short, long = bench.sizes.growth
    for which in PASSES:
        ms = {f"at {length:,}": one[which] for length, one in zip((short, long), found, strict=True)}
        at = {"length": long, "over": short, "head_dim": 64, "batch": 1}
        bench.report.add("growth", which, at, found[1][which] / found[0][which], at_most=8.5, ms=ms)


def pass_times(bench: Bench, forward: Forward, length: int) -> dict[str, float]:
    """Return the ms of both passes over one sequence."""
    inputs = bench.inputs(length, 64, batch=1)
    d_out = torch.randn_like(inputs[0])
    return {which: bench.measure(make(forward, inputs, d_out)) for which, make in PASSES.items()}


def trained(bench: Bench) -> None:
    from lengthen.evaluation import open_run
    from lengthen.evaluation.runs import refuse_other_tokens

    options, longest = bench.options, max(bench.sizes.trained)
    with tempfile.TemporaryDirectory() as name:
        run = options.model_run or train_one(bench, training_corpus(bench, Path(name)), Path(name) / "run")
        subject = open_run(run, device=bench.device)
        corpus = text_to_read(bench, Path(name))
        refuse_other_tokens(subject, corpus)
        text = corpus[next((split for split in reversed(corpus.splits) if len(corpus[split]) >= longest), "train")]
        bench.clear()
        for length in bench.sizes.trained:
            if length > len(text):
                note = f"the text has {len(text):,} tokens"
                bench.report.add("trained", "forward against torch", {"length": length}, None, note=note)
                continue
            for one in captured(bench, subject.model, torch.from_numpy(text.read(0, length)).unsqueeze(0)):
                if not isinstance(one.bias, Linear):
                    raise TypeError(f"--model-run: expected a model with a linear bias, got {one.bias}")
                q, k, v = (x.detach().contiguous().requires_grad_() for x in (one.q, one.k, one.v))
                at = {"length": length, "layer": one.layer, "heads": q.shape[1], "head_dim": q.shape[3], "batch": 1}
                compare(bench, "trained", at, (q, k, v), one.bias, roundings=1.0)
            bench.clear()


def captured(bench: Bench, model: Transformer, ids: Tensor) -> list[Any]:
    """Return what the first, the middle and the last layer's attention is given."""
    from lengthen.evaluation.capture import each_layer

    found: list[Any] = []
    last = model.config.layers - 1
    with torch.autocast(bench.device.type, DTYPE):
        each_layer(model, ids, lambda one: found.append(one) if one.layer in (0, (last + 1) // 2, last) else None)
    return found


def training_corpus(bench: Bench, folder: Path) -> Any:
    """Return the corpus that is given, or else the standard library's; for a check that it works, this file will do."""
    from lengthen.data import Corpus, prepare

    if bench.options.corpus is not None:
        return Corpus.open(bench.options.corpus)
    if bench.options.quick:
        return prepare([__file__], folder / "corpus", validation=0)
    return prepare(None, folder / "corpus")


def text_to_read(bench: Bench, folder: Path) -> Any:
    """Return a corpus of the text that is given, or else the one to train on."""
    from lengthen.data import prepare

    if bench.options.text is None:
        return training_corpus(bench, folder)
    tokenizer = str(bench.options.corpus or "bytes")
    return prepare([bench.options.text], folder / "text", tokenizer=tokenizer, validation=0)


def train_one(bench: Bench, corpus: Any, folder: Path) -> Path:
    """Train a model with ALiBi and return its folder."""
    from lengthen.training import load, train, world

    quick, steps = bench.options.quick, 4 if bench.options.quick else bench.options.train_steps
    overrides = {
        "model.positions": "alibi",
        "model.train_length": 64 if quick else 512,
        "train.steps": steps,
        "train.batch": 4 if quick else 64,
        "train.micro_batch": 4 if quick else 64,
        "schedule.shape": "trapezoid",
        "schedule.warmup": max(1, steps // 5),
        "evaluation.every": 0,
        "checkpoint.every": 0,
        **({"model.width": 128, "model.heads": 2} if quick else {}),  # heads of 64, as the kernels like them
    }
    began = time.monotonic()
    with world(str(bench.device)) as here:
        outcome = train(load("tiny" if quick else "small", overrides, corpus.vocab_size), corpus, folder, here)
    at = {"steps": steps, "seconds": round(time.monotonic() - began)}
    bench.report.add("trained", "loss of the model", at, outcome.loss, "")
    return folder


def kerple(bench: Bench) -> None:
    """Measure two sets of r₁ and r₂: they are learned, and heads with a flat kernel have to read everything.

    `spread` is how the package's Kerple starts, evenly over (0, 1]; `root` is ALiBi's slopes times √distance.
    """
    length = bench.sizes.kerple
    evenly = torch.arange(HEADS, 0, -1, device=bench.device) / HEADS
    sets = {
        f"spread (r₁ = r₂ = 1 … 1/{HEADS})": (evenly, evenly),
        "root (r₁ = 2^−½ … 2^−8, r₂ = ½)": (bench.alibi().slopes, torch.full_like(evenly, 0.5)),
    }
    q, k, v = bench.inputs(length, 64, batch=1)
    d_out, distance = torch.randn_like(q), torch.arange(length, device=bench.device)
    for name, (r1, r2) in sets.items():
        values = (-r1[:, None] * distance ** r2[:, None]).requires_grad_()
        at = {"kernel": name, "length": length, "head_dim": 64, "batch": 1}
        for what, make, inputs, bias in (
            ("forward", forward_call, (q, k, v), Table(values.detach())),
            ("backward", backward_call, (q, k, v), Table(values.detach())),
            ("backward with the table's gradient", backward_call, (q, k, v, values), Table(values)),
        ):
            ways = {"lengthen": bench.ours(bias), "tolerance 0": bench.ours(bias, tolerance=0)}
            calls = {way: make(forward, inputs, d_out) for way, forward in ways.items()}
            ms = bench.together(calls)
            results = [found if isinstance(found, tuple) else (found,) for found in (call() for call in calls.values())]
            errors = [float((x - exact).abs().max() / exact.abs().max()) for x, exact in zip(*results, strict=True)]
            names = ("dq", "dk", "dv", "d_table") if make is backward_call else ("out",)
            said = ", ".join(f"{which} {error:.1e}" for which, error in zip(names, errors, strict=False))
            ratio, note = ms["tolerance 0"] / ms["lengthen"], f"largest error over largest number: {said}"
            bench.report.add("kerple", f"{what}, against tolerance 0", at, ratio, ms=ms, note=note)
            del calls, results
            bench.clear()


def table(bench: Bench) -> None:
    method = positions.build("t5", heads=HEADS, head_dim=64, width=HEADS * 64).to(bench.device)
    with torch.no_grad():  # it starts at zeros; a trained one is of the size of the scores
        method.get_parameter("weight").normal_()
    slow = ""
    for length in bench.sizes.table:
        short = method.bias(length - 1)
        assert isinstance(short, Table)
        qkv = bench.inputs(length, 64)
        d_out = torch.randn_like(qkv[0])
        every = short.at(torch.arange(length, device=bench.device)).detach().requires_grad_()
        last = short.values.detach().requires_grad_()
        calls = {
            "lengthen": both_call(bench.ours(Table(last, extended=True)), (*qkv, last), d_out),
            "every distance": both_call(bench.ours(Table(every)), (*qkv, every), d_out),
        }
        ms = bench.together(calls)  # before FlexAttention, which may leave the GPU in a state where nothing runs
        flex, problem = (None, slow) if slow else attempted(partial(flex_table, bench, (*qkv, every), d_out))
        if flex is not None:
            began = time.perf_counter()
            flex()
            bench.wait()
            once = 1000 * (time.perf_counter() - began)
            if once > FLEX_LIMIT:
                problem = slow = f"one iteration of flex at {length:,} took {once / 1000:.0f} s"
            else:
                ms = bench.together(calls | {"flex": flex})
        ratio = ms["flex"] / ms["lengthen"] if "flex" in ms else None
        at = {"length": length, "head_dim": 64, "batch": qkv[0].shape[0]}
        bench.report.add("table", "forward+backward against flex", at, ratio, at_least=1.3, ms=ms, note=problem)
        del qkv, calls, flex, d_out
        bench.clear()


def flex_table(bench: Bench, inputs: Sequence[Tensor], d_out: Tensor) -> Call:
    """Return FlexAttention with a table, forward and backward, compiled; in smaller blocks where its own do not fit."""
    values = inputs[3]

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + values[head, i - j]

    def run(options: Any) -> Call:
        call = both_call(with_flex(bench, inputs[0].shape[2], score_mod, options), inputs, d_out)
        call()
        bench.wait()
        return call

    call, _ = attempted(partial(run, None))
    return call or run(SMALL_BLOCKS)


def masks(bench: Bench) -> None:
    length, interval = bench.sizes.rate_at, bench.sizes.interval
    whole = pass_times(bench, bench.ours(bench.alibi(), tolerance=0), length)
    pairs = length**2 / 2  # a head, as floating-point operations are usually counted
    for which, operations in (("forward", 4), ("backward", 10)):  # a pair and feature: two products, or five
        rate = operations * pairs * 64 * HEADS / whole[which] / 1e9
        at = {"length": length, "head_dim": 64, "batch": 1}
        bench.report.add("masks", f"{which}, everything read", at, rate, " TFLOP/s", ms={"lengthen": whole[which]})
    shapes: tuple[Mask, ...] = Blockwise(interval), Window(interval)
    for mask in shapes:
        for name, bias in (("none", None), ("linear", bench.alibi())):
            for size in bench.sizes.masks:
                first, last = mask.interval(size, size, 0, bench.device)
                visible = int((last - first + 1).sum())
                here = {"mask": f"{type(mask).__name__}({interval})", "bias": name, "length": size, "batch": 1}
                for which, took in pass_times(bench, bench.ours(bias, mask), size).items():
                    floor = whole[which] * visible / pairs
                    judged = isinstance(mask, Blockwise) and which == "forward" and size == bench.sizes.masks[-1]
                    ms = {"lengthen": took, "floor": floor}
                    most = 1.5 if judged else None
                    bench.report.add("masks", f"{which} over its floor", here, took / floor, at_most=most, ms=ms)
        bench.clear()


def decode(bench: Bench) -> None:
    size = bench.sizes.copied
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    copy = 2 * size / bench.measure(partial(torch.empty_like(source).copy_, source)) / 1e6
    bench.report.add("decode", "copy, read and written", {"bytes": size}, copy, " GB/s")
    del source
    for batch in bench.sizes.batches:
        for key_heads in (HEADS, HEADS // 4):
            for head_dim in (64, 128):
                bench.clear()
                decode_at(bench, batch, key_heads, head_dim, copy)


@torch.no_grad()
def decode_at(bench: Bench, batch: int, key_heads: int, head_dim: int, copy: float) -> None:
    """Measure one size of cache; `copy` is the bandwidth of a copy, in GB/s."""
    at = {"batch": batch, "key_heads": key_heads, "head_dim": head_dim, "keys": bench.sizes.cache}
    shape = (batch, key_heads, bench.sizes.cache, head_dim)
    count = max(2, min(GRAPH_CALLS, int(CACHE_BYTES / (4 * math.prod(shape)))))
    caches = [
        (bench.normal(batch, HEADS, 1, head_dim), bench.normal(*shape), bench.normal(*shape)) for _ in range(count)
    ]
    bias, balls = bench.alibi(), [Ball.around(k) for _, k, _ in caches]
    ours = [partial(bench.ours(bias, ball=ball), *cache) for cache, ball in zip(caches, balls, strict=True)]
    mine, failed = step_times(bench, ours)
    distance = torch.arange(bench.sizes.cache - 1, -1, -1, device=bench.device)
    dense = bias.at(distance)[None, :, None].to(DTYPE)
    for name, mask in (("torch", None), ("torch with a dense bias", dense)):
        best, problem = attempted(partial(best_of_torch, bench, caches, mask))
        backend, theirs = best or ("", {})
        for way, least in (("graph", 10.0), ("eager", None)):
            ratio = theirs[way] / mine[way] if way in theirs and way in mine else None
            ms = {who: times[way] for who, times in (("lengthen", mine), ("torch", theirs)) if way in times}
            said = failed or problem or f"torch's {backend}"
            bench.report.add("decode", f"against {name}, {way}", at, ratio, at_least=least, ms=ms, note=said)
    if bench.cuda and batch == bench.sizes.batches[-1]:
        read = bytes_read(*caches[0], bias, balls[0])
        fraction = read / mine["graph"] / 1e6 / copy if "graph" in mine else None
        note = failed or f"{read / 1e6:.1f} MB in {1000 * mine['graph']:.1f} µs"
        bench.report.add("decode", "bandwidth over a copy's", at, fraction, "", at_least=0.6, note=note)


def step_times(bench: Bench, calls: Sequence[Call]) -> tuple[dict[str, float], str]:
    """Return the ms of one call, in a CUDA graph that goes round these and eagerly, and why there is no graph."""
    found = {"eager": bench.measure(lambda: [call() for call in calls], ahead=False) / len(calls)}
    most = max(len(calls), min(GRAPH_CALLS, int(BUDGET / found["eager"])))
    graph, problem = attempted(lambda: bench.replayed([calls[i % len(calls)] for i in range(most)]))
    return found if graph is None else {"graph": graph, **found}, problem


def best_of_torch(
    bench: Bench, caches: Sequence[tuple[Tensor, Tensor, Tensor]], mask: Tensor | None
) -> tuple[str, dict[str, float]]:
    """Return which of torch's backends is the fastest over a whole cache, and its times."""
    grouped = caches[0][0].shape[1] != caches[0][1].shape[1]
    calls = [partial(F.scaled_dot_product_attention, *cache, attn_mask=mask, enable_gqa=grouped) for cache in caches]
    fused = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    choices = {"own choice": [*fused, SDPBackend.MATH]} | {one.name.split("_")[0].lower(): [one] for one in fused}
    times: dict[str, float] = {}
    problem = ""
    for name, backends in choices.items():
        with sdpa_kernel(backends):
            found, refused = attempted(partial(bench.measure, calls[0]))
        times |= {} if found is None else {name: found}
        problem = problem or refused
    if not times:
        raise RuntimeError(problem)
    best = min(times, key=lambda name: times[name])
    with sdpa_kernel(choices[best]):
        return best, step_times(bench, calls)[0]


def bytes_read(q: Tensor, k: Tensor, v: Tensor, bias: Linear, ball: Ball) -> float:
    """Return the bytes of keys and values that one decoding step needs: heads that share keys read them once."""
    first, end = kernels.decode_few(pose(q, k, v, bias, None, Causal(), ball=ball), False)[3].long().unbind(0)
    return float((end - first).sum()) * (k.shape[3] + v.shape[3]) * k.element_size()


def memory(bench: Bench) -> None:
    length = bench.sizes.memory
    at = {"length": length, "head_dim": 64, "batch": 1}
    forward = bench.ours(bench.alibi())

    def once() -> int:
        q, k, v = bench.inputs(length, 64, batch=1)
        d_out = torch.randn_like(q)
        out = forward(q, k, v)
        return sum(x.nbytes for x in (q, k, v, d_out, out, *torch.autograd.grad(out, (q, k, v), d_out)))

    needed = once()  # what is compiled and kept for good is there now
    bench.clear()
    if not bench.cuda:
        bench.report.add("memory", "peak", at, None, at_most=1.3, note="only a GPU counts its bytes")
        return
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    once()
    peak = torch.cuda.max_memory_allocated() - before
    note = f"{peak / 1e9:.2f} GB for {needed / 1e9:.2f} GB of inputs, outputs and gradients"
    bench.report.add("memory", "peak", at, peak / needed, at_most=1.3, note=note)


def xpos(bench: Bench) -> None:
    decay = positions.build("xpos", heads=HEADS, head_dim=64, width=HEADS * 64).to(bench.device).decay()
    backend = "triton" if bench.cuda else None  # not torch's own, without a decay
    for length, window in bench.sizes.xpos:
        mask = Causal() if window is None else Window(window)
        inputs = bench.inputs(length, 64)
        d_out = torch.randn_like(inputs[0])
        ms = bench.together(
            {
                name: both_call(bench.ours(mask=mask, decay=given, backend=backend), inputs, d_out)
                for name, given in (("with", decay), ("without", None))
            }
        )
        at = {"length": length, "head_dim": 64, "batch": inputs[0].shape[0]}
        at |= {} if window is None else {"window": window}
        bench.report.add("xpos", "forward+backward, over no decay", at, ms["with"] / ms["without"], at_most=1.1, ms=ms)


@torch.no_grad()
def overhead(bench: Bench) -> None:
    for heads in (1, HEADS):
        q, k, v = (bench.normal(1, heads, 128, 64) for _ in range(3))
        call = partial(bench.ours(bench.alibi(heads)), q, k, v)
        host = host_time(bench, call)
        graph, problem = attempted(partial(bench.replayed, [call] * GRAPH_CALLS))
        of_torch = host_time(bench, partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
        ms = {"host": host, "host for torch's attention": of_torch} | ({} if graph is None else {"GPU": graph})
        at = {"heads": heads, "length": 128, "head_dim": 64, "batch": 1}
        bench.report.add("overhead", "host", at, 1000 * host, " µs", at_most=50.0, ms=ms, note=problem)


def host_time(bench: Bench, call: Call) -> float:
    """Return the ms that the CPU takes for a call."""
    for _ in range(10):
        call()
    times = []
    for _ in range(ROUNDS):
        bench.wait()
        began = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        times.append(1000 * (time.perf_counter() - began) / HOST_CALLS)
    bench.wait()
    return statistics.median(times)


def first(bench: Bench) -> None:
    found = in_new_process(bench, calls=0)
    at = {"length": 1024, "head_dim": 64, "batch": 1}
    note = f"{found['kernels_of_first']} kernels; forward {found['forward']:.2f} s, backward {found['backward']:.2f} s"
    both = found["forward"] + found["backward"]
    bench.report.add("first", "forward+backward, empty Triton cache", at, both, " s", at_most=6.0, note=note)


def variants(bench: Bench) -> None:
    found = in_new_process(bench, calls=bench.sizes.variants)
    at, note = {"calls": bench.sizes.variants}, f"{found['kernels_of_first']} of them for the first call"
    bench.report.add("variants", "kernels compiled", at, found["kernels"], "", note=note)
    bench.report.add("variants", "time after the first call", at, found["seconds"], " s")


def in_new_process(bench: Bench, calls: int) -> Any:
    """Return what `from_cold` says in a process that finds no compiled kernels."""
    command = [sys.executable, __file__, "--device", str(bench.device), "--from-cold", str(calls)]
    command += ["--quick"] if bench.options.quick else []
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def from_cold(bench: Bench, calls: int) -> dict[str, float]:
    """Return the seconds of a first call, and of random calls after it, and the kernels compiled for them."""

    def compiled() -> int:
        if not bench.cuda:  # the interpreter compiles nothing
            return 0
        launch = importlib.import_module("lengthen.attention.backends.triton.launch")
        return sum(len(kernel.variants) for kernel in launch.KERNELS.values())

    inputs = bench.inputs(1024, 64, batch=1)
    forward, d_out = bench.ours(bench.alibi()), torch.randn_like(inputs[0])
    marks = []
    for step in (lambda: None, lambda: forward(*inputs), both_call(forward, inputs, d_out)):
        step()
        bench.wait()
        marks.append(time.perf_counter())
    # The second forward finds its kernels compiled: what is left is the backward.
    found: dict[str, float] = {"forward": marks[1] - marks[0], "backward": marks[2] - marks[1]}
    found["kernels_of_first"] = compiled()
    draw, began = random.Random(SEED), time.perf_counter()
    for _ in range(calls):
        inputs, mask = random_call(bench, draw)
        both_call(bench.ours(bench.alibi(), mask), inputs, torch.randn_like(inputs[0]))()
    bench.wait()
    return found | {"seconds": time.perf_counter() - began, "kernels": compiled()}


def random_call(bench: Bench, draw: random.Random) -> tuple[tuple[Tensor, Tensor, Tensor], Mask]:
    """Return inputs and a mask as no other call has them."""
    batch, length, key_heads = draw.randint(1, 4), draw.randint(33, bench.sizes.varied), draw.choice((16, 8, 4, 2, 1))
    queries = draw.choice((length, draw.randint(33, length)))
    tokens_first, window, padded = (draw.random() < 0.5 for _ in range(3))

    def normal(heads: int, rows: int) -> Tensor:
        wide = 64 * draw.randint(1, 3)  # where features stand beside those of others, as in one projection for all
        if tokens_first:
            return bench.normal(batch, rows, heads, wide)[..., :64].transpose(1, 2).requires_grad_()
        return bench.normal(batch, heads, rows, wide)[..., :64].requires_grad_()

    mask: Mask = Window(draw.randint(1, length)) if window else Causal()
    if padded:
        mask = mask.padded(torch.tensor([draw.randrange(length // 2) for _ in range(batch)], device=bench.device))
    return (normal(HEADS, queries), normal(key_heads, length), normal(key_heads, length)), mask


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section
    for section in (
        *(lengths, acp, growth, trained, kerple, masks, decode, memory, xpos, overhead, first, variants),
        table,
    )
}


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    bench = Bench(device, QUICK if options.quick else Sizes(), Report(describe(device), options.out), options)
    if options.from_cold is not None:
        print(json.dumps(from_cold(bench, options.from_cold)))
        return 0

    def begin(section: Callable[[Bench], None]) -> None:
        torch.manual_seed(SEED)
        bench.clear()
        section(bench)

    return bench.report.run({name: partial(begin, SECTIONS[name]) for name in options.only}, options.strict)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, tuple(SECTIONS))
    parser.add_argument("--device", default="cuda", help="cuda, or with --quick cpu")
    parser.add_argument("--acp", type=Path, metavar="DIR", help="acp: a checkout of the Forgetting Transformer's code")
    parser.add_argument("--model-run", type=Path, metavar="DIR", help="trained: a run's folder; without it, train one")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="trained: token shards (the standard library's)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="trained: a text to read, with --corpus' tokenizer")
    parser.add_argument("--train-steps", type=int, default=500, help="trained: steps of 32,768 tokens (500)")
    parser.add_argument("--from-cold", type=int, help=argparse.SUPPRESS)  # the process of `first` and `variants`
    options = parsed(parser, "attention_gpu", tuple(SECTIONS))
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and torch sees none (--quick --device cpu checks the script)")
    if not options.device.startswith("cuda") and not options.quick:
        parser.error("--device: without a GPU only --quick makes sense")
    return options


def describe(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers."""
    return {
        "benchmark": "attention_gpu",
        **software(),
        "device": machine(device),
        "triton": attempted(partial(version, "triton"))[0],
        "cuda": torch.version.cuda,
        "cudnn": attempted(torch.backends.cudnn.version)[0],
        "settings": {"heads": HEADS, "dtype": str(DTYPE).removeprefix("torch."), "seed": SEED},
    }


if __name__ == "__main__":
    sys.exit(main())
