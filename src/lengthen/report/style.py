"""How curves look: a colour and a marker per run, a dash pattern per protocol.

The colours are those of Okabe and Ito, which people with colour-blindness tell apart, the yellow left out, and three
more; each has a contrast of at least 3 to the page's white and to its black. A known method has the same colour in
every report.
"""

from __future__ import annotations

from collections.abc import Sequence

from lengthen.report.collect import Run

COLOURS = ("#0072b2", "#d55e00", "#009473", "#b8548a", "#b87a00", "#3590c8", "#8d66b0", "#9a6733", "#7d7d7d")
METHODS = {
    **{"alibi": 0, "xpos": 1, "t5": 2, "sinusoidal": 3, "absolute": 3, "rotary": 4, "learned": 5, "kerple": 6},
    **{"sandwich": 7, "none": 8},
}
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
DASHES = {"nonoverlapping": [1, 0], "full": [1, 0], "blockwise": [2, 3], "sliding": [7, 3], "window": [8, 3, 2, 3]}


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


def look(colour: int, shape: int, protocol: str) -> dict[str, object]:
    """Return the columns that say how a curve is drawn."""
    dash = DASHES.get(protocol, [4, 2, 1, 2, 1, 2])
    return {"colour": COLOURS[colour], "shape": SHAPES[shape % len(SHAPES)], "dash": dash}
