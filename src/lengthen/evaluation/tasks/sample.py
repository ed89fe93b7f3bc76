"""What the tasks share: a sample, the text that it is hidden in, and random numbers from a seed.

**Lengths are exact.** A sample is built of token ids: what the task writes is encoded piece by piece, and tokens of the
text fill what is left. So prompt and answer together have exactly the length that was asked for.

**The border.** Where a question ends and its answer begins, a tokenizer may have a token that spans both. Question and
answer are encoded as one text, and the prompt ends at the last border where that agrees with the question's own tokens.
The answer is what follows, in tokens as the model has seen them in training.

Random numbers come from `random.Random(seed).random()` alone, which Python promises never to change.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lengthen.checks import whole_number
from lengthen.data import Corpus, Tokenizer, Tokens

LOOKED_AT = 1 << 16  # tokens of a text that are looked through for a task's own sentences


class Draws:
    """Whole numbers and choices from a seed."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed if isinstance(seed, str) else whole_number("seed", seed, at_least=0)).random

    def below(self, end: int) -> int:
        """Return one of 0 … end − 1."""
        return int(self._random() * end)

    def one(self, of: Sequence[str]) -> str:
        """Return one of several."""
        return of[self.below(len(of))]

    def shuffled(self, of: Sequence[str]) -> list[str]:
        """Return them all, in another order."""
        left = list(of)
        for last in range(len(left) - 1, 0, -1):
            other = self.below(last + 1)
            left[last], left[other] = left[other], left[last]
        return left

    def different(self, *symbols: str) -> Iterator[str]:
        """Yield strings, none twice: each has one of the first symbols, one of the second, and so on."""
        found: set[str] = set()
        while len(found) < math.prod(map(len, symbols)):
            text = "".join(map(self.one, symbols))
            if text not in found:
                found.add(text)
                yield text

    def numbers(self, digits: int) -> Iterator[str]:
        """Yield numbers of so many digits, none twice."""
        return self.different(*["0123456789"] * digits)

    def words(self) -> Iterator[str]:
        """Yield made-up words of three syllables, none twice; there are 857,375."""
        return self.different(*["bcdfghjklmnpqrstvwz", "aeiou"] * 3)


@dataclass(frozen=True)
class Sample:
    """A question: what is read, what must follow it, and how likely that is for one who guesses."""

    prompt: list[int]
    answer: list[int]
    chance: float
    depth: float | None = None  # where what is asked for stands: 0 at the beginning, 1 before the question

    @property
    def ids(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.answer


class TooShortError(ValueError):
    """A length that a task has no room in."""


class Haystack:
    """A text, and the tokenizer that its tokens were made with."""

    def __init__(self, tokens: Tokens, tokenizer: Tokenizer) -> None:
        self.tokens, self.tokenizer = tokens, tokenizer
        self._known: dict[str, list[int]] = {}

    @classmethod
    def of(cls, corpus: Corpus, split: str = "validation") -> Haystack:
        """Return a corpus' text."""
        return cls(corpus[split], corpus.tokenizer)

    @property
    def start(self) -> list[int]:
        """What a sample begins with: the token that ends the document before it, if there is one."""
        return [] if self.tokenizer.end_id is None else [self.tokenizer.end_id]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        if text not in self._known:
            self._known[text] = self.tokenizer.encode(text)
        return self._known[text]

    def border(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the ids of a question and of its answer, as those of both together have them."""
        alone, both = self.tokenizer.encode(question), self.tokenizer.encode(question + answer)
        same = next((place for place, pair in enumerate(zip(alone, both, strict=False)) if pair[0] != pair[1]), None)
        end = min(len(alone), len(both)) if same is None else same
        return both[:end], both[end:]

    def filler(self, draws: Draws, count: int) -> list[int]:
        """Return so many tokens from a place in the text on, ends of documents left out; from its end, its start."""
        found: list[int] = []
        place, read = draws.below(len(self.tokens)), 0
        while len(found) < count:
            if read > len(self.tokens) and not found:
                where = f"split {self.tokens.name!r} of {self.tokens.directory}"
                raise ValueError(f"split: expected text to stand around what is asked for, got only ends in {where}")
            stop = min(place + count - len(found) + 1, len(self.tokens))
            found += [one for one in self.tokens.read(place, stop).tolist() if one != self.tokenizer.end_id]
            place, read = stop % len(self.tokens), read + stop - place
        return found[:count]

    @cached_property
    def beginning(self) -> str:
        """The text's first tokens as text."""
        return self.tokenizer.decode(self.tokens.read(0, min(len(self.tokens), LOOKED_AT)).tolist())


Make = Callable[[Haystack, Draws, int, float], Sample]  # the text, random numbers, the length, the depth


@dataclass(frozen=True)
class Task:
    """A kind of question; `make` gives a sample of exactly a length."""

    name: str
    about: str
    make: Make
    deep: bool  # whether a sample has a depth
    sentence: str | None = None  # what a text must not hold, since the task writes it
    document: Callable[[Draws], str] | None = None  # a text to train on, where that is not a sample

    def samples(self, text: Haystack, length: int, depths: Sequence[float], count: int, seed: int) -> list[Sample]:
        """Return `count` samples, dealt to the depths in turn; each has a seed of its own, whatever the others are."""
        if self.sentence is not None and self.sentence in text.beginning:
            raise ValueError(
                f"--data: expected a text without the sentences of the task {self.name!r}, got {self.sentence!r} in "
                f"{text.tokens.directory}; name the corpus whose text shall stand around them"
            )
        seeds = (Draws(f"{seed}, {self.name}, {length}, {number}") for number in range(count))
        try:
            return [self.make(text, draws, length, depths[n % len(depths)]) for n, draws in enumerate(seeds)]
        except TooShortError as problem:
            raise TooShortError(f"lengths: {self.name}: {problem}") from None


def hide(
    text: Haystack, draws: Draws, length: int, needles: Sequence[tuple[float, str]], question: str, answer: str
) -> tuple[list[int], list[int]]:
    """Return prompt and answer: the text with sentences at their depths, in order where they meet, and a question."""
    asked, wanted = text.border(question, answer)
    pieces = [(depth, text.encode(sentence)) for depth, sentence in sorted(needles, key=lambda one: one[0])]
    room = room_in(length, text.start, asked, wanted, *(ids for _, ids in pieces))
    filler, prompt, done = text.filler(draws, room), list(text.start), 0
    for depth, ids in pieces:
        place = round(depth * room)
        prompt += filler[done:place] + ids
        done = place
    return prompt + filler[done:] + asked, wanted


def room_in(length: int, *pieces: Sequence[int]) -> int:
    """Return how many tokens of a length pieces leave free; an error if they are longer than it."""
    needed = sum(map(len, pieces))
    if needed > length:
        raise TooShortError(f"expected at least {needed:,} tokens, which the task's own words take, got {length:,}")
    return length - needed
