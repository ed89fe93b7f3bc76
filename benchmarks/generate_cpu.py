"""Long generation on the CPU: time per token and memory as the text grows, under each cache policy.

    python benchmarks/generate_cpu.py                           # 20,000 tokens each; writes benchmarks/results
    python benchmarks/generate_cpu.py --run demo/alibi          # of a run that is there
    python benchmarks/generate_cpu.py --quick                   # does the script work: short, means little
    python benchmarks/generate_cpu.py --figure RESULT.json docs/figures/generation.svg

The model is the demo's with ALiBi: the preset `tiny`, trained for the demo's 120 steps, in a temporary folder unless
--run names one. One sequence at temperature 0.8, float32, one thread. `full` keeps everything, and makes its storage
at once; `exact` and `certified` are the two modes of `reach` at the tolerance that is recorded. Each policy runs in a
process of its own. A record is of 1,000 tokens: the median CPU time of one, which other processes of a shared machine
disturb less than the time on the clock, and that beside it; at their end, the cache's bytes on the device and in host
memory, and the process's resident memory.

CPU time still depends on what else the machine does. So `turns` compares an early token with a late one in turn: caches
that have read 2,000 and 20,000 bytes of Python's argparse.py, in one process, which then read a token each, one after
the other; medians of 300.

    section                     what is measured
    full, exact, certified      the policy of that name as the text grows
    turns                       each policy: a token after 20,000 beside a token after 2,000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import Report, parsed, parser_of, software

from lengthen.evaluation import open_run
from lengthen.model.stepping import read

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"cache": "full"},
    "exact": {"cache": "reach", "mode": "exact"},
    "certified": {"cache": "reach", "mode": "certified"},
}
SECTIONS = (*POLICIES, "turns")
TOKENS, QUICK_TOKENS = 20_000, 300
EVERY, QUICK_EVERY = 1_000, 100
EARLY, QUICK_EARLY = 2_000, 100  # tokens that the end is compared with
TURNS, QUICK_TURNS = 300, 10
TOLERANCE, TEMPERATURE, SEED = 1e-3, 0.8, 0
PROMPT = b"def main("
STEPS, QUICK_STEPS = 120, 2  # of training; 120 are the demo's
SLOWER = 1.10  # how much longer the last tokens may take than the early ones


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def trained(folder: Path, steps: int) -> Path:
    """Train the demo's ALiBi model; return the run's folder."""
    from lengthen.cli.demo import config_of, train_one
    from lengthen.data import prepare

    corpus = prepare(None, folder / "corpus")
    train_one(config_of("alibi", steps, SEED), corpus, folder / "alibi", lambda what, done, total: None)
    return folder / "alibi"


def generate(policy: str, run: str, tokens: int, every: int) -> None:
    """Generate in this process; print a line of JSON for each so many tokens."""
    torch.set_num_threads(1)
    model = open_run(run).model.eval()
    options = {"tolerance": TOLERANCE, "temperature": TEMPERATURE, "seed": SEED, **POLICIES[policy]}
    times: list[tuple[float, float]] = []
    before = time.process_time(), time.perf_counter()
    for count, step in enumerate(model.stream([list(PROMPT)], tokens, **options), 1):
        times.append((time.process_time() - before[0], time.perf_counter() - before[1]))
        if count % every == 0:
            cache = step.cache
            sizes = {"device": cache.nbytes, "host": cache.host_nbytes, "resident": resident()}
            cpu, clock = (1e3 * statistics.median(part) for part in zip(*times, strict=True))
            print(json.dumps({"at": count, "cpu": cpu, "clock": clock, "bound": cache.bound, **sizes}), flush=True)
            times = []
        before = time.process_time(), time.perf_counter()


def section(report: Report, policy: str, run: Path, tokens: int, every: int) -> None:
    """Record one policy, in a process of its own."""
    words = [sys.executable, __file__, "--process", policy, str(run), str(tokens), str(every)]
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


@torch.no_grad()
def turns(report: Report, run: Path, early: int, late: int, count: int) -> None:
    """Record what a token takes after a long text beside a short one, in turn."""
    torch.set_num_threads(1)
    model = open_run(run).model.eval()
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()[: late + count]))
    for policy, options in POLICIES.items():
        options = {"policy": options["cache"], **{key: one for key, one in options.items() if key != "cache"}}
        caches = {length: model.cache(tolerance=TOLERANCE, **options) for length in (early, late)}
        times: dict[int, list[float]] = {length: [] for length in caches}
        for length, cache in caches.items():
            read(model, text[None, :length], cache)
        for i in range(count):
            for length, cache in caches.items():
                before = time.process_time()
                read(model, text[None, length + i : length + i + 1], cache)
                times[length].append(1e3 * (time.process_time() - before))
        ms = {f"{length:,}": statistics.median(taken) for length, taken in times.items()}
        at, value = {"cache": policy, "tokens": late, "beside": early}, ms[f"{late:,}"] / ms[f"{early:,}"]
        target = SLOWER if policy == "certified" else None
        report.add("turns", "CPU time per token", at, value, at_most=target, ms=ms)
        report.add("turns", "cache bytes", at, caches[late].nbytes / caches[early].nbytes)


def draw(source: Path, path: Path) -> None:
    """Draw time per token and memory against the length, side by side; the file's ending says the format."""
    import altair as alt

    from lengthen.report.lines import COLOURS

    titles = {
        "CPU time per token": ("CPU time per token, ms", 1.0),
        "device bytes": ("cache on the device, MB", 1e6),
        "host bytes": ("cache in host memory, MB", 1e6),
    }
    sections = json.loads(source.read_text(encoding="utf-8"))["sections"]
    names = [policy for policy in POLICIES if policy in sections]
    colour = alt.Color("cache:N", sort=names, scale=alt.Scale(domain=names, range=list(COLOURS[: len(names)])))
    panels = []
    for what, (title, unit) in titles.items():
        rows = [
            {"cache": policy, "tokens": one["tokens"], "value": one["value"] / unit}
            for policy in names
            for one in sections[policy]
            if one["what"] == what
        ]
        if not any(row["value"] for row in rows):
            continue
        chart = alt.Chart(alt.InlineData(values=rows), title=title).mark_line(point=True)
        x, y = alt.X("tokens:Q", title="tokens generated"), alt.Y("value:Q", title=None, scale=alt.Scale(zero=True))
        shape = alt.Shape("cache:N", sort=names, scale=alt.Scale(domain=names))
        panels.append(chart.encode(x=x, y=y, color=colour, shape=shape).properties(width=250, height=220))
    path.parent.mkdir(parents=True, exist_ok=True)
    alt.hconcat(*panels).configure(background="white").save(str(path))
    print(path)


def main() -> int:
    if sys.argv[1:2] == ["--process"]:
        generate(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return 0
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument("--run", type=Path, metavar="RUN", help="a run's folder (default: the demo's model, trained)")
    parser.add_argument("--figure", type=Path, nargs=2, metavar=("JSON", "FILE"), help="draw an earlier result")
    options = parsed(parser, "generate_cpu", SECTIONS)
    if options.figure:
        draw(*options.figure)
        return 0
    sizes = (QUICK_TOKENS, QUICK_EVERY) if options.quick else (TOKENS, EVERY)
    late = (QUICK_EARLY, QUICK_TOKENS, QUICK_TURNS) if options.quick else (EARLY, TOKENS, TURNS)
    facts = {**software(), "machine": platform.machine(), "threads": 1, "tolerance": TOLERANCE, "seed": SEED}
    facts |= {"temperature": TEMPERATURE, "model": "the demo's, alibi" if options.run is None else options.run.name}
    report = Report(facts, options.out)
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or trained(Path(folder), QUICK_STEPS if options.quick else STEPS)
        sections = {name: partial(section, report, name, run, *sizes) for name in POLICIES}
        sections["turns"] = partial(turns, report, run, *late)
        return report.run({name: sections[name] for name in options.only}, options.strict)


if __name__ == "__main__":
    sys.exit(main())
