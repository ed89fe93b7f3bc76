"""A model's answers to samples, and a run's results at many lengths.

**Greedy generation in one pass.** A model that generates greedily writes an answer exactly if each of the answer's
tokens is the likeliest one after the prompt and the answer's tokens before it. So prompt and answer are read at once,
and the likeliest token at each place of the answer is compared: the verdict is that of generation, at the price of one
forward pass. (Rounding may differ between the two, so two tokens whose logits are equal to the last bits may change
places.)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch

from lengthen import __version__
from lengthen.attention import Mask
from lengthen.checks import choice, whole_number
from lengthen.data import Corpus
from lengthen.evaluation.protocols import Protocol, protocol
from lengthen.evaluation.results import alone
from lengthen.evaluation.runs import Subject, refuse_other_tokens
from lengthen.evaluation.tasks import results
from lengthen.evaluation.tasks.registry import TASKS
from lengthen.evaluation.tasks.results import Asked, TaskResult
from lengthen.evaluation.tasks.sample import Haystack, Sample
from lengthen.model.score import BATCH_TOKENS, Model, device_name, device_of, logits_at, precision_named, precision_of

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SAMPLES = 100
PROTOCOLS = ("nonoverlapping", "blockwise", "window")

Tell = Callable[[str, int, int, int], None]  # the task, the length, tokens that were read, and all there are


def answered(
    model: Model,
    samples: Sequence[Sample],
    mask: Mask | None = None,
    precision: torch.dtype | None = None,
    tell: Callable[[int], None] = lambda done: None,
) -> list[list[bool]]:
    """Return for each sample which of its answer's tokens a model would write; `tell` hears how many were read."""
    found, done = [], 0
    most = BATCH_TOKENS.get(device_of(model).type, 1)
    for length, alike in groupby(samples, key=lambda one: len(one.ids)):
        group = list(alike)
        rows = max(1, most // length)
        for start in range(0, len(group), rows):
            here = group[start : start + rows]
            ids = torch.tensor([one.ids for one in here])
            where = torch.zeros_like(ids, dtype=torch.bool)
            for row, one in enumerate(here):
                where[row, len(one.prompt) :] = True
            likeliest = logits_at(model, ids[:, :-1], where[:, 1:], mask, precision).argmax(dim=-1).cpu()
            right = (likeliest == ids[where]).tolist()
            for one in here:
                found.append(right[: len(one.answer)])
                del right[: len(one.answer)]
            done += ids.numel()
            tell(done)
    return found


def evaluate(
    subject: Subject,
    corpus: Corpus,
    tasks: Iterable[str],
    lengths: Iterable[int],
    *,
    split: str = "validation",
    depths: Sequence[float] = DEPTHS,
    samples: int = SAMPLES,
    seed: int = 0,
    how: str = "nonoverlapping",
    block: int | None = None,
    precision: str = "auto",
    tell: Tell = lambda task, length, done, total: None,
    again: bool = False,
) -> list[TaskResult]:
    """Ask each task at each length, and return all results; those that are there are not made again.

    Results are appended to `tasks.jsonl` in the subject's folder as they come. `how` is a protocol that reads a sample
    at once, under its mask; `precision` as for `lengthen.evaluation.evaluate`.
    """
    check(subject, depths, samples, seed, how)
    refuse_other_tokens(subject, corpus)
    text, device = Haystack.of(corpus, split), device_of(subject.model)
    dtype = precision_named(precision, device)
    known = dict if again else functools.partial(results.read, subject.folder)
    found = []
    for name in tasks:
        task = TASKS[choice("task", name, tuple(TASKS))]
        for length in sorted(lengths):
            one = protocol(how, length, subject.model.config.train_length, block=block)
            asked = Asked(
                weights=subject.weights,
                position_options=subject.model.config.position_options,
                data=corpus.fingerprint,
                split=split,
                task=name,
                length=length,
                protocol=how,
                block=one.block,
                samples=samples,
                depths=list(depths) if task.deep else [None],
                seed=seed,
                precision=precision_of(subject.model, dtype),
            )
            result = known().get(asked.key)
            if result is None:
                with alone(subject.folder, asked.key):
                    result = known().get(asked.key)  # from another process
                    if result is None:
                        made = task.samples(text, length, depths, samples, seed)
                        result = _result(asked, subject, corpus, made, one, dtype, tell)
                        results.append(subject.folder, result)
            found.append(result)
    return found


def check(subject: Subject, depths: Sequence[float], samples: int, seed: int, how: str) -> None:
    """Refuse what cannot be asked."""
    if subject.model.config.kind != "decoder":
        raise ValueError("model: expected a decoder, which writes answers, got an encoder")
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths: expected numbers from 0 (the beginning) to 1 (the end), got {list(depths)}")
    whole_number("samples", samples, at_least=len(depths))
    whole_number("seed", seed, at_least=0)
    if how not in PROTOCOLS:
        raise ValueError(f"protocol: expected one of {', '.join(PROTOCOLS)} for a task, got {how!r}")


def _result(
    asked: Asked,
    subject: Subject,
    corpus: Corpus,
    samples: list[Sample],
    how: Protocol,
    dtype: torch.dtype,
    tell: Tell,
) -> TaskResult:
    config = subject.model.config
    total, began = sum(len(one.ids) for one in samples), time.perf_counter()
    right = answered(subject.model, samples, how.mask, dtype, lambda done: tell(asked.task, asked.length, done, total))
    seconds = time.perf_counter() - began
    at = [asked.depths.index(one.depth) for one in samples]
    return TaskResult(
        **vars(asked),
        positions=config.positions,
        train_length=config.train_length,
        checkpoint=subject.checkpoint.path.name,
        step=subject.checkpoint.step,
        corpus=str(corpus.directory),
        right=[sum(all(one) for one, own in zip(right, at, strict=True) if own == n) for n in range(len(asked.depths))],
        counts=[at.count(n) for n in range(len(asked.depths))],
        token_accuracy=sum(map(sum, right)) / sum(map(len, right)),
        chance=sum(one.chance for one in samples) / len(samples),
        tokens_per_second=total / max(seconds, 1e-9),
        seconds=seconds,
        device=device_name(device_of(subject.model)),
        version=__version__,
    )
