"""What the tasks of words share: a list of made-up words that fills a length, each as often as the task says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lengthen.evaluation.tasks.sample import Draws, Haystack, room_in

ASKED = 3  # words, the first three

Counts = Callable[[int], Sequence[int]]  # how often each word stands in a list of n


def word_list(
    text: Haystack, draws: Draws, length: int, counts: Counts, least: int, question: str, ordered: bool
) -> tuple[list[int], list[int], int]:
    """Return prompt, answer and how many different words the list has: as long a list as fits, in a random order.

    The answer is the first three words, in this order or in that of the alphabet. The few tokens that the list leaves
    of the length are filled with text before it.
    """
    source = draws.words()
    pool = [next(source) for _ in range(ASKED)]
    asked, answer = text.border(question, " " + " ".join(pool if ordered else sorted(pool)))
    frame = (text.start, text.encode("\nWords:"), asked, answer)

    def size(n: int) -> int:
        often = counts(n)
        pool.extend(next(source) for _ in range(len(often) - len(pool)))
        return sum(count * len(text.encode(f" {word}")) for count, word in zip(often, pool, strict=False))

    room_in(length, *frame, range(size(least)))
    room, fits, beyond = room_in(length, *frame), least, 2 * least
    while size(beyond) <= room:
        fits, beyond = beyond, 2 * beyond
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if size(middle) <= room else (fits, middle)
    often = counts(fits)
    words = draws.shuffled([word for count, word in zip(often, pool, strict=False) for _ in range(count)])
    ids = [one for word in words for one in text.encode(f" {word}")]
    prompt = [*text.start, *text.filler(draws, room - len(ids)), *text.encode("\nWords:"), *ids, *asked]
    return prompt, answer, len(often)
