"""Position methods by name: `build("rotary+alibi", heads=8, head_dim=64, width=512)`.

What options a method has is read off its constructor, so there is no second list to keep.
"""

from __future__ import annotations

import inspect
from typing import Any

from lengthen.checks import describe, nearest
from lengthen.positions.alibi import ALiBi
from lengthen.positions.compose import compose
from lengthen.positions.kerple import Kerple
from lengthen.positions.learned import Learned
from lengthen.positions.method import PositionMethod
from lengthen.positions.nothing import NoPosition
from lengthen.positions.rotary import Rotary
from lengthen.positions.sandwich import Sandwich
from lengthen.positions.sinusoidal import Sinusoidal
from lengthen.positions.t5 import T5
from lengthen.positions.xpos import XPos

SIZES = ("heads", "head_dim", "width")  # what every method is told, whether it needs it or not

METHODS: dict[str, type[PositionMethod]] = {
    method.name: method for method in (ALiBi, Kerple, Learned, NoPosition, Rotary, Sandwich, Sinusoidal, T5, XPos)
}

ALIASES = {"rope": "rotary"}  # other names that the field has for them


def canonical(name: str) -> str:
    """Return a method's own name for one that it goes by, and so for several joined by '+'."""
    parts = [part.strip() for part in name.split("+")]
    return "+".join(ALIASES.get(part, part) for part in parts)


def names() -> tuple[str, ...]:
    """Return the names that `build` knows, in alphabetical order."""
    return tuple(sorted(METHODS))


def summaries() -> dict[str, str]:
    """Return what each method is, in a line."""
    return {name: (inspect.getdoc(METHODS[name]) or "").split("\n", 1)[0] for name in names()}


def options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of one method, beside the three sizes, with their defaults and types."""
    signature = inspect.signature(_method(canonical(name)).__init__)
    return {key: value for key, value in signature.parameters.items() if key not in ("self", *SIZES)}


def two_sided(name: str) -> dict[str, Any]:
    """Return the options with which a method, or several joined by '+', tells keys ahead from keys behind."""
    return {key: value for part in canonical(name).split("+") for key, value in _method(part).two_sided.items()}


def build(name: str, *, heads: int, head_dim: int, width: int, **given: Any) -> PositionMethod:
    """Return the method of this name, or several joined by '+'; an option goes to each that has it."""
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of a position method, got {describe(name)}")
    chosen = canonical(name).split("+")
    accepted = {part: options(part) for part in chosen}
    _refuse_unknown(name, accepted, given)
    for part, known in accepted.items():
        missing = [key for key, option in known.items() if option.default is option.empty and key not in given]
        if missing:
            raise TypeError(f"{part}: expected the option {missing[0]!r}, which has no default, got none")
    return compose(
        *(
            METHODS[part](
                heads=heads,
                head_dim=head_dim,
                width=width,
                **{key: value for key, value in given.items() if key in accepted[part]},
            )
            for part in chosen
        )
    )


def _method(name: str) -> type[PositionMethod]:
    if name not in METHODS:
        raise ValueError(f"name: expected one of {', '.join(names())}, got {name!r}{nearest(name, names())}")
    return METHODS[name]


def _refuse_unknown(name: str, accepted: dict[str, dict[str, inspect.Parameter]], given: dict[str, Any]) -> None:
    known = sorted({key for part in accepted.values() for key in part})
    for key in given:
        if key not in known:
            listed = f"its options are {', '.join(known)}" if known else "it has no options"
            raise TypeError(f"{name}: unknown option {key!r}{nearest(key, known)} ({listed})")
