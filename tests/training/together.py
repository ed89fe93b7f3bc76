"""What test_distributed.py has two processes do, under torchrun: several runs, one after the other.

torchrun --nproc-per-node 2 together.py DATA OUT
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from conftest import make_config

from lengthen.data import Corpus
from lengthen.model import Transformer
from lengthen.training import train, world
from lengthen.training.parallel import spread

HALF, WHOLE = 6, 12
MODES = ("replicate", "shard", "hybrid")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "t5": {"model__positions": "t5", "train__micro_batch": 1},  # several passes a step, and a learned bias
    # Targets that are not scored, unevenly.
    "mask": {"data__document_mask": True, "model__positions": "rotary"},
    "encoder": {"model__kind": "encoder"},
}


def config(kind: str, mode: str, steps: int) -> Any:
    made = make_config(**KINDS[kind], distributed__mode=mode)
    return dataclasses.replace(made, train=dataclasses.replace(made.train, steps=steps))


def main() -> None:
    torch.set_num_threads(1)
    corpus, out = Corpus.open(sys.argv[1]), Path(sys.argv[2])
    with world("cpu") as here:
        parts = {}  # what one process holds of the model in each mode, and as what
        for mode in MODES:
            core = Transformer(config("plain", mode, WHOLE).model)
            model = spread(core, here, mode, torch.float32)
            held = sum(
                getattr(weight, "to_local", lambda weight=weight: weight)().numel() for weight in core.parameters()
            )
            parts[mode] = [type(model).__name__, held]
        if here.first:
            (out / "parts.json").write_text(json.dumps(parts))
        for kind in KINDS:
            train(config(kind, "replicate", WHOLE), corpus, out / f"{kind}-replicate", here)
        for mode in MODES[1:]:
            train(config("t5", mode, WHOLE), corpus, out / f"t5-{mode}", here)
        for mode in MODES:  # half of a run, for one process to finish; and the end of one that one process began
            train(config("plain", mode, HALF), corpus, out / f"begun-{mode}", here)
            start = out / "begun-alone" / "checkpoints" / f"step-{HALF:08d}"
            train(config("plain", mode, WHOLE), corpus, out / f"ended-{mode}", here, resume=str(start))


if __name__ == "__main__":
    main()
