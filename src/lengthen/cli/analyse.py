"""Look into a trained model: where its loss falls, how far it looks, what it tells apart.

  resolution   R(s), how well the scores tell near from far, for each layer and the model; --blockwise beside it
  positions    loss by position in the window, and how much of what long inputs gain is context, how much the early
               tokens' curse fading
  reach        ALiBi: how many keys back each head must look, and the share of the score matrix that is
  distance     how much of its attention each head spends at which distance
  recall       for a model trained on recall (configs/recall.toml): how often it finds a value at growing distances;
               --lengths are the distances, and no data is needed

RUN is a run's folder, whose last checkpoint is used, or one checkpoint's folder. Results are written to
RUN/analysis/NAME.json. docs/analyses.md has the definitions.

Examples:
  lengthen analyse runs/tiny                                          every analysis that fits the model
  lengthen analyse runs/tiny --data data/python --what resolution --blockwise --lengths 64,256,1024
  lengthen analyse runs/tiny --data data/python --what positions --tokens 65536 --stride 1
  lengthen analyse runs/recall --what recall --lengths 16,32,64,128,256
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from lengthen.cli.progress import Progress, show_progress

if TYPE_CHECKING:
    from torch import Tensor

    from lengthen.data import Corpus, Tokens
    from lengthen.evaluation import Subject

Name = Literal["resolution", "positions", "reach", "distance", "recall"]
NAMES: tuple[Name, ...] = get_args(Name)
USUAL = NAMES[:-1]
BATCH_TOKENS = 1 << 13
WIDEST = 9  # columns of numbers that fit on a terminal

Row = dict[str, Any]


@dataclass(frozen=True)
class Arguments:
    """What `lengthen analyse` is told."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]  # a run's folder, or a checkpoint's
    data: Path | None = None  # token shards; none: the default corpus
    what: list[Name] | None = None  # none: all but recall, and reach for ALiBi alone
    lengths: list[int] | None = None  # tokens read at once; none: the training length times 1, 2, 4, 8, 16
    tokens: int = 16_384  # of the text to read
    split: str = "validation"  # of the corpus
    blockwise: bool = False  # resolution: with blockwise attention too
    block: int | None = None  # its block; none: half the training length
    stride: int | None = None  # positions: of sliding windows; none: the shortest length / 8
    trials: int = 256  # recall: questions
    seed: int = 0  # recall: other questions
    device: str | None = None  # cpu, cuda or cuda:1; none: cuda where there is one


def run(arguments: Arguments) -> int:
    """Analyse, with progress; write the results, and end with short tables."""
    import torch

    from lengthen.cli.evaluate import whole_numbers
    from lengthen.evaluation import open_run

    asked = wanted(arguments.what)
    lengths = whole_numbers("--lengths", arguments.lengths) if arguments.lengths is not None else None
    for name in ("tokens", "trials", "block", "stride"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected a whole number of at least 1, got {value}")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    subject = open_run(arguments.run_folder, device=device)
    corpus = _corpus(arguments.data, asked, subject)
    names = _fitting(asked, subject, said=arguments.what is not None)
    chosen = {name: _lengths(lengths, subject, None if name == "recall" else corpus, arguments.split) for name in names}
    for name in names:
        analysis = Analysis(subject, corpus, chosen[name], arguments)
        with show_progress(unit="tokens") as progress:
            found = getattr(analysis, name)(progress)
        path = write(subject.folder, name, header(name, subject, corpus) | found)
        print()
        for line in TABLES[name](found):
            print(line)
        print(f"  {path}")
    return 0


class Analysis:
    """The analyses of one model on one text: each returns what its file says beside the header."""

    def __init__(self, subject: Subject, corpus: Corpus | None, lengths: list[int], arguments: Any) -> None:
        self.model, self.lengths, self.arguments = subject.model, lengths, arguments
        self.text: Tokens | None = None if corpus is None else corpus[arguments.split]

    def _batches(self, length: int) -> tuple[int, Iterator[Tensor]]:
        """Return how many pieces of a length are read, and batches of them."""
        import numpy as np
        import torch

        assert self.text is not None
        text = self.text
        count = max(1, min(self.arguments.tokens, len(text)) // length)
        rows = max(1, BATCH_TOKENS // length)

        def batches() -> Iterator[Tensor]:
            for start in range(0, count, rows):
                pieces = range(start, min(start + rows, count))
                yield torch.from_numpy(np.stack([text.read(p * length, (p + 1) * length) for p in pieces]))

        return count, batches()

    def _over(self, stage: str, length: int, progress: Progress, measure: Callable[..., Any], **options: Any) -> Any:
        """Return what a measurement says of the text in pieces of a length."""
        count, batches = self._batches(length)
        return measure(
            self.model,
            batches,
            tell=lambda done: progress(f"{stage}, {length}", done * length, count * length),
            **options,
        )

    def resolution(self, progress: Progress) -> Row:
        """R of each layer and of the model, at each length."""
        from lengthen.attention import Blockwise
        from lengthen.evaluation import resolution

        block = self.arguments.block or max(1, self.model.config.train_length // 2)
        rows = []
        for blockwise in (False, True) if self.arguments.blockwise else (False,):
            stage, mask = ("blockwise resolution", Blockwise(block)) if blockwise else ("resolution", None)
            for length in self.lengths:
                found = self._over(stage, length, progress, resolution.of_model, mask=mask)
                row: Row = {"length": length, "blockwise": blockwise, "block": block if blockwise else None}
                rows.append(row | {"resolution": found.model, "layers": found.layers})
        return {"rows": rows}

    def positions(self, progress: Progress) -> Row:
        """Loss by position at each length, and the curse between the shortest and the longest."""
        from lengthen.evaluation import by_position

        assert self.text is not None
        limit, rows = self.arguments.tokens, []
        for length in self.lengths:
            tell = _adding(progress, f"positions, {length}", by_position.scored(self.text, length, limit))
            found = by_position.by_position(self.model, self.text, length, limit, tell=tell)
            rows.append({"length": length, "positions": found.positions, "loss": found.loss, "count": found.count})
        return {"rows": rows, "curse": self._curse(progress)}

    def _curse(self, progress: Progress) -> Row | None:
        from lengthen.evaluation import by_position

        assert self.text is not None
        short, long, limit = self.lengths[0], self.lengths[-1], self.arguments.tokens
        if short == long:
            return None
        stride = self.arguments.stride or max(1, short // 8)
        total = by_position.tokens_to_read(by_position.scored(self.text, long, limit), short, long, stride)
        tell = _adding(progress, f"curse, {short} to {long}", total)
        found = by_position.curse(self.model, self.text, short, long, limit, stride, tell)
        row: Row = {"short": short, "long": long, "gain": found.gain}
        row |= {"from_context": found.from_context, "from_curse": found.from_curse}
        return row | {"stride": stride, "tokens": found.tokens, "whole": found.whole, "sliding": found.sliding}

    def reach(self, progress: Progress) -> Row:
        """How far each head must look, at each length."""
        from lengthen.evaluation import reaches

        rows = []
        for length in self.lengths:
            found = self._over("reach", length, progress, reaches.of_model)
            rows.append({"length": length, "reach": found.reach.tolist(), "share": found.share.tolist()})
        return {"rows": rows}

    def distance(self, progress: Progress) -> Row:
        """What each head spends at which distance, at each length."""
        from lengthen.evaluation import by_distance

        rows = []
        for length in self.lengths:
            found = self._over("distance", length, progress, by_distance.of_model)
            starts = by_distance.bucket_starts(length)
            rows.append({"length": length, "distances": starts, "weight": found.tolist()})
        return {"rows": rows}

    def recall(self, progress: Progress) -> Row:
        """How often a value is found, at each distance."""
        from lengthen.evaluation import recall

        rows = []
        trials, all_tokens = self.arguments.trials, self.arguments.trials * sum(self.lengths)
        for number, distance in enumerate(self.lengths):
            share = recall.accuracy(self.model, distance, trials, self.arguments.seed)
            rows.append({"distance": distance, "accuracy": share, "trials": trials})
            progress("recall", trials * sum(self.lengths[: number + 1]), all_tokens)
        return {"rows": rows}


def wanted(given: list[Name] | None) -> list[str]:
    """Return the analyses that are asked for, in the order of NAMES."""
    return [name for name in NAMES if name in (USUAL if given is None else given)]


def _corpus(directory: Path | None, asked: list[str], subject: Subject) -> Corpus | None:
    """Return the corpus, if an analysis reads one: the folder's, or the default one of the run's config."""
    from lengthen.cli.corpus import open_corpus
    from lengthen.config import Config
    from lengthen.evaluation.runs import refuse_other_tokens
    from lengthen.io import read_toml

    if asked == ["recall"]:
        return None
    corpus = open_corpus(directory, read_toml(subject.checkpoint.path / "config.toml", Config).data)
    refuse_other_tokens(subject, corpus)
    return corpus


def _fitting(asked: list[str], subject: Subject, said: bool) -> list[str]:
    """Refuse an analysis that the model has nothing for; if it was not asked for by name, leave it out."""
    from lengthen.evaluation import reaches

    if "reach" not in asked:
        return asked
    try:
        reaches.refuse_unbounded(subject.model)
    except ValueError:
        if said:
            raise
        return [name for name in asked if name != "reach"]
    return asked


def _lengths(given: list[int] | None, subject: Subject, corpus: Corpus | None, split: str) -> list[int]:
    """Return the lengths, checked against the text and the model; those chosen here are those that fit."""
    from lengthen.evaluation.recall import BESIDE, NEAREST
    from lengthen.evaluation.runs import reachable

    extra = BESIDE if corpus is None else 0
    least = NEAREST if corpus is None else 2
    room = None if corpus is None else len(corpus[split]) - 1
    config, fitting = subject.model.config, []
    for length in given or [config.train_length * factor for factor in (1, 2, 4, 8, 16)]:
        problem = None
        if length < least:
            problem = f"expected at least {least}, got {length}"
        elif room is not None and corpus is not None and length > room:
            problem = (
                f"{length:,} is longer than the text: split {split!r} of {corpus.directory} has {room + 1:,} tokens"
            )
        elif not reachable(subject, length + extra):
            most = config.position_options.get("max_length", config.train_length)
            problem = (
                f"{length + extra:,} tokens are beyond the {most:,} positions that this model has learned vectors for"
            )
        if problem is None:
            fitting.append(length)
        elif given is not None or length == config.train_length:
            raise ValueError(f"--lengths: {problem}")
    return fitting


def _adding(progress: Progress, stage: str, total: int) -> Callable[[int], None]:
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        done += more
        progress(stage, min(done, total), total)

    return tell


def header(name: str, subject: Subject, corpus: Corpus | None) -> Row:
    """Return what every file says of the model and the data."""
    config = subject.model.config
    return {
        "kind": name,
        "positions": config.positions,
        "train_length": config.train_length,
        "checkpoint": subject.checkpoint.path.name,
        "data": None if corpus is None or name == "recall" else corpus.fingerprint,
    }


def write(folder: Path, name: str, content: Row) -> Path:
    """Write RUN/analysis/NAME.json, whole or not at all, and return its path."""
    path = folder / "analysis" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def _line(first: object, cells: Iterable[object]) -> str:
    return (f"  {first!s:<22}" + "".join(f"{cell!s:>9}" for cell in cells)).rstrip()


def _resolution_table(found: Row) -> Iterator[str]:
    yield "attention resolution (0: tells nothing apart)"
    layers = range(len(found["rows"][0]["layers"]))[: WIDEST - 1]
    yield _line("length", ["model", *(f"layer {layer}" for layer in layers)])
    for row in found["rows"]:
        name = f"{row['length']:,}" + (f", blocks of {row['block']:,}" if row["blockwise"] else "")
        yield _line(name, [f"{row['resolution']:.2g}", *(f"{row['layers'][layer]:.2g}" for layer in layers)])


def _positions_table(found: Row) -> Iterator[str]:
    yield "loss by position, nonoverlapping pieces (nats a token)"
    ends = found["rows"][-1]["positions"]
    shown = ends[-WIDEST:]
    yield _line("length", [f"to {end:,}" for end in shown])
    for row in found["rows"]:
        by_end = dict(zip(row["positions"], row["loss"], strict=True))
        yield _line(f"{row['length']:,}", [f"{by_end[end]:.3f}" if end in by_end else "" for end in shown])
    split = found["curse"]
    if split is not None:
        yield (
            f"  from {split['short']:,} to {split['long']:,}: gain {split['gain']:.4f} = context "
            f"{split['from_context']:.4f} + curse fading {split['from_curse']:.4f}  "
            f"({split['tokens']:,} tokens, sliding with stride {split['stride']:,})"
        )


def _reach_table(found: Row) -> Iterator[str]:
    yield "reach: keys read by a query on average, and of the causal score matrix"
    for row in found["rows"]:
        heads = range(len(row["reach"][0]))[:WIDEST]
        yield _line(f"length {row['length']:,}", [f"head {head}" for head in heads])
        for layer, (keys, share) in enumerate(zip(row["reach"], row["share"], strict=True)):
            yield _line(f"  layer {layer}", [f"{keys[head]:,.1f}" for head in heads])
            yield _line("", [f"{100 * share[head]:.1f} %" for head in heads])


def _distance_table(found: Row) -> Iterator[str]:
    row = found["rows"][-1]
    starts = row["distances"]
    yield f"attention by distance at length {row['length']:,}, mean over heads (% of the weight; per head in the file)"
    shown = list(range(len(starts)))[:WIDEST]
    last = len(shown) < len(starts)
    yield _line("from distance", [f"{starts[b]:,}" + "+" * (last and b == shown[-1]) for b in shown])
    for layer, heads in enumerate(row["weight"]):
        means = [sum(head[b] for head in heads) / len(heads) for b in range(len(starts))]
        cells = [*means[: len(shown) - 1], sum(means[len(shown) - 1 :])] if last else means
        yield _line(f"  layer {layer}", [f"{100 * cell:.1f}" for cell in cells])


def _recall_table(found: Row) -> Iterator[str]:
    yield f"recall, {found['rows'][0]['trials']:,} questions a distance (chance: 10 %)"
    for row in found["rows"]:
        yield _line(f"distance {row['distance']:,}", [f"{100 * row['accuracy']:.1f} %"])


TABLES: dict[str, Callable[[Row], Iterator[str]]] = {
    "resolution": _resolution_table,
    "positions": _positions_table,
    "reach": _reach_table,
    "distance": _distance_table,
    "recall": _recall_table,
}
