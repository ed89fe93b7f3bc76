"""Batched generation: prompts of different lengths, several samples of each; finished sequences leave the batch.

Prompts are read once, in chunks, into a cache (`lengthen.attention.cache`), left-padded to one length; padding is
masked. Then every step reads one token of each unfinished sequence. A sequence that ends frees its row. The output for
a prompt does not depend on the rest of its batch: positions count from its own first token, and its random numbers come
from a generator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from random import Random
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from lengthen.attention.cache import Cache
from lengthen.checks import describe, whole_number
from lengthen.model.memory import refuse_long
from lengthen.model.sampling import Sampling
from lengthen.model.stepping import CHUNK, Stepper, read

if TYPE_CHECKING:
    from lengthen.model.transformer import Transformer

DEFAULT = {"policy": "full", "mode": "exact"}  # of a cache

Prompts = Tensor | Sequence[Tensor | Sequence[int]]


@dataclass(frozen=True)
class Step:
    """One step: the new token of each unfinished sequence, and which of them ended with it."""

    tokens: dict[int, int]  # by the sequence's number: prompt · samples + sample
    ended: dict[int, str]  # "stop": at a stop token, which is not among the tokens, or as `until` says; "length"
    cache: Cache


@dataclass
class Generated:
    """Generated tokens of each sequence, why each ended, and the cache's bound and size."""

    tokens: list[list[int]]
    ended: list[str]
    bound: float = 0.0  # the largest fraction of softmax mass that any row left unread
    cache_bytes: int = 0  # on the device, at the most


@dataclass
class Prefix:
    """Tokens that were read once, to be continued in many ways: a cache of one sequence, and what follows it."""

    tokens: list[int]
    cache: Cache
    logits: Tensor = field(repr=False)  # of the token after it, [1, vocabulary]


def stream(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    sampling: Sampling,
    samples: int = 1,
    seed: int | Sequence[int] = 0,
    stop: Iterable[int] = (),
    until: Callable[[int, list[int]], bool] | None = None,
    prefix: Prefix | None = None,
    chunk: int = CHUNK,
    cache: dict[str, Any],
) -> Iterator[Step]:
    """Check the arguments and return an iterator of steps; `Transformer.stream` says what they are."""
    given = checked_prompts(model, prompts, prefix)
    whole_number("max_new_tokens", max_new_tokens, at_least=0)
    whole_number("samples", samples, at_least=1)
    whole_number("chunk", chunk, at_least=1)
    seeds = list(seed) if isinstance(seed, Sequence) else [seed] * len(given)
    if len(seeds) != len(given):
        raise ValueError(f"seed: expected a number, or one for each of {len(given)} prompts, got {len(seeds)}")
    own = [name for name, value in cache.items() if value is not None and value != DEFAULT.get(name)]
    if prefix is not None and own:
        named = "cache" if own[0] == "policy" else own[0]
        raise ValueError(f"prefix: it has a cache already, made by model.prefix(…); expected no {named!r}, got one")
    if model.training and model.config.dropout:
        raise ValueError("model: expected one in eval mode (model.eval()), got one that drops features out")
    longest = max(map(len, given)) + (len(prefix.tokens) if prefix else 0)
    limit, most = model.config.longest, longest + max_new_tokens
    if limit is not None and most > limit + 1:  # the last token is not read
        raise ValueError(
            f"max_new_tokens: expected prompt and new tokens of at most {limit + 1} together, since the model learned "
            f"a vector for each of {limit} positions, got {most}"
        )
    held = {
        name: cache.get(name) or DEFAULT[name] if prefix is None else getattr(prefix.cache, name) for name in DEFAULT
    }
    refuse_long(model, len(given) * samples, longest, max_new_tokens, **held)
    for one in seeds:
        whole_number("seed", one)
    generators = [generator(one, sample) for one in seeds for sample in range(samples)]
    run = _Run(model, given, sampling, samples, generators, frozenset(whole("stop", stop)), until, max_new_tokens)
    return run.steps(prefix, chunk, cache) if max_new_tokens else iter(())


def generator(seed: int, sample: int) -> Random:
    """Return the random generator of a sequence, from its prompt's seed and the sample's number."""
    return Random(f"{seed}, sample {sample}")


class _Run:
    """The state of a stream: which sequences go on, and what they have."""

    def __init__(
        self,
        model: Transformer,
        prompts: list[list[int]],
        sampling: Sampling,
        samples: int,
        generators: list[Random],
        stop: frozenset[int],
        until: Callable[[int, list[int]], bool] | None,
        most: int,
    ) -> None:
        self.model, self.prompts, self.sampling, self.samples = model, prompts, sampling, samples
        self.generators, self.stop, self.until, self.most = generators, stop, until, most
        self.device = model.embedding.weight.device
        self.live = list(range(len(prompts) * samples))
        self.new: list[list[int]] = [[] for _ in self.live]

    @torch.no_grad()
    def steps(self, prefix: Prefix | None, chunk: int, options: dict[str, Any]) -> Iterator[Step]:
        """Yield the steps; the model is called as they are asked for."""
        cache, logits = self._read(prefix, chunk, options)
        every = torch.arange(len(self.prompts)).repeat_interleave(self.samples)
        if self.samples > 1:
            cache, logits = cache.rows(every), logits[every.to(logits.device)]
        seen, stepper = self._seen(prefix, logits), Stepper(self.model, cache)
        while True:
            chosen = self.sampling.choose(logits, seen, [self.generators[one] for one in self.live])
            step = self._step(chosen.tolist(), cache)
            yield step
            rows = [row for row, one in enumerate(self.live) if one not in step.ended]
            if not rows:
                return
            if len(rows) < len(self.live):
                cache, chosen = cache.rows(rows), chosen[rows]
                stepper = Stepper(self.model, cache)
                seen = None if seen is None else seen[rows]
                self.live = [self.live[row] for row in rows]
            if seen is not None:
                seen.scatter_(1, chosen.unsqueeze(1), True)
            logits = stepper(chosen)

    def _read(self, prefix: Prefix | None, chunk: int, options: dict[str, Any]) -> tuple[Cache, Tensor]:
        """Return a cache of all prompts, and the logits of what follows each."""
        count, longest = len(self.prompts), max(map(len, self.prompts))
        if prefix is None:
            starts = [longest - len(one) for one in self.prompts]
            if options.get("policy", "full") == "full":
                options = {"room": longest + self.most, **options}
            cache = self.model.cache(starts=starts if any(starts) else None, **options)
        else:
            cache = prefix.cache.rows([0] * count)
            if not longest:
                return cache, prefix.logits.expand(count, -1)
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in self.prompts], device=self.device)
        return cache, read(self.model, ids, cache, chunk)

    def _seen(self, prefix: Prefix | None, logits: Tensor) -> Tensor | None:
        """Return which tokens each sequence has had, where the penalty asks for it."""
        if self.sampling.repetition_penalty == 1:
            return None
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for row in range(len(self.live)):
            tokens = [*(prefix.tokens if prefix else ()), *self.prompts[row // self.samples]]
            seen[row, torch.tensor(tokens, device=seen.device)] = True
        return seen

    def _step(self, chosen: list[int], cache: Cache) -> Step:
        tokens, ended = {}, {}
        for one, token in zip(self.live, chosen, strict=True):
            if token in self.stop:
                ended[one] = "stop"
                continue
            tokens[one] = token
            self.new[one].append(token)
            if self.until is not None and self.until(one, self.new[one]):
                ended[one] = "stop"
            elif len(self.new[one]) == self.most:
                ended[one] = "length"
        return Step(tokens, ended, cache)


def gather(count: int, steps: Iterable[Step]) -> Generated:
    """Return what the steps of so many sequences hold."""
    found, cache = Generated([[] for _ in range(count)], ["length"] * count), None
    for step in steps:
        for one, token in step.tokens.items():
            found.tokens[one].append(token)
        found.ended = [step.ended.get(one, why) for one, why in enumerate(found.ended)]
        found.cache_bytes = max(found.cache_bytes, step.cache.nbytes)
        cache = step.cache
    found.bound = cache.bound if cache is not None else 0.0  # the largest of all steps
    return found


@torch.no_grad()
def read_prefix(model: Transformer, ids: Tensor | Sequence[int], chunk: int = CHUNK, **cache_options: Any) -> Prefix:
    """Return a prefix, read once; `Transformer.prefix` says what the arguments are."""
    (tokens,) = checked_prompts(model, [ids])
    cache = model.cache(**cache_options)
    row = torch.tensor([tokens], device=model.embedding.weight.device)
    return Prefix(tokens, cache, read(model, row, cache, chunk))


def checked_prompts(model: Transformer, prompts: Prompts, prefix: Prefix | None = None) -> list[list[int]]:
    """Return prompts as lists of tokens, or refuse them by name."""
    if isinstance(prompts, Tensor) and prompts.dim() != 2:
        raise ValueError(f"prompts: expected [batch, length], or a list of sequences, got {describe(prompts)}")
    found = []
    for number, one in enumerate(prompts):
        if isinstance(one, Tensor) and (one.dim() != 1 or one.is_floating_point()):
            raise ValueError(f"prompts[{number}]: expected integers of one dimension, got {describe(one)}")
        tokens = whole(f"prompts[{number}]", one.tolist() if isinstance(one, Tensor) else one)
        if not tokens and prefix is None:
            raise ValueError(
                f"prompts[{number}]: expected at least one token, got none; begin with the tokenizer's end token"
            )
        wrong = [t for t in tokens if not 0 <= t < model.config.vocabulary]
        if wrong:
            raise ValueError(f"prompts[{number}]: expected tokens 0 … {model.config.vocabulary - 1}, got {wrong[0]!r}")
        found.append(tokens)
    if not found:
        raise ValueError("prompts: expected at least one, got none")
    if prefix is not None and len({len(one) for one in found}) > 1:
        raise ValueError("prompts: expected one length for all that continue a prefix, got several: make several calls")
    return found


def whole(name: str, tokens: Iterable[object]) -> list[int]:
    """Return tokens as Python's integers; those of numpy are taken too."""
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise TypeError(f"{name}: expected a sequence of tokens, got {describe(tokens)}")
    found = []
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, SupportsIndex):
            raise TypeError(f"{name}: expected tokens, which are whole numbers, got {describe(token)}")
        found.append(index(token))
    return found
