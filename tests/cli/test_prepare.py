"""`lengthen prepare`: its arguments reach `prepare`, and it says what it made."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lengthen.cli.main import main
from lengthen.cli.prepare import Arguments, unescape, validation
from lengthen.data import Corpus, prepare
from lengthen.io import fields


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes("\0".join(f"Document {i}: a line\nand another.\n" * (i + 1) for i in range(40)).encode())
    return path


def test_from_text_to_a_corpus(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = [str(text), "--separator", r"\0", "--tokenizer", "bpe", "--vocab-size", "280", "-o", str(out)]
    assert main(["prepare", *words, "--validation", "0.25", "--shard-tokens", "1000", "--workers", "1"]) == 0
    corpus = Corpus.open(out, verify=True)
    assert corpus.vocab_size == 280
    documents = [len(corpus[split].bytes) for split in corpus.splits]
    assert sum(documents) == 40
    said = capsys.readouterr().out
    for stage in ("checking", "reading", "training the tokenizer", "tokenising", "writing"):
        assert re.search(rf"^{stage}: ", said, flags=re.MULTILINE)
    assert re.search(rf"train +{documents[0]} documents +{len(corpus['train']):,} tokens .* bytes per token", said)
    assert f"{out}: prepared in" in said
    assert said.endswith(f"Next: lengthen train tiny --data {out}\n")


def test_again_other_and_forced(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prepare", str(text), "--separator", r"\0", "-o", str(tmp_path / "out")]
    assert main(words) == 0
    assert main(words) == 0
    assert "already prepared, checked and unchanged" in capsys.readouterr().out
    assert main([*words, "--dtype", "uint32"]) == 1
    assert "lengthen prepare: error: --out: " in capsys.readouterr().err
    assert main([*words, "--dtype", "uint32", "--force"]) == 0
    assert Corpus.open(tmp_path / "out").index.dtype == "uint32"


def test_validation_files(text: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("held out")
    (tmp_path / "0.5").write_text("a file with the name of a number")
    files = [str(tmp_path / "a.txt"), str(tmp_path / "0.5")]
    assert (
        main(["prepare", str(text), "-o", str(tmp_path / "out"), "--separator", r"\x00", "--validation", *files]) == 0
    )
    assert Corpus.open(tmp_path / "out")["validation"].bytes.tolist() == [8, 32]
    assert validation(["0.5"]) == 0.5
    assert validation([files[1]]) == [files[1]]
    assert validation(["x.txt"]) == ["x.txt"]


def test_the_default_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--default", "-o", str(tmp_path / "out")]) == 0
    assert len(Corpus.open(tmp_path / "out")["train"]) > 3_000_000
    assert main(["prepare", "-o", str(tmp_path / "out")]) == 0  # the same
    assert "unchanged" in capsys.readouterr().out
    assert main(["prepare", "x.txt", "--default", "-o", str(tmp_path / "out")]) == 1
    assert "--default: expected no other source beside it, got x.txt" in capsys.readouterr().err


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.txt").write_bytes(b"\x89PNG")
    assert main(["prepare", str(tmp_path / "data.txt"), "-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"lengthen prepare: error: {tmp_path / 'data.txt'}: expected UTF-8 text, got")
    assert said.count("\n") == 1


def test_one_text_file_just_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("A line of the only text.\n" * 100)
    assert main(["prepare", str(tmp_path / "one.txt"), "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^validation is the end of the text: 125 B of 2.5 kB \(5 %\)", said, flags=re.MULTILINE)
    assert Corpus.open(tmp_path / "out")["validation"].bytes.tolist() == [125]


def test_bad_files_are_named_and_skipped_when_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    for number in range(12):
        (tmp_path / "in" / f"bad{number:02d}.txt").write_bytes(b"caf\xe9s")
        (tmp_path / "in" / f"good{number:02d}.txt").write_text(f"text {number}")
    words = ["prepare", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert (
        "bad00.txt: expected UTF-8 text, got invalid continuation byte at byte 3; --skip-bad leaves such files out"
        in said
    )
    for _ in range(2):  # made, and found there
        assert main([*words, "--skip-bad"]) == 0
        said = capsys.readouterr().out
        assert re.search(r"^  skipped +in/bad00.txt: expected UTF-8 text, got", said, flags=re.MULTILINE)
        assert re.search(r"^  skipped +2 more: see sources\.[0-9a-f]+\.jsonl$", said, flags=re.MULTILINE)
    assert main([*words, "--encoding", "latin-1", "--force"]) == 0
    assert "skipped" not in capsys.readouterr().out
    assert sum(len(Corpus.open(tmp_path / "out")[split].bytes) for split in ("train", "validation")) == 24


def test_links_out_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "elsewhere.txt").write_text("the text that a link leads to, and its end")
    (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    words = ["prepare", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert main(words) == 1
    assert "got a link out of it; --follow-links reads it" in capsys.readouterr().err
    assert main([*words, "--follow-links"]) == 0


def listen_to_ctrl_c() -> None:
    """A shell lets processes in its background ignore it, and those that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("after", ["checking", "reading", "training the tokenizer"])
def test_ctrl_c_is_one_line_and_the_next_run_goes_on(tmp_path: Path, after: str) -> None:
    """In the stage that follows this one."""
    text = "".join(f"Line {number} of a text that takes a while {number % 977}.\n" for number in range(50_000))
    (tmp_path / "text.txt").write_text(text)
    words = [sys.executable, "-u", "-m", "lengthen", "prepare", str(tmp_path / "text.txt"), "-o", str(tmp_path / "out")]
    words += ["--tokenizer", "bpe", "--vocab-size", "600", "--workers", "1"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_ctrl_c
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:  # a stage is told when the next one begins
            if line.startswith(after):
                process.send_signal(signal.SIGINT)
                break
        assert process.stderr.read() == "\nlengthen: stopped\n"
        process.stdout.read()
    assert process.returncode == 130
    kept = list((tmp_path / "out").rglob("tokenizer.json"))
    assert len(kept) == (after == "training the tokenizer")
    stamps = [path.stat().st_mtime_ns for path in kept]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ("training the tokenizer" in done.stdout) == (not stamps)
    assert not (tmp_path / "out" / ".prepare").exists()
    assert os.listdir(tmp_path / "out")


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["prepare", "--help"])
    assert left.value.code == 0
    assert "lengthen prepare books.txt.xz --separator '\\0' -o data/books" in capsys.readouterr().out


def test_every_option_is_offered() -> None:
    known = set(inspect.signature(prepare).parameters) - {"sources", "out", "progress"}
    assert set(fields(Arguments)) - {"sources", "out", "default"} == known


def test_escapes() -> None:
    assert unescape(r"\0") == "\0"
    assert unescape(r"\n<\"海é\t>") == '\n<"海é\t>'
    for wrong in (r"\d", "\\", r"\x1"):
        with pytest.raises(ValueError, match="--separator: expected text with escapes"):
            unescape(wrong)
