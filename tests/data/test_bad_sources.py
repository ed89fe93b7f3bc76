"""Sources that cannot be read, or should not be: named, or left out when asked to, and never waited for."""

from __future__ import annotations

import codecs
import errno
import gzip
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from lengthen.data import Corpus, prepare, readers
from lengthen.data.settings import check_encoding
from lengthen.data.sources import expand

Make = Callable[..., Corpus]
Texts = Callable[..., list[str]]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with two good files between bad ones of every kind."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name in ("a.txt", "z.txt"):
        (folder / name).write_text(f"good text of {name}")
    (folder / "b.txt").write_bytes(b"caf\xe9")
    (folder / "c.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-20])
    (folder / "e.parquet").write_bytes(b"PAR1 and no more")
    os.mkfifo(folder / "f.txt")
    (folder / "g.txt").symlink_to("nowhere")
    (folder / "h.txt").symlink_to("h.txt")
    (folder / "i.txt").symlink_to("/dev/zero")
    return folder


def test_bad_files_are_skipped_counted_and_named(mixed: Path, make: Make, texts: Texts) -> None:
    with pytest.raises(ValueError, match=r"f.txt: expected a regular file, got a named pipe .*; skip_bad=True leaves"):
        make(mixed)
    corpus = make(mixed, skip_bad=True)
    assert texts(corpus) == ["good text of a.txt", "good text of z.txt"]
    reasons = dict(Corpus.open(corpus.directory).skipped)
    assert reasons == {
        "mixed/b.txt": "expected UTF-8 text, got unexpected end of data at byte 3",
        "mixed/c.jsonl": reasons["mixed/c.jsonl"],
        "mixed/d.txt.gz": reasons["mixed/d.txt.gz"],
        "mixed/e.parquet": reasons["mixed/e.parquet"],
        "mixed/f.txt": "expected a regular file, got a named pipe",
        "mixed/g.txt": "expected a regular file, got a link to nothing",
        "mixed/h.txt": "expected a regular file, got a link to itself",
        "mixed/i.txt": "expected a regular file, got a device",
    }
    assert reasons["mixed/c.jsonl"].startswith("line 2: expected a JSON object, got")
    assert reasons["mixed/d.txt.gz"].startswith("expected gz data, got")
    listed = [json.loads(line) for line in (corpus.directory / corpus.index.sources.file).read_text().splitlines()]
    assert [line["name"] for line in listed if "skipped" not in line] == ["mixed/a.txt", "mixed/z.txt"]
    assert str(mixed) not in json.dumps(listed)


def test_a_corpus_with_skipped_files_is_left_alone_and_not_taken_for_another(mixed: Path, tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        prepare(mixed, tmp_path / "out", skip_bad=True, progress=lambda stage, *_: said.append(stage))
    assert said[-1] == "unchanged"
    for name in "fghi":
        (mixed / f"{name}.txt").unlink()
    with pytest.raises(ValueError, match=r"b.txt: expected UTF-8 text.*; skip_bad=True leaves such files out"):
        prepare(mixed, tmp_path / "new")
    again = prepare(mixed, tmp_path / "new", skip_bad=True)
    with pytest.raises(ValueError, match=r"another corpus \(skip_bad: True there, False asked for\)"):
        prepare(mixed, tmp_path / "new")
    for name in ("b.txt", "c.jsonl", "d.txt.gz", "e.parquet"):
        (mixed / name).unlink()
    good = prepare(mixed, tmp_path / "good", skip_bad=True)
    assert good.fingerprint == again.fingerprint
    assert prepare(mixed, tmp_path / "good").skipped == []  # nothing was skipped, so it is the same corpus


def test_nothing_but_bad_files(mixed: Path, make: Make) -> None:
    with pytest.raises(ValueError, match=r"no text for the split 'train' in any file \(2 files cannot be read\)"):
        make([mixed / "b.txt", mixed / "c.jsonl"], skip_bad=True)


def test_two_files_of_one_name_of_which_one_is_bad(tmp_path: Path, make: Make, texts: Texts) -> None:
    for name, data in (("a", b"good"), ("b", b"\xff")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_bytes(data)
    corpus = make([tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt"], skip_bad=True)
    assert texts(corpus) == ["good"]
    assert [name for name, _ in corpus.skipped] == ["x.txt"]


def test_a_file_that_may_not_be_read(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root everything can be read, so the system is made to say no."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(name)
    plain = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == "b.txt":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return plain(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match=r"b.txt"):
        make(folder)
    assert make(folder, skip_bad=True).skipped == [("in/b.txt", "Permission denied")]


def test_a_folder_that_may_not_be_read(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("in/a.txt", "in/secret/b.txt", "in/z/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    plain = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("secret"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"secret: expected a folder that can be read, got Permission denied; sk"):
        make(tmp_path / "in")
    corpus = make(tmp_path / "in", skip_bad=True)
    assert corpus.skipped == [("in/secret", "expected a folder that can be read, got Permission denied")]
    assert len(corpus["train"].bytes) == 2
    with pytest.raises(PermissionError):
        make(tmp_path / "in" / "secret", skip_bad=True)


def test_links(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "out" / "deep").mkdir(parents=True)
    for name in ("in/real.txt", "in/sub/b.txt", "out/secret.txt", "out/deep/c.txt"):
        (tmp_path / name).write_text(name)
    names = ["in/real.txt", "in/sub/b.txt"]
    (tmp_path / "in" / "a link.txt").symlink_to("real.txt")  # the same file, listed once, under its own name
    (tmp_path / "in" / "again").symlink_to("sub")
    (tmp_path / "in" / "loop").symlink_to(".")
    (tmp_path / "in" / "up").symlink_to("../in/sub")
    assert [file.name for file in expand(tmp_path / "in")] == names
    assert [file.name for file in expand([tmp_path / "in" / "a link.txt"])] == ["a link.txt"]  # named, so read
    (tmp_path / "named").symlink_to("in")
    assert [file.name for file in expand(tmp_path / "named")] == names
    assert [file.name for file in expand([tmp_path / "in", tmp_path / "named"])] == names
    (tmp_path / "in" / "stolen.txt").symlink_to("../out/secret.txt")
    with pytest.raises(ValueError, match=r"stolen.txt: expected a file in the folder .* a link out of it; follow_"):
        expand(tmp_path / "in")
    assert [file.name for file in expand(tmp_path / "in", skip_bad=True) if not file.problem] == names
    (tmp_path / "in" / "stolen.txt").unlink()
    (tmp_path / "in" / "other").symlink_to("../out")
    with pytest.raises(ValueError, match=r"in/other: expected a file in .* that was named, got a link out of it"):
        expand(tmp_path / "in")
    (tmp_path / "out" / "back").symlink_to("..")  # and round again
    followed = [file.name for file in expand(tmp_path / "in", follow_links=True)]
    assert followed == ["in/other/deep/c.txt", "in/other/secret.txt", *names]


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.arrow", "sub/../../x.arrow", "..", "", "a\0b"])
def test_a_dataset_that_names_files_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "x.arrow").write_text("not to be read")
    (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    for follow in (False, True):
        with pytest.raises(ValueError, match=r"state.json: expected names of files beside it under '_data_files', got"):
            expand(tmp_path / "set", follow_links=follow)


@pytest.mark.parametrize("which", ["file", "split"])
def test_a_dataset_with_links_elsewhere(tmp_path: Path, which: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "x.arrow").write_text("not to be read")
    (out / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    (tmp_path / "set").mkdir()
    if which == "split":
        (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
        (tmp_path / "set" / "train").symlink_to(out)
    else:
        (tmp_path / "set" / "state.json").write_text((out / "state.json").read_text())
        (tmp_path / "set" / "x.arrow").symlink_to(out / "x.arrow")
    with pytest.raises(ValueError, match=r"x.arrow: expected a file in the .* that was named, got a link out of it"):
        expand(tmp_path / "set")
    assert len(expand(tmp_path / "set", follow_links=True)) == 1


@pytest.mark.parametrize("splits", ['["../out"]', '["a/b"]', '[""]', "3", '{"a": 1}'])
def test_a_dict_of_datasets_that_names_folders_elsewhere(tmp_path: Path, splits: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(f'{{"splits": {splits}}}')
    with pytest.raises(ValueError, match=r"dataset_dict.json: expected names of letters .* under 'splits', got"):
        expand(tmp_path)


def test_what_is_no_file_is_named_at_once(tmp_path: Path, make: Make) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: expected a regular file, got a named pipe"):
        make(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"/dev/zero: expected a regular file, got a device"):
        make("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match=r"loop: expected a regular file, got a link to itself"):
        make(tmp_path / "loop")


# Encodings.


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32", "utf-8-sig", "shift_jis"])
@pytest.mark.parametrize("block", [5, 1 << 18])
def test_encodings(
    tmp_path: Path, make: Make, texts: Texts, monkeypatch: pytest.MonkeyPatch, encoding: str, block: int
) -> None:
    monkeypatch.setattr(readers.cuts, "BLOCK", block)
    words = "海と山\r\nカナ" if encoding.startswith(("utf", "shift")) else "café naïve\r\n÷"
    documents = [f"{words} {i}" for i in range(9)]
    (tmp_path / "a.txt").write_bytes("<E>".join(documents).encode(encoding))
    corpus = make(tmp_path / "a.txt", encoding=encoding, separator="<E>")
    assert texts(corpus) == documents
    assert corpus.index.settings["encoding"] == codecs.lookup(encoding).name


def test_a_byte_that_an_encoding_does_not_know(tmp_path: Path, make: Make) -> None:
    for encoding, data, at in (
        ("cp1252", b"x" * 300_000 + b"\x81", 300_000),
        ("utf-16-le", "ab".encode("utf-16-le") * 70_000 + b"\x00\xd8ab", 280_000),
        ("shift_jis", "海山".encode("shift_jis") + b"\xff", 4),
        ("utf-16-le", "ab\0".encode("utf-16-le"), 5),  # the NUL is there with its second byte
    ):
        (tmp_path / "a.txt").write_bytes(data)
        with pytest.raises(ValueError, match=rf"a.txt: expected {encoding} text, got .* at byte {at}; skip_bad=True"):
            make(tmp_path / "a.txt", encoding=encoding)


def test_which_encodings_there_are(tmp_path: Path, make: Make) -> None:
    assert check_encoding("UTF8") is None
    assert check_encoding("Latin1") == "iso8859-1"
    for wrong in ("nope", "base64", "rot13", "undefined", "", 3, None):
        with pytest.raises(ValueError, match=r"encoding: expected a name such as 'utf-8', 'latin-1' or 'cp1252', got"):
            check_encoding(wrong)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    with pytest.raises(ValueError, match="encoding: is for text files, but there is none"):
        make(tmp_path / "a.jsonl", encoding="latin-1")


def test_utf_8_is_not_written_down(tmp_path: Path, make: Make) -> None:
    """A corpus that was made before there was the option is the same corpus."""
    (tmp_path / "a.txt").write_text("text")
    assert "encoding" not in make(tmp_path / "a.txt", encoding="utf8").index.settings


# Patterns and lines without an end.


def test_a_pattern_that_does_not_end(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SECONDS", 0.2)
    (tmp_path / "a.txt").write_text("fine\n" + "a" * 60 + "!\n")
    before = signal.getsignal(signal.SIGALRM)
    for options in ({}, {"skip_bad": True}):
        with pytest.raises(ValueError, match=r"split_before: expected a pattern that ends, got .* line 2 of"):
            make(tmp_path / "a.txt", split_before="(a+)+$", **options)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_pattern_in_another_thread(tmp_path: Path, make: Make, texts: Texts) -> None:
    (tmp_path / "a.txt").write_text("# one\ntext\n# two\n")
    found: list[Corpus] = []
    thread = threading.Thread(target=lambda: found.append(make(tmp_path / "a.txt", split_before="^#")))
    thread.start()
    thread.join()
    assert texts(found[0]) == ["# one\ntext\n", "# two\n"]


def test_of_a_long_line_the_beginning_is_matched(
    tmp_path: Path, make: Make, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MATCHED", 10)
    monkeypatch.setattr(readers.cuts, "BLOCK", 16)
    wanted = ["= first " + "x" * 100 + "=\n", "= second\n", "=\nmore = " + "y" * 70 + "\n = z"]
    (tmp_path / "a.txt").write_text("".join(wanted))
    assert texts(make(tmp_path / "a.txt", split_before="^=")) == wanted
    assert len(texts(make(tmp_path / "a.txt", split_before="=$"))) == 2  # the first line's end is not seen


def test_a_line_of_json_that_is_too_long(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", 1000)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "' + "b" * 2000 + '"}')
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: expected at most 1,000 bytes, got more"):
        make(tmp_path / "a.jsonl")


# Damage.


@pytest.mark.parametrize("nesting", ['{"text": ' + "[" * 100_000, "[" * 100_000, '{"a":' * 100_000])
def test_deeply_nested_json(tmp_path: Path, make: Make, nesting: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + nesting + "\n")
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: expected a JSON object, got"):
        make(tmp_path / "a.jsonl")


def test_two_columns_of_one_name(tmp_path: Path, make: Make) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(ValueError, match=rf"{name}: expected one column 'text', got 2 of that name"):
            make(tmp_path / name)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_damaged_tables_are_named(tmp_path: Path, make: Make, ending: str) -> None:
    """Any byte may be another: what is read is read, and what is not is an error that names the file."""
    table = pa.table({"text": [f"document {i} " * 9 for i in range(50)]})
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pa.parquet.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    data = path.read_bytes()
    for at in range(0, len(data), max(len(data) // 60, 1)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        problem = None
        try:
            make(path)
        except ValueError as raised:
            problem = str(raised)
        named = rf"{re.escape(str(path))}(, row \d+)?: expected|sources: no text"
        assert problem is None or re.match(named, problem), problem


def test_names_that_are_no_text(tmp_path: Path, make: Make, texts: Texts) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in (b"\xff.txt", b"a\nb.txt", "海.txt".encode(), b"-o", b"a b'\".txt"):
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_text("text " + repr(name))
    corpus = make(folder)
    assert len(texts(corpus)) == 5
    assert "in/\\\\xff.txt" in (corpus.directory / corpus.index.sources.file).read_text()
