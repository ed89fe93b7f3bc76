"""Documents in a task's format, for a model to learn it from: a corpus with the tokenizer of the text around them.

    python -m lengthen.evaluation.tasks.training passkey data/passkey --text data/python --length 128
    python -m lengthen.evaluation.tasks.training recall data/recall

A document is a sample, prompt and answer, of a length drawn between the shortest that the task has room in and
`--length`, at a depth drawn from 0 to 1; one of recall is about 200 characters with many questions. Text comes from the
train split, so that of the validation split, which `lengthen eval --task` takes, was not seen. A document is written as
text and tokenised as a whole, so a few borders of tokens may differ from a sample's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from lengthen.checks import choice, whole_number
from lengthen.data import Corpus, prepare
from lengthen.evaluation.tasks.registry import TASKS
from lengthen.evaluation.tasks.sample import Draws, Haystack, Task, TooShortError

DOCUMENTS = 16_000


def documents(task: Task, text: Haystack | None, length: int, count: int, seed: int = 0) -> Iterator[str]:
    """Yield documents of a task, of up to about `length` tokens each."""
    if task.document is not None:
        draws = Draws(seed)
        yield from (task.document(draws) for _ in range(count))
        return
    if text is None:
        raise ValueError(f"text: expected the corpus whose text stands around {task.name!r}, got none")
    shortest = least(task, text, length)
    for number in range(count):
        draws = Draws(f"{seed}, {task.name}, document {number}")
        size = shortest + draws.below(length - shortest + 1)
        try:
            one = task.make(text, draws, size, draws.below(1001) / 1000)
        except TooShortError:  # with other words it takes a few tokens more
            one = task.make(text, draws, length, draws.below(1001) / 1000)
        yield text.tokenizer.decode(one.ids[len(text.start) :])


def least(task: Task, text: Haystack, most: int) -> int:
    """Return the shortest length, of those up to `most`, that a task has room in; an error if there is none."""
    low, high = 0, most
    task.make(text, Draws(0), most, 0.5)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            task.make(text, Draws(0), middle, 0.5)
            high = middle
        except TooShortError:
            low = middle
    return high


def make_corpus(
    task: str, folder: str | Path, text: Corpus | None = None, length: int = 128, count: int = DOCUMENTS, seed: int = 0
) -> Corpus:
    """Prepare documents of a task into a corpus at `folder`, a twentieth for validation; their text is FOLDER.jsonl."""
    folder = Path(folder)
    chosen = TASKS[choice("task", task, tuple(TASKS))]
    whole_number("length", length, at_least=1)
    whole_number("documents", count, at_least=1)
    whole_number("seed", seed, at_least=0)
    source = folder.with_name(f"{folder.name}.jsonl")
    source.parent.mkdir(parents=True, exist_ok=True)
    around = None if text is None else Haystack.of(text, "train")
    lines = (json.dumps({"text": one}) + "\n" for one in documents(chosen, around, length, count, seed))
    source.write_text("".join(lines), encoding="utf-8")
    tokenizer = "bytes" if text is None or text.tokenizer.path is None else text.tokenizer.path
    return prepare([source], folder, tokenizer=tokenizer, validation=0.05, workers=1)


def main(words: Sequence[str] | None = None) -> None:
    """Make a corpus from the command line."""
    name = "python -m lengthen.evaluation.tasks.training"
    parser = argparse.ArgumentParser(prog=name, description="make a corpus of documents in a task's format")
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("folder", help="the folder to make")
    parser.add_argument("--text", help="the corpus whose text and tokenizer are used; recall needs none")
    parser.add_argument("--length", type=int, default=128, help="tokens in a document, at most about (128)")
    parser.add_argument("--seed", type=int, default=0, help="another corpus (0)")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help=f"how many ({DOCUMENTS})")
    asked = parser.parse_args(words)
    text = None if asked.text is None else Corpus.open(asked.text)
    corpus = make_corpus(asked.task, asked.folder, text, asked.length, asked.documents, asked.seed)
    print(f"{corpus}\nNext: lengthen train {'recall' if asked.task == 'recall' else 'tiny'} --data {corpus.directory}")


if __name__ == "__main__":
    main()
