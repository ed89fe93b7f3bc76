"""Results of evaluations, each with how it was measured: an append-only file of JSON lines."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from lengthen import io
from lengthen.model.loss import perplexity

FILE = "evaluation.jsonl"


class Keyed:
    """A dataclass that says what is measured; what derives from it adds what was found."""

    @property
    def key(self) -> str:
        """What makes it the same measurement as another."""
        said = next(kind for kind in reversed(type(self).__mro__) if is_dataclass(kind))
        return json.dumps([getattr(self, field.name) for field in fields(said)], sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Measured(Keyed):
    """What is measured: two results of the same are of one number."""

    weights: str  # the sha256 of the model's file
    position_options: dict[str, Any]  # as the model was read, which may differ from how it was trained
    data: str  # the corpus' fingerprint
    split: str
    document_mask: bool
    protocol: str
    length: int
    stride: int
    block: int | None
    per_document: int | None
    targets: int  # tokens that were come to: all of them are scored, but of an encoder and at the borders of documents
    precision: str


@dataclass(frozen=True, kw_only=True)
class Result(Measured):
    """The loss of one model on one text at one length under one protocol."""

    positions: str
    train_length: int
    task: str  # what is predicted: "next tokens" by a decoder, "masked tokens" by an encoder
    checkpoint: str
    step: int
    corpus: str  # its folder
    tokens: int  # scored
    documents: int  # that those tokens are from
    loss: float  # nats per token
    segment_losses: list[float]  # the text in segments: the sum of the losses of each
    segment_counts: list[int]  # and the tokens scored in it
    unigram: float  # the loss of predicting each token from its frequency in the text
    perplexity_per_word: float  # a document that was scored in part counts with that fraction of its words
    bits_per_byte: float  # likewise
    tokens_per_second: float
    seconds: float
    peak_bytes: int | None  # of a GPU's memory that scoring took beside the model
    device: str  # cpu, or the GPU's name
    version: str  # of this package

    @property
    def perplexity(self) -> float:
        """e^loss, per token."""
        return perplexity(self.loss)

    def record(self) -> dict[str, Any]:
        """Return it as a line of the file has it."""
        return {"kind": "evaluation", **asdict(self), "perplexity": self.perplexity}


def read(folder: Path) -> dict[str, Result]:
    """Return the results in a folder by their key; of two with the same key, the later."""
    path, found = folder / FILE, {}
    lines: Iterable[dict[str, Any]] = io.read_lines(path, dict) if path.exists() else ()
    for number, record in enumerate(lines, 1):
        if "targets" not in record:  # from before results said all that they are of: measured again
            continue
        values = {name: value for name, value in record.items() if name not in ("kind", "perplexity")}
        result = io.build(Result, values, f"{path}, line {number}")
        found[result.key] = result
    return found


@contextmanager
def alone(folder: Path, key: str, waits: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Hold a measurement, by its key, against other processes, and give the path of a file for what is done of it.

    A process that comes second calls `waits`, and waits until the first is done or dead: the result may be there then.
    """
    name = f".measuring-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    lock = folder / f"{name}.lock"
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield folder / f"{name}.json"
        finally:
            lock.unlink(missing_ok=True)


def append(folder: Path, result: Result) -> None:
    """Add a result to the folder's file."""
    append_line(folder / FILE, result.record())


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add a line to a file; lines stay whole if others append too, and one left torn is cut off."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
        file.write(io.line_of(record).encode())
