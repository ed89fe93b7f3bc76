"""Long generation on the CPU: time per token and memory as the text grows, under each cache policy.

    python benchmarks/generate_cpu.py                           # 20,000 tokens each; writes benchmarks/results
    python benchmarks/generate_cpu.py --quick                   # does the script work: short, means little
    python benchmarks/generate_cpu.py --figure benchmarks/results/generate_cpu-2026-11-18.json figures

An ALiBi decoder of 2 layers × 128 with 4 heads and random weights, float32, one thread, one sequence, greedy. `full`
keeps everything; `exact` and `certified` are the two modes of `reach` at the tolerance that is recorded. Each policy
runs in a process of its own. A record is of 1,000 tokens: the median CPU time of one, which other processes of a shared
machine disturb less than the time on the clock, and that beside it; at their end, the cache's bytes on the device and
in host memory, and the process's resident memory.

    section     what is measured
    full, exact, certified      the policy of that name
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import Report, parsed, parser_of, software

from lengthen import ModelConfig, Transformer

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"cache": "full"},
    "exact": {"cache": "reach", "mode": "exact"},
    "certified": {"cache": "reach", "mode": "certified"},
}
TOKENS, QUICK_TOKENS = 20_000, 300
EVERY, QUICK_EVERY = 1_000, 100
TOLERANCE = 1e-3
SEED = 0


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def generate(policy: str, tokens: int, every: int) -> None:
    """Generate in this process; print a line of JSON for each so many tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = Transformer(ModelConfig(vocab_size=258, layers=2, width=128, heads=4, train_length=64)).eval()
    times: list[tuple[float, float]] = []
    before = time.process_time(), time.perf_counter()
    for count, step in enumerate(model.stream([[1]], tokens, tolerance=TOLERANCE, **POLICIES[policy]), 1):
        times.append((time.process_time() - before[0], time.perf_counter() - before[1]))
        if count % every == 0:
            cache = step.cache
            sizes = {"device": cache.nbytes, "host": cache.host_nbytes, "resident": resident()}
            cpu, clock = (1e3 * statistics.median(part) for part in zip(*times, strict=True))
            print(json.dumps({"at": count, "cpu": cpu, "clock": clock, "bound": cache.bound, **sizes}), flush=True)
            times = []
        before = time.process_time(), time.perf_counter()


def section(report: Report, policy: str, tokens: int, every: int) -> None:
    """Record one policy, in a process of its own."""
    words = [sys.executable, __file__, "--process", policy, str(tokens), str(every)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            one = json.loads(line)
            at = {"tokens": one["at"]}
            times = {"clock": one["clock"]}
            report.add(policy, "CPU time per token", at, one["cpu"], " ms", ms=times, note=f"bound {one['bound']:.2g}")
            for what in ("device", "host", "resident"):
                report.add(policy, f"{what} bytes", at, one[what], " B")
    if process.returncode:
        raise RuntimeError(f"{policy}: the process ended with {process.returncode}")


def draw(source: Path, folder: Path) -> None:
    """Draw time per token and memory against the length, as SVG."""
    from lengthen.report.lines import lines, row

    sections = json.loads(source.read_text(encoding="utf-8"))["sections"]
    folder.mkdir(parents=True, exist_ok=True)
    for what, title in (
        ("CPU time per token", "ms of CPU time per token"),
        ("device bytes", "bytes of the cache on the device"),
    ):
        rows = [
            row(policy, colour, "full", one["tokens"], one["value"], {"tokens": one["tokens"]})
            for colour, (policy, records) in enumerate(sections.items())
            for one in records
            if one["what"] == what
        ]
        path = folder / f"generate_{what.split()[0].lower()}.svg"
        lines(rows, "tokens generated", title, 520).save(str(path))
        print(path)


def main() -> int:
    if sys.argv[1:2] == ["--process"]:
        generate(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = parser_of(__doc__, tuple(POLICIES))
    parser.add_argument("--figure", type=Path, nargs=2, metavar=("JSON", "FOLDER"), help="draw an earlier result")
    options = parsed(parser, "generate_cpu", tuple(POLICIES))
    if options.figure:
        draw(*options.figure)
        return 0
    sizes = (QUICK_TOKENS, QUICK_EVERY) if options.quick else (TOKENS, EVERY)
    facts = {**software(), "machine": platform.machine(), "threads": 1, "tolerance": TOLERANCE, "seed": SEED}
    report = Report(facts, options.out)
    return report.run({name: partial(section, report, name, *sizes) for name in options.only}, options.strict)


if __name__ == "__main__":
    sys.exit(main())
