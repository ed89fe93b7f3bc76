"""One sequence of a million tokens, in one forward, on one GPU: an ALiBi model that was trained on 512.

    python benchmarks/replication.py … --runs alibi --seeds 1 --work work   # trains the model
    python benchmarks/million_gpu.py --run work/runs/alibi-0 --data work/books --out million.json

Reads the first 1,048,576 tokens of the text as one sequence: loss by position, time, peak memory; and the same tokens
in pieces of the training length. Beside it stands what the attention of one layer takes with torch's causal attention
(cuDNN, no bias at all) and with FlexAttention (the same bias), the latter measured at a shorter length and multiplied
up from there: it grows with the square of the length.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from records import machine, software
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lengthen import Linear, alibi_slopes, attention
from lengthen.data import Corpus, Tokens
from lengthen.evaluation import open_run
from lengthen.evaluation.analyses.positions import bucket_ends
from lengthen.model import Transformer


def read_whole(model: Transformer, tokens: Tokens, length: int) -> dict[str, Any]:
    """Return loss by position, time and memory of one forward over one sequence."""
    ids = torch.from_numpy(tokens.read(0, length + 1)).long().cuda()[None]
    for _ in range(2):  # the first compiles
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            losses = model.losses(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    ends = bucket_ends(length)
    each = losses[0].double().cpu()
    starts = [0, *ends[:-1]]
    means = [float(each[start:end].mean()) for start, end in zip(starts, ends, strict=True)]
    return {
        "length": length,
        "seconds": seconds,
        "tokens_per_second": length / seconds,
        "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9,
        "loss": float(each.mean()),
        "positions": ends,
        "loss_by_position": means,
    }


def read_pieces(model: Transformer, tokens: Tokens, length: int, piece: int) -> float:
    """Return the mean loss of the same tokens in pieces, each read by itself."""
    total = 0.0
    for start in range(0, length, 1 << 17):
        ids = torch.from_numpy(tokens.read(start, min(start + (1 << 17), length) + 1)).long().cuda()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            total += float(model.losses(ids[:-1].view(-1, piece), ids[1:].view(-1, piece)).sum())
    return total / length


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of one run after a first."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def one_layer(heads: int, head_dim: int, length: int, flex_length: int) -> dict[str, Any]:
    """Return what the attention of one layer takes: ours at the whole length, others at theirs and multiplied up."""
    slopes = alibi_slopes(heads).cuda()

    def inputs(n: int) -> list[Tensor]:
        return [torch.randn(1, heads, n, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    q, k, v = inputs(length)
    ours = timed(lambda: attention(q, k, v, bias=Linear(slopes)))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        causal = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    row: dict[str, Any] = {"length": length, "lengthen_seconds": ours, "causal_without_bias_seconds": causal}
    try:
        flex = _flex(slopes, *inputs(flex_length))
        row |= {"flex_length": flex_length, "flex_seconds": flex}
        row["flex_seconds_multiplied_up"] = flex * (length / flex_length) ** 2
    except Exception as error:
        row["flex_error"] = str(error).strip().splitlines()[0]
    return row


def _flex(slopes: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j)

    def behind(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    mask = create_block_mask(behind, None, None, q.shape[2], q.shape[2], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return timed(lambda: compiled(q, k, v, score_mod=alibi, block_mask=mask))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, metavar="DIR", help="a run with ALiBi")
    parser.add_argument("--data", required=True, type=Path, metavar="DIR", help="token shards of the text to read")
    parser.add_argument("--split", default="train", help="of the data (train)")
    parser.add_argument("--length", type=int, default=1 << 20, help="tokens (1048576)")
    parser.add_argument("--flex-length", type=int, default=1 << 16, help="that FlexAttention is given (65536)")
    parser.add_argument("--out", type=Path, help="the JSON (default: benchmarks/results, with the date)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and torch sees none")
    today = datetime.date.today().isoformat()
    path = arguments.out or Path(__file__).parent / "results" / f"million_gpu-{today}.json"
    model = open_run(arguments.run, device="cuda").model.eval()
    config, tokens = model.config, Corpus.open(arguments.data)[arguments.split]
    result: dict[str, Any] = {"benchmark": "million_gpu", **software()}
    result |= {"device": machine("cuda"), "train_length": config.train_length}
    result["whole"] = read_whole(model, tokens, arguments.length)
    result["loss_in_pieces"] = read_pieces(model, tokens, arguments.length, config.train_length)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)
    result["one_layer"] = one_layer(config.heads, config.head_width, arguments.length, arguments.flex_length)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["one_layer"]))


if __name__ == "__main__":
    main()
