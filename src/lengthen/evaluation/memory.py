"""How much memory a stretch of work took beside what was there before."""

from __future__ import annotations

from pathlib import Path

import torch


class Peak:
    """The highest growth of memory since this was made: torch's own on a GPU, the process's on Linux."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is held now
            self.before = _held("VmRSS")
        except OSError:  # not Linux, or not allowed
            self.before = None

    def bytes(self) -> int | None:
        """Return the growth, or None where it cannot be known."""
        if self.before is None:
            return None
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device)) - self.before
        return max(0, _held("VmHWM") - self.before)


def _held(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
