"""`lengthen eval` against a loop that shares nothing with it: the model written out densely, one window at a time.

Weights are read from the file by their names. Attention is a softmax over a matrix of scores with an explicit mask, in
float64; the command computes in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from lengthen.cli.main import main
from lengthen.config import from_table
from lengthen.data import Corpus
from lengthen.training import World, train

HEADS, LAYERS, WIDTH, TRAINED = 4, 2, 32, 16
Sees = Callable[[Tensor, Tensor], Tensor]  # from the positions of queries and keys: which keys are seen


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    model = {"vocab_size": 258, "layers": LAYERS, "width": WIDTH, "heads": HEADS, "train_length": TRAINED}
    table = {"model": model, "train": {"steps": 30, "batch": 8}, "optimizer": {"lr": 0.01}, "schedule": {"warmup": 5}}
    train(from_table(table | {"evaluation": {"every": 0}}, "test"), corpus, out, World(0, 1, torch.device("cpu")))
    return out


class Plain:
    """An ALiBi model, from its weights alone."""

    def __init__(self, run: Path) -> None:
        (file,) = run.glob("checkpoints/*/model.safetensors")
        self.w = {name: tensor.double() for name, tensor in load_file(file).items()}

    def losses(self, ids: Tensor, sees: Sees) -> Tensor:
        """Return the loss of predicting ids[1:] from those before."""
        x = self.first(ids[:-1])
        place = torch.arange(len(ids) - 1)
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)], dtype=torch.float64)
        hidden = ~sees(place[:, None], place[None])
        bias = (-slopes[:, None, None] * (place[:, None] - place[None])).masked_fill(hidden, -math.inf)
        for n in range(LAYERS):
            block = f"blocks.{n}."
            y = self.linear(self.norm(x, block + "attention_norm"), block + "attention.qkv")
            q, k, v = (part.view(-1, HEADS, WIDTH // HEADS).transpose(0, 1) for part in y.split(WIDTH, dim=1))
            weights = (q @ k.mT / math.sqrt(WIDTH // HEADS) + bias).softmax(-1)
            x = x + self.linear((weights @ v).transpose(0, 1).flatten(1), block + "attention.out")
            y = F.gelu(
                self.linear(self.norm(x, block + "feed_forward_norm"), block + "feed_forward.up"), approximate="tanh"
            )
            x = x + self.linear(y, block + "feed_forward.down")
        return F.cross_entropy(self.last(self.norm(x, "norm")), ids[1:], reduction="none")

    def first(self, ids: Tensor) -> Tensor:
        return self.w["embedding.weight"][ids] * math.sqrt(WIDTH)

    def last(self, x: Tensor) -> Tensor:
        return x @ self.w["embedding.weight"].T

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[name + ".weight"], self.w[name + ".bias"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, [WIDTH], self.w[name + ".weight"], self.w[name + ".bias"])


def causal(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def blocks(i: Tensor, j: Tensor) -> Tensor:
    size = TRAINED // 2
    return (j <= i) & (j // size >= i // size - 1)


def pieces(text: Tensor, length: int) -> Iterator[tuple[Tensor, int]]:
    """Yield pieces with the token after them, and how many of their losses count."""
    for start in range(0, len(text) - 1, length):
        piece = text[start : start + length + 1]
        yield piece, len(piece) - 1


def slid(text: Tensor, length: int, stride: int) -> Iterator[tuple[Tensor, int]]:
    yield text[: length + 1], length
    for end in range(length + stride, len(text) - 1 + stride, stride):
        start = end - length
        yield text[start : min(end, len(text) - 1) + 1], stride - max(0, end - (len(text) - 1))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonoverlapping", []),
        ("sliding", ["--protocol", "sliding", "--stride", "3"]),
        ("blockwise", ["--protocol", "blockwise"]),
        ("per document", ["--per-document", "90"]),
    ],
)
def test_perplexities_are_those_of_a_plain_loop(trained: Path, corpus: Corpus, name: str, words: list[str]) -> None:
    length, tokens, model = 64, corpus["validation"], Plain(trained)
    text = torch.from_numpy(tokens.read(0, len(tokens)))
    if name == "sliding":
        windows, sees = list(slid(text, length, 3)), causal
    elif name == "per document":
        ends = tokens.documents.tolist()
        documents = [text[start:end][:91] for start, end in pairwise(ends)]
        windows, sees = [one for document in documents for one in pieces(document, length)], causal
    else:
        windows, sees = list(pieces(text, length)), blocks if name == "blockwise" else causal
    losses = torch.cat([model.losses(window, sees)[-count:] for window, count in windows])
    assert main(["eval", str(trained), "--lengths", str(length), "--device", "cpu", *words]) == 0
    found = json.loads((trained / "evaluation.jsonl").read_text().splitlines()[-1])
    assert (found["length"], found["tokens"], found["precision"]) == (length, len(losses), "float32")
    assert found["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-6)
