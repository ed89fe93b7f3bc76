"""What bfloat16 costs BLOOM, Falcon and MPT: their logits against float32's, with transformers' attention and ours.

    python benchmarks/bf16_logits.py                    # 4,096 tokens; writes benchmarks/results
    python benchmarks/bf16_logits.py --quick            # does the script work: short, means little

One model of 4 layers × 512 with 8 heads per family, random weights from a fixed seed, one sequence of random tokens, on
the CPU. The error is ‖logits − reference‖ / ‖logits of the reference‖ over all positions; the reference is the float32
model with `lengthen.accelerate`, and how far transformers' own float32 is from it stands beside (Falcon multiplies its
bias in bfloat16 even there). The weights are rounded to bfloat16 first, in every model: what is left is computing.

The weights are transformers' own initialisation, whose queries and keys are so small that attention hardly looks at
content, and then the same with the query, key and value projections scaled by 3 and by 8, so scores by 9 and 64. The
standard deviation of the scores in the first layer is recorded. At a scale of 8 it is 13: attention picks single keys,
and rounding anything to bfloat16 picks others.

    section     what is measured
    bloom, falcon, mpt      the family of that name
"""

from __future__ import annotations

import os
import platform
import sys
from functools import partial
from typing import Any

import torch
import transformers
from records import Report, parsed, parser_of, software
from torch import Tensor, nn

import lengthen

LENGTH, QUICK_LENGTH = 4096, 256
LAYERS, WIDTH, HEADS, WORDS = 4, 512, 8, 1024
SCALES = (1, 3, 8)  # of the query, key and value projections
SEED = 0
FAMILIES = ("bloom", "falcon", "mpt")
# The projection that queries, keys and values come from.
FUSED = {"bloom": "query_key_value", "falcon": "query_key_value", "mpt": "Wqkv"}


def model_of(family: str, scale: int) -> Any:
    """Return a model with random weights that bfloat16 holds exactly."""
    transformers.set_seed(SEED)
    common: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
    if family == "bloom":
        config: Any = transformers.BloomConfig(hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **common)
    elif family == "falcon":
        sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        shape: dict[str, Any] = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}  # Falcon-RW
        config = transformers.FalconConfig(**sizes, **shape, **common)
    else:
        sizes = {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": LENGTH}
        config = transformers.MptConfig(**sizes, **common)
    automatic: Any = transformers.AutoModelForCausalLM
    model = automatic.from_config(config).eval()
    for name, module in model.named_modules():
        if name.endswith(FUSED[family]) and isinstance(module, nn.Linear):
            module.weight.data.mul_(scale)
    return model.bfloat16().float()


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits.float()  # type: ignore[no-any-return]


def spread_of_scores(family: str, model: Any, ids: Tensor) -> float:
    """Return the standard deviation of q·k/√head_dim in the first layer."""
    kept: list[Tensor] = []
    projection = next(m for name, m in model.named_modules() if name.endswith(FUSED[family]))
    handle = projection.register_forward_hook(lambda module, inputs, output: kept.append(output))
    logits(model, ids[:, :512])
    handle.remove()
    fused: Any = kept[0][0]
    parts = (3, HEADS, -1) if family == "mpt" else (HEADS, 3, -1)
    split = fused.unflatten(1, parts)
    q, k = (split[:, part] if family == "mpt" else split[:, :, part] for part in (0, 1))
    return float((torch.einsum("ihd,jhd->hij", q, k) / (WIDTH // HEADS) ** 0.5).std())


def section(report: Report, family: str, length: int) -> None:
    """Measure one family with weights of every scale."""
    ids = torch.randint(3, WORDS, (1, length), generator=torch.Generator().manual_seed(SEED))
    for scale in SCALES:
        model = model_of(family, scale)
        std = spread_of_scores(family, model, ids)
        found = {"transformers, float32": logits(model, ids)}
        found["transformers, bfloat16"] = logits(model.bfloat16(), ids)
        found["lengthen, bfloat16"] = logits(lengthen.accelerate(model), ids)
        reference = logits(model.float(), ids)
        at = {"scale": scale, "length": length}
        for what, one in found.items():
            error = 100 * float((one - reference).norm() / reference.norm())
            same = float((one.argmax(-1) == reference.argmax(-1)).float().mean())
            note = f"scores' std {std:.2g}; same first choice at {100 * same:.1f} %"
            target = 1.5 if what == "lengthen, bfloat16" else None
            report.add(family, f"{what}: relative error of logits", at, error, " %", at_most=target, note=note)


def main() -> int:
    options = parsed(parser_of(__doc__, FAMILIES), "bf16_logits", FAMILIES)
    torch.set_num_threads(os.cpu_count() or 1)
    model = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "vocabulary": WORDS, "seed": SEED}
    facts = {"benchmark": "bf16_logits", **software(), "transformers": transformers.__version__}
    facts |= {"machine": platform.machine(), "threads": torch.get_num_threads(), "model": model}
    report = Report(facts, options.out)
    length = QUICK_LENGTH if options.quick else LENGTH
    return report.run({name: partial(section, report, name, length) for name in options.only}, options.strict)


if __name__ == "__main__":
    sys.exit(main())
