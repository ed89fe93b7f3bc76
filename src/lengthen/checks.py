"""Checks of what a caller passes in: each error names the argument or key, what was expected and what came."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


def describe(value: object) -> str:
    """Say what came, shortly enough for an error message."""
    if hasattr(value, "dtype") and hasattr(value, "device"):  # a tensor; torch is not imported to ask
        shape = list(getattr(value, "shape", ()))
        if type(value).__module__ != "numpy":
            return f"a {value.dtype} tensor of shape {shape} on {value.device}"
        if shape:
            return f"a {value.dtype} array of shape {shape}"
    return f"{value!r} ({type(value).__name__})"


def whole_number(name: str, value: object, at_least: int | None = None) -> int:
    """Return `value` as an int, or say why it is not one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a whole number, got {describe(value)}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}: expected at least {at_least}, got {value}")
    return value


def number(name: str, value: object, *, above: float | None = None, at_least: float | None = None) -> float:
    """Return `value` as a float if it is a finite number inside its bound."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    if above is not None and value <= above:
        raise ValueError(f"{name}: expected more than {above:g}, got {value}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}: expected at least {at_least:g}, got {value}")
    return float(value)


def flag(name: str, value: object) -> bool:
    """Return `value` if it is True or False, and not merely something true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")
    return value


def choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of the words allowed."""
    listed = " or ".join(repr(word) for word in allowed)
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected {listed}, got {describe(value)}")
    if value not in allowed:
        raise ValueError(f"{name}: expected {listed}, got {value!r}{nearest(value, allowed)}")
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean '…'?" for the known word that is most like this one, or nothing."""
    match = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
