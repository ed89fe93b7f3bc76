"""Every kind of source gives the same documents, and what cannot be read is named."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from lengthen.data import Corpus, prepare, standard_library
from lengthen.data import cuts as cuts_module
from lengthen.data.readers import pieces
from lengthen.data.settings import Settings
from lengthen.data.sources import Source, expand


def zst(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


DOCUMENTS = ["One.\n\nTwo — two.\n", "Ünï\x1ccode 海\n" * 50, " three", "4\n"]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    # Two frames, as `cat a.zst b.zst` or pzstd make them.
    ".zst": lambda data: b"".join(zst(half) for half in (data[:99], data[99:])),
}


def as_text(path: Path) -> bytes:
    return "\0".join(DOCUMENTS).encode()


def as_jsonl(path: Path) -> bytes:
    return b"\n".join(json.dumps({"id": i, "text": text}).encode() for i, text in enumerate(DOCUMENTS)) + b"\n\n"


def as_parquet(path: Path) -> bytes:
    pa.parquet.write_table(pa.table({"id": range(4), "text": DOCUMENTS}), path, row_group_size=3)
    return path.read_bytes()


def as_arrow(path: Path) -> bytes:
    table = pa.table({"text": DOCUMENTS})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path.read_bytes()


def as_arrow_file(path: Path) -> bytes:
    table = pa.table({"text": pa.array(DOCUMENTS, type=pa.large_string())})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path.read_bytes()


KINDS = [("txt", as_text), ("jsonl", as_jsonl), ("parquet", as_parquet), ("arrow", as_arrow), ("arrow", as_arrow_file)]


@pytest.mark.parametrize("packing", list(PACK))
@pytest.mark.parametrize(("ending", "write"), KINDS, ids=[f"{e}-{w.__name__}" for e, w in KINDS])
def test_every_kind_and_packing(
    tmp_path: Path, make: Callable[..., Corpus], texts: Callable[..., list[str]], ending: str, write: Any, packing: str
) -> None:
    path = tmp_path / f"data.{ending}{packing}"
    path.write_bytes(PACK[packing](write(tmp_path / "plain")))
    options = {"separator": "\0"} if ending == "txt" else {}
    assert texts(make(path, **options)) == DOCUMENTS


def test_every_packed_file_that_is_cut_short(tmp_path: Path) -> None:
    for packing, pack in PACK.items():
        for kept in (-3, 20):
            path = tmp_path / f"cut.txt{packing}"
            path.write_bytes(pack(as_text(path))[:kept])
            if packing:
                with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: expected {packing[1:]} data, got"):
                    list(pieces(Source(path, "x"), Settings(separator="\0")))


@pytest.mark.parametrize("ending", ["txt.xz", "txt.gz", "txt.bz2", "txt.zst", "parquet", "arrow"])
def test_what_is_not_what_its_name_says(tmp_path: Path, make: Callable[..., Corpus], ending: str) -> None:
    path = tmp_path / f"data.{ending}"
    path.write_bytes(b"This is plain text, whatever its name says.")
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: expected"):
        make(path)


@pytest.mark.parametrize("packing", ["", ".xz"])
@pytest.mark.parametrize(
    ("data", "offset", "reason"),
    [
        (b"a" * 300_000 + b"\xff" + b"b", 300_000, "invalid start byte"),
        (b"a" * 10 + b"\0" + b"b", 10, "a NUL character"),
        (b"a" * (cuts_module.BLOCK - 1) + "海".encode()[:2], cuts_module.BLOCK - 1, "unexpected end of data"),
        (b"a" * (cuts_module.BLOCK - 1) + b"\xe6b", cuts_module.BLOCK - 1, "invalid continuation byte"),
    ],
)
def test_not_text(
    tmp_path: Path, make: Callable[..., Corpus], data: bytes, offset: int, reason: str, packing: str
) -> None:
    path = tmp_path / f"data.bin{packing}"
    path.write_bytes(PACK[packing](data))
    with pytest.raises(
        ValueError, match=rf"{re.escape(str(path))}: expected UTF-8 text, got {reason} at byte {offset}"
    ):
        make(path)
    assert not (tmp_path / "made0" / "index.json").exists()


def test_a_character_across_blocks_and_a_byte_order_mark(
    tmp_path: Path, make: Callable[..., Corpus], texts: Callable[..., list[str]]
) -> None:
    text = "a" * (cuts_module.BLOCK - 4) + "海海" * 200_000
    (tmp_path / "data.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert texts(make(tmp_path / "data.txt")) == [text]


@pytest.mark.parametrize("block", [*range(1, 14), 1 << 18])
def test_separators_and_lines_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(cuts_module, "BLOCK", block)
    documents = [f"{i}<E" * (i % 7) + "é\n" for i in range(90)]
    (tmp_path / "data.txt").write_text("<END>".join(documents))

    def read(**how: Any) -> str:
        found = pieces(Source(tmp_path / "data.txt", "x"), Settings(**how))
        return "".join(piece.decode() + ("|" if ends else "") for piece, ends in found)

    assert read(separator="<END>") == "|".join(documents) + "|"
    assert read() == "<END>".join(documents) + "|"
    assert read(split_before="^<END>8") == "<END>".join(documents).replace("<END>8", "|<END>8") + "|"


def test_split_before(tmp_path: Path, make: Callable[..., Corpus], texts: Callable[..., list[str]]) -> None:
    wiki = [" = First = \n \n Text . \n = = A section = = \n more \n \n", " = Second title = \n body \n"]
    (tmp_path / "wiki.txt").write_text(" \n" + "".join(wiki))
    assert texts(make(tmp_path / "wiki.txt", split_before="^ = [^=].* = $")) == wiki


def test_empty_documents_are_left_out(
    tmp_path: Path, make: Callable[..., Corpus], texts: Callable[..., list[str]]
) -> None:
    (tmp_path / "data.txt").write_text("\0\0a\0 \n\t\0b\0")
    assert texts(make(tmp_path / "data.txt", separator="\0")) == ["a", "b"]
    (tmp_path / "data.jsonl").write_text('{"text": null}\n{"text": "c"}\n{"text": ""}\n')
    assert texts(make(tmp_path / "data.jsonl")) == ["c"]


def save_to_disk(path: Path, documents: list[str], files: int = 2) -> None:
    """Write what `Dataset.save_to_disk` writes."""
    path.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for number, name in enumerate(names):
        table = pa.table({"text": documents[number::files], "meta": [1] * len(documents[number::files])})
        with pa.ipc.new_stream(str(path / name), table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string", "_type": "Value"}}}))


def test_a_hugging_face_dataset(tmp_path: Path, make: Callable[..., Corpus], texts: Callable[..., list[str]]) -> None:
    save_to_disk(tmp_path / "set", DOCUMENTS)
    assert texts(make(tmp_path / "set")) == DOCUMENTS[0::2] + DOCUMENTS[1::2]
    (tmp_path / "set" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ValueError, match=r"data-00001-of-00002.arrow: named by state.json but not there"):
        make(tmp_path / "set")


def test_a_dict_of_hugging_face_datasets(
    tmp_path: Path, make: Callable[..., Corpus], texts: Callable[..., list[str]]
) -> None:
    for name, documents in (("train", ["a", "b"]), ("valid", ["c"]), ("test", ["d"])):
        save_to_disk(tmp_path / "set" / name, documents, files=1)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "valid", "test"]}')
    corpus = make(tmp_path / "set", validation=None)
    assert corpus.splits == ("train", "validation", "test")
    assert [texts(corpus, split) for split in corpus.splits] == [["a", "b"], ["c"], ["d"]]
    with pytest.raises(
        ValueError, match=r"validation: 0.1 asked for, but the source set/valid/.* is validation already"
    ):
        make(tmp_path / "set", validation=0.1)


def test_a_hugging_face_dataset_in_its_cache(tmp_path: Path, make: Any, texts: Any) -> None:
    (tmp_path / "set").mkdir()
    for name, documents in (("x-train-00000-of-00002", ["a"]), ("x-train-00001-of-00002", ["b"]), ("x-test", ["c"])):
        with pa.ipc.new_stream(str(tmp_path / "set" / f"{name}.arrow"), pa.schema([("text", pa.string())])) as writer:
            writer.write_table(pa.table({"text": documents}))
    (tmp_path / "set" / "dataset_info.json").write_text("{}")
    (tmp_path / "set" / "cache-0123.arrow").write_bytes(b"not to be read")
    corpus = make(tmp_path / "set")
    assert (texts(corpus), texts(corpus, "test")) == (["a", "b"], ["c"])


def test_a_dataset_with_indices_is_refused(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "set", DOCUMENTS)
    state = json.loads((tmp_path / "set" / "state.json").read_text())
    (tmp_path / "set" / "state.json").write_text(json.dumps({**state, "_indices_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(ValueError, match=r"state.json: .* flatten_indices\(\)"):
        expand(tmp_path / "set")


def test_a_folder_is_walked_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a.txt", ".hidden", ".git/x.txt", "__pycache__/x.txt", "a/b/c.jsonl"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("x")
    files = expand([tmp_path / "in"])
    assert [file.name for file in files] == ["in/a/b/c.jsonl", "in/a/z.txt", "in/a.txt", "in/b.txt"]
    assert [file.kind for file in files] == ["jsonl", "text", "text", "text"]


def test_files_held_out_of_a_folder(
    folder: Path, make: Callable[..., Corpus], texts: Callable[..., list[str]], stories: list[str]
) -> None:
    corpus = make(folder, validation=[folder / "03.txt", folder / "07.txt"])
    assert texts(corpus, "validation") == [stories[3], stories[7]]
    assert texts(corpus) == [text for i, text in enumerate(stories) if i not in (3, 7)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"texts": "a"}', r"line 2: expected the text_key 'text', got 'texts'; did you mean 'texts'"),
        ('{"text": 3}', r"line 2: expected a string under 'text', got int"),
        ('{"text": "a"', r"line 2: expected a JSON object, got"),
        ("[1]", r"line 2: expected a JSON object, got list"),
        ('{"text": "\\ud800"}', r"line 2: expected text under 'text', got half a surrogate pair"),
    ],
)
def test_wrong_json_lines(tmp_path: Path, make: Callable[..., Corpus], line: str, said: str) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"data.jsonl, {said}"):
        make(tmp_path / "data.jsonl")


def test_a_wrong_column(tmp_path: Path, make: Callable[..., Corpus], texts: Callable[..., list[str]]) -> None:
    path = tmp_path / "data.parquet"
    pa.parquet.write_table(pa.table({"content": ["a"], "n": [1]}), path)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: expected the text_key 'text', got 'content', 'n'"):
        make(path)
    with pytest.raises(ValueError, match=r"row 0: expected a string under 'n', got int"):
        make(path, text_key="n")
    assert texts(make(path, text_key="content")) == ["a"]


def test_missing_and_doubled_sources(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"sources: .*04.text is not there; did you mean '04.txt'"):
        expand(folder / "04.text")
    with pytest.raises(ValueError, match=r"sources: .*04.txt is named twice"):
        expand([folder, folder / "04.txt"])
    with pytest.raises(TypeError, match="sources: expected a path, got 3"):
        expand([3])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"sources: the folder .*empty holds no files"):
        expand(tmp_path / "empty")


def test_a_missing_package_is_named(tmp_path: Path, make: Callable[..., Corpus], monkeypatch: Any) -> None:
    (tmp_path / "data.txt.zst").write_bytes(zst(b"text"))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"data.txt.zst needs pyarrow: pip install pyarrow"):
        make(tmp_path / "data.txt.zst")


def test_the_standard_library(tmp_path: Path) -> None:
    files = standard_library()
    assert 3e6 < sum(path.stat().st_size for path in files) < 50e6
    assert not {"test", "site-packages"} & {part for path in files for part in path.parts[-4:-1]}
    corpus = prepare(None, tmp_path / "out")
    assert len(corpus["train"].bytes) + len(corpus["validation"].bytes) <= len(files)  # empty files are left out
    assert len(corpus["validation"].bytes) > 5
    assert len(corpus["train"]) > 10 * len(corpus["validation"])
    assert "standard-library/argparse.py" in (corpus.directory / corpus.index.sources.file).read_text()
    tokens = corpus["train"].read(0, len(corpus["train"])).astype("<u2").tobytes()
    tokens += corpus["validation"].read(0, len(corpus["validation"])).astype("<u2").tobytes()
    wanted = next(path for path in files if path.name == "argparse.py").read_bytes()
    assert np.frombuffer(wanted, np.uint8).astype("<u2").tobytes() in tokens
