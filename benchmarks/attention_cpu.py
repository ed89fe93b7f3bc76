"""Attention on the CPU beside its peers, in one run: `make bench`, or `python benchmarks/attention_cpu.py`.

    python benchmarks/attention_cpu.py                          # every section; writes benchmarks/results
    python benchmarks/attention_cpu.py --only busy --threads 2,8 --out out.json
    python benchmarks/attention_cpu.py --quick                  # does the script work: short, means little

8 heads × 64, float32, one sequence of random normal queries, keys and values. Contestants take turns, round after
round, and medians are reported, as speeds against torch's causal attention without any bias: above 1 is faster. All is
measured with each number of threads that `--threads` names.

    section   what is measured
    speed     forward, and forward with backward, of each contestant; at 1,024 the largest difference from the float64
              reference is beside it
    busy      the same of `alibi`, idle and beside two processes that keep two cores busy: what is left of the speed
    memory    what forward and backward of `alibi` take above inputs and outputs, in a process of their own

    contestant   what it is                                                     forward  backward
    alibi        lengthen.attention, Linear, the backend it picks               yes      yes
    t5, xpos     lengthen.attention, Table or Decay (for information)           yes      yes
    dense        scaled_dot_product_attention, ALiBi as a dense float32 mask    yes      yes
    flex         FlexAttention, compiled, ALiBi as its score_mod                yes      none on the CPU
    causal       scaled_dot_product_attention, is_causal, no bias               yes      yes
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from records import Report, attempted, parsed, parser_of, software
from torch import Tensor

from lengthen import Causal, Linear, alibi_slopes, attention, positions

HEADS, HEAD_DIM, SEED = 8, 64, 0
LENGTHS, QUICK_LENGTHS = (1024, 4096, 16384), (512, 1024)
ROUNDS, QUICK_ROUNDS = 7, 2  # at least, after one to warm up
MOST_ROUNDS, SECONDS = 50, 2.0  # of short calls: so many that what disturbs one disturbs all, or so long
CHECKED_AT = 1024  # the length at which outputs are compared with the float64 reference
INFORMATION_UP_TO = 4096  # t5 and xpos have no target; beyond this they are left out
MASK_LIMIT = 6e9  # bytes of a dense mask that is still built
SPINNERS = 2  # busy processes
# Length: at least so many times the speed of torch's causal attention.
TARGETS = {
    "forward": {1024: 0.8, 4096: 1.2, 16384: 3.0},
    "forward+backward": {1024: 0.7, 4096: 1.0, 16384: 2.5},
}
LEFT = 0.7  # of each of those ratios, beside busy processes
MEMORY = {16384: 300.0}  # length: at most so many MB

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> int:
    options = parse()
    if options.memory_of is not None:
        torch.set_num_threads(options.threads[0])
        print(memory_of(options.memory_of))
        return 0
    report = Report(describe(options), options.out)

    def each_number_of_threads(section: Callable[[Report, argparse.Namespace, dict[str, Any]], None]) -> None:
        for threads in options.threads:
            torch.set_num_threads(threads)
            for length in options.lengths:
                section(report, options, {"threads": threads, "length": length})

    return report.run({name: partial(each_number_of_threads, SECTIONS[name]) for name in options.only}, options.strict)


def parse() -> argparse.Namespace:
    cores = count_cores()
    parser = parser_of(__doc__, tuple(SECTIONS))
    both = ",".join(map(str, sorted({min(2, cores), cores})))
    parser.add_argument("--threads", type=numbers, default=both, help=f"torch's threads, with commas (default: {both})")
    parser.add_argument("--lengths", type=numbers, help=f"with commas (default: {','.join(map(str, LENGTHS))})")
    parser.add_argument("--rounds", type=int, help=f"of turns at least, after one to warm up (default: {ROUNDS})")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)  # the process that measures memory
    options = parsed(parser, "attention_cpu", tuple(SECTIONS))
    options.lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return options


def numbers(text: str) -> list[int]:
    """Return the whole numbers that are separated by commas, each once."""
    found = list(dict.fromkeys(int(word) for word in text.split(",")))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, got {text}")
    return found


# --- the contestants ------------------------------------------------------------------------------------------------


def contestants_at(length: int) -> dict[str, Callable[[], Forward]]:
    """Return what makes each of them: masks, tables and compiled code are not to be timed."""
    ours = {name: partial(with_lengthen, name, length) for name in ("alibi", "t5", "xpos")}
    if length > INFORMATION_UP_TO:
        ours = {"alibi": ours["alibi"]}
    return {
        **ours,
        "dense": partial(with_dense_mask, length),
        "flex": partial(with_flex_attention, length),
        "causal": lambda: partial(F.scaled_dot_product_attention, is_causal=True),
    }


def with_lengthen(name: str, length: int) -> Forward:
    return partial(attention, mask=Causal(), **meant(name, length))


def meant(name: str, length: int) -> dict[str, Any]:
    """Return the bias or decay that a contestant computes, as arguments of `lengthen.attention`."""
    if name == "causal":
        return {}
    if name in ("alibi", "dense", "flex"):
        return {"bias": Linear(alibi_slopes(HEADS))}
    method = positions.build(name, heads=HEADS, head_dim=HEAD_DIM, width=HEADS * HEAD_DIM)
    if name == "xpos":
        return {"decay": method.decay()}
    with torch.no_grad():  # it starts at zeros; a trained one is of the size of the scores
        method.get_parameter("weight").normal_(generator=torch.Generator().manual_seed(SEED))
        return {"bias": method.bias(length - 1)}


def with_dense_mask(length: int) -> Forward:
    size = 4 * HEADS * length**2
    if size > MASK_LIMIT:
        raise MemoryError(f"the mask alone would take {size / 1e9:.1f} GB")
    mask = torch.empty(HEADS, length, length)
    key = torch.arange(length, dtype=torch.float32)
    for head, slope in enumerate(alibi_slopes(HEADS).tolist()):
        mask[head] = slope * (key - key[:, None])
        mask[head].masked_fill_(key > key[:, None], -torch.inf)
    return partial(F.scaled_dot_product_attention, attn_mask=mask)


def with_flex_attention(length: int) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = alibi_slopes(HEADS)

    def bias(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[head] * (i - j)

    def behind(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    torch._dynamo.reset()  # else it would compile for any length and number of threads, not for these
    compiled = torch.compile(flex_attention, dynamic=False)
    seen = create_block_mask(behind, None, None, length, length, device="cpu")
    forward = partial(compiled, score_mod=bias, block_mask=seen)
    with torch.no_grad():
        forward(*inputs(length))
    return forward


# --- time and correctness -------------------------------------------------------------------------------------------


def inputs(length: int, needs_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = torch.randn(3, 1, HEADS, length, HEAD_DIM, generator=generator).unbind(0)
    return q.requires_grad_(needs_grad), k.requires_grad_(needs_grad), v.requires_grad_(needs_grad)


def medians(which: str, forwards: dict[str, Forward], length: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of each contestant's pass; they take turns, and another begins in each round."""
    q, k, v = inputs(length, needs_grad=which != "forward")
    d_out = torch.ones_like(q)
    names, seconds = list(forwards), {name: list[float]() for name in forwards}
    turn = 0
    while turn <= rounds:
        started = time.perf_counter()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            if which == "forward":
                with torch.no_grad():
                    forwards[name](q, k, v)
            else:
                torch.autograd.grad(forwards[name](q, k, v), (q, k, v), d_out)
            if turn:
                seconds[name].append(time.perf_counter() - began)
        turn += 1
        if turn == 2 and rounds >= ROUNDS:  # the first round after warming up says how many there is time for
            rounds = max(rounds, min(MOST_ROUNDS, int(SECONDS / (time.perf_counter() - started))))
    return {name: statistics.median(found) for name, found in seconds.items()}


def difference(name: str, forward: Forward, length: int) -> str:
    """Return how far a contestant's output is from the reference in float64, at most."""
    q, k, v = inputs(length)
    with torch.no_grad():
        reference = partial(attention, mask=Causal(), backend="reference", **meant(name, length))
        exact = reference(q.double(), k.double(), v.double())
        return f"differs by {float((forward(q, k, v) - exact).abs().max()):.1e}"


# --- the sections ---------------------------------------------------------------------------------------------------


def speed(report: Report, options: argparse.Namespace, at: dict[str, Any]) -> None:
    length = at["length"]
    made = {name: attempted(make) for name, make in contestants_at(length).items()}
    forwards = {name: forward for name, (forward, _) in made.items() if forward is not None}
    notes = {name: difference(name, f, length) for name, f in forwards.items()} if length == CHECKED_AT else {}
    for which, targets in TARGETS.items():
        taking_part = {name: f for name, f in forwards.items() if which == "forward" or name != "flex"}
        taken = medians(which, taking_part, length, options.rounds)
        for name, (_, problem) in made.items():
            if name in taken:
                ms = {who: 1000 * taken[who] for who in (name, "causal")}
                least, note = targets.get(length) if name == "alibi" else None, notes.get(name, "")
                ratio = taken["causal"] / taken[name]
                report.add("speed", f"{name}, {which}", at, ratio, at_least=least, ms=ms, note=note)
            else:
                note = problem or "FlexAttention has no backward on the CPU"
                report.add("speed", f"{name}, {which}", at, None, note=note)


def busy(report: Report, options: argparse.Namespace, at: dict[str, Any]) -> None:
    length, made = at["length"], contestants_at(at["length"])
    forwards = {name: made[name]() for name in ("alibi", "causal")}
    for which in TARGETS:
        idle = medians(which, forwards, length, options.rounds)
        with spinning(SPINNERS):
            taken = medians(which, forwards, length, options.rounds)
        before, after = (times["causal"] / times["alibi"] for times in (idle, taken))
        ms = {f"{name}, idle": 1000 * idle[name] for name in forwards}
        ms |= {f"{name}, busy": 1000 * taken[name] for name in forwards}
        note = f"{after:.2f}× the speed of causal, {before:.2f}× idle"
        report.add("busy", f"alibi, {which}, busy over idle", at, after / before, "", at_least=LEFT, ms=ms, note=note)


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Keep cores busy; the processes end with this one, however it ends."""
    code = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(1_000_000): pass"
    spinners: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            spinners.append(subprocess.Popen([sys.executable, "-S", "-c", code, str(os.getpid())]))
        time.sleep(0.2)  # until they are at it
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()


def memory(report: Report, options: argparse.Namespace, at: dict[str, Any]) -> None:
    command = [sys.executable, __file__, "--memory-of", str(at["length"]), "--threads", str(at["threads"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    problem = (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else ""
    used, most = None if problem else float(done.stdout) / 1e6, MEMORY.get(at["length"])
    report.add("memory", "alibi, above inputs and outputs", at, used, " MB", at_most=most, note=problem)


def memory_of(length: int) -> int:
    """Return the peak of forward and backward above inputs, output and the gradients of q, k and v, in bytes.

    The inputs and the output's gradient exist before; the rest is counted, the code that torch loads on the way too.
    """
    q, k, v = inputs(length, needs_grad=True)
    d_out = torch.ones_like(q)
    forget_peak()
    before = resident("VmRSS")
    out = with_lengthen("alibi", length)(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), d_out)
    return resident("VmHWM") - before - sum(x.nbytes for x in (out, *gradients))


def forget_peak() -> None:
    """Start the peak of resident memory anew, on Linux; elsewhere it counts from the process's start."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def resident(field_name: str) -> int:
    """Return resident memory in bytes: "VmRSS" now, "VmHWM" at its peak (where there is no /proc, both the peak)."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field_name + ":"))


SECTIONS = {section.__name__: section for section in (speed, busy, memory)}


# --- the machine ----------------------------------------------------------------------------------------------------


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers."""
    return {
        "benchmark": "attention_cpu",
        **software(),
        "cpu": cpu_model(),
        "cores": count_cores(),
        "threads": options.threads,
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": round(os.getloadavg()[0], 2),  # above 0: something else was running
        "settings": {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "batch": 1, "rounds": options.rounds},
    }


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())
