"""What a model sees and what it does not: each position method, mask and packing, in float64; and how it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lengthen import Bidirectional, Blockwise, Causal, Linear, Window, positions
from lengthen.attention.masks import Mask
from lengthen.config import load, presets
from lengthen.model import IGNORED, ModelConfig, Transformer
from lengthen.positions import xpos

Make = Callable[..., Transformer]
METHODS = (*positions.names(), "rotary+alibi", "sinusoidal+t5", "xpos+alibi")
LEARNING: dict[str, dict[str, Any]] = {
    "alibi": {"learned": True},
    "xpos": {"learned_gamma": True, "scale_base": 8.0},
    "xpos+alibi": {"learned": True, "learned_gamma": True},
}
every_method = pytest.mark.parametrize("method", METHODS)


def tokens(*shape: int) -> Tensor:
    return torch.randint(19, shape)


def gradients(model: Transformer, ids: Tensor, **call: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of predicting each next token, and every weight's gradient."""
    total = model(ids[:, :-1], targets=ids[:, 1:], **call)
    model.zero_grad()
    total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == dict(model.named_parameters()).keys()
    return total.detach(), found


def assert_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], **by: float) -> None:
    torch.testing.assert_close(got[0], expected[0], **by)
    for name, theirs in expected[1].items():
        torch.testing.assert_close(
            got[1][name], theirs, msg=lambda text, name=name: f"gradient of {name}: {text}", **by
        )


@every_method
def test_a_decoder_never_sees_ahead(make: Make, method: str) -> None:
    model, ids = make(positions=method), tokens(2, 12)
    before = model(ids)
    for place in (1, 7, 11):
        changed = ids.clone()
        changed[:, place] = (ids[:, place] + 1) % 19
        after = model(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-13)
        assert ((after - before).abs().amax((0, 2))[place:] > 1e-6).all(), "a later token did not see the change"


@every_method
def test_an_encoder_sees_both_sides(make: Make, method: str) -> None:
    model, ids = make(positions=method, kind="encoder"), tokens(2, 12)
    before = model(ids)
    for place in (0, 5, 11):
        changed = ids.clone()
        changed[:, place] = (ids[:, place] + 1) % 19
        assert ((model(changed) - before).abs().amax((0, 2)) > 1e-7).all()


def mirrored(model: Transformer, ids: Tensor) -> bool:
    """Return whether a reversed text gives the reversed output: then nothing tells left from right."""
    return torch.allclose(model(ids.flip(1)), model(ids).flip(1), rtol=0, atol=1e-9)


@every_method
def test_an_encoder_tells_left_from_right(make: Make, method: str) -> None:
    model = make(positions=method, kind="encoder")
    assert mirrored(model, tokens(1, 12)) == (method in ("none", "sandwich"))  # which have no form that does
    assert model.config.position_options == {}, "a default that is written down twice"


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("alibi", {"sides": "same"}),
        ("alibi", {"sides": "same", "learned": True}),
        ("t5", {"bidirectional": False}),
        ("kerple", {"sides": "same"}),
        ("kerple", {"sides": "same", "kind": "power"}),
    ],
)
def test_an_encoder_s_method_is_as_it_was_asked_for(make: Make, method: str, options: dict[str, Any]) -> None:
    assert mirrored(make(positions=method, kind="encoder", position_options=options), tokens(1, 12))
    others = {key: value for key, value in options.items() if key not in ("sides", "bidirectional")}
    assert not mirrored(make(positions=method, kind="encoder", position_options=others), tokens(1, 12))


def test_composed_methods_of_an_encoder_have_two_sides_each(make: Make) -> None:
    bias = make(positions="rotary+alibi", kind="encoder").method.bias(3)
    assert isinstance(bias, Linear)
    assert bias.ahead is not None
    assert make(positions="rotary+alibi").method.bias(3).ahead is None  # type: ignore[union-attr]


@every_method
def test_order_matters_to_every_method_but_none(make: Make, method: str) -> None:
    """Of an encoder: without positions, shuffled tokens give the shuffled output."""
    model, ids = make(positions=method, kind="encoder"), tokens(1, 12)
    shuffled = torch.tensor([3, 0, 11, 5, 1, 2, 10, 9, 4, 8, 7, 6])
    same = torch.allclose(model(ids)[:, shuffled], model(ids[:, shuffled]), rtol=0, atol=1e-9)
    assert same == (method == "none")


@every_method
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_packed_documents_are_as_each_would_be_alone(make: Make, method: str, kind: str) -> None:
    model = make(positions=method, kind=kind, position_options=LEARNING.get(method, {}))
    ids = tokens(2, 14)
    sizes = [[5, 1, 8], [9, 5]]
    starts = torch.stack(
        [torch.cat([torch.full((size,), sum(row[:place])) for place, size in enumerate(row)]) for row in sizes]
    )
    targets = tokens(2, 14)
    packed = model(ids, document_starts=starts)
    mean, losses = model(ids, targets, document_starts=starts), model.losses(ids, targets, document_starts=starts)
    alone = 0.0
    for row, parts in enumerate(sizes):
        start = 0
        for size in parts:
            here = (slice(row, row + 1), slice(start, start + size))
            torch.testing.assert_close(packed[here], model(ids[here]), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(losses[here], model.losses(ids[here], targets[here]), rtol=1e-10, atol=1e-10)
            alone += model(ids[here], targets[here]).item() * size
            start += size
    assert mean.item() == pytest.approx(alone / ids.numel(), rel=1e-12)


@every_method
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_padded_sequences_are_as_each_would_be_alone(make: Make, method: str, kind: str) -> None:
    model = make(positions=method, kind=kind, position_options=LEARNING.get(method, {}))
    plain: Mask = Causal() if kind == "decoder" else Bidirectional()
    ids = tokens(3, 14)
    starts, ends = torch.tensor([0, 5, 9]), torch.tensor([14, 14, 12])
    for mask, first, last in (
        (plain.padded(starts), starts, torch.full((3,), 14)),
        (plain.padded(key_end=ends), torch.zeros(3, dtype=torch.int64), ends),
        (plain.padded(starts, ends), starts, ends),
    ):
        together = model(ids, mask=mask)
        for row, (start, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            here = (slice(row, row + 1), slice(start, end))
            torch.testing.assert_close(together[here], model(ids[here]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["none", "alibi", "rotary", "xpos"])
@pytest.mark.parametrize(("mask", "reach"), [(Window(4), 4), (Blockwise(3), 6)], ids=["window", "blockwise"])
def test_a_mask_is_passed_on(make: Make, method: str, mask: Mask, reach: int) -> None:
    model, ids = make(positions=method, layers=1), tokens(1, 15)
    narrow, whole = model(ids, mask=mask), model(ids)
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % 19
    moved = (model(changed, mask=mask) - narrow).abs().amax((0, 2)) > 1e-9
    assert moved[0]
    assert not moved[reach:].any(), "a token saw farther than its mask lets it"
    torch.testing.assert_close(narrow[:, :3], whole[:, :3], rtol=0, atol=1e-12)  # so far it sees everything either way
    assert not torch.allclose(narrow[:, reach:], whole[:, reach:], atol=1e-6)


def test_the_default_masks(make: Make) -> None:
    ids = tokens(2, 9)
    decoder, encoder = make(), make(kind="encoder")
    torch.testing.assert_close(decoder(ids), decoder(ids, mask=Causal()), rtol=0, atol=0)
    torch.testing.assert_close(encoder(ids), encoder(ids, mask=Bidirectional()), rtol=0, atol=0)
    alike = make(kind="encoder", position_options={"sides": "same"})
    torch.testing.assert_close(decoder(ids), alike(ids, mask=Causal()), rtol=0, atol=0)


@every_method
def test_models_that_differ_in_positions_alone_start_alike(method: str) -> None:
    def start(name: str) -> dict[str, Tensor]:
        torch.manual_seed(5)
        config = ModelConfig(vocab_size=19, layers=2, width=24, heads=4, train_length=40, positions=name)
        state = Transformer(config).state_dict()
        return {key: weight for key, weight in state.items() if not key.startswith("method.")}

    expected, got = start("none"), start(method)
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(got[name], weight), name


def test_how_weights_start() -> None:
    model = Transformer(ModelConfig(vocab_size=500, layers=8, width=100, heads=4, train_length=40, tied=False))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            into_stream = "attention.out" in name or "feed_forward.down" in name
            expected = 0.05 / 4 if into_stream else 0.05  # 1/(2·√100), and √(2·8) = 4
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        elif name == "norm.weight":
            assert parameter.tolist() == [1.0, -1.0] * 50
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize("name", presets())
def test_a_new_model_finds_all_tokens_as_likely(name: str) -> None:
    """Whether the next token is any or the one just read: with tied weights the latter must be arranged for."""
    vocabulary = 258 if name in ("tiny", "recall") else 16_384
    config = load(name, {"model.layers": 1}, vocab_size=vocabulary).model
    model = Transformer(config).eval()
    different = torch.randint(vocabulary, (64, 5))
    repeated = torch.randint(vocabulary, (64, 1)).expand(-1, 5)
    for ids in (different, repeated):
        with torch.no_grad():
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        assert loss.item() == pytest.approx(math.log(vocabulary), abs=0.3)


def test_weights_can_be_drawn_again(make: Make) -> None:
    model = make(dtype=torch.float32, positions="learned")
    torch.manual_seed(3)
    model.reset_parameters()
    first = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    torch.manual_seed(3)
    model.reset_parameters()
    assert all(torch.equal(weight, first[name]) for name, weight in model.state_dict().items())
    assert model.method.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_embeddings_are_scaled(make: Make) -> None:
    """Checked at the first block's input, since a norm follows."""
    for scaled, factor in ((True, 24**0.5), (False, 1.0)):
        model, ids = make(scale_embeddings=scaled), tokens(1, 5)
        seen: list[Tensor] = []
        hook = model.blocks[0].register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        model(ids)
        hook.remove()
        torch.testing.assert_close(seen[0], model.embedding.weight[ids] * factor)


def test_losses_are_those_of_the_logits(make: Make) -> None:
    for tied in (True, False):
        model, ids, targets = make(tied=tied), tokens(3, 8), tokens(3, 8)
        targets[0, 2:5] = IGNORED
        mean, losses = model(ids, targets), model.losses(ids, targets)
        expected = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none")
        torch.testing.assert_close(losses, expected.view(3, 8), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mean, expected.sum() / 21, rtol=1e-12, atol=1e-12)
        assert not losses.requires_grad
        assert model(ids, torch.full_like(targets, IGNORED)).item() == 0


@every_method
def test_checkpointed_activations_change_nothing(make: Make, method: str) -> None:
    model = make(positions=method, position_options=LEARNING.get(method, {}), dropout=0.3)
    ids = tokens(2, 12)
    runs = []
    for again in (False, True):
        model.checkpoint_activations = again
        calls = [0]
        hook = model.blocks[0].feed_forward.register_forward_hook(
            lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1)
        )
        torch.manual_seed(8)
        runs.append(gradients(model, ids))
        hook.remove()
        assert calls[0] == 1 + again, "a block is computed again in the backward pass, or should not be"
    assert_same(runs[1], runs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("key", ["dropout", "activation_dropout"])
def test_dropout_is_for_training_alone(make: Make, key: str) -> None:
    model, ids = make(**{key: 0.5}), tokens(1, 8)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
    torch.testing.assert_close(model(ids), make()(ids), rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "swiglu", "geglu"])
def test_activation_dropout_is_after_the_activation(make: Make, activation: str) -> None:
    layer = make(activation=activation, activation_dropout=0.4).blocks[0].feed_forward
    seen: list[Tensor] = []
    hook = layer.down.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    x = torch.randn(3, 50, 24, dtype=torch.float64)
    layer.train()(x)
    layer.eval()(x)
    hook.remove()
    dropped, whole = seen
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.6)
    assert kept[whole != 0].double().mean().item() == pytest.approx(0.6, abs=0.05)


@every_method
def test_bfloat16_autocast_is_near(make: Make, method: str) -> None:
    model, ids = make(dtype=torch.float32, positions=method), tokens(2, 20)
    exact, exact_gradients = gradients(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near, near_gradients = gradients(model, ids)
        assert model.hidden(ids).dtype == torch.bfloat16, "blocks read and write the stream in 32 bits"
    assert near.dtype == torch.float32
    assert near.item() == pytest.approx(exact.item(), rel=0.01)
    assert near.item() != exact.item(), "autocast changed nothing"
    for name, theirs in exact_gradients.items():
        if theirs.abs().max() > 1e-3:  # the bias of keys has no gradient but rounding
            assert near_gradients[name].dtype == torch.float32
            off = (near_gradients[name] - theirs).norm() / theirs.norm()
            assert off < 0.1, f"gradient of {name} is off by {off:.3f}"


@pytest.mark.parametrize("options", [{}, {"pairs": "neighbours"}, {"learned_gamma": True}], ids=str)
@pytest.mark.parametrize("key_heads", [None, 2])
def test_decay_in_the_angles_or_in_the_op(
    make: Make, options: dict[str, Any], key_heads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(positions="xpos", position_options=options | {"scale_base": 30.0}, key_heads=key_heads)
    ids = tokens(2, 40)
    starts = torch.tensor([[0] * 15 + [15] * 24, [0] * 39])
    kept = []
    for least in (xpos.LEAST_POWER, dict.fromkeys(xpos.LEAST_POWER, 2.0)):  # no power is as large as that
        monkeypatch.setattr(xpos, "LEAST_POWER", least)
        kept.append(model.method.at(torch.arange(39), torch.float64, False).decay is not None)
        runs = gradients(model, ids), gradients(model, ids, document_starts=starts)
        if len(kept) == 1:
            folded = runs
    assert kept == [False, True]
    for in_the_angles, in_the_op in zip(folded, runs, strict=True):
        assert_same(in_the_angles, in_the_op, rtol=1e-9, atol=1e-9)
    assert model.method.at(torch.arange(39), torch.float64, True).decay is not None  # of keys ahead, it would grow


def test_xpos_far_beyond_what_the_paper_could(make: Make) -> None:
    """At 10,000 positions ζ^(−j/scale_base) is 10⁴² for the fastest pair: past float32."""
    sizes: dict[str, Any] = {"layers": 1, "width": 4, "heads": 1}
    model = make(dtype=torch.float32, positions="xpos", position_options={"scale_base": 128.0}, **sizes).eval()
    ids = tokens(1, 10_000)
    with torch.no_grad():
        far = model(ids)
        near = model(ids, mask=Window(500))
        assert far.isfinite().all()
        exact = model.double()
        torch.testing.assert_close(far[:, :500].double(), exact(ids[:, :500]), rtol=1e-3, atol=1e-3)
        tail = exact(ids[:, -2000:], mask=Window(500))[:, 500:]
        torch.testing.assert_close(near[:, -1500:].double(), tail, rtol=1e-3, atol=1e-3)


def test_wrong_input_is_named(make: Make) -> None:
    model, ids = make(), tokens(2, 6)
    with pytest.raises(ValueError, match=r"^ids: expected integers \[batch, length\], got .*shape \[6\]"):
        model(ids[0])
    with pytest.raises(ValueError, match=r"^ids: expected integers \[batch, length\], got a torch.float32 tensor"):
        model(ids.float())
    with pytest.raises(ValueError, match=r"^targets: expected shape \[2, 6\] like ids, got .*shape \[2, 5\]"):
        model(ids, targets=ids[:, 1:])
    with pytest.raises(ValueError, match=r"^document_starts: expected 0 ≤"):
        model(ids, document_starts=torch.full((2, 6), 7))
    with pytest.raises(TypeError, match=r"^config: expected a ModelConfig, got \{'layers': 2\}"):
        Transformer({"layers": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^positions: expected 0 … 39, got 40: a learned table"):
        make(positions="learned")(tokens(1, 41))


# What other architectures have.


def by_hand(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of a model without positions, dropout and grouped queries, written out."""
    config, w = model.config, model.state_dict()

    def norm(x: Tensor, name: str) -> Tensor:
        return nn.functional.layer_norm(x, [24], w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def attend(x: Tensor, name: str) -> Tensor:
        qkv = linear(x, f"{name}.qkv")
        if config.clip_qkv is not None:
            qkv = qkv.clamp(-config.clip_qkv, config.clip_qkv)
        q, k, v = (part.unflatten(-1, (4, 6)).transpose(1, 2) for part in qkv.split(24, dim=-1))
        scores = q @ k.mT * (config.score_scale or 6**-0.5)
        place = torch.arange(ids.shape[1])
        behind = place[:, None] - place
        hidden = (behind < 0) | (behind >= (config.window or len(place)))
        read = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return linear(read.transpose(1, 2).flatten(2), f"{name}.out")

    def forward(x: Tensor, name: str) -> Tensor:
        up = linear(x, f"{name}.up")
        if config.activation == "geglu":
            gate, up = up.chunk(2, dim=-1)
            return linear(nn.functional.gelu(gate) * up, f"{name}.down")
        approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        return linear(nn.functional.gelu(up, approximate=approximate), f"{name}.down")

    x = w["embedding.weight"][ids] * (24**0.5 if config.scale_embeddings else 1)
    x = norm(x, "embedding_norm") if config.embedding_norm else x
    for n in range(config.layers):
        a, f = f"blocks.{n}.attention", f"blocks.{n}.feed_forward"
        if config.block == "pre":
            x = x + attend(norm(x, f"{a}_norm"), a)
            x = x + forward(norm(x, f"{f}_norm"), f)
        elif config.block == "post":
            x = norm(x + attend(x, a), f"{a}_norm")
            x = norm(x + forward(x, f), f"{f}_norm")
        else:
            second = f"{f}_norm" if config.block == "parallel" else f"{a}_norm"
            x = x + attend(norm(x, f"{a}_norm"), a) + forward(norm(x, second), f)
    x = x if config.block == "post" else norm(x, "norm")
    return x @ w["embedding.weight"].T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block": "post"},
        {"block": "parallel"},
        {"block": "shared"},
        {"embedding_norm": True},
        {"clip_qkv": 0.3},
        {"score_scale": 1.0},
        {"window": 5},
        {"activation": "gelu"},
        {"activation": "geglu"},
        {"biases": ["qkv"]},
        {"biases": ["norm", "feed_forward"], "block": "shared", "embedding_norm": True},
    ],
    ids=str,
)
def test_the_forms_of_other_architectures(make: Make, options: dict[str, Any]) -> None:
    model, ids = make(positions="none", **options), tokens(2, 17)
    expected = by_hand(model, ids)
    torch.testing.assert_close(model(ids), expected, rtol=1e-9, atol=1e-9)
    cache = model.cache()
    parts = [model.extend(part, cache) for part in ids.split(4, dim=1)]
    cached = nn.functional.linear(torch.cat(parts, dim=1), model.output_weight)
    torch.testing.assert_close(cached, expected, rtol=1e-9, atol=1e-9)


def test_biases_stand_where_they_are_asked_for(make: Make) -> None:
    names = {name for name in make(biases=["qkv", "norm"]).state_dict() if name.endswith("bias")}
    assert {name.removeprefix("blocks.0.") for name in names if not name.startswith("blocks.1.")} == {
        *("attention_norm.bias", "feed_forward_norm.bias", "attention.qkv.bias", "norm.bias")
    }


def test_every_form_begins_with_the_same_loss() -> None:
    for block in ("pre", "post", "parallel", "shared"):
        model = Transformer(ModelConfig(vocab_size=500, layers=2, width=64, heads=4, train_length=32, block=block))
        ids = torch.randint(500, (4, 32))
        assert model(ids, ids).item() == pytest.approx(math.log(500) + 1 / 8, abs=0.2)
