"""Preparing: the same bytes from the same input, what is already there, and errors that leave it as it is."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lengthen.data import Corpus, prepare
from lengthen.data import cuts as cuts_module
from lengthen.data import documents as documents_module
from lengthen.data import parts as parts_module
from lengthen.data.documents import without_long_words
from lengthen.io import whole


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and pieces so small that a few files make many."""
    monkeypatch.setattr(documents_module, "PART_BYTES", 5000)
    monkeypatch.setattr(cuts_module, "BLOCK", 700)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The parts that were written, as they are."""
    done: list[Path] = []

    @contextmanager
    def write(path: Path) -> Iterator[Path]:
        with whole(path) as partial:
            yield partial
        done.append(path)

    monkeypatch.setattr(parts_module, "whole", write)
    return done


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_same_bytes_whatever_the_workers_and_parts(
    tmp_path: Path, folder: Path, contents: Any, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "validation": 0.2, "shard_tokens": 3000}
    made = []
    for number, workers in enumerate((1, 3)):
        prepare(folder, tmp_path / str(number), workers=workers, **options)
        made.append(contents(tmp_path / str(number)))
    monkeypatch.setattr(documents_module, "PART_BYTES", 1 << 20)
    prepare(folder, tmp_path / "large parts", **options)
    assert made[0] == made[1] == contents(tmp_path / "large parts")
    assert "index.json" in made[0]
    assert len(made[0]) > 6  # several shards


def test_the_bytes_are_pinned(tmp_path: Path) -> None:
    """A corpus that was made before is the same corpus: nothing of it, the index included, changes with the package."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"The text of {name}, 海.\n" * 9)
    corpus = prepare([tmp_path / f"{name}.txt" for name in "abc"], tmp_path / "out", validation=0.5)
    digest = hashlib.sha256((corpus.directory / "index.json").read_bytes()).hexdigest()
    assert (corpus.fingerprint, digest[:16]) == ("a919df9158f17df9", "40e1481d1ad5fb98")


def test_the_same_bytes_wherever_the_input_lies(tmp_path: Path, folder: Path, contents: Any) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / folder.name
    moved.mkdir()
    for path in sorted(folder.iterdir(), reverse=True):  # made in another order, at another time
        (moved / path.name).write_bytes(path.read_bytes())
    prepare(folder, tmp_path / "a")
    prepare(moved, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert str(tmp_path) not in (tmp_path / "a" / "index.json").read_text()


def test_the_fraction_is_chosen_by_the_text_alone(make: Any, folder: Path, texts: Any, tmp_path: Path) -> None:
    corpus = make(folder, validation=0.3)
    held_out = set(texts(corpus, "validation"))
    assert 3 <= len(held_out) <= 15
    (tmp_path / "joined.txt").write_bytes(b"\0".join(path.read_bytes() for path in sorted(folder.iterdir())[::-1]))
    joined = make(tmp_path / "joined.txt", validation=0.3, separator="\0")
    assert set(texts(joined, "validation")) == held_out
    fewer = make([folder / f"{i:02d}.txt" for i in range(0, 30, 2)], validation=0.3)
    assert set(texts(fewer, "validation")) == held_out & set(texts(fewer) + texts(fewer, "validation"))
    assert set(texts(make(folder, validation=0.3, seed=1), "validation")) != held_out


def test_each_side_has_a_document(make: Any, folder: Path, tmp_path: Path) -> None:
    for fraction in (1e-9, 0.999999):
        corpus = make([folder / "01.txt", folder / "02.txt"], validation=fraction)
        assert [len(corpus[split].bytes) for split in corpus.splits] == [1, 1]
    same = folder / "01.txt"
    (tmp_path / "same.txt").write_bytes(same.read_bytes())
    with pytest.raises(ValueError, match=r"validation: a fraction of 0.05 needs documents that differ, got 2 equal"):
        make([same, tmp_path / "same.txt"], validation=None)


def test_the_end_of_a_single_document_is_validation(make: Any, tmp_path: Path, texts: Any, stories: list[str]) -> None:
    """At a line, or else at a word, or else at a character; nothing is lost, and half of the fraction at least."""
    lines = "".join(f"line {i}\n" for i in range(200))
    for text, ends_with in (
        (lines, "\n"),
        (lines + "\n" * 500, "\n"),  # what nobody sees does not count
        ("some words " * 100, " "),
        ("海" * 100, "海"),
        ("日本", "日"),
        ("\n\n ab  \n", "a"),
    ):
        (tmp_path / "one.txt").write_text(text)
        said: list[tuple[Any, ...]] = []
        corpus = make(tmp_path / "one.txt", validation=None, progress=lambda *one, said=said: said.append(one))
        (train,), (held_out,) = texts(corpus), texts(corpus, "validation")
        assert train + held_out == text
        assert train.endswith(ends_with)
        assert held_out.strip()
        visible = len(text.rstrip().encode())
        assert len(train.encode()) >= 0.9 * visible or visible < 20
        assert len(held_out.strip().encode()) >= 0.02 * visible
        size = len(text.encode())
        assert ("validation is the end of the text", len(held_out.encode()), size) in said
    (tmp_path / "one.txt").write_text(" x\n")
    with pytest.raises(ValueError, match=r"validation: a fraction of 0.05 needs two documents, or one whose end can"):
        make(tmp_path / "one.txt", validation=None)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_end_of_a_long_document(make: Any, tmp_path: Path, texts: Any, stories: list[str], tokenizer: str) -> None:
    """One that comes in many pieces and parts; an empty document before and after it is none."""
    text = "\n".join(stories)
    (tmp_path / "long.txt").write_text(" \n\0" + text + "\0\n" + " " * 5000)
    for fraction in (0.01, 0.05, 0.5, 0.99):
        corpus = make(tmp_path / "long.txt", validation=fraction, separator="\0", tokenizer=tokenizer)
        (train,), (held_out,) = texts(corpus), texts(corpus, "validation")
        assert train + held_out == text
        assert train.endswith("\n")
        assert len(held_out.encode()) == pytest.approx(fraction * len(text.encode()), rel=0.05, abs=100)


def test_a_corpus_that_is_there_is_left_alone(tmp_path: Path, folder: Path, contents: Any, encoded: list[Path]) -> None:
    stages: list[str] = []
    prepare(folder, tmp_path / "out", workers=1)
    count, before = len(encoded), contents(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = prepare(folder, tmp_path / "out", progress=lambda stage, *_: stages.append(stage))
    assert set(stages) == {"checking", "unchanged"}
    assert len(encoded) == count > 0
    assert contents(again.directory) == before
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


def test_other_settings_and_sources_are_refused_by_name(tmp_path: Path, folder: Path, contents: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("first words\0second words")
    options: dict[str, Any] = {"separator": "\0", "validation": 0.5, "workers": 1}
    old = prepare(text, tmp_path / "out", **options)
    before = contents(tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"another corpus \(dtype: None there, 'uint32' asked for.*force=True replaces"
    ):
        prepare(text, tmp_path / "out", **options, dtype="uint32")
    with pytest.raises(
        ValueError, match=r"source 01.txt \(train\): None there, 'sha256 .*source text.txt \(train\): 'sha256"
    ):
        prepare([folder / "01.txt", folder / "02.txt"], tmp_path / "out", **options)
    text.write_text("first words\0second wordz")
    with pytest.raises(ValueError, match=r"source text.txt \(train\): 'sha256 .* there, 'sha256 .* asked for"):
        prepare(text, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == before
    new = prepare(text, tmp_path / "out", **options, force=True)
    assert new.fingerprint != old.fingerprint
    assert Corpus.open(tmp_path / "out", verify=True).fingerprint == new.fingerprint
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.json"} | {f.file for f in new.index.files()}


def test_a_damaged_corpus_is_mended(tmp_path: Path, folder: Path, contents: Any) -> None:
    corpus = prepare(folder, tmp_path / "out", workers=1)
    before = contents(tmp_path / "out")
    shard = tmp_path / "out" / corpus.index.splits["train"].shards[0].file
    for damage in (shard.read_bytes()[:-1], bytes(len(shard.read_bytes()))):
        shard.write_bytes(damage)
        prepare(folder, tmp_path / "out", workers=1)
        assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "index.json").write_text("{")
    with pytest.raises(ValueError, match=r"holds a corpus that cannot be read .* force=True replaces it"):
        prepare(folder, tmp_path / "out", workers=1)
    prepare(folder, tmp_path / "out", workers=1, force=True)
    assert contents(tmp_path / "out") == before


def test_a_failing_run_with_force_leaves_the_old_corpus(tmp_path: Path, folder: Path, contents: Any) -> None:
    prepare(folder, tmp_path / "out", workers=1)
    before = contents(tmp_path / "out")
    (tmp_path / "bad.txt").write_bytes(b"text \xff")
    with pytest.raises(ValueError, match=r"bad.txt: expected UTF-8 text, got invalid start byte at byte 5"):
        prepare([folder, tmp_path / "bad.txt"], tmp_path / "out", force=True)
    assert contents(tmp_path / "out") == before


@pytest.mark.usefixtures("small_parts")
def test_finished_parts_are_used_again(tmp_path: Path, folder: Path, contents: Any, encoded: list[Path]) -> None:
    out = tmp_path / "out"

    def stop(stage: str, done: int, total: int) -> None:
        if len(encoded) >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(folder, out, workers=1, progress=stop)
    with pytest.raises(FileNotFoundError, match="one was interrupted here"):
        Corpus.open(out)
    finished = encoded[:]
    data = bytearray(finished[1].read_bytes())
    data[len(data) // 2] ^= 1
    finished[1].write_bytes(data)  # a part that was altered is made again
    finished[3].write_bytes(b"")
    prepare(folder, out, workers=1)
    second = encoded[len(finished) :]
    assert {finished[1], finished[3]} == set(second) & set(finished)
    assert len(second) > 4
    whole = prepare(folder, tmp_path / "whole", workers=1)
    assert contents(out) == contents(whole.directory)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("change", ["settings", "source"])
def test_parts_of_another_run_are_not_used(
    tmp_path: Path, contents: Any, encoded: list[Path], stories: list[str], change: str
) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("\0".join(stories))
    options: dict[str, Any] = {"separator": "\0", "workers": 1}

    def stop(stage: str, done: int, total: int) -> None:
        if len(encoded) >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(text, out, progress=stop, **options)
    if change == "settings":
        options["dtype"] = "uint32"
    else:
        text.write_text("\0".join(stories).replace("end\0", "END\0"))
    first = encoded[:]
    prepare(text, out, **options)
    assert set(first).isdisjoint(encoded[len(first) :])
    assert contents(out) == contents(prepare(text, tmp_path / "whole", **options).directory)


@pytest.mark.usefixtures("small_parts")
def test_a_tokenizer_is_used_again_by_its_own_run_alone(tmp_path: Path, folder: Path, contents: Any) -> None:
    out = tmp_path / "out"
    stages: list[str] = []
    trained: list[bool] = []

    def stop(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if stage == "tokenising":
            raise KeyboardInterrupt

    for size in (300, 300, 320, 320):
        stages.clear()
        with pytest.raises(KeyboardInterrupt):
            prepare(folder, out, tokenizer="bpe", vocab_size=size, workers=1, progress=stop)
        trained.append("training the tokenizer" in stages)
    assert trained == [True, False, True, False]
    assert prepare(folder, out, tokenizer="bpe", vocab_size=320, workers=1).vocab_size == 320
    whole = prepare(folder, tmp_path / "whole", tokenizer="bpe", vocab_size=320, workers=1)
    assert contents(out) == contents(whole.directory)


@pytest.mark.usefixtures("small_parts")
def test_a_source_that_changes_meanwhile(tmp_path: Path, stories: list[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\0".join(stories))

    def meddle(stage: str, done: int, total: int) -> None:
        if stage == "tokenising":
            os.utime(text, ns=(1, 1))

    with pytest.raises(ValueError, match=r"text.txt: changed while it was read"):
        prepare(text, tmp_path / "out", separator="\0", workers=1, progress=meddle)
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.usefixtures("small_parts")
def test_a_full_disk(tmp_path: Path, folder: Path, contents: Any, encoded: list[Path], monkeypatch: Any) -> None:
    reference = prepare(folder, tmp_path / "whole")
    count = len(encoded)

    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        with whole(path) as partial:
            if len(encoded) == count + 5:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield partial
        encoded.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(parts_module, "whole", full)
        with pytest.raises(OSError, match=r"No space left on device: .*part'"):
            prepare(folder, tmp_path / "out", workers=1)
    assert not (tmp_path / "out" / "index.json").exists()
    assert contents(prepare(folder, tmp_path / "out").directory) == contents(reference.directory)
    assert len(encoded) == 2 * count  # each part once


def test_two_runs_at_once(tmp_path: Path, folder: Path) -> None:
    met: list[str] = []

    def intrude(stage: str, done: int, total: int) -> None:
        if stage == "tokenising":
            with pytest.raises(ValueError, match=r"out: another `prepare` is running in .*out"):
                prepare(folder, tmp_path / "out", workers=1)
            met.append(stage)

    prepare(folder, tmp_path / "out", workers=1, progress=intrude)
    assert met


def test_a_long_document_is_shared_out(tmp_path: Path, make: Any, stories: list[str], small_parts: None) -> None:
    text = "\n".join(stories)
    (tmp_path / "long.txt").write_text(text)
    alone = make(tmp_path / "long.txt", tokenizer="bpe", vocab_size=300)
    shared = make(tmp_path / "long.txt", tokenizer="bpe", vocab_size=300, workers=2)
    assert alone.fingerprint == shared.fingerprint
    assert len(alone["train"].bytes) == 1
    tokens = alone["train"].read(0, len(alone["train"]))
    assert tokens.tolist() == [*alone.tokenizer.encode(text), alone.end_id]
    assert int(alone["train"].bytes[0]) == len(text.encode())
    assert int(alone["train"].words[0]) == len(text.split())


def test_progress_goes_from_stage_to_stage(tmp_path: Path, folder: Path, small_parts: None) -> None:
    seen: list[tuple[str, int, int]] = []
    prepare(folder, tmp_path / "o", tokenizer="bpe", progress=lambda *said: seen.append(said), workers=2)
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["checking", "reading", "training the tokenizer", "tokenising", "writing"]
    for stage in stages:
        done = [(done, total) for name, done, total in seen if name == stage]
        assert [d for d, _ in done] == sorted(d for d, _ in done)
        assert stage == "training the tokenizer" or done[-1][0] == done[-1][1]


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"validation": 1.0}, ValueError, "validation: expected a fraction of the documents below 1"),
        ({"validation": {}}, TypeError, "validation: expected a fraction"),
        ({"separator": ""}, ValueError, "separator: expected a string of at least one character"),
        ({"separator": "a", "split_before": "b"}, ValueError, "separator, split_before: expected one of them"),
        ({"split_before": "("}, ValueError, "split_before: expected a regular expression"),
        ({"shard_tokens": 0}, ValueError, "shard_tokens: expected at least 1"),
        ({"workers": 0}, ValueError, "workers: expected at least 1"),
        ({"text_key": 3}, TypeError, "text_key: expected a word, got 3"),
        ({"validation": ["nowhere.txt"]}, FileNotFoundError, "validation: nowhere.txt is not there"),
    ],
)
def test_wrong_options(make: Any, folder: Path, options: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        make(folder, **options)


def test_wrong_places(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="out: expected a folder, got the file"):
        prepare(folder, tmp_path / "file")
    with pytest.raises(ValueError, match="out: expected a folder apart from the sources"):
        prepare(folder, folder)
    with pytest.raises(ValueError, match="sources: all of them are held out for validation"):
        prepare(folder, tmp_path / "out", validation=[folder])


def test_separators_need_a_text_file(tmp_path: Path, make: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    with pytest.raises(ValueError, match="separator: is for text files, but there is none"):
        make(tmp_path / "a.jsonl", separator="x")


@pytest.mark.parametrize("content", ["", " \n\t\n", "\0\0"])
def test_an_empty_corpus(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(content)
    for validation in (0, 0.1):
        with pytest.raises(ValueError, match=rf"sources: no text for the split 'train' in {path}"):
            prepare(path, tmp_path / "out", separator="\0", validation=validation)
    assert not (tmp_path / "out").exists()


def test_a_script_needs_no_guard(tmp_path: Path, folder: Path) -> None:
    """No part of the caller's main module runs again, which multiprocessing would do, and fail."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nprint('once')\nfrom lengthen.data import prepare\n"
        "prepare(sys.argv[1], sys.argv[2], tokenizer='bpe', vocab_size=300, workers=2)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "once\n"
    assert done.stderr == ""
    assert len(Corpus.open(tmp_path / "out", verify=True)["train"]) > 0


def test_index_and_tokens_agree(corpus: Corpus) -> None:
    index = json.loads((corpus.directory / "index.json").read_text())
    for name in corpus.splits:
        tokens = corpus[name]
        said = index["splits"][name]
        assert (said["tokens"], said["documents"]) == (len(tokens), len(tokens.bytes))
        assert (said["text_bytes"], said["words"]) == (int(tokens.bytes.sum()), int(tokens.words.sum()))
        assert np.array_equal(np.diff(tokens.documents), tokens.bytes + 1)  # bytes, and the end


@pytest.mark.parametrize("run", ["\u0301", "ა", "7", " ", "-", "字"])
def test_no_word_is_too_long_to_train_a_bpe_on(run: str) -> None:
    plain = "A word, and 12 others:\n    " + "x" * 512 + " done"
    assert list(without_long_words(plain)) == [plain]
    text = plain + run * 2000 + plain
    found = list(without_long_words(text))
    assert "".join(found) == text
    assert all(run * 513 not in piece for piece in found)
    assert len(found) <= 5
