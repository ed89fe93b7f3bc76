"""The process that turns pieces of text into tokens, or trains a tokenizer on them; it is run as a script.

As a script, and importing nothing of this package, it starts in a fraction of the time and memory that torch would
take, and it never runs the caller's own main module again, as multiprocessing would. It reads jobs from its standard
input and answers each with a line of JSON; when its parent is gone the input ends, and so does it.

A job is a line of JSON, then the pieces' bytes joined. A part, which is what it writes for a job, is

    int64 [pieces, 4]   tokens, UTF-8 bytes, words, whether the document ends here; little endian
    tokens              of the dtype asked for, little endian; each document's end token after it
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

import numpy as np


class Encoder:
    """Encodes parts for one tokenizer: `settings` has kind, path, end_id and dtype."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.dtype = np.dtype(settings["dtype"]).newbyteorder("<")
        self.end_id: int | None = settings["end_id"]
        self.inner: Any = None
        if settings["kind"] != "bytes":
            self.inner = importlib.import_module("tokenizers").Tokenizer.from_file(settings["path"])
            self.inner.no_truncation()
            self.inner.no_padding()
            self.inner.encode_special_tokens = True  # a document may speak of <|end|> without ending

    def ids(self, piece: bytes, text: str) -> np.ndarray[Any, Any]:
        """Return the ids of one piece."""
        if self.inner is None:
            return np.frombuffer(piece, dtype=np.uint8).astype(self.dtype)
        # The batch call of one: it leaves out the offsets, which cost more than the ids.
        return np.array(self.inner.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=self.dtype)

    def part(self, pieces: list[tuple[bytes, bool]], out: str) -> dict[str, Any]:
        """Encode pieces, write the part under a temporary name, and rename it when it is on the disk."""
        rows = np.zeros((len(pieces), 4), dtype="<i8")
        arrays = []
        end = np.array([] if self.end_id is None else [self.end_id], dtype=self.dtype)
        for number, (piece, ends) in enumerate(pieces):
            text = piece.decode("utf-8")
            ids = self.ids(piece, text)
            arrays += [ids, end] if ends else [ids]
            rows[number] = (len(ids) + (len(end) if ends else 0), len(piece), len(text.split()), ends)
        data = rows.tobytes() + np.concatenate(arrays).tobytes()
        write_whole(out, data)
        return {
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
            "pieces": len(pieces),
            "tokens": int(rows[:, 0].sum()),
        }


def write_whole(path: str, data: bytes) -> None:
    """Write a file so that under its name there is all of it or nothing."""
    temporary = f"{path}.{os.getpid()}.tmp"  # a worker whose parent was killed may still be writing the same part
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def train(texts: Iterator[str], vocab_size: int, special: list[str], out: str) -> None:
    """Train a byte-level BPE on texts and write its tokenizer.json. The same texts give the same bytes."""
    package = importlib.import_module("tokenizers")
    inner = package.Tokenizer(package.models.BPE())
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair seen once is that document's, not the language's
        special_tokens=special,
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),  # every byte, so every text has ids
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer=trainer)
    write_whole(out, inner.to_str(pretty=True).encode("utf-8"))


def _texts(stream: IO[bytes]) -> Iterator[str]:
    """Yield texts, each after its length in eight bytes, until a length of 0."""
    while size := int.from_bytes(_exactly(stream, 8), "little"):
        yield _exactly(stream, size).decode("utf-8")


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        sys.exit(1)  # the parent is gone
    return data


def main(stream: IO[bytes], answers: IO[bytes]) -> None:
    """Serve jobs until the input ends. An error is an answer too: the parent raises it."""
    encoder: Encoder | None = None
    while line := stream.readline():
        job = json.loads(line)
        try:
            if job["do"] == "train":
                train(_texts(stream), job["vocab_size"], job["special"], job["out"])
                answer: dict[str, Any] = {}
            elif job["do"] == "settings":
                encoder = Encoder(job["settings"])
                answer = {}
            else:
                assert encoder is not None
                pieces = [(_exactly(stream, size), ends) for size, ends in job["pieces"]]
                answer = encoder.part(pieces, job["out"])
        except Exception as problem:
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    try:
        main(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:  # the parent was killed; what is written is written, and nobody is there to be told
        os._exit(1)
