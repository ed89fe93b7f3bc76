"""A model's config: what it counts is what is built, and a wrong value is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lengthen import positions
from lengthen.checks import nearest
from lengthen.config import BIASES
from lengthen.model import ModelConfig, Transformer

SIZES: dict[str, Any] = {"vocab_size": 19, "layers": 2, "width": 24, "heads": 4, "train_length": 40}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in positions.names()),
    ("alibi", {"learned": True}),
    ("alibi", {"learned": True, "sides": "separate"}),
    ("xpos", {"learned_gamma": True}),
    ("t5", {"buckets": 8, "bidirectional": True}),
    ("learned", {"max_length": 7}),
    ("rotary+alibi", {}),
    ("sinusoidal + t5", {}),
    ("learned + t5", {}),
]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_parameters_are_as_many_as_are_built(data: st.DataObject) -> None:
    def draw(strategy: st.SearchStrategy[Any]) -> Any:
        return data.draw(strategy)

    key_heads = draw(st.sampled_from([None, 1, 2, 3]))
    heads = draw(st.integers(1, 3)) * (key_heads or 1)
    head_dim = draw(st.sampled_from([None, 2, 6]))
    name, options = draw(st.sampled_from(OPTIONS))
    width = heads * 2 * draw(st.integers(1, 3)) if head_dim is None else 2 * draw(st.integers(1, 9))
    config = ModelConfig(
        vocab_size=draw(st.integers(1, 40)),
        layers=draw(st.integers(1, 3)),
        width=width,
        heads=heads,
        train_length=draw(st.integers(1, 20)),
        positions=name,
        position_options=options,
        key_heads=key_heads,
        head_dim=head_dim,
        feed_forward=draw(st.sampled_from([None, 1, 17])),
        norm=draw(st.sampled_from(["layer", "rms"])),
        activation=draw(st.sampled_from(["gelu", "gelu_tanh", "relu", "swiglu", "geglu"])),
        biases=draw(st.booleans() | st.lists(st.sampled_from(BIASES), unique=True)),
        block=draw(st.sampled_from(["pre", "post", "parallel", "shared"])),
        embedding_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
        kind=draw(st.sampled_from(["decoder", "encoder"])),
    )
    with torch.device("meta"):
        model = Transformer(config)
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_size_written_out() -> None:
    """GPT-2's 124,439,808: 50,257 tokens and 1,024 positions of 768, 12 blocks of 7,087,872, and the last norm."""
    config = ModelConfig(vocab_size=50257, layers=12, width=768, heads=12, train_length=1024, positions="learned")
    assert config.parameters == 124_439_808


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"key_heads": 2, "activation": "swiglu", "tied": False},
        {"head_dim": 10, "feed_forward": 31, "layers": 3, "biases": False},
    ],
    ids=["plain", "grouped", "wide heads"],
)
def test_operations_are_those_that_torch_counts(kind: str, changes: dict[str, Any]) -> None:
    """Torch counts every product, hidden keys' too, as an encoder does; a decoder's token needs (length + 1)/2 keys."""
    length, rows = 12, 3
    config = ModelConfig(**(SIZES | changes), kind=kind, positions="none")
    model, ids = Transformer(config).double(), torch.randint(19, (rows, length))
    counter = FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    whole = counter.get_total_flops() / (rows * length)
    if kind == "encoder":
        assert config.flops_per_token(length) == whole
    hidden_keys = length - (length + 1) / 2
    saved = 12 * config.layers * config.heads * config.head_width * hidden_keys if kind == "decoder" else 0
    assert config.flops_per_token(length) == pytest.approx(whole - saved, rel=1e-12)


@pytest.mark.parametrize("window", [1, 5, 12, 99])
def test_operations_with_a_window(window: int) -> None:
    """A token sees itself and those behind it that its window has."""
    config = ModelConfig(**SIZES, window=window)
    seen = sum(min(place + 1, window) for place in range(12)) / 12
    more = ModelConfig(**SIZES).flops_per_token(12) - config.flops_per_token(12)
    assert more == pytest.approx(12 * config.layers * config.heads * config.head_width * (13 / 2 - seen))


def test_making_a_config_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    ModelConfig(**SIZES, positions="learned").parameters  # noqa: B018 (it is a property that counts)
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_that_follow_from_others() -> None:
    config = ModelConfig(**SIZES)
    assert (config.head_width, config.key_value_heads, config.hidden_width) == (6, 4, 96)
    assert ModelConfig(**SIZES, activation="swiglu").hidden_width == 64  # 8/3 · 24, to a multiple of 64
    assert ModelConfig(**(SIZES | {"width": 768, "heads": 12}), activation="swiglu").hidden_width == 2048
    given = ModelConfig(**SIZES, key_heads=2, head_dim=10, feed_forward=5)
    assert (given.head_width, given.key_value_heads, given.hidden_width) == (10, 2, 5)
    assert ModelConfig(**SIZES, positions="learned").position_method().max_length == 40  # type: ignore[union-attr]


WRONG: list[tuple[str, Any, str]] = [
    *((key, 0, rf"^model.{key}: expected at least 1, got 0$") for key in SIZES),
    *((key, 1.5, rf"^model.{key}: expected a whole number( or none)?, got 1.5 \(float\)$") for key in SIZES),
    *((key, True, rf"^model.{key}: expected a whole number( or none)?, got True \(bool\)$") for key in SIZES),
    *((key, -1, rf"^model.{key}: expected at least 1, got -1$") for key in ("key_heads", "head_dim", "feed_forward")),
    *((key, "2", rf"^model.{key}: expected a whole number or none, got '2'") for key in ("key_heads", "head_dim")),
    ("kind", "decoders", r"^model.kind: expected 'decoder' or 'encoder', got 'decoders' .*; did you mean 'decoder'\?"),
    ("norm", "batch", r"^model.norm: expected 'layer' or 'rms', got 'batch'"),
    ("activation", "silu", r"^model.activation: expected 'gelu' or 'gelu_tanh' or .* or 'geglu', got 'silu'"),
    ("activation", None, r"^model.activation: expected 'gelu' .*, got None"),
    *(
        (key, 1, rf"^model.{key}: expected true or false, got 1")
        for key in ("tied", "scale_embeddings", "qk_norm", "embedding_norm")
    ),
    ("biases", 1, r"^model.biases: expected true or false or a list \(each item 'qkv' or .*\), got 1"),
    (
        "biases",
        ["qkv", "heads"],
        r"^model.biases\[1\]: expected 'qkv' or 'out' or 'feed_forward' or 'norm', got 'heads'",
    ),
    ("block", "serial", r"^model.block: expected 'pre' or 'post' or 'parallel' or 'shared', got 'serial'"),
    ("clip_qkv", 0, r"^model.clip_qkv: expected more than 0, got 0"),
    ("score_scale", -1.0, r"^model.score_scale: expected more than 0, got -1.0"),
    ("window", 0, r"^model.window: expected at least 1, got 0"),
    ("norm_epsilon", 0, r"^model.norm_epsilon: expected more than 0, got 0"),
    ("norm_epsilon", float("nan"), r"^model.norm_epsilon: expected a finite number, got nan"),
    ("dropout", 1.0, r"^model.dropout: expected a fraction from 0 to below 1, got 1.0"),
    ("dropout", -0.1, r"^model.dropout: expected a fraction from 0 to below 1, got -0.1"),
    ("activation_dropout", 1.0, r"^model.activation_dropout: expected a fraction from 0 to below 1, got 1.0"),
    ("dropout", "0.1", r"^model.dropout: expected a number, got '0.1'"),
    ("heads", 5, r"^model.heads: expected a number that divides width=24 \(or give head_dim\), got 5"),
    ("key_heads", 3, r"^model.key_heads: expected a number that divides heads=4, got 3"),
    ("position_options", ["base"], r"^model.position_options: expected a table, got \['base'\] \(list\)"),
    ("position_options", {"slope": 2}, r"^model.positions = 'alibi': alibi: unknown option 'slope'"),
    ("positions", "alibbi", r"^model.positions = 'alibbi': .* got 'alibbi'; did you mean 'alibi'\?"),
    ("positions", 5, r"^model.positions: expected a word, got 5 \(int\)"),
    ("positions", "alibi+t5", r"^model.positions = 'alibi\+t5': compose: alibi and t5 both add a bias"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG, ids=[f"{key}={value!r}" for key, value, _ in WRONG])
def test_a_wrong_value_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ModelConfig(**(SIZES | {key: value}))


def test_every_key_is_tried() -> None:
    known = set(ModelConfig.__dataclass_fields__)
    assert {key for key, _, _ in WRONG} == known
    assert nearest("hed_dim", known) == "; did you mean 'head_dim'?"
