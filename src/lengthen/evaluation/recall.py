"""Recall: text in which a key's value is told once and asked for later, at a distance that is chosen.

    ...7..c...F..!c....?7.c..#F…

There are five keys, and each has ten values of its own: `?` digits, `!` letters a–j, `#` letters A–J, `$` k–t, `%` K–T.
So a pair of a key and its value is one byte, and one token: `7` tells that the value of `?` is 7, and `?7` asks and
answers. A text gives a key one value. Dots are filler. Whoever answers must find the place where the value was told or
last answered: there is no other way to do better than one in ten. (Keys and values as tokens of their own, `K7 … ?K7`,
need two layers that learn together to look for each other: a small model had not learned it in several times as long.)

`make_corpus` writes such documents for training, from a seed; `accuracy` asks a model which token comes next in

    <|end|> 7 … ?           the value stands `distance` tokens behind the key that asks, and is named nowhere else

with other keys told and asked for between, as in training. The model reads distance + 2 tokens.

    python -m lengthen.evaluation.recall data/recall
    lengthen train recall --data data/recall
    lengthen analyse runs/recall --what recall --lengths 16,32,64,128,256

Random numbers come from `random.Random(seed).random()` alone, which Python promises never to change.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lengthen.attention import Mask
from lengthen.checks import whole_number
from lengthen.data import Corpus, prepare
from lengthen.data.tokenizer import BYTE_END, BYTE_VOCAB_SIZE
from lengthen.model import Transformer
from lengthen.model.score import evaluating

VALUES = {"?": "0123456789", "!": "abcdefghij", "#": "ABCDEFGHIJ", "$": "klmnopqrst", "%": "KLMNOPQRST"}
KEYS = "".join(VALUES)
FILLER = "."
MOST_FILLER = (0, 1, 3, 7, 15, 31)  # a text has up to so many dots between two units, each number as likely
NEAREST = 1  # the value, then the key that asks
BESIDE = 2  # tokens that are read beside the distance
UNITS = 32  # in a document: about 200 tokens
BATCH_TOKENS = 1 << 16  # read in one pass


class Draws:
    """Whole numbers and choices from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(whole_number("seed", seed, at_least=0)).random

    def below(self, end: int) -> int:
        """Return one of 0 … end − 1."""
        return int(self._random() * end)

    def one(self, of: Sequence[str]) -> str:
        """Return one of several."""
        return of[self.below(len(of))]


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


def question(draws: Draws, distance: int) -> tuple[str, str]:
    """Return a text that ends in a key, its value standing `distance` behind it, and that value."""
    whole_number("distance", distance, at_least=NEAREST)
    key = draws.one(KEYS)
    value = draws.one(VALUES[key])
    between, room = "", distance - NEAREST
    for unit in units(draws, KEYS.replace(key, "")):
        if len(between) + len(unit) > room:
            break
        between += unit
    return f"{value}{between}{FILLER * (room - len(between))}{key}", value


def make_corpus(folder: str | Path, seed: int = 0, documents: int = 16000) -> Corpus:
    """Prepare documents from a seed into a corpus at `folder`, a twentieth for validation; the text is `folder`.txt."""
    folder = Path(folder)
    whole_number("documents", documents, at_least=1)
    draws = Draws(seed)
    source = folder.with_name(f"{folder.name}.txt")
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("\n".join(document(draws) for _ in range(documents)), encoding="utf-8")
    return prepare([source], folder, separator="\n", validation=0.05, workers=1)


def accuracy(model: Transformer, distance: int, trials: int = 256, seed: int = 0, mask: Mask | None = None) -> float:
    """Return the share of questions at a distance that a model answers with the right token.

    `seed` and `distance` choose the questions; `mask` is what the model reads with, as `Transformer.forward` has it.
    """
    whole_number("trials", trials, at_least=1)
    if model.config.vocabulary < BYTE_VOCAB_SIZE:
        raise ValueError(
            f"model: recall is asked in bytes and needs a vocabulary of {BYTE_VOCAB_SIZE}, "
            f"got {model.config.vocabulary}"
        )
    draws = Draws(seed)
    asked = [question(draws, distance) for _ in range(trials)]
    device = next(model.parameters()).device
    ids = torch.tensor([[BYTE_END, *text.encode()] for text, _ in asked])
    values = torch.tensor([ord(value) for _, value in asked])
    rows = max(1, BATCH_TOKENS // ids.shape[1])
    right = 0
    with evaluating(model):
        for start in range(0, trials, rows):
            part, expected = ids[start : start + rows], values[start : start + rows]
            last = model.hidden(part.to(device), mask)[:, -1]
            right += int(((last @ model.output_weight.T.to(last.dtype)).argmax(-1).cpu() == expected).sum())
    return right / trials


def main(words: Sequence[str] | None = None) -> None:
    """Make the corpus that `configs/recall.toml` is trained on."""
    parser = argparse.ArgumentParser(prog="python -m lengthen.evaluation.recall", description="make the recall corpus")
    parser.add_argument("folder", help="the folder to make")
    parser.add_argument("--seed", type=int, default=0, help="another corpus (0)")
    parser.add_argument("--documents", type=int, default=16000, help="how many, of about 200 tokens each (16000)")
    asked = parser.parse_args(words)
    corpus = make_corpus(asked.folder, asked.seed, asked.documents)
    print(f"{corpus}\nNext: lengthen train recall --data {corpus.directory}")


if __name__ == "__main__":
    main()
