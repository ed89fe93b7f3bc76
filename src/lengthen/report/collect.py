"""Read what evaluation and analysis left in run folders.

    RUN/config.toml            the model's settings
    RUN/metrics.jsonl          training: a line a step
    RUN/evaluation.jsonl       a line a measurement; a later line of the same measurement replaces an earlier one
    RUN/analysis/<kind>.json   resolution, positions, reach, distance, recall

Only `evaluation.jsonl` must be there. Nothing is computed here but labels, curves and medians: every number that is
shown is one of these files'.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]

ANALYSES = ("resolution", "positions", "reach", "distance", "recall")
KEY = ("checkpoint", "data", "split", "protocol", "length", "stride", "block")  # what makes two measurements the same
WORDS = ("positions", "checkpoint", "data", "split", "protocol", "device")
WHOLE = ("train_length", "step", "length", "stride", "block", "tokens", "documents")
REAL = (
    *("loss", "loss_se", "perplexity", "perplexity_per_word", "bits_per_byte"),
    *("tokens_per_second", "seconds", "peak_bytes"),
)
NEEDED = ("protocol", "length", "loss")
PROTOCOLS = ("nonoverlapping", "sliding", "blockwise", "window")  # the order they are shown in


@dataclass(frozen=True)
class Run:
    """One run folder: its model, what was measured, and what was analysed."""

    path: str  # as it was given
    positions: str
    train_length: int
    label: str = ""  # the method, and as much more as tells it from the other runs
    model: Record = field(default_factory=dict)  # the table `model` of config.toml
    training: Record | None = None  # steps, loss and the median speed, from metrics.jsonl
    evaluations: list[Record] = field(default_factory=list)
    analyses: dict[str, Record] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's name."""
        return Path(self.path).resolve().name


@dataclass(frozen=True)
class Curve:
    """Measurements of one run under one protocol, by length: what one line of the headline figure shows."""

    run: Run
    label: str
    protocol: str
    block: int | None
    stride: int | None  # of a sliding window, where it is the same for all lengths
    data: str | None
    split: str | None
    checkpoint: str | None
    records: list[Record]

    @property
    def reference(self) -> Record | None:
        """The measurement at the training length: this curve's own, or without overlap where this curve has none."""
        own = [r for r in self.records if r["length"] == self.run.train_length]
        other = [
            r
            for r in self.run.evaluations
            if r["length"] == self.run.train_length
            and r["protocol"] == "nonoverlapping"
            and all(r.get(key) == getattr(self, key) for key in ("data", "split", "checkpoint"))
        ]
        return next(iter(own + other), None)


@dataclass(frozen=True)
class Report:
    """The runs of one report, in the order given."""

    runs: list[Run]

    @property
    def curves(self) -> list[Curve]:
        """One curve a run and protocol, of the newest checkpoint that was measured so."""
        several = len({(r.get("data"), r.get("split")) for run in self.runs for r in run.evaluations}) > 1
        return [curve for run in self.runs for curve in _curves(run, several)]


def collect(paths: Iterable[str | Path]) -> Report:
    """Read the folders of the runs; an error names the folder and the command that would make what is missing."""
    words = [str(path) for path in paths]
    if not words:
        raise ValueError("runs: expected at least one folder, got none")
    places = [Path(word).resolve() for word in words]
    for word, place in zip(words, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"runs: expected each folder once, got {word} twice")
    return Report(_labelled([_run(word) for word in words]))


def finite(value: Any) -> float | None:
    """Return a number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def perplexity(record: Record) -> float | None:
    """Return a record's perplexity, infinite ones included, or None where there is none."""
    value = record.get("perplexity")
    if value is None and record.get("loss") is not None:
        loss = float(record["loss"])
        value = math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan
    return None if value is None else float(value)


def describe(protocol: str, stride: int | None, block: int | None) -> str:
    """Return a protocol in words."""
    if protocol == "sliding" and stride is not None:
        return f"sliding, stride {stride:,}"
    if protocol in ("blockwise", "window") and block is not None:
        return f"{protocol} {block:,}"
    return protocol


def _run(word: str) -> Run:
    folder = Path(word)
    if not folder.is_dir():
        raise FileNotFoundError(f"{word}: expected the folder of a run, got none; `lengthen train` makes one")
    source = folder / "evaluation.jsonl"
    if not source.is_file():
        raise FileNotFoundError(f"{word}: has no evaluation.jsonl; `lengthen eval {word}` makes it")
    latest: dict[tuple[Any, ...], Record] = {}
    for record in _evaluations(source):
        key = tuple(record.get(name) for name in KEY)
        latest.pop(key, None)  # so that what replaces it stands where it was written
        latest[key] = record
    if not latest:
        raise ValueError(f"{source}: expected measurements, got none; `lengthen eval {word}` makes them")
    records = list(latest.values())
    model = _model(folder / "config.toml")
    found = {**records[-1], **model}
    for name, kind in (("positions", str), ("train_length", int)):
        if not isinstance(found.get(name), kind):
            raise ValueError(f"{word}: expected `{name}` in config.toml or evaluation.jsonl, got {found.get(name)!r}")
    if found["train_length"] < 1:
        raise ValueError(f"{word}: train_length: expected at least 1, got {found['train_length']}")
    analyses = {kind: analysis for kind in ANALYSES if (analysis := _analysis(folder, kind)) is not None}
    training = _training(folder / "metrics.jsonl")
    return Run(word, found["positions"], found["train_length"], "", model, training, records, analyses)


def _lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield a log's objects with their line numbers; a last line that a killed process left torn is not one."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as problem:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: expected JSON, got {line[:60]!r} ({problem})") from None
        if isinstance(record, dict):
            yield number, record
        elif number < len(lines):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}")


def _evaluations(path: Path) -> Iterator[Record]:
    for number, record in _lines(path):
        if record.get("kind") != "evaluation":
            continue
        for name in NEEDED:
            if name not in record:
                raise ValueError(f"{path}, line {number}: expected `{name}`, got {', '.join(record)}")
        for names, kinds, what in (
            (WORDS, (str,), "text"),
            (WHOLE, (int,), "a whole number"),
            (REAL, (int, float), "a number"),
        ):
            for name in names:
                value = record.get(name)
                if value is None and name not in ("protocol", "length"):
                    continue
                if isinstance(value, bool) or not isinstance(value, kinds):
                    raise ValueError(f"{path}, line {number}: {name}: expected {what}, got {value!r}")
        if record["length"] < 1:
            raise ValueError(f"{path}, line {number}: length: expected at least 1, got {record['length']}")
        yield record


def _model(path: Path) -> Record:
    if not path.is_file():
        return {}
    try:
        model = tomllib.loads(path.read_text(encoding="utf-8")).get("model", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"{path}: expected TOML: {problem}") from None
    return model if isinstance(model, dict) else {}


def _analysis(folder: Path, kind: str) -> Record | None:
    path = folder / "analysis" / f"{kind}.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as problem:
        raise ValueError(f"{path}: expected JSON: {problem}") from None
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected an object with a list `rows` of objects, got {str(found)[:60]}")
    for row in rows:
        _check_row(path, kind, row)
    return dict(found)


# What a row of each analysis has: how deep its lists are, and whether it cannot do without.
ROWS = {
    "resolution": {"length": (0, True), "resolution": (0, True), "layers": (1, False)},
    "positions": {"length": (0, True), "positions": (1, True), "loss": (1, True), "count": (1, False)},
    "reach": {"length": (0, True), "reach": (2, True), "share": (2, False)},
    "distance": {"length": (0, True), "distances": (1, True), "weight": (3, True)},
    "recall": {"distance": (0, True), "accuracy": (0, True), "trials": (0, False)},
}
ALIKE = {"positions": ("positions", "loss", "count"), "reach": ("reach", "share")}  # lists of the same shape
AXES = ("length", "distance", "positions", "distances")  # whole numbers, which figures are drawn against


def _check_row(path: Path, kind: str, row: Record) -> None:
    for name, (depth, needed) in ROWS[kind].items():
        if name not in row and needed:
            raise ValueError(f"{path}: expected `{name}` in every row, got {', '.join(row)}")
        if row.get(name) is None and (not needed or (depth == 0 and name not in AXES)):
            continue
        kinds = (int,) if name in AXES else (int, float, type(None))
        if not _deep(row[name], depth, kinds):
            what = f"{'lists of ' * depth}{'whole ' * (name in AXES)}numbers"
            raise ValueError(f"{path}: {name}: expected {what}, got {str(row[name])[:60]}")
    first, *others = ALIKE.get(kind, ("length",))
    shapes = [_shape(row[name]) for name in (first, *others) if row.get(name) is not None]
    if kind == "distance":
        shapes = [_shape(row["distances"]), *(_shape(weights) for heads in row["weight"] for weights in heads)]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{path}: expected lists of equal lengths in a row, got {shapes}")


def _deep(value: Any, depth: int, kinds: tuple[type, ...]) -> bool:
    if depth == 0:
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, list) and all(_deep(one, depth - 1, kinds) for one in value)


def _shape(value: Any) -> Any:
    if not isinstance(value, list):
        return 0
    inner = [_shape(one) for one in value]
    return [len(value), *([inner] if any(inner) else [])]


def _training(path: Path) -> Record | None:
    if not path.is_file():
        return None
    steps = [record for _, record in _lines(path) if record.get("kind") == "step"]
    if not steps:
        return None
    speeds = [speed for record in steps if (speed := finite(record.get("tokens_per_second"))) is not None]
    return {
        "steps": steps[-1].get("step"),
        "loss": steps[-1].get("loss"),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
    }


def _labelled(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with labels that differ: the method; the training length; the folder, where it must be."""
    choices = [
        [run.positions for run in runs],
        [f"{run.positions}, trained at {run.train_length:,}" for run in runs],
        [f"{run.positions} ({run.name})" for run in runs],
        [f"{run.positions} ({run.path})" for run in runs],
    ]
    counts = [Counter(choice) for choice in choices]
    labels = []
    for index in range(len(runs)):
        unique = (choice[index] for choice, count in zip(choices, counts, strict=True) if count[choice[index]] == 1)
        labels.append(next(unique, choices[-1][index]))
    return [Run(**{**vars(run), "label": label}) for run, label in zip(runs, labels, strict=True)]


def _curves(run: Run, several: bool) -> Iterator[Curve]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in run.evaluations:
        key = (*(record.get(name) for name in ("data", "split", "protocol", "block")), _stride(run, record))
        groups.setdefault(key, []).append(record)

    def place(key: tuple[Any, ...]) -> int:
        return PROTOCOLS.index(key[2]) if key[2] in PROTOCOLS else len(PROTOCOLS)

    for key in sorted(groups, key=place):
        data, split, protocol, block, (how, amount) = key
        newest = max(groups[key], key=lambda record: record.get("step") or 0).get("checkpoint")
        records = sorted((r for r in groups[key] if r.get("checkpoint") == newest), key=lambda r: int(r["length"]))
        words = [run.label]
        if how == "share":
            words.append(f"sliding, stride length/{amount:g}")
        elif protocol != "nonoverlapping":
            words.append(describe(protocol, amount, block))
        if several:
            words.append(f"{split} of {str(data)[:8]}")
        stride = amount if how == "stride" else None
        yield Curve(run, " · ".join(words), protocol, block, stride, data, split, newest, records)


def _stride(run: Run, record: Record) -> tuple[str, Any]:
    """Return what of a sliding window's stride the points of a curve share: the stride, or its share of the length."""
    stride = record.get("stride")
    if record["protocol"] != "sliding" or not stride:
        return ("", None)
    peers = {r["length"] for r in run.evaluations if r["protocol"] == "sliding" and r.get("stride") == stride}
    alike = {
        r["length"]
        for r in run.evaluations
        if r["protocol"] == "sliding" and r.get("stride") and r["length"] * stride == record["length"] * r["stride"]
    }
    return ("share", record["length"] / stride) if len(alike) > len(peers) else ("stride", stride)
