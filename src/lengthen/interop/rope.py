"""Rotary angles, theirs and ours: `rope_parameters` of a config.json ↔ the options of the method `rotary`.

    theirs                                            ours
    rope_theta                                        base
    partial_rotary_factor                             rotary_dim / head_dim
    rope_type default, linear, dynamic, yarn, llama3  scaling
    factor                                            factor
    original_max_position_embeddings                  original_length
    beta_fast, beta_slow (yarn)                       beta_fast, beta_slow
    high_freq_factor, low_freq_factor (llama3)        beta_fast, beta_slow
    attention_factor, or mscale and mscale_all_dim    attention_factor

"dynamic" has `max_position_embeddings` as its original length. Older files have `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lengthen.config import STRETCHES, ModelConfig
from lengthen.interop.asked import REQUIRED, Asked

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


def read(asked: Asked, head_dim: int, longest: int, partial: float | None, over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `rotary`.

    Args:
        asked: the config, of which the keys on angles are read.
        head_dim: features of a head.
        longest: `max_position_embeddings`.
        partial: the fraction of a head that is rotated where no key says it; None: all of it, and no key may say less.
        over: options that the caller gives: with "scaling" among them, the file's is left alone.
    """
    if partial is None:
        base, part = _number(asked, "rope_theta", 10000.0), _number(asked, "partial_rotary_factor", 1.0)
    else:  # GPT-NeoX, where the other two names say nothing by themselves
        base, part = _number(asked, "rotary_emb_base", 10000.0), _number(asked, "rotary_pct", partial)
        asked.same("rope_theta", base, "rotary_emb_base")
        asked.same("partial_rotary_factor", part, "rotary_pct")
    rope = asked.part("rope_scaling" if asked.table.get("rope_scaling") else "rope_parameters")
    asked.read |= {"rope_scaling", "rope_parameters"}
    options: dict[str, Any] = {"base": rope.take("rope_theta", default=base, hint=float)}
    part = rope.take("partial_rotary_factor", default=part, hint=float)
    if part != 1:
        if partial is None:
            raise rope.refusal("partial_rotary_factor", "1 for this architecture", part)
        options["rotary_dim"] = int(head_dim * part)
    kind = rope.take("rope_type", "type", default="default")
    if kind not in KINDS:
        raise rope.refusal("rope_type", " or ".join(map(repr, KINDS)), kind, KINDS)
    found = {} if kind == "default" else _scaling(rope, kind, longest)
    if "scaling" not in over:
        rope.finish(("original_max_position_embeddings",) if kind in ("default", "linear", "dynamic") else ())
        options |= found
    elif over["scaling"] in STRETCHES and "original_length" in found:
        options["original_length"] = found["original_length"]
    return options


def _number(asked: Asked, name: str, default: float) -> float:
    found: float = asked.take(name, default=default, hint=float)
    return found


def _scaling(rope: Asked, kind: str, longest: int) -> dict[str, Any]:
    original = None
    if kind in ("yarn", "llama3"):
        original = rope.take("original_max_position_embeddings", default=longest, hint=int)
    default = REQUIRED if original is None else longest / original  # as `factor: null` means in theirs
    found = {"scaling": kind, "factor": rope.take("factor", default=default, hint=float)}
    if kind == "linear":
        return found
    if kind == "dynamic":
        return {**found, "original_length": longest}
    found["original_length"] = original
    names = ("beta_fast", "beta_slow") if kind == "yarn" else ("high_freq_factor", "low_freq_factor")
    for ours, theirs in zip(("beta_fast", "beta_slow"), names, strict=True):
        value = rope.take(theirs, default=None, hint=float | None)
        if value is not None:
            found[ours] = value
    if kind == "yarn":
        if rope.take("truncate", default=True) is not True:
            raise rope.refusal("truncate", "true", False)
        given = rope.take("attention_factor", default=None, hint=float | None)
        scales = [rope.take(name, default=None, hint=float | None) for name in ("mscale", "mscale_all_dim")]
        if given is None and all(scales):
            above, below = (0.1 * scale * math.log(found["factor"]) + 1 for scale in scales)
            given = above / below
        if given is not None:
            found["attention_factor"] = given
    return found


def write(config: ModelConfig) -> dict[str, Any]:
    """Return `rope_parameters` for a model whose method is `rotary`; nothing for another."""
    if config.positions != "rotary":
        return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    method: Any = config.position_method()
    rope: dict[str, Any] = {"rope_type": method.scaling or "default", "rope_theta": method.base}
    if method.rotary_dim != config.head_width:
        rope["partial_rotary_factor"] = method.rotary_dim / config.head_width
    if method.scaling is not None:
        rope["factor"] = method.factor
    if method.scaling in ("yarn", "llama3"):
        names = ("beta_fast", "beta_slow") if method.scaling == "yarn" else ("high_freq_factor", "low_freq_factor")
        rope |= {names[0]: method.beta_fast, names[1]: method.beta_slow}
        rope["original_max_position_embeddings"] = method.original_length
    if method.scaling == "yarn":
        rope["attention_factor"] = method.magnitude
    return {"rope_parameters": rope}


def head_order(config: ModelConfig) -> Tensor | None:
    """Return which of their features of a query or key each of ours is; None: the same.

    Theirs: pair n is features n and n + r/2 of the first r, which are rotated; the rest follows. Ours: n and
    n + head_dim/2, or 2n and 2n + 1 (`pairs`), and what is not rotated is where there is room.
    """
    if "rotary" not in config.positions.split("+"):
        return None
    method: Any = config.position_method()
    method = getattr(method, "_rotating", method)
    size, half = config.head_width, method.rotary_dim // 2
    order = torch.full((size,), -1)
    for pair in range(half):
        first, second = (pair, pair + size // 2) if method.pairs == "halves" else (2 * pair, 2 * pair + 1)
        order[first], order[second] = pair, pair + half
    order[order < 0] = torch.arange(2 * half, size)
    return None if torch.equal(order, torch.arange(size)) else order
