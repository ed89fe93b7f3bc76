"""Sandwich: the product of two sinusoidal embeddings as a bias (Chi et al., 2022, arXiv 2212.10356).

    bias_h(d) = (Σ_i cos(d / 10000^(2i/dim)) − dim/2) / (8h/heads),    i = 0 … dim/2 − 1,  h = 1 … heads

The sum is p_m·p_n, the inner product of the sinusoidal embeddings of two positions d apart. Taking away
dim/2, its value at distance 0, changes no softmax and puts the bias at 0 there. Nothing is learned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lengthen.attention.biases import Table
from lengthen.checks import whole_number
from lengthen.positions.method import PositionMethod

CHUNK = 1 << 21  # float64 numbers held at once: 16 MiB


class Sandwich(PositionMethod):
    """The product of two sinusoidal embeddings as a bias; nothing is learned."""

    name = "sandwich"

    def __init__(self, *, heads: int, head_dim: int, width: int, dim: int = 128) -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width)
        self.dim = whole_number("sandwich.dim", dim, at_least=2)
        if dim % 2:
            raise ValueError(f"sandwich.dim: expected an even number (a sine and a cosine each), got {dim}")

    def bias(self, max_distance: int) -> Table:
        """Return the bias at every distance, float32; remembered for the longest asked for."""
        length = whole_number("max_distance", max_distance, at_least=0) + 1
        if torch.compiler.is_compiling():
            return Table(self._compute(length))
        kept: Tensor | None = self._kept
        if kept is None or kept.device != self.device or kept.shape[1] < length:
            # To the next power of two: decoding asks for one distance more at each token.
            with torch.inference_mode(False):
                kept = self._compute(1 << (length - 1).bit_length())
            self._kept = kept
        return Table(kept[:, :length].clone())  # a copy, which a caller may change

    def _compute(self, length: int) -> Tensor:
        """Return `[heads, length]`, computed in float64."""
        pair = torch.arange(0, self.dim, 2, dtype=torch.float64, device=self.device)
        frequency = 10000.0 ** (-pair / self.dim)
        head = torch.arange(1, self.heads + 1, dtype=torch.float64, device=self.device).unsqueeze(1)
        table = torch.empty(self.heads, length, dtype=torch.float32, device=self.device)
        step = max(1, CHUNK // (self.dim // 2))
        for start in range(0, length, step):
            distance = torch.arange(start, min(start + step, length), dtype=torch.float64, device=self.device)
            curve = (distance.unsqueeze(1) * frequency).cos().sum(dim=1) - self.dim / 2
            table[:, start : start + step] = curve / (8 * head / self.heads)
        return table
