"""Where position enters a transformer: one small module per method, by name or composed.

method.py      the four places that a method may act in
registry.py    methods by name; compose.py: several as one
rotation.py    what rotary and xPos share; fused.py: their rotation as one kernel
"""

from lengthen.positions.alibi import ALiBi
from lengthen.positions.compose import compose
from lengthen.positions.kerple import Kerple
from lengthen.positions.learned import Learned
from lengthen.positions.method import PositionMethod
from lengthen.positions.nothing import NoPosition
from lengthen.positions.registry import build, names, options, summaries
from lengthen.positions.rotary import Rotary
from lengthen.positions.sandwich import Sandwich
from lengthen.positions.sinusoidal import Sinusoidal
from lengthen.positions.t5 import T5
from lengthen.positions.xpos import XPos

__all__ = [
    "T5",
    "ALiBi",
    "Kerple",
    "Learned",
    "NoPosition",
    "PositionMethod",
    "Rotary",
    "Sandwich",
    "Sinusoidal",
    "XPos",
    "build",
    "compose",
    "names",
    "options",
    "summaries",
]
