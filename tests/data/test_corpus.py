"""Corpus and Tokens: what is on the disk, and the errors when it is not what it was."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lengthen.data import Corpus


@pytest.fixture
def copy(corpus: Corpus, tmp_path: Path) -> Path:
    shutil.copytree(corpus.directory, tmp_path / "copy")
    return tmp_path / "copy"


def test_another_program_can_read_the_shards(corpus: Corpus, folder: Path) -> None:
    """The format as docs/data.md tells it, read with nothing of the package."""
    index = json.loads((corpus.directory / "index.json").read_text())
    texts = {path.read_bytes() for path in folder.iterdir()}
    found = set()
    for split in index["splits"].values():
        parts = [(corpus.directory / shard["file"]).read_bytes() for shard in split["shards"]]
        assert [len(part) for part in parts[:-1]] == [2000] * (len(parts) - 1)
        tokens = np.frombuffer(b"".join(parts), dtype="<u2")
        table = np.frombuffer((corpus.directory / split["documents_file"]["file"]).read_bytes(), "<i8").reshape(-1, 3)
        start = 0
        for size, text_bytes, words in table:
            document = bytes(tokens[start : start + size - 1].astype(np.uint8))
            assert tokens[start + size - 1] == index["end_id"] == 256
            assert len(document) == text_bytes
            assert len(document.decode().split()) == words
            found.add(document)
            start += size
    assert found == texts


def test_reading_across_shards(corpus: Corpus) -> None:
    tokens = corpus["train"]
    whole = tokens.read(0, len(tokens))
    assert whole.dtype == np.int64
    assert len(corpus.index.splits["train"].shards) > 5
    draw = np.random.default_rng(0)
    for _ in range(200):
        start, stop = sorted(draw.integers(0, len(tokens) + 1, 2).tolist())
        assert np.array_equal(tokens.read(start, stop), whole[start:stop])
    assert len(tokens.read(len(tokens), len(tokens))) == 0
    for wrong in ((-1, 3), (3, 2), (0, len(tokens) + 1)):
        with pytest.raises(ValueError, match="start, stop: expected 0 ≤ start ≤ stop"):
            tokens.read(*wrong)


def test_documents_bytes_and_words(corpus: Corpus, texts: Callable[..., list[str]]) -> None:
    for split in corpus.splits:
        tokens = corpus[split]
        assert tokens.documents[0] == 0
        assert tokens.documents[-1] == len(tokens)
        assert tokens.documents.dtype == tokens.bytes.dtype == tokens.words.dtype == np.int64
        assert tokens.bytes.tolist() == [len(text.encode()) for text in texts(corpus, split)]
        assert tokens.words.tolist() == [len(text.split()) for text in texts(corpus, split)]


def test_names_and_sizes(corpus: Corpus) -> None:
    assert corpus.splits == ("train", "validation")
    assert (corpus.vocab_size, corpus.end_id, corpus.mask_id) == (258, 256, 257)
    assert corpus["train"] is corpus["train"]
    assert "30" not in repr(corpus["validation"])
    with pytest.raises(ValueError, match="has 'train', 'validation', got 'valid'; did you mean 'validation'"):
        corpus["valid"]


def test_a_split_that_was_not_made(make: Callable[..., Corpus], folder: Path) -> None:
    with pytest.raises(ValueError, match="has 'train', got 'validation'; `prepare` makes it with validation="):
        make(folder)["validation"]


def test_a_truncated_shard(copy: Path) -> None:
    shard = copy / Corpus.open(copy).index.splits["train"].shards[2].file
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ValueError, match=rf"{re.escape(str(shard))}: expected 2000 bytes, got 1998; .* truncated"):
        Corpus.open(copy)


@pytest.mark.parametrize("which", ["shard", "documents", "sources"])
def test_an_altered_file(copy: Path, which: str) -> None:
    index = Corpus.open(copy, verify=True).index
    split = index.splits["validation"]
    name = {"shard": split.shards[0], "documents": split.documents_file, "sources": index.sources}[which].file
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    for verify in (False, True):  # the size is right
        with pytest.raises(ValueError, match=rf"{re.escape(name)}: its sha256 is not that of index.json"):
            Corpus.open(copy, verify=verify)


def test_an_altered_table_of_documents_is_noticed_when_read(copy: Path) -> None:
    corpus = Corpus.open(copy)
    path = copy / corpus.index.splits["train"].documents_file.file
    table = np.fromfile(path, dtype="<i8")
    table[0] += 1
    table.tofile(path)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: expected .* tokens in all"):
        _ = corpus["train"].documents


def test_a_missing_shard(copy: Path) -> None:
    shard = copy / Corpus.open(copy).index.splits["train"].shards[0].file
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(shard))):
        Corpus.open(copy)


def test_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"index.json: not there; expected a folder that `lengthen prepare`"):
        Corpus.open(tmp_path)
    (tmp_path / ".prepare").mkdir()
    with pytest.raises(FileNotFoundError, match="one was interrupted here"):
        Corpus.open(tmp_path)


def change(index: Any, *keys: Any, to: Any) -> None:
    for key in keys[:-1]:
        index = index[key]
    index[keys[-1]] = to


@pytest.mark.parametrize(
    ("keys", "to", "said"),
    [
        (("format",), "other", "expected format 'lengthen tokens', got 'other'"),
        (("version",), 99, "expected version 1, got 99"),
        (("dtype",), "int8", "expected 'uint16' or 'uint32'"),
        (("vocab_size",), 70000, "uint16 tells 65536 ids apart, but the vocabulary of index.json has 70000"),
        (("end_id",), 258, "end_id: expected less than vocab_size 258"),
        (("splits", "train", "tokens"), 5, "do not add up to 5 tokens"),
        (("splits", "train", "documents"), 5, "splits.train: expected 120 bytes for train.documents"),
        (("splits", "train", "documents_file", "file"), "../x", "expected a name in this folder"),
        (("splits",), 3, "splits: expected a table, got 3"),
        (("splits", "train", "shards"), {}, "splits.train.shards: expected a list"),
        (("vocab_size",), "258", "vocab_size: expected a whole number, got '258'"),
        (("tokenizer",), {"kind": "json", "file": "../x"}, "expected a name in this folder"),
        (("tokenizer", "kind"), "bpe", "tokenizer: expected a file"),
        (("extra",), 1, "unknown key 'extra'"),
    ],
)
def test_an_altered_index(copy: Path, keys: tuple[str, ...], to: Any, said: str) -> None:
    index = json.loads((copy / "index.json").read_text())
    change(index, *keys, to=to)
    (copy / "index.json").write_text(json.dumps(index))
    with pytest.raises((TypeError, ValueError), match=rf"index.json: .*{said}"):
        Corpus.open(copy)


@pytest.mark.parametrize("content", ["[]", '"text"', "3", "null", "[" * 100_000, "", "\0", '{"format": []}'])
def test_what_is_no_index(copy: Path, content: str) -> None:
    (copy / "index.json").write_text(content)
    with pytest.raises((TypeError, ValueError), match=r"index.json: .*expected"):
        Corpus.open(copy)


def places(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in table if isinstance(table, dict) else range(min(len(table), 1)) if isinstance(table, list) else ():
        yield (*path, key)
        yield from places(table[key], (*path, key))


def test_any_wrong_value_in_the_index_is_an_error_that_names_it(make: Callable[..., Corpus], folder: Path) -> None:
    """Every key, with values of every wrong shape; settings may be anything, as they are only compared."""
    copy = make([folder / "01.txt", folder / "02.txt"], validation=0.5).directory
    text = (copy / "index.json").read_text()
    for path in places(json.loads(text)):
        if path[0] == "settings" and len(path) > 1:
            continue
        for value in ([], {}, "x", "", -1, 0, 10**30, None, True, 1.5, [[]], {"a": {}}, "../x", "a\0b", "index.json"):
            index = json.loads(text)
            change(index, *path, to=value)
            (copy / "index.json").write_text(json.dumps(index))
            try:
                corpus = Corpus.open(copy)
                [corpus[split].documents for split in corpus.splits]
                _ = corpus.tokenizer, corpus.fingerprint, corpus.skipped
                problem = None
            except (TypeError, ValueError, OSError) as raised:
                problem = str(raised)
            assert problem is None or str(copy) in problem, (path, value, problem)


def test_a_truncated_index(copy: Path) -> None:
    data = (copy / "index.json").read_bytes()
    (copy / "index.json").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"index.json: expected JSON, got"):
        Corpus.open(copy)


def test_the_fingerprint_is_of_the_content(make: Callable[..., Corpus], folder: Path) -> None:
    first = make(folder)
    assert make(folder).fingerprint == first.fingerprint
    assert len(first.fingerprint) == 16
    others = [make(folder, validation=0.2), make(folder, dtype="uint32"), make(folder / "03.txt")]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4
