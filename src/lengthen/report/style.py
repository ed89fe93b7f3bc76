"""How runs look, the same on the page and in figures: a colour and a marker a run, a dash pattern a protocol.

The colours are those of Okabe and Ito, which people with colour-blindness tell apart, the yellow left out, and three
more; markers and dashes say the same without colour. A known method has the same colour in every report.
"""

from __future__ import annotations

from collections.abc import Sequence

from lengthen.report.collect import Run

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8548a", "#c98500", "#3a9bd6", "#7a5195", "#8a5a2b", "#707070")
METHODS = {
    **{"alibi": 0, "xpos": 1, "t5": 2, "sinusoidal": 3, "absolute": 3, "rotary": 4, "learned": 5, "kerple": 6},
    **{"sandwich": 7, "none": 8},
}
MARKERS = ("o", "s", "^", "D", "v", "P")  # matplotlib's names; the page draws the same six
DASHES = {"nonoverlapping": (), "full": (), "blockwise": (2, 3), "sliding": (7, 3), "window": (8, 3, 2, 3)}


def colours(runs: Sequence[Run]) -> list[int]:
    """Return a colour's number for each run: its method's if no earlier run has it, or else the first that is free."""
    taken: list[int] = []
    wanted = {METHODS[run.positions] for run in runs if run.positions in METHODS}
    for run in runs:
        own = METHODS.get(run.positions)
        free = [i for i in range(len(COLOURS)) if i not in taken and i not in wanted]
        free += [i for i in range(len(COLOURS)) if i not in taken]
        taken.append(own if own is not None and own not in taken else free[0] if free else len(taken) % len(COLOURS))
    return taken


def dashes(protocol: str) -> tuple[int, ...]:
    """Return the dash pattern of a protocol, in points; none is a whole line."""
    return DASHES.get(protocol, (4, 2, 1, 2, 1, 2))
