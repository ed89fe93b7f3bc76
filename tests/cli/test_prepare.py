"""`lengthen prepare`: its arguments reach `prepare`, and it says what it made."""

from __future__ import annotations

import inspect
import re
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
    assert re.search(rf"train +{documents[0]} documents +{len(corpus['train']):,} tokens .* bytes a token", said)
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
