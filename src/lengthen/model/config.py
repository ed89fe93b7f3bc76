"""What a model is made of: one dataclass, checked where it is made, the same in a preset and in a checkpoint.

`train_length` is the number of tokens that the model is trained on at once. At what lengths it is used afterwards is
not a property of the model, and is never called by that name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lengthen.checks import choice, describe, flag, number, whole_number
from lengthen.positions import build
from lengthen.positions.method import PositionMethod

KINDS = ("decoder", "encoder")
NORMS = ("layer", "rms")
ACTIVATIONS = ("gelu", "relu", "swiglu")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a transformer.

    >>> from lengthen import ModelConfig
    >>> ModelConfig(vocab_size=258, layers=2, width=64, heads=4, train_length=32, positions="rotary").parameters
    116608
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    train_length: int
    positions: str = "alibi"  # a name that lengthen.positions.build knows, or several joined by '+'
    position_options: dict[str, Any] = field(default_factory=dict)
    kind: str = "decoder"  # or "encoder": every token sees every other, and masked ones are predicted
    key_heads: int | None = None  # fewer than heads: grouped queries; None: as many
    head_dim: int | None = None  # None: width / heads
    feed_forward: int | None = None  # None: 4·width, or 8/3·width with SwiGLU, whose third matrix makes up for it
    norm: str = "layer"
    norm_epsilon: float = 1e-5
    activation: str = "gelu"
    biases: bool = True
    tied: bool = True  # the output shares the embedding's weights
    scale_embeddings: bool = True  # by √width, so that they are of a size with sinusoids added to them
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "train_length"):
            whole_number(f"model.{name}", getattr(self, name), at_least=1)
        for name in ("key_heads", "head_dim", "feed_forward"):
            if getattr(self, name) is not None:
                whole_number(f"model.{name}", getattr(self, name), at_least=1)
        choice("model.kind", self.kind, KINDS)
        choice("model.norm", self.norm, NORMS)
        choice("model.activation", self.activation, ACTIVATIONS)
        for name in ("biases", "tied", "scale_embeddings"):
            flag(f"model.{name}", getattr(self, name))
        number("model.norm_epsilon", self.norm_epsilon, above=0)
        if not 0 <= number("model.dropout", self.dropout) < 1:
            raise ValueError(f"model.dropout: expected a share from 0 to below 1, got {self.dropout}")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"model.heads: expected a number that divides width={self.width} (or give head_dim), got {self.heads}"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"model.key_heads: expected a number that divides heads={self.heads}, got {self.key_value_heads}"
            )
        if not isinstance(self.position_options, dict):
            raise TypeError(f"model.position_options: expected a table, got {describe(self.position_options)}")
        if not isinstance(self.positions, str):
            raise TypeError(f"model.positions: expected the name of a position method, got {describe(self.positions)}")
        try:
            self._blueprint()
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"model.positions = {self.positions!r}: {problem}") from None

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.head_dim if self.head_dim is not None else self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and of values."""
        return self.key_heads if self.key_heads is not None else self.heads

    @property
    def hidden_width(self) -> int:
        """Features between the two matrices of a feed-forward layer."""
        if self.feed_forward is not None:
            return self.feed_forward
        # A multiple of 64 keeps matrix units busy.
        return -(-8 * self.width // (3 * 64)) * 64 if self.activation == "swiglu" else 4 * self.width

    @property
    def longest(self) -> int | None:
        """How many positions the model can tell apart, if it learns a vector for each; None: any number."""
        if "learned" not in (part.strip() for part in self.positions.split("+")):
            return None
        found: int = self.position_options.get("max_length", self.train_length)
        return found

    def position_method(self) -> PositionMethod:
        """Return the position method, new."""
        sizes = {"heads": self.heads, "head_dim": self.head_width, "width": self.width}
        table = {} if self.longest is None else {"max_length": self.longest}
        return build(self.positions, **sizes, **{**self.position_options, **table})

    def _blueprint(self) -> PositionMethod:
        """Return the position method without memory: to ask it something, with no random number drawn."""
        with torch.device("meta"):
            return self.position_method()

    @property
    def parameters(self) -> int:
        """How many numbers the model learns, those of its position method among them."""
        learned = sum(parameter.numel() for parameter in self._blueprint().parameters())
        norms = (2 * self.layers + 1) * self.width * (2 if self.norm == "layer" and self.biases else 1)
        outputs = 0 if self.tied else self.vocab_size * self.width
        return self.vocab_size * self.width + outputs + self.layers * (self._matrices + self._biases) + norms + learned

    @property
    def _matrices(self) -> int:
        """Parameters of one layer's matrices."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.key_value_heads)
        return attention + self.width * self.hidden_width * (3 if self.activation == "swiglu" else 2)

    @property
    def _biases(self) -> int:
        if not self.biases:
            return 0
        projections = self.head_width * (self.heads + 2 * self.key_value_heads) + self.width
        return projections + self.hidden_width * (2 if self.activation == "swiglu" else 1) + self.width

    def flops_per_token(self, length: int) -> float:
        """Return the floating-point operations that one token of training needs, forward and backward.

        Six for each parameter of a matrix product (a multiplication and an addition, once forward and twice backward),
        and the two products of attention over the keys that a token sees: half of them on average in a decoder, all in
        an encoder. Nothing is counted twice, whatever a program recomputes.
        """
        seen = (length + 1) / 2 if self.kind == "decoder" else length
        scores = 2 * self.heads * self.head_width * seen
        return 6 * (self.layers * (self._matrices + scores) + self.vocab_size * self.width)
