"""What is captured is what the op was given: from it, the op's own output can be made again, in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lengthen import Blockwise, Causal, Decay, Linear, ModelConfig, Transformer, Window, alibi_slopes
from lengthen.attention import Mask, attention
from lengthen.evaluation.capture import Call, each_layer
from lengthen.model.block import Attention, AttentionOp


def small(positions: str = "alibi", **options: object) -> Transformer:
    torch.manual_seed(3)
    config = ModelConfig(vocab_size=258, layers=3, width=32, heads=4, train_length=16, positions=positions, **options)  # type: ignore[arg-type]
    return Transformer(config).double().eval()


def again(call: Call, most: int) -> Tensor:
    """Return the op's output, made from the chunks' scores."""
    value = call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], dim=1)
    rows = [chunk.score.softmax(-1).nan_to_num(0) @ value[:, :, : chunk.score.shape[-1]] for chunk in call.chunks(most)]
    return torch.cat(rows, dim=2)


def expected(call: Call) -> Tensor:
    return attention(call.q, call.k, call.v, call.bias, call.decay, call.mask, call.scale, backend="reference")


@pytest.mark.parametrize("positions", ["alibi", "rotary", "xpos", "t5", "sinusoidal", "none", "rotary+alibi"])
@pytest.mark.parametrize("mask", [None, Blockwise(8)], ids=["causal", "blockwise"])
def test_the_ops_output_can_be_made_again(positions: str, mask: Mask | None) -> None:
    model = small(positions, key_heads=2)
    ids = torch.randint(258, (2, 50))
    seen: list[int] = []

    def check(call: Call) -> None:
        seen.append(call.layer)
        assert call.q.shape == (2, 4, 50, 8)
        assert call.k.shape == (2, 2, 50, 8)
        assert type(call.mask) is (Causal if mask is None else Blockwise)
        torch.testing.assert_close(again(call, most=2 * 4 * 50 * 7), expected(call))  # seven queries at a time

    hidden = each_layer(model, ids, check, mask)
    assert seen == [0, 1, 2]
    assert not hidden.requires_grad
    torch.testing.assert_close(hidden, model.hidden(ids, mask))


def test_chunks_are_as_small_as_asked_and_cover_every_query() -> None:
    q, k = torch.randn(2, 3, 2, 40, 4)
    call = Call(0, q, k, k)
    for most, rows in ((1, 1), (3 * 2 * 40 * 16, 16), (10**9, 40)):
        chunks = list(call.chunks(most))
        assert [chunk.score.shape[2] for chunk in chunks] == [rows] * (40 // rows) + [40 % rows] * (40 % rows > 0)
        assert all(chunk.score.numel() <= max(most, 3 * 2 * 40) for chunk in chunks)
        assert sum(int(chunk.visible.sum()) for chunk in chunks) == 40 * 41 // 2


@pytest.mark.parametrize("rate", [1e-40, 0.01, 0.9, 1.0])
def test_a_decay_of_any_rate_is_exact_over_any_distance(rate: float) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 3, dtype=torch.float64)
    rates = torch.tensor([1.0, rate, 0.99], dtype=torch.float64)
    call = Call(0, q, k, v, decay=Decay(rates), bias=Linear(alibi_slopes(2)), mask=Causal())
    torch.testing.assert_close(again(call, most=10**9), expected(call))


def test_padding_and_documents_hide_keys() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 20, 4, dtype=torch.float64)
    padded = Call(0, q, k, v, mask=Causal().padded(torch.tensor([0, 5])))
    torch.testing.assert_close(again(padded, most=10**9), expected(padded))
    packed = Call(0, q, k, v, mask=Window(6).packed(torch.tensor([[0] * 9 + [9] * 11])), scale=0.3)
    torch.testing.assert_close(again(packed, most=100), expected(packed))


def test_everything_is_as_before_afterwards() -> None:
    model = small().train()
    ops = [module for module in model.modules() if isinstance(module, AttentionOp)]
    assert len(ops) == 3

    def fail(call: Call) -> None:
        assert not model.training
        raise LookupError("on purpose")

    with pytest.raises(LookupError, match="on purpose"):
        each_layer(model, torch.zeros(1, 4, dtype=torch.int64), fail)
    assert not any(op._forward_pre_hooks for op in ops)
    assert model.training
    each_layer(model, torch.zeros(1, 4, dtype=torch.int64), lambda call: None)
    assert not any(op._forward_pre_hooks for op in ops)
    assert model.training


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_a_compiled_model_is_observed() -> None:
    model, ids, calls = small("rotary"), torch.randint(258, (1, 20)), []
    expected = model.hidden(ids)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    model.hidden(ids)
    hidden = each_layer(model, ids, calls.append)
    assert [call.layer for call in calls] == [0, 1, 2]
    torch.testing.assert_close(hidden, expected.detach())


def test_a_layer_that_goes_past_the_op_is_said() -> None:
    class Mine(Attention):
        def forward(self, x: Tensor, *_: object) -> Tensor:
            return x

    model = small()
    model.blocks[1].attention = Mine(model.config).double()
    with pytest.raises(RuntimeError, match="expected 3 calls of an AttentionOp, saw 2"):
        each_layer(model, torch.zeros(1, 4, dtype=torch.int64), lambda call: None)


def test_the_op_has_no_state() -> None:
    assert not any("op" in name.split(".") for name in small().state_dict())


def test_an_encoder_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a decoder, got an encoder"):
        each_layer(small(kind="encoder"), torch.zeros(1, 4, dtype=torch.int64), lambda call: None)
