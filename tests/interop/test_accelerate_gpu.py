"""Accelerated models on a GPU: near transformers' float32, on padded batches and while decoding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon", "t5", "umt5", "llama"])
def test_outputs(kind: str, make: Callable[..., Any], ids: Tensor, left: Tensor, right: Tensor) -> None:
    model = make(kind, 8).cuda()
    encoder = model.config.is_encoder_decoder
    mask = (right if encoder else left).cuda()
    named = {"input_ids": ids.cuda(), "attention_mask": mask, **({"decoder_input_ids": ids.cuda()} if encoder else {})}
    real = torch.ones_like(mask).bool() if encoder else mask > 0
    with torch.no_grad():
        expected = model(**named).logits[real]
        lengthen.accelerate(model)
        torch.testing.assert_close(model(**named).logits[real], expected, atol=1e-2, rtol=1e-2)
        found = model.bfloat16()(**named).logits[real].float()
    assert (found - expected).norm() / expected.norm() < 0.1
    new = model.generate(ids.cuda(), attention_mask=mask, do_sample=False, max_new_tokens=5)
    assert new.shape[1] >= 5
