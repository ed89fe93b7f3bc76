"""Attention on one GPU beside its peers: what `lengthen.attention` costs, with its targets beside what was measured.

    python benchmarks/attention_gpu.py                                # every section; writes benchmarks/results
    python benchmarks/attention_gpu.py --only lengths,decode --out out.json
    python benchmarks/attention_gpu.py --only trained --model-run runs/alibi --corpus data/books
    python benchmarks/attention_gpu.py --quick --device cpu           # does the script work: tiny, means nothing

It is one long file because it is one run: sections share the peers, the clock and the machine, and a ratio means
something only within it.

    section   what is measured (bf16, 16 heads, ALiBi's slopes, causal, random normal inputs unless it says otherwise)
    lengths   forward and backward against cuDNN's causal attention, which has no bias, and forward against
              FlexAttention with the same bias; the share of keys read; the distance from reading everything
    growth    time at 1,048,576 tokens over that at 131,072
    trained   as `lengths`, on the queries, keys and values of a trained model
    masks     Blockwise(512) and Window(512) against the kernel's own rate on as many visible pairs
    decode    one query and a cache of 131,072 keys, against torch's attention over the whole cache; bandwidth
    memory    the peak of forward and backward over the bytes of inputs, outputs and gradients
    xpos      a decay, against the same call without it: causal, and in a window
    overhead  the host's time for a tiny call above the GPU's, and that of torch's own attention
    table     T5's bias, forward and backward with the table's gradient, against FlexAttention; and as a table of which
              nothing is known

Times are the GPU's, between CUDA events, with the host let run ahead so that no launch is waited for (`overhead`, and
the eager times of `decode`, tell of the host). Contestants take turns, and medians are reported. Backward is the time
of `torch.autograd.grad` alone. Ratios against a peer are above 1 where `lengthen` is faster. The JSON is written after
every record. `table` comes last, since FlexAttention may leave the GPU in a state where nothing runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lengthen import Blockwise, Causal, Linear, Table, Transformer, Window, alibi_slopes, attention, positions, reach
from lengthen.attention import Bias, Mask

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
SPAN = 64  # keys: what a kernel reads at least, where it does not say

# Length: at least so many times the speed.
FORWARD = {1024: 0.95, 2048: 1.1, 8192: 2.5, 32768: 8.0, 131072: 30.0}
BACKWARD = {1024: 0.85, 2048: 1.0, 8192: 2.0, 32768: 6.0, 131072: 25.0}
FORWARD_FLEX = {1024: 1.5, 2048: 1.7, 8192: 4.0, 32768: 12.0, 131072: 45.0}

cuda: Any = torch.cuda  # in parts it has no types

Call = Callable[[], Any]
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    tokens: int = 32768  # in a batch of short sequences
    lengths: tuple[int, ...] = (1024, 2048, 8192, 32768, 131072)
    growth: tuple[int, int] = (131072, 1048576)
    trained: tuple[int, ...] = (2048, 8192, 32768)
    table: tuple[int, ...] = (8192, 32768)
    masks: tuple[int, ...] = (8192, 32768, 131072)
    interval: int = 512
    rate_at: int = 16384
    cache: int = 131072
    batches: tuple[int, int] = (1, 16)
    memory: int = 131072
    xpos: tuple[tuple[int, int | None], ...] = ((2048, None), (8192, None), (32768, 4096))  # length, window
    copied: int = 4 << 30  # bytes


QUICK = Sizes(
    tokens=512,
    lengths=(256, 512),
    growth=(256, 512),
    trained=(256, 512),
    table=(256, 512),
    masks=(256, 512),
    interval=128,
    rate_at=512,
    cache=1024,
    batches=(1, 2),
    memory=512,
    xpos=((512, None), (512, 128)),
    copied=1 << 20,
)


@dataclass
class Report:
    """The records so far: each is printed and written down as it comes."""

    path: Path | None
    facts: dict[str, Any]
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(
        self,
        section: str,
        what: str,
        at: dict[str, Any],
        value: float | None,
        unit: str = "×",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        ms: dict[str, float] | None = None,
        note: str = "",
    ) -> None:
        """Take one record; a value of None was not measured, and the note says why."""
        record: dict[str, Any] = {"what": what, **at, "value": value, "unit": unit}
        record |= {key: bound for key, bound in (("at_least", at_least), ("at_most", at_most)) if bound is not None}
        if at_least is not None or at_most is not None:
            low, high = -math.inf if at_least is None else at_least, math.inf if at_most is None else at_most
            record["met"] = None if value is None else low <= value <= high
        record |= {key: said for key, said in (("ms", ms), ("note", note)) if said}
        self.sections.setdefault(section, []).append(record)
        self.write()
        print(f"{section:<8} " + "  ".join(cell for cell in cells(record, at) if cell), flush=True)

    def write(self) -> None:
        """Write everything down."""
        if self.path is not None:
            whole = {"benchmark": "attention_gpu", **self.facts, "sections": self.sections}
            self.path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        """Return all records in Markdown."""
        lines = ["| section | what | at | result | target | met | times, ms | note |", "|---" * 8 + "|"]
        known = {"what", "value", "unit", "at_least", "at_most", "met", "ms", "note"}
        for section, records in self.sections.items():
            for record in records:
                at = {key: value for key, value in record.items() if key not in known}
                lines.append(f"| {section} | " + " | ".join(cells(record, at)) + " |")
        return "\n".join(lines)


def cells(record: dict[str, Any], at: dict[str, Any]) -> list[str]:
    """Return a record as words: what, where, the result, the target, whether it was met, times, a note."""
    where = ", ".join(f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in at.items())
    result = "–" if record["value"] is None else f"{record['value']:.3g}{record['unit']}"
    bounds = [f"{sign} {record[key]:g}" for sign, key in (("≥", "at_least"), ("≤", "at_most")) if key in record]
    met = {True: "yes", False: "NO", None: ""}[record.get("met")]
    times = ", ".join(f"{name} {value:.4g}" for name, value in record.get("ms", {}).items())
    return [record["what"], where, result, " ".join(bounds), met, times, record.get("note", "")]


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
        return Linear(alibi_slopes(heads).to(self.device, torch.float32))

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


def attempted(make: Callable[[], T]) -> tuple[T | None, str]:
    """Return what `make` makes, or None and the first line of what went wrong: peers may fail, the run goes on."""
    try:
        return make(), ""
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0][:200]}"


# --- the contestants --------------------------------------------------------------------------------------------------


def with_lengthen(bias: Bias | None = None, mask: Mask | None = None, **rest: Any) -> Forward:
    return partial(attention, bias=bias, mask=mask or Causal(), **rest)


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


def flex_alibi(bench: Bench, inputs: tuple[Tensor, Tensor, Tensor]) -> Call:
    """Return FlexAttention's forward pass with ALiBi's bias, compiled."""
    slopes = bench.alibi().slopes

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[head] * (i - j)

    call = forward_call(with_flex(bench, inputs[0].shape[2], score_mod), *inputs)
    call()
    return call


def forward_call(forward: Forward, q: Tensor, k: Tensor, v: Tensor) -> Call:
    return partial(forward, q.detach(), k.detach(), v.detach())


def backward_call(forward: Forward, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Call:
    """Return the backward pass alone, of a forward pass that is made here."""
    out = forward(q, k, v)
    return lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)


def both_call(forward: Forward, inputs: Sequence[Tensor], d_out: Tensor) -> Call:
    """Return forward and backward; inputs after the first three get their gradients too."""
    return lambda: torch.autograd.grad(forward(*inputs[:3]), inputs, d_out)


# --- how much is read, and how far that is from reading everything ----------------------------------------------------


@torch.no_grad()
def share_read(bench: Bench, q: Tensor, k: Tensor, v: Tensor, bias: Linear) -> float:
    """Return the keys read over those that reading everything reads."""
    if not bench.cuda:
        behind = torch.arange(1, q.shape[2] + 1).expand(q.shape[:3])
        return float(reach(q, k, bias).sum() / behind.sum())
    from lengthen.attention import kernels

    first, end = kernels.spans(q, k, v, bias=bias, mask=Causal()).long().unbind(0)
    return float((end - first).sum() / end.sum())  # everything, for a causal block, is from 0 to its end


@torch.no_grad()
def apart(q: Tensor, k: Tensor, v: Tensor, bias: Linear) -> tuple[float, float]:
    """Return the largest difference from reading everything, plain and in roundings of the output's dtype.

    A rounding is eps·|exact|, and no less than that of the median number.
    """
    out, exact = (attention(q, k, v, bias=bias, tolerance=tolerance).float() for tolerance in (None, 0))
    size, difference = exact.abs(), (out - exact).abs()
    median = size.flatten()[:: max(1, size.numel() >> 20)].median()
    return float(difference.max()), float((difference / size.clamp(min=median)).max() / torch.finfo(q.dtype).eps)


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
    ours = with_lengthen(bias)
    d_out = torch.randn_like(inputs[0])
    peer, theirs = with_torch(inputs, d_out)
    calls = {"lengthen": forward_call(ours, *inputs), peer: forward_call(theirs, *inputs)}
    problem = ""
    if flex:
        call, problem = attempted(partial(flex_alibi, bench, inputs))
        calls |= {} if call is None else {"flex": call}
    ms = bench.together(calls)
    least = FORWARD.get(length) if targets else None
    add("forward against torch", at, ms[peer] / ms["lengthen"], at_least=least, ms=ms, note=f"torch's {peer}")
    if flex:
        ratio = ms["flex"] / ms["lengthen"] if "flex" in ms else None
        least = FORWARD_FLEX.get(length) if targets else None
        add("forward against flex", at, ratio, at_least=least, ms=ms, note=problem)
    ms = bench.together({name: backward_call(f, *inputs, d_out) for name, f in (("lengthen", ours), (peer, theirs))})
    least = BACKWARD.get(length) if targets else None
    add("backward against torch", at, ms[peer] / ms["lengthen"], at_least=least, ms=ms, note=f"torch's {peer}")
    add("share of keys read", at, share_read(bench, *inputs, bias), "")
    plain, rounded = apart(*inputs, bias)
    add("from reading everything", at, rounded, " roundings", at_most=roundings, note=f"at most {plain:.2g}")


# --- the sections -----------------------------------------------------------------------------------------------------


def lengths(bench: Bench) -> None:
    for head_dim in (64, 128):
        for length in bench.sizes.lengths:
            inputs = bench.inputs(length, head_dim)
            at = {"length": length, "head_dim": head_dim, "batch": inputs[0].shape[0]}
            compare(bench, "lengths", at, inputs, bench.alibi(), flex=head_dim == 64, targets=True)
            del inputs
            bench.clear()


def growth(bench: Bench) -> None:
    forward, found = with_lengthen(bench.alibi()), []
    for length in bench.sizes.growth:
        inputs = bench.inputs(length, 64, batch=1)
        ms = {"forward": bench.measure(forward_call(forward, *inputs))}
        ms["backward"] = bench.measure(backward_call(forward, *inputs, torch.randn_like(inputs[0])))
        found.append(ms)
        del inputs
        bench.clear()
    short, long = bench.sizes.growth
    for which in ("forward", "backward"):
        ms = {f"at {length:,}": one[which] for length, one in zip((short, long), found, strict=True)}
        at = {"length": long, "over": short, "head_dim": 64, "batch": 1}
        bench.report.add("growth", which, at, found[1][which] / found[0][which], at_most=8.5, ms=ms)


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
    words = [
        ("model.positions", "alibi"),
        ("model.train_length", "64" if quick else "512"),
        ("train.steps", str(steps)),
        ("train.batch", "4" if quick else "64"),
        ("train.micro_batch", "4" if quick else "64"),
        ("schedule.shape", "trapezoid"),
        ("schedule.warmup", str(max(1, steps // 5))),
        ("evaluation.every", "0"),
        ("checkpoint.every", "0"),
        *([("model.width", "128"), ("model.heads", "2")] if quick else []),  # heads of 64, as the kernels like them
    ]
    began = time.monotonic()
    with world(str(bench.device)) as here:
        outcome = train(load("tiny" if quick else "small", words, corpus.vocab_size), corpus, folder, here)
    at = {"steps": steps, "seconds": round(time.monotonic() - began)}
    bench.report.add("trained", "loss of the model", at, outcome.loss, "")
    return folder


def table(bench: Bench) -> None:
    method = positions.build("t5", heads=HEADS, head_dim=64, width=HEADS * 64).to(bench.device)
    with torch.no_grad():  # it starts at zeros; a trained one is of the size of the scores
        method.get_parameter("weight").normal_()
    slow = ""
    for length in bench.sizes.table:
        bias = method.bias(length - 1)
        assert isinstance(bias, Table)
        values = bias.values.detach().requires_grad_()
        inputs = (*bench.inputs(length, 64), values)
        d_out = torch.randn_like(inputs[0])
        calls = {
            "lengthen": both_call(with_lengthen(Table(values, level=bias.level)), inputs, d_out),
            "no level told": both_call(with_lengthen(Table(values)), inputs, d_out),
        }
        ms = bench.together(calls)  # before FlexAttention, which may leave the GPU in a state where nothing runs
        flex, problem = (None, slow) if slow else attempted(partial(flex_table, bench, inputs, d_out))
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
        at = {"length": length, "head_dim": 64, "batch": inputs[0].shape[0]}
        bench.report.add("table", "forward+backward against flex", at, ratio, at_least=1.3, ms=ms, note=problem)
        del inputs, calls, flex, d_out
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
    def times(forward: Forward, length: int) -> dict[str, float]:
        inputs = bench.inputs(length, 64, batch=1)
        found = {"forward": bench.measure(forward_call(forward, *inputs))}
        found["backward"] = bench.measure(backward_call(forward, *inputs, torch.randn_like(inputs[0])))
        return found

    length, interval = bench.sizes.rate_at, bench.sizes.interval
    whole = times(with_lengthen(bench.alibi(), tolerance=0), length)
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
                for which, took in times(with_lengthen(bias, mask), size).items():
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
    # A little above the longest key, as a cache would keep it: the norm itself is rounded.
    norms = [torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(-1) * 1.0001 for _, k, _ in caches]
    bias = bench.alibi()
    known = [{"key_norm": norm} if bench.cuda else {} for norm in norms]
    ours = [partial(attention, *cache, bias=bias, **rest) for cache, rest in zip(caches, known, strict=True)]
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
    if batch == bench.sizes.batches[-1]:
        read = bytes_read(bench, *caches[0], bias, known[0])
        share = read / mine["graph"] / 1e6 / copy if "graph" in mine else None
        note = failed or f"{read / 1e6:.1f} MB in {1000 * mine['graph']:.1f} µs"
        bench.report.add("decode", "bandwidth over a copy's", at, share, "", at_least=0.6, note=note)


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


def bytes_read(bench: Bench, q: Tensor, k: Tensor, v: Tensor, bias: Linear, known: dict[str, Tensor]) -> float:
    """Return the bytes of keys and values that one decoding step needs: heads that share keys read them once."""
    decode_spans = None
    if bench.cuda:
        from lengthen.attention import kernels

        decode_spans = getattr(kernels, "decode_spans", None)
    if decode_spans is None:
        end = torch.full(q.shape[:2], k.shape[2], device=q.device)
        first = (end - reach(q, k, bias)[..., 0]) // SPAN * SPAN
    else:
        first, end = decode_spans(q, k, v, bias, **known).long().unbind(0)
    of_keys = (k.shape[0], k.shape[1], -1)
    read = end.reshape(of_keys).amax(-1) - first.reshape(of_keys).amin(-1)
    return float(read.clamp(min=0).sum()) * (k.shape[3] + v.shape[3]) * k.element_size()


def memory(bench: Bench) -> None:
    length = bench.sizes.memory
    at = {"length": length, "head_dim": 64, "batch": 1}
    forward = with_lengthen(bench.alibi())

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
    backend = "triton" if bench.cuda else None
    for length, window in bench.sizes.xpos:
        mask = Causal() if window is None else Window(window)
        inputs = bench.inputs(length, 64)
        d_out = torch.randn_like(inputs[0])
        ms = bench.together(
            {
                name: both_call(with_lengthen(mask=mask, decay=given, backend=backend), inputs, d_out)
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
        call = partial(attention, q, k, v, bias=bench.alibi(heads))
        host = host_time(bench, call)
        graph, problem = attempted(partial(bench.replayed, [call] * GRAPH_CALLS))
        above = None if graph is None else 1000 * (host - graph)
        of_torch = host_time(bench, partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
        ms = {"host": host, "host for torch's attention": of_torch} | ({} if graph is None else {"GPU": graph})
        at = {"heads": heads, "length": 128, "head_dim": 64, "batch": 1}
        bench.report.add("overhead", "host above GPU", at, above, " µs", at_most=30.0, ms=ms, note=problem)


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


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section for section in (lengths, growth, trained, masks, decode, memory, xpos, overhead, table)
}


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    report = Report(options.out, describe_machine(device))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(device, QUICK if options.quick else Sizes(), report, options)
    began, failed = time.monotonic(), False
    for name in options.only:
        torch.manual_seed(SEED)
        started = time.monotonic()
        try:
            SECTIONS[name](bench)
        except Exception as error:  # the other sections are worth having
            failed = True
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            report.add(name, "failed", {}, None, note=f"{type(error).__name__}: {lines[0][:200]}")
        bench.clear()
        print(f"{name} took {time.monotonic() - started:.0f} s", flush=True)
    print("\n" + report.table())
    print(f"\ntook {time.monotonic() - began:.0f} s" + (f"; written to {options.out}" if options.out else ""))
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas (default: all)")
    parser.add_argument("--device", default="cuda", help="cuda, or with --quick cpu")
    parser.add_argument("--quick", action="store_true", help="check that it works: tiny sizes, no file without --out")
    parser.add_argument("--model-run", type=Path, metavar="DIR", help="trained: a run's folder; without it, train one")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="trained: token shards (the standard library's)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="trained: a text to read, with --corpus' tokenizer")
    parser.add_argument("--train-steps", type=int, default=500, help="trained: steps of 32,768 tokens (500)")
    parser.add_argument("--out", type=Path, help="the JSON (default: benchmarks/results, with the date)")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"--only: expected some of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    options.only = [name for name in SECTIONS if name in chosen]
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and torch sees none (--quick --device cpu checks the script)")
    if not options.device.startswith("cuda") and not options.quick:
        parser.error("--device: without a GPU only --quick makes sense")
    if options.out is None and not options.quick:
        options.out = Path(__file__).parent / "results" / f"attention_gpu-{datetime.now(UTC):%Y-%m-%d}.json"
    return options


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers; neither the host's name nor a path is in it."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": attempted(partial(version, "triton"))[0],
        "cuda": torch.version.cuda,
        "cudnn": attempted(torch.backends.cudnn.version)[0],
        "python": platform.python_version(),
        "settings": {"heads": HEADS, "dtype": str(DTYPE).removeprefix("torch."), "seed": SEED},
    }


if __name__ == "__main__":
    sys.exit(main())
