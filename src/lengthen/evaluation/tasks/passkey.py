"""Passkey: a number stands once in a long text, and is asked for at its end (Mohtashami and Jaggi, 2023, 2305.16300).

… text … The pass key is 48213. Remember it. … text … What is the pass key? The pass key is 48213
"""

from __future__ import annotations

from lengthen.evaluation.tasks.sample import Draws, Haystack, Sample, Task, hide

DIGITS = 5


def sample(text: Haystack, draws: Draws, length: int, depth: float) -> Sample:
    """Return a text with a pass key at a depth, and the question for it."""
    key = next(draws.numbers(DIGITS))
    needle = f"\nThe pass key is {key}. Remember it.\n"
    prompt, answer = hide(text, draws, length, [(depth, needle)], "\nWhat is the pass key? The pass key is", f" {key}")
    return Sample(prompt, answer, 10.0**-DIGITS, depth)


TASK = Task("passkey", "a number that stands once in the text", sample, deep=True, sentence="The pass key is")
