"""Needles: several keys have a number each, and one of them is asked for (RULER's multi-key needle in a haystack).

    … The number of bamiro is 48213. … The number of tokesu is 90551. … What is the number of tokesu? The number of
    tokesu is 90551

A model that finds the numbers but not which key each belongs to is right once in four.
"""

from __future__ import annotations

from lengthen.evaluation.tasks.sample import Draws, Haystack, Sample, Task, hide

KEYS, DIGITS = 4, 5


def sample(text: Haystack, draws: Draws, length: int, depth: float) -> Sample:
    """Return a text with the number of the key that is asked for at a depth, the others anywhere, and the question."""
    names, values = draws.words(), draws.numbers(DIGITS)
    numbers = {next(names): next(values) for _ in range(KEYS)}
    key, *others = numbers
    places = [(depth, key), *((draws.below(1001) / 1000, other) for other in others)]
    needles = [(place, f"\nThe number of {one} is {numbers[one]}.\n") for place, one in places]
    question = f"\nWhat is the number of {key}? The number of {key} is"
    prompt, answer = hide(text, draws, length, needles, question, f" {numbers[key]}")
    return Sample(prompt, answer, 1 / KEYS, depth)


TASK = Task("needles", "the number of one of four keys", sample, deep=True, sentence="\nThe number of ")
