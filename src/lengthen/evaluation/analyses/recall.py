"""Recall by distance: how often a model finds a value that stands far back (the task: `lengthen.evaluation.recall`)."""

from __future__ import annotations

from collections.abc import Iterator

from lengthen.data import Corpus
from lengthen.evaluation.analyses.shared import Lengths, Progress, Row, header, line, silent
from lengthen.evaluation.recall import BESIDE, NEAREST, accuracy
from lengthen.evaluation.runs import Subject

LENGTHS = Lengths(least=NEAREST, beside=BESIDE, of_text=False)
TRIALS = 256


def analyse(
    subject: Subject,
    corpus: Corpus | None,
    lengths: list[int],
    *,
    trials: int = TRIALS,
    seed: int = 0,
    progress: Progress = silent,
) -> Row:
    """Return how often a value is found at each of the distances `lengths`; it needs no corpus."""
    trained = subject.checkpoint.state.tokenizer
    if trained not in (None, "bytes"):
        raise ValueError(
            f"recall: expected a model of bytes, which questions are asked in, got {subject.checkpoint.path} with the "
            f"tokenizer {str(trained)[:12]}"
        )
    rows = []
    for number, distance in enumerate(lengths, 1):
        found = accuracy(subject.model, distance, trials, seed)
        rows.append({"distance": distance, "accuracy": found, "trials": trials})
        progress("recall", trials * sum(lengths[:number]), trials * sum(lengths))
    return header("recall", subject, None) | {"rows": rows}


def table(found: Row) -> Iterator[str]:
    """Yield the lines of a table for the terminal."""
    yield f"recall, {found['rows'][0]['trials']:,} questions a distance (chance: 10 %)"
    for row in found["rows"]:
        yield line(f"distance {row['distance']:,}", [f"{100 * row['accuracy']:.1f} %"])
