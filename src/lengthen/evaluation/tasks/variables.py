"""Variables: which of them hold a value, where most are set to another variable (RULER's variable tracking).

    … VAR KQX = 48213 … VAR BDF = VAR KQX … Which variables hold 48213, in the order in which they are set? KQX BDF

Two chains of four names each are mixed; who copies one of them without following it is right every other time.
"""

from __future__ import annotations

from lengthen.evaluation.tasks.sample import Draws, Haystack, Sample, Task, hide

CHAINS, NAMES, DIGITS = 2, 4, 5
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


def sample(text: Haystack, draws: Draws, length: int, depth: float) -> Sample:
    """Return a text with the chains at random places, and the question for the first one's names; depth has no use."""
    names, numbers = draws.different(*[LETTERS] * 3), draws.numbers(DIGITS)
    chains = [[next(names) for _ in range(NAMES)] for _ in range(CHAINS)]
    values = [next(numbers) for _ in chains]
    needles = []
    for value, chain in zip(values, chains, strict=True):
        told = [value, *(f"VAR {name}" for name in chain[:-1])]
        places = sorted(draws.below(1001) / 1000 for _ in chain)
        needles += [(place, f"\nVAR {name} = {to}\n") for place, name, to in zip(places, chain, told, strict=True)]
    question = f"\nWhich variables hold {values[0]}, in the order in which they are set?"
    prompt, answer = hide(text, draws, length, needles, question, " " + " ".join(chains[0]))
    return Sample(prompt, answer, 1 / CHAINS)


TASK = Task("variables", "the names that hold a value, set one to another", sample, deep=False, sentence="\nVAR ")
