"""Tokenizers: bytes, a BPE, somebody else's."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from lengthen.data import Corpus, prepare
from lengthen.data import cuts as cuts_module
from lengthen.data.readers import _cut
from lengthen.data.tokenizer import Tokenizer, train


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory, stories: list[str]) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train(stories, 400, path)
    return path


def test_bytes() -> None:
    tokenizer = Tokenizer()
    text = "naïve 海 <|end|>\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([104, 105, 256, 257]) == "hi<|end|><|mask|>"
    assert (tokenizer.vocab_size, tokenizer.end_id, tokenizer.mask_id, tokenizer.name) == (258, 256, 257, "bytes")


def test_a_trained_bpe(make: Callable[..., Corpus], folder: Path, stories: list[str], texts: Any) -> None:
    corpus = make(folder, tokenizer="bpe", vocab_size=380)
    tokenizer = corpus.tokenizer
    assert (corpus.vocab_size, corpus.end_id, corpus.mask_id, tokenizer.name) == (380, 0, 1, "bpe")
    assert texts(corpus) == stories
    for text in (stories[3], "<|end|> in a text is text", "\x00 any byte \U0001f600"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert not {0, 1} & set(tokenizer.encode(text))
    assert len(corpus["train"]) < 0.7 * sum(len(text.encode()) for text in stories)


def test_training_gives_the_same_bytes(tmp_path: Path, bpe: Path, stories: list[str]) -> None:
    for number in range(3):
        train(stories, 400, tmp_path / f"{number}.json")
        assert (tmp_path / f"{number}.json").read_bytes() == bpe.read_bytes()


def test_training_can_be_interrupted(tmp_path: Path) -> None:
    """The package does not look for Ctrl-C; whoever waits for it does."""
    waiting = threading.Event()

    def texts() -> Iterator[str]:
        yield "some text"
        os.kill(os.getpid(), signal.SIGINT)
        assert waiting.wait(60)

    with pytest.raises(KeyboardInterrupt):
        train(texts(), 300, tmp_path / "tokenizer.json")
    waiting.set()
    assert not (tmp_path / "tokenizer.json").exists()


def test_an_error_while_texts_are_read_is_raised(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield "some text"
        raise OSError("the disk has gone")

    with pytest.raises(OSError, match="the disk has gone"):
        train(texts(), 300, tmp_path / "tokenizer.json")


def test_a_sample_and_no_validation_text_train_the_bpe(make: Callable[..., Corpus], folder: Path) -> None:
    whole = make(folder, tokenizer="bpe", vocab_size=600)
    sampled = make(folder, tokenizer="bpe", vocab_size=600, sample_bytes=20_000)
    again = make(folder, tokenizer="bpe", vocab_size=600, sample_bytes=20_000)
    assert sampled.fingerprint == again.fingerprint != whole.fingerprint
    # Held out, a file has no part in the tokenizer: it is the one trained without the file.
    held_out = make(folder, tokenizer="bpe", vocab_size=600, validation=[folder / "29.txt"])
    rest = make([folder / f"{i:02d}.txt" for i in range(29)], tokenizer="bpe", vocab_size=600)
    assert held_out.index.tokenizer.sha256 == rest.index.tokenizer.sha256
    assert held_out.index.tokenizer.sha256 != whole.index.tokenizer.sha256


def other(path: Path, special: list[str], **changes: Any) -> Path:
    """Somebody else's tokenizer.json: whole words, a template that adds tokens, cut off after 5."""
    vocab = {word: number for number, word in enumerate(["[UNK]", "the", "ship", "sea", *special])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens([*special, "[BOS]"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", inner.token_to_id("[BOS]"))]
    )
    inner.enable_truncation(5)
    inner.enable_padding(length=9)
    said = json.loads(inner.to_str())
    said["model"].update(changes)
    path.write_text(json.dumps(said))
    return path


@pytest.mark.parametrize(
    ("special", "options", "end", "mask"),
    [
        (["<|endoftext|>"], {}, "<|endoftext|>", None),
        (["</s>", "<mask>"], {}, "</s>", "<mask>"),
        (["STOP", "HIDE"], {"end_token": "STOP", "mask_token": "HIDE"}, "STOP", "HIDE"),
        (["STOP"], {}, None, None),
    ],
)
def test_an_existing_tokenizer(
    tmp_path: Path, make: Callable[..., Corpus], special: list[str], options: Any, end: str | None, mask: str | None
) -> None:
    path = other(tmp_path / "tokenizer.json", special)
    (tmp_path / "text.txt").write_text("the ship the sea the ship the sea </s> the")
    corpus = make(tmp_path / "text.txt", tokenizer=path, **options)
    ids = {name: tokenizers.Tokenizer.from_file(str(path)).token_to_id(name) for name in (end, mask) if name}
    assert (corpus.end_id, corpus.mask_id) == (ids.get(end), ids.get(mask))  # type: ignore[arg-type]
    assert corpus.vocab_size == 5 + len(special)
    read = corpus["train"].read(0, len(corpus["train"])).tolist()
    assert read[:8] == [1, 2, 1, 3, 1, 2, 1, 3]  # nothing added, nothing cut off, nothing padded
    assert read[-1] == (1 if end is None else ids[end])
    assert read.count(ids.get("</s>", -1)) <= 1  # the one in the text is text
    assert corpus.tokenizer.encode("the sea") == [1, 3]
    assert corpus.tokenizer.name == "json"
    stored = corpus.directory / corpus.index.tokenizer.file
    assert stored.read_bytes() == path.read_bytes()


def test_a_folder_with_a_tokenizer(tmp_path: Path, make: Callable[..., Corpus], folder: Path, bpe: Path) -> None:
    assert make(folder, tokenizer=bpe.parent).fingerprint == make(folder, tokenizer=str(bpe)).fingerprint


def test_documents_stay_whole_for_a_tokenizer_that_joins_across_newlines(
    tmp_path: Path, make: Callable[..., Corpus], monkeypatch: Any, stories: list[str]
) -> None:
    """As newer patterns do: here everything is one word, newlines and all."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(["a\nb a\nb"] * 9, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "a\nb a\nb" * 200
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.setattr(cuts_module, "BLOCK", 10)
    corpus = make(tmp_path / "text.txt", tokenizer=tmp_path / "tokenizer.json")
    assert corpus["train"].read(0, len(corpus["train"])).tolist() == inner.encode(text).ids
    cut = [i for piece, _ in _cut([(text.encode(), True)]) for i in inner.encode(piece.decode()).ids]
    assert cut != inner.encode(text).ids  # so it had to be whole


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"tokenizer": "byte"}, FileNotFoundError, "got 'byte'; did you mean 'bytes'"),
        ({"tokenizer": 3}, TypeError, "tokenizer: expected 'bytes', 'bpe' or a path"),
        ({"vocab_size": 300}, ValueError, "vocab_size: only tokenizer='bpe' has one to choose, got 300 for 'bytes'"),
        ({"tokenizer": "bpe", "vocab_size": 100}, ValueError, "vocab_size: expected at least 258, got 100"),
        ({"tokenizer": "bpe", "end_token": "x"}, ValueError, "end_token: only a tokenizer.json has one"),
        (
            {"tokenizer": "bpe", "vocab_size": 65537, "dtype": "uint16"},
            ValueError,
            "dtype: uint16 tells 65536 ids apart",
        ),
        ({"dtype": "uint8"}, ValueError, "dtype: expected 'uint16' or 'uint32' or none, got 'uint8'"),
    ],
)
def test_wrong_options(make: Callable[..., Corpus], folder: Path, options: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        make(folder, **options)


def test_wrong_tokenizer_files(tmp_path: Path, make: Callable[..., Corpus], folder: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"expected a tokenizer.json, got"):
        make(folder, tokenizer=path)
    other(path, ["<eos>"])
    with pytest.raises(
        ValueError, match=rf"end_token: {re.escape(str(path))} has no token '<eo>'; did you mean '<eos>'"
    ):
        make(folder, tokenizer=path, end_token="<eo>")
    path.write_text(
        json.dumps(
            {**json.loads(path.read_text()), "model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.1}}
        )
    )
    with pytest.raises(ValueError, match=r"expected no dropout, .* got 0.1"):
        make(folder, tokenizer=path)


@pytest.mark.parametrize("content", ["[]", '"text"', "", "\0", '{"tokenizer_class": "GPT2"}', "[" * 100_000])
def test_what_is_no_tokenizer(tmp_path: Path, make: Callable[..., Corpus], folder: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: expected a tokenizer.json, got"):
        make(folder, tokenizer=path)


def test_a_tokenizer_without_tokens(tmp_path: Path, make: Callable[..., Corpus], folder: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: expected a tokenizer.json with tokens, got one"):
        make(folder, tokenizer=path)
    tokenizers.Tokenizer(tokenizers.models.BPE({"Q": 0}, [])).save(str(path))
    with pytest.raises(ValueError, match="tokenizer: expected tokens for the text of the split 'train', got none"):
        make(folder, tokenizer=path)


def test_a_panic_inside_the_package_is_an_error_that_names_the_file(
    tmp_path: Path, make: Callable[..., Corpus], folder: Path
) -> None:
    """Such a panic is no Exception; here a merge makes a token that is not in the vocabulary."""
    path = tmp_path / "tokenizer.json"
    said = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    said["model"] |= {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}
    path.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: expected a tokenizer.json, got"):
        make(folder, tokenizer=path)


def test_a_tokenizer_without_ids_for_a_text(tmp_path: Path, make: Callable[..., Corpus], folder: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0}, unk_token="?")).save(str(path))
    with pytest.raises(ValueError, match=r"tokenizer: .*WordLevel error: Missing \[UNK\] token"):
        make(folder, tokenizer=path)


def test_a_vocabulary_that_does_not_fit(tmp_path: Path, make: Callable[..., Corpus], folder: Path) -> None:
    vocab = {f"w{number}": number for number in range(65_537)}
    path = tmp_path / "large.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0")).save(str(path))
    with pytest.raises(
        ValueError, match=rf"uint16 .* the vocabulary of {re.escape(str(path))} has 65537; expected 'uint32'"
    ):
        make(folder, tokenizer=path, dtype="uint16")
    corpus = make(folder / "03.txt", tokenizer=path)
    assert corpus.index.dtype == "uint32"
    assert corpus.vocab_size == 65_537


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_another_text_in_the_tokens_of_a_corpus(tmp_path: Path, kind: str) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"a text of its own, {name} and {name} again " * 30)
    size = {"vocab_size": 300} if kind == "bpe" else {}
    first = prepare(tmp_path / "one.txt", tmp_path / "first", tokenizer=kind, validation=0, **size)  # type: ignore[arg-type]
    second = prepare(tmp_path / "two.txt", tmp_path / "second", tokenizer=tmp_path / "first", validation=0)
    assert second.tokenizer_name == first.tokenizer_name
    assert (second.vocab_size, second.end_id, second.mask_id) == (first.vocab_size, first.end_id, first.mask_id)
    text = second["train"].read(0, len(second["train"]) - 1).tolist()
    assert first.tokenizer.decode(text) == (tmp_path / "two.txt").read_text()
