"""How much of a GPU's memory a stretch of work took beside what was there before.

On a CPU it cannot be told: what a process holds does not grow when memory that it freed is used again, so the number
would be 0 or too small, and none is given.
"""

from __future__ import annotations

import torch


class Peak:
    """The highest growth of a GPU's memory since this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def bytes(self) -> int | None:
        """Return the growth, or None where it cannot be known."""
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.max_memory_allocated(self.device)) - self.before
