"""Write a model as a folder that Hugging Face's transformers opens.

  lengthen export runs/tiny models/tiny
  lengthen export runs/tiny models/tiny --architecture lengthen    # our own, even if another would do
  lengthen export models/pythia-70m models/again                   # a folder of Hugging Face, read and written again
  lengthen export models/old models/new --pickled                  # the same of a pytorch_model.bin: now safetensors

If an architecture of transformers can represent the model, it is written as that one and opens without this package:
BLOOM or MPT with ALiBi, Llama, GPT-NeoX and others with rotary, GPT-2 with learned positions. Any other model keeps
the architecture `lengthen`, which transformers opens after `import lengthen.interop.huggingface`. Measured
perplexities go into the model card (docs/huggingface.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

Architecture = Literal["bloom", "mpt", "falcon", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2", "lengthen"]


@dataclass(frozen=True)
class Arguments:
    """Arguments of `lengthen export`."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run's folder, one checkpoint's, or a model of Hugging Face."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]  # the folder to make
    architecture: Architecture | None = None  # none: the first that can hold the model
    data: Path | None = None  # token shards with the tokenizer; none: those that the model was trained on
    checkpoint: Literal["last", "best"] = "last"  # which of a run's checkpoints
    force: bool = False  # replace a folder that holds something
    pickled: bool = False  # read a pytorch_model.bin too: tensors alone, no code of it is run


def run(arguments: Arguments) -> int:
    """Export; print the architecture that was written, and why the others were not."""
    from lengthen.interop.export import export
    from lengthen.interop.subjects import open_model

    subject = open_model(arguments.run, arguments.checkpoint, pickled=arguments.pickled)
    wanted, data = arguments.architecture, arguments.data
    made = export(subject, arguments.out, architecture=wanted, data=data, force=arguments.force)
    print(f"{made.folder}: {made.architecture}")
    if made.architecture == "LengthenForCausalLM" and arguments.architecture is None:
        print(
            "transformers opens it after `import lengthen.interop.huggingface`; no other architecture can represent it:"
        )
        for name, lacking in made.reasons.items():
            print(f"  {name}: {'; '.join(lacking[:2])}{f'; and {len(lacking) - 2} more' if len(lacking) > 2 else ''}")
    for note in made.notes:
        print(note)
    return 0
