"""The engine: whoever joins and leaves, each job gets what it would get alone, and nothing stays behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from running import made, waited

from lengthen import Blockwise, Transformer, Window
from lengthen.model.sampling import Sampling
from lengthen.serving.engine import Engine, FullError, Job, Limits, Stats, Told

LIMITS = Limits(context=200, sequences=12, waiting=300)


class Asked:
    """A job and what it was told."""

    def __init__(self, prompt: list[int], new: int, **options: Any) -> None:
        samples = options.get("samples", 1)
        self.tokens: list[list[int]] = [[] for _ in range(samples)]
        self.ended: list[str] = [""] * samples
        self.told: list[Told] = []
        self.failed = ""
        self.first, self.done = threading.Event(), threading.Event()
        self.job = Job(prompt, new, self.take, self.fail, **options)

    def take(self, told: Told) -> bool:
        self.told.append(told)
        if told.token is not None:
            self.tokens[told.sample].append(told.token)
        self.ended[told.sample] = told.ended or ""
        self.first.set()
        if all(self.ended):
            self.done.set()
        return False

    def fail(self, problem: str) -> None:
        self.failed = problem
        self.done.set()

    def alone(self, model: Transformer, **cache: Any) -> list[list[int]]:
        job, sampling = self.job, self.job.sampling
        options = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        found = model.generate(
            *([job.prompt], job.max_new_tokens),
            **{"seed": job.seed, "samples": job.samples, "stop": job.stop, **options, **cache},
        )
        assert self.ended == found.ended
        return found.tokens


def asked(count: int, seed: int) -> Iterator[Asked]:
    """Yield jobs of all kinds."""
    draw = random.Random(seed)
    for number in range(count):
        prompt = [draw.randrange(258) for _ in range(draw.choice([1, 3, 9, 40, 90]))]
        drawn = Sampling(temperature=1.2, top_p=0.9) if number % 3 == 0 else Sampling(0.7, top_k=20)
        yield Asked(
            *(prompt, draw.randrange(1, 30)),
            sampling=Sampling() if number % 3 == 1 else drawn,
            seed=draw.randrange(1000),
            samples=draw.choice([1, 1, 3]),
            stop=frozenset(range(0, 258, 16)),
        )


@pytest.fixture
def engine(model: Transformer) -> Iterator[Engine]:
    engine = Engine(model, LIMITS, chunk=16)
    yield engine
    engine.close()


def empty(engine: Engine) -> bool:
    """Whether nothing is left; the number of tokens is of all time."""
    return not engine.batches and not engine.waiting and engine.stats == Stats(tokens=engine.stats.tokens)


@pytest.mark.parametrize(
    ("positions", "cache"),
    [
        ("alibi", {"policy": "full"}),
        ("rotary", {"policy": "full"}),
        ("t5", {"policy": "full"}),
        ("rotary", {"policy": "window", "mask": Window(9)}),
        ("xpos", {"policy": "window", "mask": Blockwise(5)}),
        ("alibi", {"policy": "reach"}),
        ("alibi", {"policy": "reach", "mode": "certified"}),
    ],
)
def test_each_job_gets_what_it_would_get_alone(positions: str, cache: dict[str, Any]) -> None:
    model = made(positions=positions, tied=False)  # greedy, it writes less of the same
    engine = Engine(model, LIMITS, chunk=16, **cache)
    jobs = list(asked(14, seed=5))
    for one in jobs:  # each comes when some of those before it are under way
        engine.submit([one.job])
        one.first.wait(0.005)
    assert all(one.done.wait(60) for one in jobs)
    options = {"cache" if name == "policy" else name: value for name, value in cache.items()}
    assert [one.tokens for one in jobs] == [one.alone(model, **options) for one in jobs]
    assert {why for one in jobs for why in one.ended} == {"stop", "length"}
    assert waited(lambda: empty(engine))
    engine.close()


def test_batches_become_one(model: Transformer, engine: Engine) -> None:
    first, second = Asked([1] * 20, 150), Asked([2] * 30, 100, samples=2)
    engine.submit([first.job])
    assert first.first.wait(20)
    engine.submit([second.job])
    assert second.first.wait(20)
    assert waited(lambda: (engine.stats.sequences, engine.stats.batches) == (3, 1))
    assert all(one.done.wait(60) for one in (first, second))
    assert [one.tokens for one in (first, second)] == [one.alone(model) for one in (first, second)]


def test_a_short_one_is_not_padded_to_a_long_one(engine: Engine) -> None:
    long = [Asked([1] * 150, 50) for _ in range(1)]
    short = [Asked([1], 40) for _ in range(9)]
    engine.submit([one.job for one in (*long, *short)])
    assert all(one.first.wait(20) for one in (*long, *short))
    sizes = sorted(len(batch.rows) for batch in list(engine.batches))
    assert sizes == [1, 9]
    assert all(one.done.wait(60) for one in (*long, *short))


def test_who_leaves_frees_their_room(engine: Engine) -> None:
    jobs = [Asked([1, 2, 3], 190) for _ in range(12)]
    after = Asked([5], 3)
    engine.submit([*(one.job for one in jobs), after.job])
    assert jobs[0].first.wait(20)
    assert not after.first.is_set()  # all places are taken
    for one in jobs:
        one.job.gone = True
    assert after.done.wait(20)
    assert waited(lambda: empty(engine))
    assert all(len(one.tokens[0]) < 190 for one in jobs)


def test_who_leaves_while_waiting_frees_their_place(model: Transformer) -> None:
    engine = Engine(model, Limits(context=200, sequences=1, waiting=3))
    first, waiting = Asked([1], 190), [Asked([2], 190) for _ in range(3)]
    engine.submit([first.job])
    assert first.first.wait(20)
    engine.submit([one.job for one in waiting])
    with pytest.raises(FullError):
        engine.submit([Asked([3], 2).job])
    waiting[2].job.gone = True  # the last in the queue
    engine.submit([Asked([3], 2).job])
    with pytest.raises(FullError):
        engine.submit([Asked([3], 2).job])
    engine.close()


def test_tokens_in_flight_are_bounded(model: Transformer) -> None:
    engine = Engine(model, Limits(context=100, sequences=12, waiting=8, tokens=150), chunk=16)
    jobs = [Asked([1, 2], 70) for _ in range(5)]
    most = 0

    def take(told: Told, of: Asked) -> bool:
        nonlocal most
        most = max(most, sum(len(batch.rows) for batch in engine.batches))
        return Asked.take(of, told)

    for one in jobs:
        one.job.take = lambda told, of=one: take(told, of)  # type: ignore[misc]
    engine.submit([one.job for one in jobs])
    assert all(one.done.wait(60) for one in jobs)
    assert most == 2
    with pytest.raises(ValueError, match="n: expected samples of at most 150 tokens together, got 2 of up to 80"):
        engine.submit([Asked([1] * 10, 70, samples=2).job])
    engine.close()


def test_too_much_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"max_tokens: expected .* of at most 200 together, got 2 \+ 199"):
        engine.submit([Asked([1, 2], 199).job])
    with pytest.raises(ValueError, match="n: expected at most 12, got 13"):
        engine.submit([Asked([1, 2], 3, samples=13).job])
    with pytest.raises(ValueError, match="max_new_tokens: expected at least 1"):
        Asked([1], 0)
    with pytest.raises(FullError, match="0 prompts wait, and 300 may"):
        engine.submit([Asked([1], 3).job for _ in range(301)])
    assert empty(engine)


def test_one_that_breaks_concerns_nobody_else(model: Transformer, engine: Engine) -> None:
    bad, good = Asked([1, 2], 20), Asked([1, 3], 20)

    def broken(told: Told) -> bool:
        raise RuntimeError("it broke\nhere")

    bad.job.take = broken
    engine.submit([bad.job, good.job])
    assert bad.done.wait(20)
    assert good.done.wait(20)
    assert bad.failed == "it broke"
    assert good.tokens == good.alone(model)


def test_a_model_that_breaks_fails_its_jobs_and_not_the_engine() -> None:
    model = made()
    engine = Engine(model, LIMITS)
    weight = model.embedding.weight.data
    weight[5] = float("nan")
    bad = Asked([5], 3)
    engine.submit([bad.job])
    assert bad.done.wait(20)
    assert bad.failed.startswith("logits: expected finite numbers")
    weight[5] = 0.1
    good = Asked([5], 3)
    engine.submit([good.job])
    assert good.done.wait(20)
    assert len(good.tokens[0]) == 3
    engine.close()


def test_logprobs_are_of_the_model(model: Transformer, engine: Engine) -> None:
    one = Asked([1, 2, 3], 4, logprobs=3, sampling=Sampling(temperature=1.5))
    engine.submit([one.job, Asked([4], 9).job])
    assert one.done.wait(20)
    ids = torch.tensor([[1, 2, 3, *one.tokens[0]]])
    scores = model(ids)[0].detach().log_softmax(-1)[2:-1]
    for told, row in zip(one.told, scores, strict=True):
        assert told.token is not None
        assert told.logprob == pytest.approx(float(row[told.token]), abs=1e-9)
        best = row.topk(3)
        assert [token for token, _ in told.top] == best.indices.tolist()
        assert [score for _, score in told.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_closing_fails_what_is_not_finished(model: Transformer) -> None:
    engine = Engine(model, LIMITS)
    jobs = [Asked([1], 190) for _ in range(20)]
    engine.submit([one.job for one in jobs])
    assert jobs[0].first.wait(20)
    engine.close()
    assert all(one.failed == "the server stops" for one in jobs)
    assert empty(engine)
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([jobs[0].job])
