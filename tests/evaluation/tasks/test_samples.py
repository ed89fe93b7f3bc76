"""Samples: exact lengths, answers that stand in the text, borders between tokens, the same ones from a seed."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthen.evaluation.tasks import TASKS, Draws, Haystack, Sample, TooShortError
from lengthen.evaluation.tasks.frequent_words import counts

WRITTEN = [name for name in TASKS if name != "recall"]  # whose text any tokenizer may have
DEPTHS = (0.0, 0.5, 1.0)


def made(name: str, text: Haystack, length: int, count: int = 9, seed: int = 0) -> list[tuple[Sample, str, str]]:
    found = TASKS[name].samples(text, length, DEPTHS, count, seed)
    return [(one, text.tokenizer.decode(one.prompt), text.tokenizer.decode(one.answer)) for one in found]


@pytest.mark.parametrize("length", [320, 321, 1000])
@pytest.mark.parametrize("name", WRITTEN)
def test_lengths_are_exact(name: str, length: int, text: Haystack) -> None:
    for one, _, _ in made(name, text, length):
        assert len(one.ids) == length
        assert one.prompt[0] == text.tokenizer.end_id
        assert text.tokenizer.end_id not in one.ids[1:]
        assert 0 < one.chance <= 0.5


@pytest.mark.parametrize("name", WRITTEN)
def test_samples_are_those_of_their_seed(name: str, text: Haystack) -> None:
    first = TASKS[name].samples(text, 400, DEPTHS, 6, seed=3)
    assert TASKS[name].samples(text, 400, DEPTHS, 3, seed=3) == first[:3], "a sample depends on how many there are"
    assert len({tuple(one.answer) for one in first}) == 6
    assert TASKS[name].samples(text, 400, DEPTHS, 6, seed=4) != first


@pytest.mark.parametrize("name", WRITTEN)
def test_a_length_that_is_too_short_is_refused(name: str, text: Haystack) -> None:
    with pytest.raises(TooShortError, match=rf"^lengths: {name}: expected at least (\d+) tokens, .* got 20$") as told:
        TASKS[name].samples(text, 20, DEPTHS, 1, seed=0)
    needed = int(re.findall(r"\d+", str(told.value))[0])
    draws = Draws(f"0, {name}, 20, 0")
    assert len(TASKS[name].make(text, draws, needed, 0.0).ids) == needed


@pytest.mark.parametrize("name", WRITTEN)
def test_prompt_and_answer_meet_at_a_border_of_tokens(name: str, text: Haystack) -> None:
    """The question's last line and its answer, encoded as one text, are the tokens of the sample's end."""
    for one, prompt, answer in made(name, text, 400):
        end = prompt[prompt.rindex("\n") :] + answer
        ids = text.tokenizer.encode(end)
        assert one.ids[-len(ids) :] == ids
        assert answer.startswith(" ")


def test_a_border_inside_a_token() -> None:
    """A tokenizer with a token across the border: the answer begins with that token, and no text is lost."""
    merged = {"is": [1], "is 4": [1, 9], "key: ": [2, 3], "key: 4": [2, 8]}
    haystack = Haystack(None, SimpleNamespace(encode=merged.__getitem__))  # type: ignore[arg-type]
    assert haystack.border("is", " 4") == ([1], [9])
    assert haystack.border("key: ", "4") == ([2], [8])


@pytest.mark.parametrize("name", ["passkey", "needles"])
def test_the_answer_stands_once_in_the_text_where_it_was_put(name: str, text: Haystack) -> None:
    for one, prompt, answer in made(name, text, 600):
        ids = one.answer
        places = [n for n in range(len(one.prompt)) if one.prompt[n : n + len(ids)] == ids]
        assert len(places) == 1, "the answer's tokens stand once, as such, in the prompt"
        assert prompt.count(answer.strip()) == 1
        assert one.depth in DEPTHS
        if one.depth == 0:
            assert places[0] < 200
        if one.depth == 1:
            assert places[0] > 350


def test_needles_have_other_keys_with_other_numbers(text: Haystack) -> None:
    for _, prompt, answer in made("needles", text, 600):
        told = re.findall(r"\nThe number of (\w+) is (\d+)\.", prompt)
        assert len(told) == len(dict(told)) == len({number for _, number in told}) == 4
        assert prompt.endswith("is")
        assert dict(told)[prompt.split()[-2]] == answer.strip()


def test_variables_are_set_in_order(text: Haystack) -> None:
    for _, prompt, answer in made("variables", text, 900):
        holds: dict[str, str] = {}
        for name, to in re.findall(r"\nVAR (\w+) = (?:VAR )?(\w+)\n", prompt):
            assert to.isdigit() or to in holds, "set to a variable that is set later"
            holds[name] = holds.get(to, to)
        value = re.findall(r"hold (\d+),", prompt)[0]
        assert len(holds) == 8
        assert answer.split() == [name for name, held in holds.items() if held == value]


@pytest.mark.parametrize(("name", "alphabetical"), [("common_words", True), ("frequent_words", False)])
@pytest.mark.parametrize("length", [400, 3000])
def test_the_most_common_words(name: str, alphabetical: bool, length: int, text: Haystack) -> None:
    for _, prompt, answer in made(name, text, length, count=3):
        words = Counter(prompt.split("Words:")[1].split("\n")[0].split())
        top = words.most_common(4)
        assert top[2][1] > top[3][1], "it is not told which are the three"
        found = [word for word, _ in top[:3]]
        assert answer.split() == (sorted(found) if alphabetical else found)
        assert alphabetical or top[0][1] > top[1][1] > top[2][1]


@given(st.integers(30, 200_000))
def test_the_first_counts_differ(n: int) -> None:
    found = counts(n)
    assert sum(found) == n
    assert all(one > other for one, other in pairwise(found[:4]))


def test_a_text_with_the_tasks_own_sentences_is_refused(text: Haystack) -> None:
    text.beginning = "xx The pass key is 12345. yy"  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"^--data: expected a text without the sentences of the task 'passkey'"):
        TASKS["passkey"].samples(text, 400, DEPTHS, 1, 0)


def test_a_text_that_is_shorter_than_the_length_is_repeated(text: Haystack) -> None:
    length = 3 * len(text.tokens)
    assert len(TASKS["passkey"].samples(text, length, DEPTHS, 1, 0)[0].ids) == length


def test_draws() -> None:
    draws = Draws(0)
    assert sorted(draws.different("01", "01")) == ["00", "01", "10", "11"]
    assert Counter(draws.shuffled("aabbc")) == Counter("aabbc")
    assert [Draws(1).below(1000) for _ in range(2)] == [134, 134]
    with pytest.raises(ValueError, match=r"^seed: expected"):
        Draws(-1)


def test_a_text_of_ends_alone_is_refused(text: Haystack) -> None:
    class Ends:
        name, directory = "train", "data/empty"

        def __len__(self) -> int:
            return 7

        def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
            return np.full(stop - start, text.tokenizer.end_id)

    empty = Haystack(Ends(), text.tokenizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^split: expected text .* got only ends in split 'train' of data/empty"):
        TASKS["common_words"].samples(empty, 400, DEPTHS, 1, 0)
