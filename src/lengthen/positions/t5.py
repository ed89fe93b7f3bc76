"""T5's bias: a learned number for each bucket of distances (Raffel et al., 2020, arXiv 1910.10683).

    score[i, j] = q_i·k_j / √d + weight[bucket(i − j), h]

Half of the buckets hold one distance each, 0 … e − 1; the other half grow in proportion, up to
`max_distance`:

    bucket(d) = min(e + ⌊ln(d/e) / ln(max_distance/e) · (buckets − e)⌋, buckets − 1)   for d ≥ e

and every distance past that shares the last. With `bidirectional`, half of all buckets are for keys ahead.
One table serves all layers, and the bias is not scaled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lengthen.attention.biases import Table
from lengthen.checks import flag, whole_number
from lengthen.positions.method import PositionMethod, widen

MOST_BUCKETS, MOST_DISTANCE = 1 << 10, 1 << 24  # borders are found with powers of whole numbers; a table is this long


class T5(PositionMethod):
    """A learned bias for each bucket of distances, buckets growing with distance."""

    name = "t5"
    two_sided: ClassVar[Mapping[str, Any]] = {"bidirectional": True}

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        width: int,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(heads=heads, head_dim=head_dim, width=width)
        self.bidirectional = flag("t5.bidirectional", bidirectional)
        self.buckets = whole_number("t5.buckets", buckets, at_least=4 if bidirectional else 2)
        for name, value, most in (("buckets", buckets, MOST_BUCKETS), ("max_distance", max_distance, MOST_DISTANCE)):
            if whole_number(f"t5.{name}", value) > most:
                raise ValueError(f"t5.{name}: expected at most {most}, got {value}")
        if bidirectional and buckets % 2:
            raise ValueError(f"t5.buckets: expected an even number with bidirectional=True, got {buckets}")
        side = buckets // 2 if bidirectional else buckets
        if max_distance <= side // 2:
            raise ValueError(
                f"t5.max_distance: expected more than {side // 2} (distances below have a bucket each), "
                f"got {max_distance}"
            )
        self.starts = bucket_starts(side, max_distance)
        self.weight = nn.Parameter(torch.empty(buckets, heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every bias to 0: no distance is preferred before training, and no random number is drawn.

        Heads still part ways at once, because their queries and keys differ; and models that differ in
        nothing but the position method start from the same weights for the same seed.
        """
        nn.init.zeros_(self.weight)

    def bias(self, max_distance: int) -> Table:
        """Return the bias of every distance, float32 at least; gradients flow to the buckets.

        The table ends where the last bucket begins, and is extended from there: it is as small at any length.
        """
        whole_number("max_distance", max_distance, at_least=0)
        sides = widen(self.weight).chunk(2) if self.bidirectional else (widen(self.weight),)
        behind, *ahead = (spread(rows, self.starts) for rows in sides)
        return Table(behind, ahead[0] if ahead else None, extended=True)


def bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """Return the smallest distance of each bucket: e + k begins at the first (d/e)^w ≥ (max_distance/e)^k.

    e = buckets // 2 and w = buckets − e; the logarithms of the formula are compared as powers of whole
    numbers. Logarithms in float32, as others take them, round a few distances just short of a boundary over
    it (24 buckets up to 889: distance 621); with the usual 32 up to 128 the two agree at every distance.
    """
    exact = buckets // 2
    wide = buckets - exact
    edges = [max_distance**k * exact ** (wide - k) for k in range(1, wide)]
    return (
        *range(exact + 1),
        *(bisect_left(range(max_distance), edge, key=lambda d: d**wide) for edge in edges),
    )


def spread(rows: Tensor, starts: tuple[int, ...]) -> Tensor:
    """Return `[heads, starts[-1] + 1]`, the row of the bucket that each distance is in, from rows `[buckets, heads]`.

    Buckets are runs of distances, so each row is repeated and the runs are joined. The gradient is then a sum
    over each run, in a fixed order; that of an indexed lookup adds up in whatever order threads arrive, and
    training with it cannot be repeated.
    """
    ends = (*starts[1:], starts[-1] + 1)
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    runs = [row.unsqueeze(1).expand(-1, count) for row, count in zip(rows.unbind(), counts, strict=True) if count > 0]
    return torch.cat(runs, dim=1)
