"""Common words: a list of words, three of which stand in it far more often than the others (RULER's common words).

    Words: bamiro tokesu bamiro … The three most common words, in alphabetical order, are: bamiro nalize tokesu

Of every seven words three are the common ones; each of the others stands in the list once or twice, however long it is.
"""

from __future__ import annotations

import math

from lengthen.evaluation.tasks.sample import Draws, Haystack, Sample, Task
from lengthen.evaluation.tasks.words import ASKED, word_list

LEAST = 21  # words in a list: the common ones three times each
QUESTION = "\nThe three most common words, in alphabetical order, are:"


def counts(n: int) -> list[int]:
    """Return how often each word stands in a list of n: three of them n // 7 times, the others once or twice."""
    common = n // 7
    pairs, one = divmod(n - ASKED * common, 3)
    return [common] * ASKED + [2, 1] * pairs + [1] * one


def sample(text: Haystack, draws: Draws, length: int, depth: float) -> Sample:
    """Return a list of words that fills the length, and the question; depth has no use."""
    prompt, answer, different = word_list(text, draws, length, counts, LEAST, QUESTION, ordered=False)
    return Sample(prompt, answer, 1 / math.comb(different, ASKED))


TASK = Task("common_words", "the three words that a list has most often", sample, deep=False)
