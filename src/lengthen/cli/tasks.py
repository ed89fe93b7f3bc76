"""`lengthen eval RUN --task …`: a run's model on the long-context tasks, with progress and a table for each task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lengthen.cli.progress import show_progress

if TYPE_CHECKING:
    from lengthen.cli.evaluate import Arguments
    from lengthen.data import Corpus
    from lengthen.evaluation import Subject
    from lengthen.evaluation.tasks import TaskResult

NOT_FOR_TASKS = ("stride", "per_document", "tokens")


def run(arguments: Arguments, subject: Subject, corpus: Corpus, split: str, lengths: list[int]) -> int:
    """Ask, with progress; end with a table for each task."""
    from lengthen.evaluation.tasks import evaluate, runner

    for name in NOT_FOR_TASKS:
        if (value := getattr(arguments, name)) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')}: is not for tasks, got {value}; --samples is how many are asked"
            )
    found: list[TaskResult] = []
    with show_progress(unit="tokens") as progress:
        for how in arguments.protocol:
            for name in arguments.task:
                found += evaluate(
                    subject,
                    corpus,
                    [name],
                    lengths if arguments.lengths else _fitting(name, lengths, corpus, split),
                    split=split,
                    depths=arguments.depths or runner.DEPTHS,
                    samples=arguments.samples,
                    seed=arguments.seed,
                    how=how,
                    block=arguments.block if how != "nonoverlapping" or len(arguments.protocol) == 1 else None,
                    precision=arguments.precision,
                    tell=lambda task, length, done, total: progress(f"{length:,} {task}", done, total),
                    again=arguments.again,
                )
    print("\n".join(describe(subject, corpus, found)))
    return 0


def _fitting(name: str, lengths: list[int], corpus: Corpus, split: str) -> list[int]:
    """Return the lengths that a task has room in."""
    from lengthen.evaluation.tasks import TASKS, Draws, Haystack, TooShortError

    fitting, text = [], Haystack.of(corpus, split)
    for length in lengths:
        try:
            TASKS[name].make(text, Draws(0), length, 0.5)
            fitting.append(length)
        except TooShortError as problem:
            if length == lengths[-1]:
                raise ValueError(f"--lengths: {name} does not fit into {length:,} tokens: {problem}") from None
            print(f"left out: {name} at {length:,}, which its own words do not fit into")
    return fitting


def describe(subject: Subject, corpus: Corpus, results: list[TaskResult]) -> Iterator[str]:
    """Yield a table for each task and protocol: a row for each length, a column for each depth."""
    from lengthen.evaluation.tasks import TASKS

    config, first = subject.model.config, results[0]
    yield (
        f"\n{subject.checkpoint.path}: {config.positions}, trained at {config.train_length:,}; read in "
        f"{first.precision} on {first.device}; text of {corpus.directory}, split {first.split!r}"
    )
    for task, how in dict.fromkeys((one.task, one.protocol) for one in results):
        rows = [one for one in results if (one.task, one.protocol) == (task, how)]
        under = "" if how == "nonoverlapping" else f", {how} {rows[0].block:,}"
        asked = f"{rows[0].samples:,} samples per length, chance {percent(rows[0].chance)}"
        yield f"\n{task}: {TASKS[task].about}{under}; {asked}"
        deep = rows[0].depths != [None]
        depths = [f"depth {depth:g}" for depth in rows[0].depths if depth is not None]
        yield "".join(f"{cell:>12}" for cell in ("length", "accuracy", "±", "tokens", *depths))
        for one in rows:
            cells = [f"{one.length:,}", percent(one.accuracy), percent(one.standard_error), percent(one.token_accuracy)]
            pairs = zip(one.right, one.counts, strict=True) if deep else ()
            yield "".join(f"{cell:>12}" for cell in [*cells, *(percent(right / count) for right, count in pairs)])


def percent(fraction: float) -> str:
    """Return a fraction in per cent, with one digit; below that, in powers of ten."""
    return f"{100 * fraction:.1f} %" if fraction >= 0.0005 or fraction == 0 else f"{100 * fraction:.0e} %"
