"""Attention on the CPU beside its peers, in one run: `make bench`, or `python benchmarks/attention_cpu.py`.

8 heads × 64, float32, one sequence of random normal queries, keys and values. All contestants of a length are timed in
turn, round after round, so that whatever else the machine does meets all of them; medians are reported, and speeds as
ratios against torch's causal attention without any bias. Beside the times stand the largest difference from the float64
reference, and the memory that `lengthen` takes above its inputs and outputs, measured in a process of its own.

    contestant      what it is                                                     forward  backward
    alibi           lengthen.attention, Linear, the backend it picks               yes      yes
    t5, xpos        lengthen.attention, Table or Decay (for information)           yes      yes
    dense           scaled_dot_product_attention, ALiBi as a dense float32 mask    yes      yes
    flex            FlexAttention, compiled, ALiBi as its score_mod                yes      none on the CPU
    causal          scaled_dot_product_attention, is_causal, no bias: the measure  yes      yes

Results go to benchmarks/results/attention_cpu-<date>.json with the machine in them (no host name). `--quick` is a check
that the script works: short lengths, few rounds, no file unless `--output` names one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthen import Causal, Linear, alibi_slopes, attention, positions
from lengthen.attention import Bias, Decay

HEADS, HEAD_DIM, SEED = 8, 64, 0
LENGTHS, QUICK_LENGTHS = (1024, 4096, 16384), (512, 1024)
CHECKED_AT = 1024  # the length at which results are compared with the float64 reference
INFORMATION_UP_TO = 4096  # t5 and xpos have no target; beyond this they are left out
MASK_LIMIT = 6e9  # bytes of a dense mask that is still built
NAMES = ("alibi", "t5", "xpos", "dense", "flex")
MEASURE = "causal"  # always takes part
# (length, pass, at least so many times the speed of the measure), and (length, at most so many bytes)
SPEED_TARGETS = (
    (4096, "forward", 1.0),
    (4096, "forward+backward", 1.0),
    (16384, "forward", 3.0),
    (16384, "forward+backward", 2.5),
)
MEMORY_TARGET = (16384, 300e6)

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class Skip(Exception):  # noqa: N818 (not an error: a contestant that does not take part, and why)
    """A contestant does not take part at this length; the message says why."""


@dataclass
class Contestant:
    """One way to compute attention, and what it did at one length."""

    name: str
    build: Callable[[int], Forward]
    no_backward: str = ""  # why it has none
    forward: Forward | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    difference: float | None = None

    def ready(self, length: int) -> None:
        """Build what is not to be timed: masks, tables, compiled code."""
        try:
            self.forward = self.build(length)
        except Skip as reason:
            self.reasons = dict.fromkeys(("forward", "forward+backward"), str(reason))
        if self.no_backward:
            self.reasons.setdefault("forward+backward", self.no_backward)

    def median(self, which: str) -> float | None:
        """Return the median time of a pass, if it was timed."""
        return statistics.median(self.seconds[which]) if self.seconds.get(which) else None


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.memory_of is not None:
        print(memory_of(options.memory_of))
        return 0
    began, machine = time.perf_counter(), describe_machine(options.threads)
    note(f"{machine['cpu']}, {machine['cores']} cores, {options.threads} threads, torch {machine['torch']}")
    results = []
    for length in options.lengths:
        contestants = run(length, options.contestants, options.repeats)
        note(f"{length:,}: memory")
        results.append(summarise(length, contestants, memory_in_own_process(length, options.threads)))
    targets = judge(results)
    print_tables(results, targets)
    note(f"took {time.perf_counter() - began:.0f} s")
    if options.output is not None:
        path = Path(options.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "batch": 1, "seed": SEED}
        settings |= {
            "lengths": options.lengths,
            "contestants": [*options.contestants, MEASURE],
            "repeats": options.repeats,
            "measure": MEASURE,
        }
        report = {"machine": machine, "settings": settings, "results": results, "targets": targets}
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        note(f"wrote {path}")
    return 1 if options.strict and any(target["met"] is False for target in targets) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Attention on the CPU beside its peers, in one run.")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default: {' '.join(map(str, LENGTHS))}")
    parser.add_argument(
        "--contestants", nargs="+", default=NAMES, choices=NAMES, help=f"besides {MEASURE}; default: all"
    )
    parser.add_argument("--repeats", type=int, help="rounds after one to warm up (default: 7)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: 2)")
    parser.add_argument("--output", help="where the JSON goes (default: benchmarks/results/attention_cpu-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="check that it works: short, few rounds, no file")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)  # the process that measures memory
    options = parser.parse_args()
    options.lengths = options.lengths or list(QUICK_LENGTHS if options.quick else LENGTHS)
    options.repeats = options.repeats or (2 if options.quick else 7)
    if options.output is None and not options.quick:
        options.output = str(Path(__file__).parent / "results" / f"attention_cpu-{datetime.now(UTC):%Y-%m-%d}.json")
    return options


# --- the contestants ------------------------------------------------------------------------------------------------


def contestants_at(length: int) -> list[Contestant]:
    given = [Contestant("alibi", lambda _: with_lengthen(bias=alibi()))]
    if length <= INFORMATION_UP_TO:
        given.append(Contestant("t5", lambda n: with_lengthen(bias=t5(n))))
        given.append(Contestant("xpos", lambda _: with_lengthen(decay=xpos())))
    given.append(Contestant("dense", with_dense_mask))
    given.append(Contestant("flex", with_flex_attention, no_backward="FlexAttention has no backward on the CPU"))
    given.append(Contestant(MEASURE, lambda _: with_torch()))
    return given


def alibi() -> Linear:
    return Linear(alibi_slopes(HEADS))


def t5(length: int) -> Bias:
    method = positions.build("t5", heads=HEADS, head_dim=HEAD_DIM, width=HEADS * HEAD_DIM)
    with torch.no_grad():  # it starts at zeros; a trained one is of the size of the scores
        method.get_parameter("weight").normal_(generator=torch.Generator().manual_seed(SEED))
        bias = method.bias(length - 1)
    assert bias is not None
    return bias


def xpos() -> Decay:
    decay = positions.build("xpos", heads=HEADS, head_dim=HEAD_DIM, width=HEADS * HEAD_DIM).decay()
    assert decay is not None
    return decay


def with_lengthen(bias: Bias | None = None, decay: Decay | None = None) -> Forward:
    return lambda q, k, v: attention(q, k, v, bias=bias, decay=decay, mask=Causal())


def with_torch() -> Forward:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def with_dense_mask(length: int) -> Forward:
    size = 4 * HEADS * length**2
    if size > MASK_LIMIT:
        raise Skip(f"the mask alone would take {size / 1e9:.1f} GB")
    mask = torch.empty(HEADS, length, length)
    key = torch.arange(length, dtype=torch.float32)
    for head, slope in enumerate(alibi_slopes(HEADS).tolist()):
        mask[head] = slope * (key - key[:, None])
        mask[head].masked_fill_(key > key[:, None], -torch.inf)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def with_flex_attention(length: int) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = alibi_slopes(HEADS)

    def bias(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[head] * (i - j)

    def behind(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    torch._dynamo.reset()  # else it would compile for any length, not for this one
    compiled = torch.compile(flex_attention, dynamic=False)
    try:
        seen = create_block_mask(behind, None, None, length, length, device="cpu")
        q, k, v = inputs(length)
        with torch.no_grad():
            compiled(q, k, v, score_mod=bias, block_mask=seen)
    except Exception as error:  # whatever its compiler says: it is a peer, not the subject
        reason = str(error).strip().splitlines() or [""]
        raise Skip(f"it did not compile: {type(error).__name__}: {reason[0][:200]}") from error
    return lambda q, k, v: compiled(q, k, v, score_mod=bias, block_mask=seen)


# --- time and correctness -------------------------------------------------------------------------------------------


def inputs(length: int, needs_grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    shape = (1, HEADS, length, HEAD_DIM)
    return [torch.randn(shape, generator=generator).requires_grad_(needs_grad) for _ in range(3)]


def run(length: int, names: Sequence[str], repeats: int) -> list[Contestant]:
    contestants = [c for c in contestants_at(length) if c.name in (*names, MEASURE)]
    for contestant in contestants:
        note(f"{length:,}: {contestant.name} gets ready")
        contestant.ready(length)
    if length == CHECKED_AT:
        check(length, contestants)
    for which, once in (("forward", time_forward), ("forward+backward", time_both)):
        q, k, v = inputs(length, needs_grad=which != "forward")
        d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(SEED + 1))
        taking_part = [c for c in contestants if which not in c.reasons]
        for turn in range(repeats + 1):
            note(f"{length:,}: {which}, round {turn} of {repeats}" + ("" if turn else " (to warm up)"))
            for contestant in taking_part[turn % len(taking_part) :] + taking_part[: turn % len(taking_part)]:
                assert contestant.forward is not None
                taken = once(contestant.forward, q, k, v, d_out)
                if turn:
                    contestant.seconds.setdefault(which, []).append(taken)
    return contestants


def time_forward(forward: Forward, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> float:
    began = time.perf_counter()
    with torch.no_grad():
        forward(q, k, v)
    return time.perf_counter() - began


def time_both(forward: Forward, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> float:
    began = time.perf_counter()
    torch.autograd.grad(forward(q, k, v), (q, k, v), d_out)
    return time.perf_counter() - began


def check(length: int, contestants: list[Contestant]) -> None:
    """Note how far each contestant's output is from the reference in float64, at most."""
    q, k, v = inputs(length)
    meant: dict[str, dict[str, Any]] = {"t5": {"bias": t5(length)}, "xpos": {"decay": xpos()}, MEASURE: {}}
    for contestant in contestants:
        if contestant.forward is None:
            continue
        note(f"{length:,}: {contestant.name} beside the reference")
        wide = meant.get(contestant.name, {"bias": alibi()})
        with torch.no_grad():
            out = contestant.forward(q, k, v)
            exact = attention(q.double(), k.double(), v.double(), mask=Causal(), backend="reference", **wide)
        contestant.difference = (out - exact).abs().max().item()


# --- memory ---------------------------------------------------------------------------------------------------------


def memory_in_own_process(length: int, threads: int) -> float | None:
    """Return the bytes that ALiBi attention takes above inputs and outputs, or None where it cannot be measured."""
    command = [sys.executable, __file__, "--memory-of", str(length), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        note(f"{length:,}: memory was not measured: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        return None
    return float(done.stdout)


def memory_of(length: int) -> int:
    """Return the peak of forward and backward above inputs, output and the gradients of q, k and v, in bytes.

    The inputs and the output's gradient exist before; the rest is counted, the code that torch loads on the way too.
    """
    q, k, v = inputs(length, needs_grad=True)
    d_out = torch.ones_like(q)
    forget_peak()
    before = resident("VmRSS")
    out = attention(q, k, v, bias=alibi(), mask=Causal())
    gradients = torch.autograd.grad(out, (q, k, v), d_out)
    results = sum(x.numel() * x.element_size() for x in (out, *gradients))
    return resident("VmHWM") - before - results


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


# --- what came of it ------------------------------------------------------------------------------------------------


def summarise(length: int, contestants: list[Contestant], memory: float | None) -> dict[str, Any]:
    measure = next(c for c in contestants if c.name == MEASURE)
    rows = []
    for c in contestants:
        row: dict[str, Any] = {"name": c.name, "max_difference": c.difference}
        for which in ("forward", "forward+backward"):
            mine, base = c.median(which), measure.median(which)
            row[which] = (
                {"not_measured": c.reasons[which]}
                if mine is None or base is None
                else {
                    "median_ms": round(1000 * mine, 3),
                    "all_ms": [round(1000 * seconds, 3) for seconds in c.seconds[which]],
                    "speed": round(base / mine, 4),
                }
            )
        rows.append(row)
    return {"length": length, "contestants": rows, "alibi_memory_bytes": memory}


def judge(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    at = {result["length"]: result for result in results}
    targets = []
    for length, which, least in SPEED_TARGETS:
        speed = None
        if length in at:
            ours: dict[str, Any] = next((row for row in at[length]["contestants"] if row["name"] == "alibi"), {})
            speed = ours.get(which, {}).get("speed")
        name = f"alibi, {which} at {length:,}: at least {least}× the speed of {MEASURE}"
        targets.append({"name": name, "value": speed, "unit": "×", "met": None if speed is None else speed >= least})
    length, most = MEMORY_TARGET
    memory = at[length]["alibi_memory_bytes"] if length in at else None
    megabytes = None if memory is None else memory / 1e6
    name = f"alibi, memory of forward+backward at {length:,}: under {most / 1e6:.0f} MB above inputs and outputs"
    targets.append({"name": name, "value": megabytes, "unit": " MB", "met": None if memory is None else memory < most})
    return targets


def print_tables(results: list[dict[str, Any]], targets: list[dict[str, Any]]) -> None:
    print(f"\nmedian ms, and the speed against `{MEASURE}` (above 1: faster)\n")
    print(f"{'length':>7}  {'contestant':<11} {'forward':>19} {'forward+backward':>19} {'difference':>11}")
    for result in results:
        for row in result["contestants"]:
            cells = []
            for which in ("forward", "forward+backward"):
                one = row[which]
                cells.append(f"{one['median_ms']:>10.1f} {one['speed']:>7.2f}×" if "speed" in one else f"{'–':>19}")
            far = "" if row["max_difference"] is None else f"{row['max_difference']:.1e}"
            print(f"{result['length']:>7,}  {row['name']:<11} {cells[0]:>19} {cells[1]:>19} {far:>11}")
    print()
    for result in results:
        for row in result["contestants"]:
            told = (row[which].get("not_measured") for which in ("forward+backward", "forward"))
            reason = next((reason for reason in told if reason), None)
            if reason:
                print(f"– {result['length']:,}, {row['name']}: {reason}")
    print(f"difference: the largest, of outputs, from the reference in float64 (at {CHECKED_AT:,})\n")
    for result in results:
        if result["alibi_memory_bytes"] is not None:
            megabytes = result["alibi_memory_bytes"] / 1e6
            print(f"{result['length']:>7,}  alibi, forward+backward: {megabytes:.0f} MB above inputs and outputs")
    print()
    for target in targets:
        verdict = {True: "PASS", False: "FAIL", None: "not measured"}[target["met"]]
        value = "" if target["value"] is None else f" (it is {target['value']:.2f}{target['unit']})"
        print(f"{verdict}: {target['name']}{value}")


def describe_machine(threads: int) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers; the host's name is not in it."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": threads,
        "load_before": round(os.getloadavg()[0], 2),  # above 0: something else was running
        "commit": commit(),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str:
    """Return the commit that is checked out, and whether tracked files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
