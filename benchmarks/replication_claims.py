"""The papers' claims and what the campaign found, as a table in Markdown: paper, ours, verdict.

    python benchmarks/replication_claims.py                       # of benchmarks/results/replication
    python benchmarks/replication_claims.py DIR --speeds FILE

Changes of perplexity are ratios of two readings of the same tokens, in per cent: the mean over seeds, the lowest and
the highest, and the largest standard error of one (paired over segments of the text). A claim whose runs are not there
yet says which are missing. Speeds and memory are those that `training_gpu.py` measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from replication_gpu import RESULTS

from lengthen.evaluation.errors import Difference, difference

HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold here"
BASE = 512  # the campaign's training length
SPEEDS = RESULTS.parent / "training_gpu-2026-11-18.json"
BOTH = ("tokens_per_second", "gigabytes")
PLAIN, BLOCKS = "nonoverlapping", "blockwise"


class MissingError(LookupError):
    """A run that a claim needs is not there."""


class At(NamedTuple):
    """A reading: of which run, how long, and how."""

    run: str
    length: int
    protocol: str = PLAIN
    stride: int | None = None


@dataclass(frozen=True)
class Change:
    """How one reading differs from another, by seed."""

    seeds: list[Difference]

    @property
    def low(self) -> float:
        """The lowest ratio of any seed."""
        return min(one.ratio for one in self.seeds)

    @property
    def high(self) -> float:
        """The highest."""
        return max(one.ratio for one in self.seeds)

    def __str__(self) -> str:
        """As in "+34 % (+31 … +36, 3 seeds, s.e. 0.2)"."""
        percent = [100 * (ratio - 1) for ratio in (statistics.mean(s.ratio for s in self.seeds), self.low, self.high)]
        errors = [one.ratio_error for one in self.seeds if one.ratio_error is not None]
        spread = f"{percent[1]:+.3g} … {percent[2]:+.3g}, {len(self.seeds)} seeds" if len(self.seeds) > 1 else "1 seed"
        return f"{percent[0]:+.3g} % ({spread}{f', s.e. {100 * max(errors):.1g}' if errors else ''})"


class Found:
    """All results of a folder, and the speeds."""

    def __init__(self, folder: Path, speeds: Path) -> None:
        self.rows: list[dict[str, Any]] = json.loads(speeds.read_text(encoding="utf-8"))["rows"]
        self.records: dict[str, dict[int, dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            self.records.setdefault(record["run"], {})[record["seed"]] = record

    def of(self, run: str) -> dict[int, dict[str, Any]]:
        """Return a run's records by seed."""
        if run not in self.records:
            raise MissingError(run)
        return self.records[run]

    def readings(self, at: At) -> dict[int, dict[str, Any]]:
        """Return a reading of the first text, by seed."""
        found = {}
        for seed, record in self.of(at.run).items():
            for one in record["readings"]:
                same = (one["length"], one["protocol"]) == (at.length, at.protocol)
                if same and one["text"] == record["readings"][0]["text"] and at.stride in (None, one["stride"]):
                    found[seed] = one
        if not found:
            raise MissingError(f"{at.run} at {at.length:,}, {at.protocol}")
        return found

    def change(self, at: At, beside: At) -> Change:
        """Return how much higher the perplexity of one reading is than that of another of the same seed."""
        ones, others = self.readings(at), self.readings(beside)
        pairs = [(ones[seed], others[seed]) for seed in sorted(ones.keys() & others.keys())]
        sums = [[(x["segment_losses"], x["segment_counts"]) for x in pair] for pair in pairs]
        found = [difference(*one, *other) for one, other in sums]
        if not found or None in found:
            raise MissingError(f"the same tokens of {at.run} and {beside.run}")
        return Change([one for one in found if one is not None])

    def row(self, method: str, length: int, what: str = "tokens_per_second", model: str = "small") -> float:
        """Return a speed, or the memory, of one model, method and length; the mean where it was measured twice."""
        here = (model, method, length)
        found = [float(one[what]) for one in self.rows if (one["model"], one["method"], one["length"]) == here]
        if not found:
            raise MissingError(":".join(map(str, here)))
        return statistics.mean(found)

    def longest(self, run: str) -> int:
        """Return the longest plain reading of a run."""
        every = [one for record in self.of(run).values() for one in record["readings"]]
        return max(int(one["length"]) for one in every if one["protocol"] == PLAIN)

    def analysis(self, run: str, name: str) -> list[dict[str, Any]]:
        """Return an analysis of a run, of every seed."""
        found = [one for record in self.of(run).values() for one in record["analyses"] if one["analysis"] == name]
        if not found:
            raise MissingError(f"{name} of {run}")
        return found


def grows(found: Found, run: str, protocol: str = PLAIN, times: int | None = None) -> Change:
    """Return the change from the training length to so many times it, or to the longest."""
    length = BASE * times if times else found.longest(run)
    return found.change(At(run, length, protocol), At(run, BASE))


def c1(found: Found) -> tuple[str, str]:
    twice, far = grows(found, "sinusoidal", times=2), grows(found, "sinusoidal")
    return f"2L: {twice}; longest: {far}", HOLDS if twice.low > 1.1 and far.low > twice.high else FAILS


def c2(found: Found) -> tuple[str, str]:
    twice, far = grows(found, "rotary", times=2), grows(found, "rotary")
    later = twice.high < grows(found, "sinusoidal", times=2).low
    verdict = HOLDS if later and far.low > 1.5 else PARTLY if far.low > 1.5 else FAILS
    return f"2L: {twice}; longest: {far}", verdict


def c3(found: Found) -> tuple[str, str]:
    twice, four = grows(found, "t5", times=2), grows(found, "t5", times=4)
    speeds = [found.row("t5", BASE, what) / found.row("sinusoidal", BASE, what) for what in BOTH]
    cost = f"{speeds[0]:.2f} of sinusoidal's speed, {speeds[1]:.2f} of its memory"
    verdict = HOLDS if four.high <= 1.02 and speeds[0] < 1 else PARTLY if twice.high <= 1.02 else FAILS
    return f"2L: {twice}; 4L: {four}; trains at {cost}", verdict


def c4(found: Found) -> tuple[str, str]:
    change = found.change(At("alibi", 3072), At("sinusoidal-3072", 3072))
    faster = found.row("alibi", BASE) / found.row("sinusoidal", 3072)
    verdict = HOLDS if change.high < 1 and faster > 1 else PARTLY if change.high < 1 or faster > 1 else FAILS
    return f"ALiBi beside it, equal tokens: {change}; trains {faster:.2f} times as fast", verdict


def c5(found: Found) -> tuple[str, str]:
    far = grows(found, "alibi")
    return f"at {found.longest('alibi'):,}: {far}", HOLDS if far.high <= 1.02 else FAILS


def c6(found: Found) -> tuple[str, str]:
    faster, more = (found.row("alibi", 1024, what, "xl") / found.row("sinusoidal", 2048, what, "xl") for what in BOTH)
    verdict = PARTLY if faster > 1 and more <= 1 else FAILS
    return f"`xl`: {faster:.3f} of the speed, {more:.3f} of the memory; perplexity not measured", verdict


def c7(found: Found) -> tuple[str, str]:
    speeds = [found.row("alibi", length) / found.row("sinusoidal", length) for length in (BASE, 3072)]
    memory = found.row("alibi", BASE, "gigabytes") / found.row("sinusoidal", BASE, "gigabytes")
    said = f"{speeds[0]:.3f} of its speed at 512, {speeds[1]:.3f} at 3,072, {memory:.3f} of its memory"
    return said, HOLDS if min(speeds) >= 0.99 and memory <= 1.01 else FAILS


def c8(found: Found) -> tuple[str, str]:
    fine = found.change(At("alibi", 2048, "sliding", 64), At("alibi", 512, "sliding", 64))
    plain = grows(found, "alibi", times=4)
    verdict = HOLDS if abs(fine.low - 1) < 0.01 and abs(fine.high - 1) < 0.01 and plain.high < fine.low else FAILS
    return f"512 → 2,048 with stride 64: {fine}; nonoverlapping: {plain}", verdict


def c9(found: Found) -> tuple[str, str]:
    change = found.change(At("xpos", BASE), At("rotary", BASE))
    return f"xPos beside rotary: {change}", HOLDS if change.high < 1 else FAILS


def c10(found: Found) -> tuple[str, str]:
    xpos, rotary = grows(found, "xpos", BLOCKS, 4), grows(found, "rotary", BLOCKS, 4)
    plain = grows(found, "rotary", times=4)
    verdict = HOLDS if xpos.high < 1 and rotary.high <= 1.02 and plain.low > 1.1 else PARTLY
    return f"4L, blockwise: xPos {xpos}, rotary {rotary}; rotary plain {plain}", verdict


def c11(found: Found) -> tuple[str, str]:
    change = found.change(At("alibi", 4 * BASE, BLOCKS), At("alibi", 4 * BASE))
    return f"4L, blockwise beside plain: {change}", HOLDS if change.low > 1 else FAILS


def c12(found: Found) -> tuple[str, str]:
    runs = [run for run in ("alibi", "xpos", "rotary", "sinusoidal", "t5", "none") if run in found.records]
    if len(runs) < 4:
        raise MissingError("resolution of four methods")
    heights = {
        run: statistics.mean(
            row["resolution"]
            for one in found.analysis(run, "resolution")
            for row in one["rows"]
            if row["length"] == 2 * BASE and not row["blockwise"]
        )
        for run in runs
    }
    losses = {run: statistics.mean(one.ratio for one in grows(found, run, times=4).seeds) for run in runs}
    correlation = spearman([heights[run] for run in runs], [losses[run] for run in runs])
    said = ", ".join(f"{run} {heights[run]:.2g}" for run in sorted(runs, key=lambda run: -heights[run]))
    verdict = HOLDS if correlation < -0.7 else PARTLY if correlation < 0 else FAILS
    return f"at 2L: {said}; rank correlation with the change at 4L: {correlation:.2f}", verdict


def spearman(x: list[float], y: list[float]) -> float:
    """Return the rank correlation of two lists without equal values."""
    ranks = [[sorted(values).index(value) for value in values] for values in (x, y)]
    return statistics.correlation(*ranks)


def c13(found: Found) -> tuple[str, str]:
    reads = "reading_tokens_per_second"
    slower = found.row("rotary", BASE, reads) / found.row("xpos", BASE, reads)
    return f"xPos reads in {slower:.3f} of rotary's time", HOLDS if 1 < slower <= 1.1 else FAILS


def c14(found: Found) -> tuple[str, str]:
    parts = []
    for learned, fixed in (("alibi-learned", "alibi"), ("xpos-learned", "xpos")):
        for length in (BASE, 16 * BASE):
            parts.append(f"{learned} at {length:,}: {found.change(At(learned, length), At(fixed, length))}")
    for run in ("encoder-alibi", "encoder-xpos", "encoder-rotary"):
        parts.append(f"{run}, 4L: {grows(found, run, times=4)}")
    return "; ".join(parts), "an open question in the papers"


def c15(found: Found) -> tuple[str, str]:
    parts = []
    for run in ("rotary", "alibi", "alibi-learned", "alibi-flat", "rotary+alibi"):
        steps: dict[int, list[float]] = {}
        for one in found.analysis(run, "induction"):
            steps.setdefault(one["step"], []).append(one["rows"][0]["difference"])
        said = ", ".join(f"{statistics.mean(values):+.2f} at {step}" for step, values in sorted(steps.items()))
        parts.append(f"{run}: {said}")
    return "nats by step: " + "; ".join(parts), "not a paper's"


CLAIMS: dict[str, tuple[str, str, Callable[[Found], tuple[str, str]]]] = {
    "C1": ("sinusoidal fails just past its training length", "20.05 → 43.5 at 2L", c1),
    "C2": ("rotary holds a little longer, then fails", "20.07 → 21.4 → 79", c2),
    "C3": ("T5's bias extrapolates", "19.65 → 18.8", c3),
    "C4": ("ALiBi at 512 beats sinusoidal at 3,072, read at 3,072, and trains faster", "18.40, 18.67; 1.8 ×", c4),
    "C5": ("ALiBi is flat or better far beyond L", "19.73 → 18.31", c5),
    "C6": ("1.3B at 1,024 is as good as at 2,048, faster and smaller", "8.92, 9.01; 11 %", c6),
    "C7": ("ALiBi is as fast and as small as sinusoidal", "within 1 %", c7),
    "C8": ("with a small stride ALiBi is flat: its gain is the early-token curse fading", "17.98 → 18.3", c8),
    "C9": ("xPos is better than rotary inside L", "23.31, 25.52", c9),
    "C10": ("xPos with blocks falls to 4L; rotary needs blocks", "23.3 → 20.7; 294 → 25.7", c10),
    "C11": ("blocks hurt ALiBi a little", "23.14 → 24.6", c11),
    "C12": ("resolution predicts extrapolation", "LEX 0.98 … rotary 0.08", c12),
    "C13": ("xPos costs 6 % at inference", "6 %", c13),
    "C14": ("learned slopes and γ, both sides", "–", c14),
    "C15": ("ALiBi learns to copy later than rotary", "–", c15),
}


def table(found: Found) -> str:
    """Return the table."""
    lines = ["| | claim | paper | ours | verdict |", "|---|---|---|---|---|"]
    for name, (claim, paper, measure) in CLAIMS.items():
        try:
            ours, verdict = measure(found)
        except MissingError as missing:
            ours, verdict = f"not measured: {missing} is missing", "–"
        lines.append(f"| {name} | {claim} | {paper} | {ours} | {verdict} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=RESULTS, help="the JSON (benchmarks/results/replication)"
    )
    parser.add_argument("--speeds", type=Path, default=SPEEDS, help="what training_gpu.py wrote")
    options = parser.parse_args()
    print(table(Found(options.folder, options.speeds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
