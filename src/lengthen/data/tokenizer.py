"""Text to ids and back: bytes, a byte-level BPE, or any `tokenizer.json` of the `tokenizers` package.

    bytes   ids 0 … 255 are the bytes of UTF-8, 256 is <|end|>, 257 is <|mask|>; it needs no file and no package
    bpe     byte-level BPE trained on the corpus, with the same two special tokens
    json    an existing tokenizer.json; its end and mask tokens are found by their usual names

Text is text: a document that holds the characters `<|end|>` gets the ids of these characters, never the special
token, or any page about tokenizers would break documents in two.
"""

from __future__ import annotations

import importlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lengthen.checks import nearest
from lengthen.io import write_text

END, MASK = "<|end|>", "<|mask|>"
END_NAMES = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")
MASK_NAMES = (MASK, "<mask>", "[MASK]", "<|mask_token|>")
BYTE_VOCAB_SIZE, BYTE_END, BYTE_MASK = 258, 256, 257


class Tokenizer:
    """Bytes, or what a `tokenizer.json` says: nothing added to a text, cut off or padded."""

    def __init__(
        self, path: Path | None = None, name: str = "bytes", end_token: str | None = None, mask_token: str | None = None
    ) -> None:
        self.path, self.name, self.vocab_size = path, name, BYTE_VOCAB_SIZE
        self.end_id: int | None = BYTE_END
        self.mask_id: int | None = BYTE_MASK
        self._inner: Any = None
        if path is None:
            return
        package = optional("tokenizers", "a tokenizer.json")
        with _saying(f"{path}: expected a tokenizer.json, got"):
            self._inner = package.Tokenizer.from_file(str(path))
        if dropout := getattr(self._inner.model, "dropout", None):
            raise ValueError(f"{path}: expected no dropout, which gives other tokens each time, got {dropout:.3g}")
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        # One more than the largest id: what an embedding needs, gaps included.
        self.vocab_size = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size == 0:
            raise ValueError(f"{path}: expected a tokenizer.json with tokens, got one without any")
        self.end_id = self._find("end_token", end_token, END_NAMES)
        self.mask_id = self._find("mask_token", mask_token, MASK_NAMES)

    def _find(self, key: str, asked: str | None, usual: Iterable[str]) -> int | None:
        """Return the id of the token asked for, or else of the first of the usual names that there is."""
        ids = [self.id_of(name) for name in (usual if asked is None else [asked])]
        found = next((one for one in ids if one is not None), None)
        if asked is not None and found is None:
            known = [token.content for token in self._inner.get_added_tokens_decoder().values()]
            raise ValueError(f"{key}: {self.path} has no token {asked!r}{nearest(asked, known)}")
        return found

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name; None if there is none of it, and among bytes."""
        found = None if self._inner is None else self._inner.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with no special token added; the names of special tokens in it are text."""
        if self._inner is None:
            return list(text.encode())
        with _saying(f"tokenizer: {self.path} cannot encode this text:"):
            # The batch call of one: it leaves out the offsets, which cost more than the ids.
            return list(self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are written out by name, bytes that are no UTF-8 as U+FFFD."""
        if self._inner is not None:
            return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))
        special = {BYTE_END: END.encode(), BYTE_MASK: MASK.encode()}
        return b"".join(special[i] if i in special else bytes([i]) for i in map(int, ids)).decode("utf-8", "replace")

    def cuttable(self) -> bool:
        """Return whether long texts may be cut as `readers` cuts them: bytes, and BPE with GPT-2's pattern."""
        if self._inner is None:
            return True
        said = json.loads(self._inner.to_str())
        splitting = said["pre_tokenizer"] or {}
        return (
            said["model"]["type"] == "BPE"
            and not said["normalizer"]
            and splitting.get("type") == "ByteLevel"
            and not splitting["add_prefix_space"]
            and splitting["use_regex"]
            and all(token["special"] for token in said["added_tokens"])
        )


def train(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on texts and write its tokenizer.json. The same texts give the same bytes."""
    package = optional("tokenizers", "tokenizer='bpe'")
    inner = package.Tokenizer(package.models.BPE())
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair seen once is that document's, not the language's
        special_tokens=[END, MASK],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),  # every byte, so every text has ids
        show_progress=False,
    )
    _train(inner, trainer, texts)
    write_text(path, inner.to_str(pretty=True))


def _train(inner: Any, trainer: Any, texts: Iterable[str]) -> None:
    """Train in another thread: it takes a minute, in which this one would not see Ctrl-C."""
    stopped, failed = threading.Event(), []

    def run() -> None:
        try:
            inner.train_from_iterator(itertools.takewhile(lambda _: not stopped.is_set(), texts), trainer=trainer)
        except BaseException as problem:
            failed.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        stopped.set()
        thread.join(1.0)  # it ends when it asks for the next text; later it has all of them, and ends with the process
        raise
    if failed:
        raise failed[0]


@contextmanager
def _saying(message: str) -> Iterator[None]:
    """Make a ValueError of what the package raises: bare Exceptions, and of a Rust panic one that is no Exception."""
    try:
        yield
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        raise ValueError(f"{message} {problem}") from None


def optional(package: str, what: str) -> Any:
    """Import a package of an extra, or say what needs it and how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as problem:
        raise ImportError(f"{what} needs {package}: pip install {package} ({problem})") from None
