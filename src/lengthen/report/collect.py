"""Read what training, evaluation and analysis left in run folders.

    RUN/config.toml            the model's settings
    RUN/evaluation.jsonl       one line per measurement; a later line of the same measurement replaces an earlier one
    RUN/analysis/<kind>.json   resolution, positions, reach, distance, induction, longppl
    RUN/tasks.jsonl            one line per task and length

Only `evaluation.jsonl` must be there: a folder without it is left out, with a note. Lines of other kinds and keys that
are not known here are passed over; a known key of the wrong type is an error that names the file and the line.
"""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lengthen.checks import whole_number
from lengthen.evaluation.errors import Difference, difference
from lengthen.evaluation.verdict import Verdict, change_between, judge
from lengthen.io import Table, read_lines, read_toml
from lengthen.model.loss import perplexity
from lengthen.report.analyses import KINDS, Analysis, known, read_analysis
from lengthen.report.tasks import Asked, changed_options, read_tasks
from lengthen.report.words import PROTOCOLS


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One line of evaluation.jsonl."""

    positions: str | None = None
    train_length: int | None = None
    checkpoint: str | None = None
    weights: str | None = None  # the sha256 of the model's file
    step: int | None = None
    data: str | None = None  # the text's fingerprint
    split: str | None = None
    protocol: str
    length: int
    stride: int | None = None
    block: int | None = None
    tokens: int | None = None
    documents: int | None = None
    per_document: int | None = None
    targets: int | None = None  # tokens that were come to
    document_mask: bool | None = None
    precision: str | None = None
    position_options: Table = field(default_factory=dict)
    task: str | None = None
    loss: float | None
    segment_losses: list[float] = field(default_factory=list)
    segment_counts: list[int] = field(default_factory=list)
    unigram: float | None = None
    perplexity: float | None = None
    perplexity_per_word: float | None = None
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    peak_bytes: int | float | None = None
    device: str | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        whole_number("length", self.length, at_least=1)
        if self.perplexity is None and self.loss is not None:
            object.__setattr__(self, "perplexity", perplexity(self.loss))

    @property
    def curve(self) -> tuple[Any, ...]:
        """What two measurements of one curve have in common."""
        options = tuple(sorted((name, str(value)) for name, value in self.position_options.items()))
        return (*self.text, self.protocol, self.how, options, self.precision)

    @property
    def text(self) -> tuple[Any, ...]:
        """What two measurements of the same tokens have in common."""
        much = self.tokens if self.targets is None else self.targets
        return (self.data, self.split, self.document_mask, much)

    @property
    def how(self) -> str:
        """The protocol in words; a stride of half the length, the default of `lengthen eval`, is told as such."""
        words = [self.protocol]
        if self.protocol == "sliding" and self.stride:
            words.append(f"stride {'length/2' if 2 * self.stride == self.length else f'{self.stride:,}'}")
        elif self.block:
            words = [f"{self.protocol} {self.block:,}"]
        if self.per_document:
            words.append(f"first {self.per_document:,} of each document")
        return ", ".join(words)


@dataclass(frozen=True)
class Run:
    """One run folder: its model, what was measured, and what was analysed."""

    path: str  # as it was given
    positions: str
    train_length: int
    label: str = ""  # the method, and as much more as tells it from the other runs
    model: Table = field(default_factory=dict)  # the table `model` of config.toml
    evaluations: list[Measurement] = field(default_factory=list)
    analyses: dict[str, Analysis] = field(default_factory=dict)
    date: str = ""  # of the last measurement
    tasks: list[Asked] = field(default_factory=list)  # what was asked, and how much of it was right
    weights: frozenset[str] = frozenset()  # the sha256 of the model's file of each checkpoint that is there

    @property
    def stale(self) -> list[str]:
        """The analyses of a model that is not there any more, and of which no curve is drawn either."""
        shown = {None, *self.weights, *(curve.first.weights for curve in _curves(self, False))}
        return [kind for kind, one in self.analyses.items() if one.weights not in shown]

    def rows(self, kind: str) -> list[Table]:
        """Return the rows of one analysis, none if it was not made."""
        return self.analyses[kind].rows if kind in self.analyses else []


@dataclass(frozen=True)
class Curve:
    """Measurements of one run under one protocol, by length: one line of the headline figure."""

    run: Run
    label: str
    records: list[Measurement]

    @property
    def first(self) -> Measurement:
        """The shortest measurement; protocol, block, data, split and checkpoint are the same in all."""
        return self.records[0]

    @property
    def reference(self) -> Measurement | None:
        """The measurement at the training length: this curve's own, or without overlap where this curve has none."""
        model = (*self.first.text, self.first.checkpoint, self.first.weights, self.first.per_document)
        plain = [one for one in self.run.evaluations if one.protocol == "nonoverlapping"]
        others = [one for one in plain if (*one.text, one.checkpoint, one.weights, one.per_document) == model]
        return next((one for one in self.records + others if one.length == self.run.train_length), None)

    @cached_property
    def verdict(self) -> Verdict[Measurement] | None:
        """How far it holds; None without a finite loss."""
        beside = [self.reference] if self.reference and self.reference not in self.records else []
        return judge([*beside, *self.records], self.run.train_length)

    def change(self, one: Measurement) -> Difference | None:
        """Return how far one of its losses is above that at the training length, paired; None for that one itself."""
        start = self.verdict.reference if self.verdict else None
        return None if start is None or one is start else change_between(one, start)


@dataclass(frozen=True)
class Report:
    """The runs of one report, in the order given, and a note for each folder that was left out."""

    runs: list[Run]
    notes: list[str] = field(default_factory=list)

    @property
    def texts(self) -> set[tuple[str | None, str | None]]:
        """The data and split of every measurement; perplexities of several cannot be compared."""
        return {(one.data, one.split) for run in self.runs for one in run.evaluations}

    @property
    def curves(self) -> list[Curve]:
        """One curve per run and protocol, of the newest checkpoint that was measured so, and is there if any is."""
        return [curve for run in self.runs for curve in _curves(run, len(self.texts) > 1)]


def collect(paths: Iterable[str | Path]) -> Report:
    """Read the folders of the runs; those without measurements are left out, if others have some."""
    words = [str(path) for path in paths]
    places = [Path(word).resolve() for word in words]
    for word, place in zip(words, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"runs: expected each folder once, got {word} twice")
        if not place.exists():
            raise FileNotFoundError(f"{word}: expected the folder of a run, got none; `lengthen train` makes one")
    found = {word: _run(word) for word in words}
    notes = [f"{word}: no measurements; `lengthen eval RUN` makes them" for word, run in found.items() if run is None]
    runs = [run for run in found.values() if run is not None]
    if not runs:
        raise ValueError("; ".join(["runs: expected a folder with measurements, got none", *notes]))
    for run in runs:
        notes += [
            f"{run.path}: {kind}, which is of other weights; `lengthen analyse RUN` makes it" for kind in run.stale
        ]
    return Report(_labelled([_without(run, run.stale) for run in runs]), notes)


def paired(one: Measurement, other: Measurement) -> Difference | None:
    """Return how far one loss is above another of the same tokens; None if they are of others."""
    if (one.data, one.split, one.document_mask, one.task) != (other.data, other.split, other.document_mask, other.task):
        return None
    return difference(one.segment_losses, one.segment_counts, other.segment_losses, other.segment_counts)


def finite(value: Any) -> float | None:
    """Return a number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _run(word: str) -> Run | None:
    folder = Path(word)
    source = folder / "evaluation.jsonl"
    latest: dict[tuple[Any, ...], Measurement] = {}
    for number, line in enumerate(read_lines(source, dict) if source.is_file() else [], 1):
        if line.get("kind") == "evaluation":
            one = known(Measurement, line, f"{source}, line {number}")
            key = (one.checkpoint, one.weights, *one.curve, one.length, one.stride)
            latest.pop(key, None)  # so that what replaces it stands where it was written
            latest[key] = one
    if not latest:
        return None
    records = list(latest.values())
    config = folder / "config.toml"
    model = read_toml(config, dict).get("model", {}) if config.is_file() else {}
    positions, train_length = (model.get(name, getattr(records[-1], name)) for name in ("positions", "train_length"))
    records = [one for one in records if one.positions in (None, positions)]  # not of a model that was here before
    if not records:
        return None
    if not isinstance(positions, str):
        raise ValueError(f"{word}: expected `positions` in config.toml or evaluation.jsonl, got {positions!r}")
    train_length = whole_number(f"{word}: train_length", train_length, at_least=1)
    files = {kind: folder / "analysis" / f"{kind}.json" for kind in KINDS}
    analyses = {kind: read_analysis(path, kind) for kind, path in files.items() if path.is_file()}
    analyses = {kind: one for kind, one in analyses.items() if one.positions in (None, positions)}
    date = datetime.datetime.fromtimestamp(source.stat().st_mtime, datetime.UTC).date().isoformat()
    tasks = [one for one in read_tasks(folder / "tasks.jsonl") if one.positions in (None, positions)]
    return Run(word, positions, train_length, "", model, records, analyses, date, tasks, _weights(folder))


def _without(run: Run, kinds: Sequence[str]) -> Run:
    return replace(run, analyses={kind: one for kind, one in run.analyses.items() if kind not in kinds})


def _weights(folder: Path) -> frozenset[str]:
    """Return the sha256 of the model's file of each checkpoint of a run."""
    lines = "".join(path.read_text(errors="replace") for path in folder.glob("checkpoints/step-*/SHA256SUMS"))
    return frozenset(re.findall(r"^([0-9a-f]{64})  model\.safetensors$", lines, flags=re.MULTILINE))


def _labelled(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with labels that differ: the method; the training length; the folder, where it must be."""
    choices = [
        [run.positions for run in runs],
        [f"{run.positions}, trained at {run.train_length:,}" for run in runs],
        [f"{run.positions} ({Path(run.path).resolve().name})" for run in runs],
        [f"{run.positions} ({run.path})" for run in runs],
    ]
    counts = [Counter(choice) for choice in choices]
    labelled = []
    for index, run in enumerate(runs):
        unique = (choice[index] for choice, count in zip(choices, counts, strict=True) if count[choice[index]] == 1)
        labelled.append(replace(run, label=next(unique, choices[-1][index])))
    return labelled


def _curves(run: Run, several: bool) -> list[Curve]:
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for one in [one for one in run.evaluations if one.weights in run.weights] or run.evaluations:
        groups.setdefault(one.curve, []).append(one)
    found = []
    for group in sorted(groups.values(), key=lambda group: [*PROTOCOLS, group[0].protocol].index(group[0].protocol)):
        # Those of the latest step; of one step's, those of the weights measured last.
        last = max(reversed(group), key=lambda one: one.step or 0)
        newest = [one for one in group if (one.checkpoint, one.weights) == (last.checkpoint, last.weights)]
        changed = ", ".join(changed_options(last.position_options, run.model))
        words = [run.label, *([changed] if changed else [])]
        words += [last.how] if last.how != "nonoverlapping" else []
        words += [f"{last.split} of {str(last.data)[:8]}"] if several else []
        found.append(Curve(run, " · ".join(words), sorted(newest, key=lambda one: one.length)))
    for facet in (_precision, _tokens):  # where names are the same, what tells them apart
        said: dict[str, set[str]] = {}
        for curve in found:
            said.setdefault(curve.label, set()).add(facet(curve.first))
        differ = {label for label, facets in said.items() if len(facets) > 1}
        found = [
            replace(curve, label=f"{curve.label} · {facet(curve.first)}") if curve.label in differ else curve
            for curve in found
        ]
    return found


def _precision(one: Measurement) -> str:
    return f"{one.precision}{', document mask' if one.document_mask else ''}"


def _tokens(one: Measurement) -> str:
    return f"{one.text[-1]:,} tokens" if one.text[-1] is not None else "n.a."
