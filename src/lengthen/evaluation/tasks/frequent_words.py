"""Frequent words: a list of words whose frequencies fall as 1/rank² (RULER's frequent words: a zeta distribution of 2).

    Words: bamiro bamiro tokesu bamiro … The three most frequent words, the most frequent first, are: bamiro tokesu …

Counts are the distribution's, rounded down, so the first four differ in any list of 30 words or more; words that stand
in it once fill it up.
"""

from __future__ import annotations

import math

from lengthen.evaluation.tasks.sample import Draws, Haystack, Sample, Task
from lengthen.evaluation.tasks.words import ASKED, word_list

LEAST = 30  # words in a list: the counts are 18, 4, 2, 1 …
ZETA = math.pi**2 / 6  # Σ 1/rank²
QUESTION = "\nThe three most frequent words, the most frequent first, are:"


def counts(n: int) -> list[int]:
    """Return how often each word stands in a list of n."""
    ranked = [int(n / (ZETA * rank**2)) for rank in range(1, math.isqrt(n) + 1)]
    ranked = [count for count in ranked if count]
    return ranked + [1] * (n - sum(ranked))


def sample(text: Haystack, draws: Draws, length: int, depth: float) -> Sample:
    """Return a list of words that fills the length, and the question; depth has no use."""
    prompt, answer, different = word_list(text, draws, length, counts, LEAST, QUESTION, ordered=True)
    return Sample(prompt, answer, 1 / math.perm(different, ASKED))


TASK = Task("frequent_words", "the three most frequent words of a list, in order", sample, deep=False)
