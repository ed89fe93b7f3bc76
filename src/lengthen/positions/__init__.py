"""Where position enters a transformer: one small module a method, by name or composed."""

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
