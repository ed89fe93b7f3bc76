"""A run's config: the presets, what they must be, where they are found, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthen import config as configs
from lengthen import io, positions
from lengthen.config import Config, differences, find, from_table, load, presets
from lengthen.model import ModelConfig, Transformer

NAMES = ("lex-medium", "recall", "small", "tiny", "wikitext103", "xl")
MODEL: dict[str, Any] = {"vocab_size": 19, "layers": 2, "width": 24, "heads": 4, "train_length": 40}


def test_the_presets_are_there() -> None:
    assert tuple(presets()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_whole(name: str) -> None:
    config = load(name, vocab_size=50304)
    again = from_table(tomllib.loads(io.to_toml(config)), "again")
    assert again == config
    with torch.device("meta"):
        model = Transformer(config.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.model.parameters
    share = config.train.micro_batch or config.train.batch
    assert config.train.batch % share == 0, "a last pass with fewer rows wastes time"
    assert config.evaluation_lengths[0] == config.model.train_length
    assert len(config.evaluation_lengths) > 1, "without a longer length, nobody sees extrapolation"
    comment = presets()[name].read_text().split("[model]")[0]
    assert f"configs/{name}.toml" in comment, "its head shows how it is used"


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "feed_forward"),
    [
        ("small", 12, 768, 12, 3072),
        ("lex-medium", 24, 1024, 16, 4096),
        ("wikitext103", 16, 1024, 8, 4096),
        ("xl", 25, 2048, 16, 8192),
    ],
)
def test_a_presets_sizes_are_the_papers(name: str, layers: int, width: int, heads: int, feed_forward: int) -> None:
    model = load(name, vocab_size=50304).model
    assert (model.layers, model.width, model.heads, model.hidden_width) == (layers, width, heads, feed_forward)


@pytest.mark.parametrize(
    ("name", "vocabulary", "low", "high"),
    [("tiny", 258, 0.9e6, 1.2e6), ("small", 50304, 120e6, 130e6), ("xl", 50304, 1.25e9, 1.4e9)],
)
def test_a_presets_parameters(name: str, vocabulary: int, low: float, high: float) -> None:
    assert low <= load(name, vocab_size=vocabulary).model.parameters <= high


def test_positions_of_the_presets() -> None:
    assert {name: load(name, vocab_size=9).model.positions for name in NAMES} == {
        "tiny": "alibi",
        "small": "alibi",
        "lex-medium": "xpos",
        "recall": "alibi",
        "wikitext103": "alibi",
        "xl": "alibi",
    }


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """A config as a file might have it: some sections, some keys of each."""

    def some(keys: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
        return draw(st.fixed_dictionaries({}, optional=keys))

    share = st.floats(0, 1)
    every = st.integers(0, 1000)
    return {
        "model": MODEL
        | some(
            {
                "positions": st.sampled_from([*positions.names(), "rotary+alibi"]),
                "kind": st.sampled_from(["decoder", "encoder"]),
                "dropout": st.floats(0, 1, exclude_max=True),
                "activation_dropout": st.floats(0, 1, exclude_max=True),
                "tied": st.booleans(),
                "key_heads": st.sampled_from([1, 2, 4]),
                "norm_epsilon": st.floats(1e-12, 1),
            }
        ),
        "data": some({"order": st.sampled_from(["pack", "sample"]), "document_mask": st.booleans()}),
        "train": some(
            {
                "steps": st.integers(1, 10**6),
                "micro_batch": st.integers(1, 64),
                "clip": st.floats(0, 10),
                "compile": st.booleans(),
                "mask_fraction": st.floats(0.01, 0.99),
            }
        ),
        "optimizer": some({"lr": st.floats(1e-9, 1), "betas": st.lists(st.floats(0, 0.99), min_size=2, max_size=2)}),
        "schedule": some({"shape": st.sampled_from(["cosine", "constant"]), "floor": share, "decay_fraction": share}),
        "evaluation": some({"every": every, "lengths": st.lists(st.integers(1, 999), max_size=4)}),
        "checkpoint": some({"every": every, "keep": st.integers(1, 9)}),
    }


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(table=tables())
def test_toml_and_back(table: dict[str, Any]) -> None:
    config = from_table(table, "table")
    again = from_table(tomllib.loads(io.to_toml(config)), "again")
    assert again == config
    assert differences(config, again) == []
    for section, keys in table.items():
        for key, value in keys.items():
            assert getattr(getattr(config, section), key) == value


def test_position_options_come_through(tmp_path: Path) -> None:
    overrides = {
        "model.positions": "rope",
        "model.position_options.scaling": "yarn",
        "model.position_options.factor": 4,
        "model.position_options.original_length": 64,
    }
    config = load("tiny", overrides, vocab_size=258)
    assert config.model.positions == "rotary", "a config has the method's own name"
    assert config.model.position_options == {"scaling": "yarn", "factor": 4, "original_length": 64}
    path = tmp_path / "saved.toml"
    path.write_text(io.to_toml(config))
    assert load(path) == config
    none = dict.fromkeys(("scaling", "factor", "original_length"))
    assert load(path, {"model.position_options": none}).model.position_options == {}, "none is the default"
    with pytest.raises(ValueError, match=r"saved.toml: model.positions = 'rotary': rotary.factor: expected at least 1"):
        load(path, {"model.position_options.factor": 0})


def test_overrides_of_every_type() -> None:
    overrides = {
        "model.layers": 2,
        "model.key_heads": None,
        "model.biases": False,
        "train.micro_batch": 8,
        "train.compile": None,
        "optimizer.lr": 0.01,
        "optimizer.betas": [0.8, 0.9],
        "evaluation.lengths": None,
        "schedule.shape": "constant",
    }
    config = load("tiny", overrides, vocab_size=258)
    assert differences(load("tiny", vocab_size=258), config) == [
        "model.layers: 4 → 2",
        "model.biases: True → False",
        "train.micro_batch: None → 8",
        "optimizer.lr: 0.003 → 0.01",
        "optimizer.betas: [0.9, 0.95] → [0.8, 0.9]",
        "schedule.shape: 'trapezoid' → 'constant'",
        "evaluation.lengths: [64, 128, 256, 512, 1024] → None",
    ]


@pytest.mark.parametrize("key", ["train.step", "train.steps.many", "steps", "model", 5])
def test_an_override_of_no_key_is_named(key: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\b{key}\b"):
        load("tiny", {key: 3})


def test_the_vocabulary_fills_a_gap_and_no_more() -> None:
    assert load("tiny", vocab_size=300).model.vocab_size == 300
    assert load("tiny", {"model.vocab_size": 512}, vocab_size=300).model.vocab_size == 512
    assert load("tiny").model.vocab_size is None, "it will be the data's"
    with pytest.raises(ValueError, match=r"model.vocab_size: expected a number, got none; `train` takes the data's"):
        assert load("tiny").model.parameters


def test_numbers_beyond_torch_are_refused() -> None:
    for key, value in (("train.seed", 2**64 - 1), ("train.batch", 10**400), ("evaluation.lengths", [64, 2**63])):
        section, name = key.split(".")
        with pytest.raises(ValueError, match=rf"^f.toml: {key}: expected at most 9223372036854775807, got \d+"):
            from_table({"model": MODEL, section: {name: value}}, "f.toml")
    assert load("tiny", {"train.seed": 2**63 - 1}).train.seed == 2**63 - 1


@pytest.mark.parametrize("method", positions.names())
def test_a_model_without_bounds_is_described_or_refused_at_once(method: str) -> None:
    """Nothing is allocated, and no loop goes over its layers or heads."""
    for sizes in (
        {"layers": 10**12},
        {"heads": 10**12, "head_dim": 2},
        {"width": 10**18, "heads": 1},
        {"vocab_size": 10**18},
        {"train_length": 10**18},
        {"feed_forward": 10**18},
    ):
        began = time.perf_counter()
        try:
            config = from_table({"model": MODEL | {"positions": method} | sizes}, "f.toml")
        except ValueError as problem:
            assert re.match(rf"f\.toml: model\.positions = '{method}': ", str(problem))  # noqa: PT017
        else:
            assert config.model.parameters > 0
        assert time.perf_counter() - began < 5


def test_where_a_config_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "tiny.toml", "configs/tiny.toml", Path("tiny")):
        assert find(name) == presets()["tiny"]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.toml").write_text("")
    assert find("configs/tiny.toml") == Path("configs/tiny.toml")  # a file of one's own comes first
    listed = (
        r"expected a TOML file or one of the presets lex-medium, recall, small, tiny, wikitext103, xl, got no such file"
    )
    with pytest.raises(FileNotFoundError, match=rf"^tny: {listed}; did you mean 'tiny'\?$"):
        find("tny")
    with pytest.raises(FileNotFoundError, match=rf"^other/place.toml: {listed}$"):
        find("other/place.toml")
    with pytest.raises(FileNotFoundError, match=rf"^tiny.json: {listed}"):
        find("tiny.json")
    with pytest.raises(FileNotFoundError, match=rf"^other/tiny.toml: {listed}"):
        find("other/tiny.toml")


def test_lengths_of_evaluation() -> None:
    def lengths(given: list[int] | None) -> list[int]:
        section = configs.EvaluationConfig(lengths=given)
        return Config(ModelConfig(**MODEL), evaluation=section).evaluation_lengths

    assert lengths(None) == [40, 80, 160]
    assert lengths([]) == [40]
    assert lengths([100, 20, 100]) == [40, 20, 100]
    assert lengths([40, 20]) == [40, 20]


def test_differences_name_every_key() -> None:
    one = Config(ModelConfig(**MODEL))
    assert differences(one, one) == []
    two = replace(one, train=replace(one.train, steps=7), model=replace(one.model, positions="t5"))
    assert differences(one, two) == ["model.positions: 'alibi' → 't5'", "train.steps: 1000 → 7"]


WRONG: list[tuple[str, Any, str]] = [
    ("data.order", "shuffle", "expected 'pack' or 'sample', got 'shuffle'"),
    ("data.tokenizer", "words", "expected 'bytes' or 'bpe' or 'json', got 'words'"),
    ("train.steps", 0, "expected at least 1, got 0"),
    ("train.batch", 0, "expected at least 1, got 0"),
    ("train.micro_batch", 0, "expected at least 1, got 0"),
    ("train.seed", -1, "expected at least 0, got -1"),
    ("train.clip", -0.5, "expected at least 0, got -0.5"),
    ("train.precision", "float16", "expected 'auto' or 'float32' or 'bfloat16', got 'float16'"),
    ("train.mask_fraction", 0.0, "expected a fraction between 0 and 1, got 0.0"),
    ("train.mask_fraction", 1.0, "expected a fraction between 0 and 1, got 1.0"),
    ("optimizer.lr", 0.0, "expected more than 0, got 0.0"),
    ("optimizer.lr", float("nan"), "expected a finite number, got nan"),
    ("optimizer.epsilon", 0.0, "expected more than 0, got 0.0"),
    ("optimizer.weight_decay", -1.0, "expected at least 0, got -1.0"),
    ("optimizer.betas", [0.9], r"expected two numbers from 0 to below 1, got \[0.9\]"),
    ("optimizer.betas", [0.9, 1.0], r"expected two numbers from 0 to below 1, got \[0.9, 1.0\]"),
    ("schedule.shape", "cosin", r"expected 'cosine' .*, got 'cosin' \(str\); did you mean 'cosine'\?"),
    ("schedule.warmup", -1, "expected at least 0, got -1"),
    ("schedule.decay_fraction", 1.5, "expected a fraction from 0 to 1, got 1.5"),
    ("schedule.floor", -0.1, "expected a fraction from 0 to 1, got -0.1"),
    ("evaluation.every", -1, "expected at least 0, got -1"),
    ("evaluation.tokens", 0, "expected at least 1, got 0"),
    ("evaluation.lengths", [64, 0], "expected at least 1, got 0"),
    ("checkpoint.every", -1, "expected at least 0, got -1"),
    ("checkpoint.keep", 0, "expected at least 1, got 0"),
    ("distributed.mode", "ddp", "expected 'auto' or 'replicate' or 'shard' or 'hybrid', got 'ddp'"),
    ("log.every", 0, "expected at least 1, got 0"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG, ids=[f"{key}={value}" for key, value, _ in WRONG])
def test_a_wrong_value_is_named(key: str, value: Any, message: str) -> None:
    section, name = key.split(".")
    with pytest.raises(ValueError, match=rf"^f.toml: {key}: {message}"):
        from_table({"model": MODEL, section: {name: value}}, "f.toml")


def test_every_section_is_tried() -> None:
    sections = {field.name for field in dataclasses.fields(Config)} - {"model"}
    assert {key.split(".")[0] for key, _, _ in WRONG} == sections


@pytest.mark.parametrize("section", [field.name for field in dataclasses.fields(Config)])
def test_a_mistyped_key_or_section_is_named(section: str) -> None:
    name = dataclasses.fields(io.fields(Config)[section])[0].name
    mistyped = name[:-1] + "xx"
    with pytest.raises(ValueError, match=rf"^f\.toml: unknown key '{section}.{mistyped}'; did you mean '{section}\."):
        from_table({"model": MODEL} | {section: {mistyped: 1}}, "f.toml")
    with pytest.raises(ValueError, match=rf"^f\.toml: unknown key '{section}x'; did you mean '{section}'\?"):
        from_table({"model": MODEL, f"{section}x": {}}, "f.toml")
