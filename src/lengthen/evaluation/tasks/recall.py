"""Recall: the value of a key, told once and asked for later, one token each: what a small model can learn in a minute.

    ...7..c...F..!c....?7.c..#F…

There are five keys, and each has ten values of its own: `?` digits, `!` letters a–j, `#` letters A–J, `$` k–t, `%` K–T.
So a pair of a key and its value is one character: `7` tells that the value of `?` is 7, and `?7` asks and answers. A
text gives a key one value. Dots are filler; no other text is used. To do better than one in ten, a
model must find the place where the value was given or last answered. (Keys and values as tokens of their own,
`K7 … ?K7`, need two layers that learn together to look for each other: a small model had not learned it in several
times as long.)

In a sample the value that is asked for is named once, and other keys are told and asked for around it. Each character
must be one token, as with bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from lengthen.evaluation.tasks.sample import Draws, Haystack, Sample, Task, room_in

VALUES = {"?": "0123456789", "!": "abcdefghij", "#": "ABCDEFGHIJ", "$": "klmnopqrst", "%": "KLMNOPQRST"}
KEYS = "".join(VALUES)
FILLER = "."
MOST_FILLER = (0, 1, 3, 7, 15, 31)  # a text has up to so many dots between two units, each number as likely
UNITS = 32  # in a document: about 200 tokens


def units(draws: Draws, keys: str) -> Iterator[str]:
    """Yield filler, then a value that is told, or a key and its value where it was told before, without end."""
    told: dict[str, str] = {}
    most = MOST_FILLER[draws.below(len(MOST_FILLER))]
    while True:
        yield FILLER * draws.below(most + 1)
        key = draws.one(keys)
        if key in told:
            yield key + told[key]
        else:
            told[key] = draws.one(VALUES[key])
            yield told[key]


def document(draws: Draws, count: int = UNITS) -> str:
    """Return one document for training: this many times a key is told or asked for."""
    keys = list(KEYS)
    chosen = "".join(keys.pop(draws.below(len(keys))) for _ in range(1 + draws.below(len(keys))))
    stream = units(draws, chosen)
    return "".join(next(stream) for _ in range(2 * count))


def question(draws: Draws, room: int, depth: float) -> tuple[str, str]:
    """Return a text of room + 2 characters that ends in a key, its value told at a depth, and that value."""
    key = draws.one(KEYS)
    value = draws.one(VALUES[key])
    stream, parts = units(draws, KEYS.replace(key, "")), []
    unit, before = next(stream), round(depth * room)
    for size in (before, room - before):
        part = ""
        while len(part) + len(unit) <= size:
            part, unit = part + unit, next(stream)
        parts.append(part + FILLER * (size - len(part)))
    return f"{parts[0]}{value}{parts[1]}{key}", value


def sample(text: Haystack, draws: Draws, length: int, depth: float) -> Sample:
    """Return a text with a value at a depth, and its key at the end."""
    room = room_in(length, text.start, range(3))  # the value, the key, the answer
    asked, value = question(draws, room, depth)
    prompt, answer = text.encode(asked), text.encode(value)
    if (len(prompt), len(answer)) != (len(asked), 1):
        raise ValueError(
            f"task: recall needs a tokenizer that has a token for each character, as bytes, got {text.tokenizer.name!r}"
        )
    return Sample([*text.start, *prompt], answer, 0.1, depth)


TASK = Task("recall", "the value of a key, one character each", sample, deep=True, document=document)
