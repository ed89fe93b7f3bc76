"""What docs/replication.md says of the papers' claims: whether each holds, and the numbers, at each scale.

    python benchmarks/replication_claims.py                       # of benchmarks/results/replication
    python benchmarks/replication_claims.py --write docs/replication.md      # into that page, between its two marks

A change is of two readings of the same tokens: perplexities, means over seeds, and their ratio in per cent: the mean
over seeds, the lowest and the highest, and the largest standard error of one (paired over segments of the text). A
claim whose runs are not there yet says which are missing. L is the training length of the scale. Speeds and memory are
those that `training_speed.py` measured.

The file is long because a claim's words and the few lines that decide it stand together.
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

from replication import HERE, RESULTS, Campaign, Scale

from lengthen.evaluation.errors import Difference, difference
from lengthen.io import read_toml, write_text
from lengthen.model.loss import perplexity

HOLDS, PARTLY, FAILS, NONE = "holds", "holds in part", "does not hold here", "–"
SPEEDS = [RESULTS.parent / f"training_{name}.json" for name in ("gpu-lengths-2026-11-16", "cpu-2026-11-20")]
TRAINS, READS, MEMORY = "tokens_per_second", "reading_tokens_per_second", "gigabytes"
PLAIN, BLOCKS = "nonoverlapping", "blockwise"
MARKS = "<!-- replication_claims.py begins -->", "<!-- replication_claims.py ends -->"

Row = tuple[str, str, int]  # of speeds: preset, method, length
Judged = tuple[list[str], str]  # what was found, what decides first, and the verdict


class MissingError(LookupError):
    """A run that a claim needs is not there."""


class At(NamedTuple):
    """A reading: of which run, how long, how, and of which text; lengths and strides in training lengths."""

    run: str
    times: int
    protocol: str = PLAIN
    stride: float | None = None
    text: str = "books"

    def __str__(self) -> str:
        return f"{self.run} at {self.times}L, {self.protocol}"


@dataclass(frozen=True)
class Change:
    """How one reading differs from another, by seed; and the perplexities, means over seeds."""

    seeds: list[Difference]
    before: float
    after: float

    @property
    def low(self) -> float:
        """The lowest ratio of any seed."""
        return min(one.ratio for one in self.seeds)

    @property
    def high(self) -> float:
        """The highest."""
        return max(one.ratio for one in self.seeds)

    def __str__(self) -> str:
        """As in "20.12 → 26.94, +34 % (+31 … +36, 3 seeds, s.e. 0.2)"."""
        mean, low, high = (
            signed(100 * (ratio - 1)) for ratio in (statistics.mean(s.ratio for s in self.seeds), self.low, self.high)
        )
        errors = [one.ratio_error for one in self.seeds if one.ratio_error is not None]
        spread = f"{low} … {high}, {len(self.seeds)} seeds" if len(self.seeds) > 1 else "1 seed"
        error = f", s.e. {digits(100 * max(errors))}" if errors else ""
        return f"{self.before:.4g} → {self.after:.4g}, {mean} % ({spread}{error})"


def digits(value: float) -> str:
    """Return two digits, and whole numbers above 10."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def signed(value: float) -> str:
    """As in "−2.5"."""
    return ("−" if value < 0 else "+") + digits(abs(value))


class Found:
    """All results of a folder, whose models were trained at `length`, and the speeds."""

    def __init__(self, folder: Path, speeds: list[Path], scale: Scale) -> None:
        self.length, self.preset = scale.length, scale.preset
        self.rows = [row for path in speeds for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
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
        """Return a reading by seed."""
        found, stride = {}, None if at.stride is None else round(at.stride * self.length)
        for seed, record in self.of(at.run).items():
            for one in record["readings"]:
                same = (one["text"], one["length"], one["protocol"]) == (at.text, at.times * self.length, at.protocol)
                if same and stride in (None, one["stride"]):
                    found[seed] = one
        if not found:
            raise MissingError(str(at))
        return found

    def change(self, at: At, beside: At) -> Change:
        """Return how much higher the perplexity of one reading is than that of another of the same seed."""
        ones, others = self.readings(at), self.readings(beside)
        pairs = [(ones[seed], others[seed]) for seed in sorted(ones.keys() & others.keys())]
        sums = [[(x["segment_losses"], x["segment_counts"]) for x in pair] for pair in pairs]
        found = [difference(*one, *other) for one, other in sums]
        if not found or None in found:
            raise MissingError(f"the same tokens of {at.run} and {beside.run}")
        after, before = (statistics.mean(perplexity(one["loss"]) for one in side) for side in zip(*pairs, strict=True))
        return Change([one for one in found if one is not None], before, after)

    def row(self, method: str, times: int) -> Row:
        """Return the row of speeds of this scale's preset at so many training lengths."""
        return self.preset, method, times * self.length

    def ratio(self, one: Row, other: Row, what: str = TRAINS) -> float | None:
        """Return one row's speed or memory beside another's, the mean of each; None where one was not measured."""
        means = []
        for key in (one, other):
            rows = [row for row in self.rows if (row["model"], row["method"], row["length"]) == key]
            means.append([float(row[what]) for row in rows if what in row])
        return statistics.mean(means[0]) / statistics.mean(means[1]) if all(means) else None

    def longest(self, run: str) -> int:
        """Return the longest plain reading of a run, in training lengths."""
        every = [one for record in self.of(run).values() for one in record["readings"]]
        return max(int(one["length"]) for one in every if one["protocol"] == PLAIN) // self.length

    def analysis(self, run: str, name: str) -> list[dict[str, Any]]:
        """Return an analysis of a run, of every seed."""
        found = [one for record in self.of(run).values() for one in record["analyses"] if one["analysis"] == name]
        if not found:
            raise MissingError(f"{name} of {run}")
        return found


def grows(found: Found, run: str, protocol: str = PLAIN, times: int | None = None) -> Change:
    """Return the change from the training length to so many times it, or to the longest."""
    return found.change(At(run, times or found.longest(run), protocol), At(run, 1))


def speeds(text: str, *ratios: float | None) -> str:
    """Return a text with ratios of speeds and memory in it."""
    return text.format(*("not measured" if ratio is None else f"{ratio:.3f}" for ratio in ratios))


def below(ratio: float | None, bound: float) -> bool:
    """Return whether a speed was measured, and is below a bound."""
    return ratio is not None and ratio < bound


def c1(found: Found) -> Judged:
    twice, far = grows(found, "sinusoidal", times=2), grows(found, "sinusoidal")
    return [f"2L: {twice}", f"longest: {far}"], HOLDS if twice.low > 1.1 and far.low > twice.high else FAILS


def c2(found: Found) -> Judged:
    twice, far = grows(found, "rotary", times=2), grows(found, "rotary")
    later = twice.high < grows(found, "sinusoidal", times=2).low
    verdict = HOLDS if later and far.low > 1.5 else PARTLY if far.low > 1.5 else FAILS
    return [f"2L: {twice}", f"longest: {far}"], verdict


def c3(found: Found) -> Judged:
    twice, four = grows(found, "t5", times=2), grows(found, "t5", times=4)
    speed, memory = (found.ratio(found.row("t5", 1), found.row("sinusoidal", 1), what) for what in (TRAINS, MEMORY))
    verdict = HOLDS if four.high <= 1.02 and below(speed, 1) else PARTLY if twice.high <= 1.02 else FAILS
    cost = speeds("training beside sinusoidal: speed {}, memory {}", speed, memory)
    return [f"2L: {twice}", f"4L: {four}", cost], verdict


def c4(found: Found) -> Judged:
    change = found.change(At("alibi", 6), At("sinusoidal-6L", 6))
    slower = found.ratio(found.row("sinusoidal", 6), found.row("alibi", 1))
    better, faster = change.high < 1, below(slower, 1)
    verdict = HOLDS if better and faster else PARTLY if better or faster else FAILS
    speed = speeds("training speed of sinusoidal at 6L beside ALiBi at L: {}", slower)
    return [f"ALiBi beside it, equal tokens: {change}", speed], verdict


def c5(found: Found) -> Judged:
    far = grows(found, "alibi")
    return [f"at {found.longest('alibi')}L: {far}"], HOLDS if far.high <= 1.02 else FAILS


def c6(found: Found) -> Judged:
    change = found.change(At("alibi", 2), At("sinusoidal-2L", 2))
    short, long = ("xl", "alibi", 1024), ("xl", "sinusoidal", 2048)  # the paper's size, whatever the scale
    slower, memory = found.ratio(long, short), found.ratio(short, long, MEMORY)
    verdict = HOLDS if change.high <= 1.02 and below(slower, 1) else PARTLY if change.high <= 1.02 else FAILS
    speed = speeds("`xl`: training speed of sinusoidal beside ALiBi {}, memory of ALiBi beside it {}", slower, memory)
    return [f"L beside 2L, read at 2L: {change}", speed], verdict


def c7(found: Found) -> Judged:
    memory = found.ratio(found.row("alibi", 1), found.row("sinusoidal", 1), MEMORY)
    ratios = [found.ratio(found.row("alibi", times), found.row("sinusoidal", times)) for times in (1, 2, 4)]
    measured = [ratio for ratio in ratios if ratio is not None]
    if len(measured) < len(ratios):
        raise MissingError("a speed")
    fast = min(measured) >= 0.99
    verdict = FAILS if not fast or (memory or 0) > 1.01 else HOLDS if memory else PARTLY
    said = speeds("training beside sinusoidal: speed {} at L, {} at 2L, {} at 4L, memory {}", *ratios, memory)
    return [said], verdict


def c8(found: Found) -> Judged:
    fine = found.change(At("alibi", 4, "sliding", 0.125), At("alibi", 1, "sliding", 0.125))
    plain = grows(found, "alibi", times=4)
    verdict = HOLDS if abs(fine.low - 1) < 0.01 and abs(fine.high - 1) < 0.01 and plain.high < fine.low else FAILS
    return [f"L → 4L with stride L/8: {fine}", f"nonoverlapping: {plain}"], verdict


def c9(found: Found) -> Judged:
    change = found.change(At("xpos", 1), At("rotary", 1))
    return [f"xPos beside rotary: {change}"], HOLDS if change.high < 1 else FAILS


def c10(found: Found) -> Judged:
    xpos, rotary = grows(found, "xpos", BLOCKS, 4), grows(found, "rotary", BLOCKS, 4)
    plain = grows(found, "rotary", times=4)
    verdict = HOLDS if xpos.high < 1 and rotary.high <= 1.02 and plain.low > 1.1 else PARTLY
    return [f"4L, blockwise: xPos {xpos}", f"rotary {rotary}", f"rotary plain {plain}"], verdict


def c11(found: Found) -> Judged:
    change = found.change(At("alibi", 4, BLOCKS), At("alibi", 4))
    return [f"4L, blockwise beside plain: {change}"], HOLDS if change.low > 1 else FAILS


def c12(found: Found) -> Judged:
    runs = [run for run in ("alibi", "xpos", "rotary", "sinusoidal", "t5", "none") if run in found.records]
    if len(runs) < 4:
        raise MissingError("resolution of four methods")
    heights = {
        run: statistics.mean(
            row["resolution"]
            for one in found.analysis(run, "resolution")
            for row in one["rows"]
            if row["length"] == 2 * found.length and not row["blockwise"]
        )
        for run in runs
    }
    losses = {run: statistics.mean(one.ratio for one in grows(found, run, times=4).seeds) for run in runs}
    correlation = spearman([heights[run] for run in runs], [losses[run] for run in runs])
    said = ", ".join(f"{run} {heights[run]:.2g}" for run in sorted(runs, key=lambda run: -heights[run]))
    verdict = HOLDS if correlation < -0.7 else PARTLY if correlation < 0 else FAILS
    return [f"rank correlation with the change at 4L: {correlation:.2f}", f"at 2L: {said}"], verdict


def spearman(x: list[float], y: list[float]) -> float:
    """Return the rank correlation of two lists without equal values."""
    ranks = [[sorted(values).index(value) for value in values] for values in (x, y)]
    return statistics.correlation(*ranks)


def c13(found: Found) -> Judged:
    speed = found.ratio(found.row("xpos", 1), found.row("rotary", 1), READS)
    if speed is None:
        raise MissingError("the speed of reading")
    return [speeds("reading speed beside rotary: {}", speed)], HOLDS if 0.9 <= speed < 1 else FAILS


def c14(found: Found) -> Judged:
    parts = []
    for learned, fixed in (("alibi-learned", "alibi"), ("xpos-learned", "xpos")):
        for times in (1, 16):
            parts.append(f"{learned} beside {fixed} at {times}L: {found.change(At(learned, times), At(fixed, times))}")
    for run in ("encoder-alibi", "encoder-xpos", "encoder-rotary"):
        parts.append(f"{run}, 4L: {grows(found, run, times=4)}")
    return parts, NONE


def c15(found: Found) -> Judged:
    parts = []
    for run in ("rotary", "alibi", "alibi-learned", "alibi-flat", "rotary+alibi"):
        steps: dict[int, list[float]] = {}
        for one in found.analysis(run, "induction"):
            steps.setdefault(one["step"], []).append(one["rows"][0]["difference"])
        nats = ", ".join(f"{signed(statistics.mean(values))} at {step}" for step, values in sorted(steps.items()))
        unlike = found.readings(At(run, 1, text="wikitext")).values()
        height = statistics.mean(perplexity(one["loss"]) for one in unlike)
        parts.append(f"{run}: nats by step {nats}; perplexity of WikiText at L {height:.4g}")
    return parts, NONE


@dataclass(frozen=True)
class Claim:
    """What a paper says, what it measured, and how it is decided whether that holds here."""

    says: str
    paper: str
    holds_if: str  # empty: there is nothing to decide
    measure: Callable[[Found], Judged]
    speed: bool = False  # whether training_speed.py measured a part of it

    def judge(self, found: Found) -> Judged:
        """Return what was found and the verdict."""
        try:
            return self.measure(found)
        except MissingError as missing:
            return [f"not measured: {missing} is missing"], NONE


CLAIMS = {
    "C1": Claim(
        "sinusoidal fails just past its training length",
        "20.05 → 43.5 at 2L",
        "perplexity is 10 % higher at 2L with every seed, and higher still at the longest",
        c1,
    ),
    "C2": Claim(
        "rotary holds a little longer, then fails",
        "20.07 → 21.4 → 79",
        "it is 50 % higher at the longest, and rises less than sinusoidal at 2L; in part: the first alone",
        c2,
    ),
    "C3": Claim(
        "T5's bias extrapolates, at a cost",
        "19.65 → 18.8",
        "it is at most 2 % higher at 4L, and trains slower than sinusoidal; in part: at most 2 % higher at 2L",
        c3,
        speed=True,
    ),
    "C4": Claim(
        "ALiBi trained at L beats sinusoidal trained at 6L, both read at 6L, and trains faster",
        "18.40 and 18.67; 1.8 ×",
        "both, after the same number of tokens; in part: one of them",
        c4,
        speed=True,
    ),
    "C5": Claim(
        "ALiBi is flat or better far beyond L",
        "19.73 → 18.31 at 30L",
        "it is at most 2 % higher at the longest, with every seed",
        c5,
    ),
    "C6": Claim(
        "ALiBi trained at L is as good as sinusoidal trained at 2L, both read at 2L, faster and smaller",
        "8.92 and 9.01; 11 % (1.3B)",
        "it is at most 2 % worse, and `xl` trains faster; in part: the first alone",
        c6,
        speed=True,
    ),
    "C7": Claim(
        "ALiBi is as fast and as small as sinusoidal",
        "within 1 %",
        "it trains at 0.99 of the speed or more at L, 2L and 4L, in 1.01 of the memory or less; in part: memory was "
        "not measured",
        c7,
        speed=True,
    ),
    "C8": Claim(
        "with a small stride ALiBi is flat: its gain is the early-token curse fading",
        "17.98 → 18.3",
        "from L to 4L it changes by less than 1 % with stride L/8, and falls by more without overlap",
        c8,
    ),
    "C9": Claim("xPos is better than rotary inside L", "23.31 and 25.52", "it is lower with every seed", c9),
    "C10": Claim(
        "xPos with blocks falls to 4L; rotary needs blocks",
        "23.3 → 20.7; 294 → 25.7",
        "xPos falls, rotary rises by at most 2 % with blocks and by 10 % without; else in part",
        c10,
    ),
    "C11": Claim(
        "blocks hurt ALiBi a little", "23.14 → 24.6", "perplexity at 4L is higher with blocks, with every seed", c11
    ),
    "C12": Claim(
        "resolution orders the methods, and predicts extrapolation",
        "LEX 0.98 … rotary 0.08",
        "the rank correlation of resolution at 2L with the change at 4L is below −0.7; in part: below 0",
        c12,
    ),
    "C13": Claim("xPos costs 6 % at inference", "6 %", "it reads at 0.9 to 1 of rotary's speed", c13, speed=True),
    "C14": Claim("learned slopes, learned γ, both sides", "future work", "", c14),
    "C15": Claim("ALiBi learns to copy later than rotary", "–", "", c15),
}


def page(found: dict[str, Found], campaign: Campaign) -> str:
    """Return the table of verdicts, and what each is of."""
    judged = {name: {scale: claim.judge(one) for scale, one in found.items()} for name, claim in CLAIMS.items()}
    lines = [
        f"| | claim | paper | {' | '.join(f'`{scale}`' for scale in found)} |",
        "|---|---|---|" + "---|" * len(found),
    ]
    for name, claim in CLAIMS.items():
        cells = [
            verdict if verdict == NONE else f"**{verdict}**: {parts[0]}" for parts, verdict in judged[name].values()
        ]
        lines.append(f"| {name} | {claim.says} | {claim.paper} | {' | '.join(cells)} |")
    lines += ["", "## What each verdict is of"]
    for name, claim in CLAIMS.items():
        decided = f"Holds if: {claim.holds_if}." if claim.holds_if else "In neither paper."
        runs = ",".join(run.name for run in campaign.runs if name in run.claims)
        commands = [f"`replication.py --runs {runs}`"] * bool(runs) + ["`training_speed.py`"] * claim.speed
        lines += ["", f"**{name}, {claim.says}.** {decided} Measured by {' and '.join(commands)}.", ""]
        lines += [f"- `{scale}`: {part}" for scale, (parts, _) in judged[name].items() for part in parts]
    return "\n".join(lines)


def written(text: str, table: str) -> str:
    """Return a page with this table between its marks."""
    before, start, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise ValueError(f"--write: expected a page with the lines {MARKS[0]!r} and {MARKS[1]!r}")
    return f"{before}{start}\n\n{table}\n\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON, by scale (benchmarks/results/replication)")
    parser.add_argument("--speeds", type=Path, nargs="+", default=SPEEDS, help="what training_speed.py wrote")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put it into this page")
    options = parser.parse_args()
    campaign = read_toml(HERE / "replication.toml", Campaign)
    scales = campaign.scales.items()
    table = page({name: Found(options.results / name, options.speeds, scale) for name, scale in scales}, campaign)
    if options.write:
        write_text(options.write, written(options.write.read_text(encoding="utf-8"), table))
    else:
        print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
