"""Turning pairs of features by an angle that grows with the position: what rotary and xPos share.

    (x₀, x₁)  →  (x₀·cos pθ − x₁·sin pθ,  x₁·cos pθ + x₀·sin pθ),    θ_i = base^(−2i/head_dim) for pair i

A query rotated by iθ and a key rotated by jθ have a product that depends on i − j alone. Angles are computed in
float64, because in float32 pθ is off by 0.06 rad at position 10⁶; the rotation itself is done in float32 at
least.

The two layouts of the pairs are the same method on permuted features: `halves` pairs feature f with f +
head_dim/2 (Llama), `neighbours` pairs 2f with 2f + 1 (the papers).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthen.checks import choice, number
from lengthen.positions import fused
from lengthen.positions.method import Placed, PositionMethod, check_positions


class Rotation(PositionMethod):
    """A rotation of queries and keys; `frequencies` and `magnitude` are for subclasses to change."""

    magnitude = 1.0  # multiplies every pair that is rotated

    def __init__(self, *, heads: int, head_dim: int, width: int, base: float, pairs: str) -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width)
        if head_dim % 2:
            raise ValueError(f"head_dim: expected an even number (features are rotated in pairs), got {head_dim}")
        self.base = number(f"{self.name}.base", base, above=1)
        self.pairs = choice(f"{self.name}.pairs", pairs, ("halves", "neighbours"))

    def frequencies(self, device: torch.device) -> Tensor:
        """Return θ for each pair, float64 `[head_dim / 2]`."""
        pair = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        return torch.pow(self.base, -pair / self.head_dim)

    def frequencies_at(self, positions: Tensor) -> Tensor:
        """Return θ for each pair in a pass over these positions."""
        return self.frequencies(positions.device)

    def at(self, positions: Tensor, dtype: torch.dtype, two_sided: bool, cached: int | None = None) -> Placed:
        """Return the angles of these positions: torch.compile would otherwise compute them in every layer."""
        placed = super().at(positions, dtype, two_sided, cached)
        if type(self).rotate is not Rotation.rotate:  # somebody's own
            return placed
        angles = self._tables(positions, torch.promote_types(dtype, torch.float32))
        return Rotated(self, positions, placed.bias, placed.decay, torch.stack((*angles, *angles)), self.pairs)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x rotated by its positions, in x's dtype."""
        check_positions(x, positions, 4, ("head_dim", self.head_dim))
        return rotate_pairs(x, *self._tables(positions, torch.promote_types(x.dtype, torch.float32)), self.pairs)

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, remembered for the last `positions`: every layer asks with the same tensor."""
        if torch.compiler.is_compiling() or _capturing(positions):
            return self._compute(positions, dtype)
        kept: _Kept | None = self._kept
        if kept is not None and kept.fits(positions, dtype):
            cos, sin = kept.tables
            return cos, sin
        # Made in inference mode, the tables could not be used by a later training step.
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = self._compute(positions, dtype)
            self._kept = _Kept.of(positions, dtype, cos, sin)
        return cos, sin

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin as `rotate_pairs` takes them."""
        theta = self.frequencies_at(positions)
        angle = positions.unsqueeze(-1) * theta
        if positions.dim() == 2:
            angle = angle.unsqueeze(1)
        cos, sin = angle.cos(), angle.sin()
        if self.magnitude != 1:  # of pairs that are rotated
            cos, sin = torch.where(theta > 0, cos * self.magnitude, cos), sin * self.magnitude
        return cos.to(dtype), sin.to(dtype)


@dataclass(frozen=True, eq=False)
class Rotated(Placed):
    """A rotation at the positions of a forward pass.

    `tables` are cos and sin of the queries and of the keys, which differ in xPos: `[4, …]`, as for `rotate_pairs`.
    """

    tables: Tensor
    pairs: str

    def split(self, qkv: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, rotated, and values; on a GPU in one pass, where its kernel knows the layout."""
        tables, pairs = self.tables, self.pairs
        known = tables.is_cuda and pairs == "halves" and tables.dim() == 3 and tables.dtype == torch.float32
        if known and not tables.requires_grad:
            return fused.split(qkv, heads, key_heads, tables)
        q, k, v = (part.transpose(1, 2) for part in torch.split(qkv, [heads, key_heads, key_heads], dim=2))
        return rotate_pairs(q, tables[0], tables[1], pairs), rotate_pairs(k, tables[2], tables[3], pairs), v


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> Tensor:
    """Return x `[batch, heads, length, head_dim]` rotated, in x's dtype.

    By cosines and sines `[length, head_dim / 2]` or `[batch, 1, length, head_dim / 2]`.
    """
    wide = x.to(cos.dtype)
    # Projections give heads that stand side by side in memory. What is rotated keeps that order: in any other, the
    # backward pass of a compiled layer takes several times as long to put the gradients together again.
    side_by_side = x.stride(1) < x.stride(2)
    if side_by_side:
        wide, cos, sin = wide.transpose(1, 2), _across_heads(cos), _across_heads(sin)
    if pairs == "halves":
        a, b = wide.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = wide[..., 0::2], wide[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    rotated = rotated.to(x.dtype)
    return rotated.transpose(1, 2) if side_by_side else rotated


def _across_heads(table: Tensor) -> Tensor:
    """Return a table for features in the order batch, length, heads."""
    return table.unsqueeze(1) if table.dim() == 2 else table.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class _Kept:
    """The tables of one `positions` tensor, while that tensor lives and until it is changed in place."""

    positions: weakref.ref[Tensor]
    version: int | None
    values: Tensor | None
    dtype: torch.dtype
    tables: list[Tensor]

    @classmethod
    def of(cls, positions: Tensor, dtype: torch.dtype, cos: Tensor, sin: Tensor) -> _Kept | None:
        """Return the entry for these tables, or None where a change of `positions` could not be noticed."""
        tables = [cos, sin]
        # The tables are much larger than the positions they are for, so they go when those go.
        alive = weakref.ref(positions, lambda _: tables.clear())
        if not positions.is_inference():
            return cls(alive, positions._version, None, dtype, tables)
        # Tensors of inference mode count no versions; on the CPU it is cheap to compare their values.
        if positions.device.type == "cpu":
            return cls(alive, None, positions.clone(), dtype, tables)
        return None

    def fits(self, positions: Tensor, dtype: torch.dtype) -> bool:
        """Whether the tables are those of this tensor as it is now."""
        if self.positions() is not positions or self.dtype != dtype:
            return False
        if self.values is not None:
            return torch.equal(self.values, positions)
        return self.version == positions._version


def _capturing(positions: Tensor) -> bool:
    """Whether a CUDA graph is being recorded: when replayed, it must compute the tables itself."""
    return positions.is_cuda and torch.cuda.is_current_stream_capturing()
