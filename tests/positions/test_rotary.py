import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lengthen.positions import Rotary

SIZES = {"heads": 4, "head_dim": 64, "width": 256}
CPU = torch.device("cpu")


def llama(max_length: int = 512, base: float = 10000.0, head_dim: int = 64, **rope: Any) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": "default", "rope_theta": base, **rope}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=max_length,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


def compare(ours: Rotary, theirs: LlamaRotaryEmbedding, length: int = 512) -> None:
    positions = torch.arange(length)
    q, k = torch.randn(2, 1, 4, length, ours.head_dim).unbind()
    cos, sin = theirs(q, positions.unsqueeze(0))
    for given, expected in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        # Their angles are float32 products: off by up to length · 2^−24 radians.
        torch.testing.assert_close(ours.rotate(given, positions), expected, rtol=0, atol=5e-4)
    torch.testing.assert_close(ours.frequencies(CPU).float(), theirs.inv_freq, rtol=2e-6, atol=0)
    assert ours.magnitude == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_against_transformers_llama(base: float) -> None:
    compare(Rotary(**SIZES, base=base), llama(base=base))


def test_against_transformers_linear() -> None:
    compare(Rotary(**SIZES, scaling="linear", factor=4), llama(rope_type="linear", factor=4.0))


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"factor": 4.0}, 256),
        ({"factor": 16.0}, 2048),
        ({"factor": 2.5, "beta_fast": 16, "beta_slow": 2}, 300),
        ({"factor": 8.0}, 7),  # the ramp begins at the fastest pair
    ],
)
@pytest.mark.parametrize(("base", "head_dim"), [(10000.0, 64), (500000.0, 128), (10.0, 8)])
def test_against_transformers_yarn(options: dict[str, Any], length: int, base: float, head_dim: int) -> None:
    sizes = {"heads": 4, "head_dim": head_dim, "width": 4 * head_dim}
    ours = Rotary(**sizes, base=base, scaling="yarn", original_length=length, **options)
    theirs = llama(
        max_length=int(length * options["factor"]),
        base=base,
        head_dim=head_dim,
        rope_type="yarn",
        original_max_position_embeddings=length,
        **options,
    )
    compare(ours, theirs, 256)


@pytest.mark.parametrize(("length", "fast", "slow"), [(8192, 4.0, 1.0), (512, 8.0, 2.0), (40, 4.0, 1.0)])
def test_against_transformers_llama3(length: int, fast: float, slow: float) -> None:
    options = {"factor": 8.0, "low_freq_factor": slow, "high_freq_factor": fast}
    theirs = llama(max_length=8 * length, rope_type="llama3", original_max_position_embeddings=length, **options)
    given = {} if fast == 4 else {"beta_fast": fast, "beta_slow": slow}
    compare(Rotary(**SIZES, scaling="llama3", factor=8.0, original_length=length, **given), theirs)


def test_yarns_factor_can_be_given() -> None:
    ours = Rotary(**SIZES, scaling="yarn", factor=4.0, original_length=256, attention_factor=0.7)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 0.7}
    compare(ours, llama(max_length=1024, **rope))


@pytest.mark.parametrize("scaling", [{}, {"scaling": "yarn", "factor": 4.0, "original_length": 64}])
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_a_part_is_rotated_as_a_head_of_its_size(pairs: str, scaling: dict[str, Any]) -> None:
    """The first pairs are rotated as those of a head with rotary_dim features, and the rest is left as it is."""
    whole = Rotary(heads=4, head_dim=16, width=256, pairs=pairs, **scaling)
    ours = Rotary(**SIZES, pairs=pairs, rotary_dim=16, **scaling)
    x, positions = torch.randn(2, 4, 30, 64), torch.arange(30)
    rotated = [*range(8), *range(32, 40)] if pairs == "halves" else list(range(16))
    still = [f for f in range(64) if f not in rotated]
    out = ours.rotate(x, positions)
    torch.testing.assert_close(out[..., rotated], whole.rotate(x[..., rotated], positions))
    assert torch.equal(out[..., still], x[..., still])


@pytest.mark.parametrize(("their_factor", "stretch"), [(1.0, 4), (2.0, 2), (4.0, 2)])
def test_against_transformers_dynamic_ntk(their_factor: float, stretch: int) -> None:
    # Theirs goes by the length at hand: base · (factor·length/trained − (factor − 1))^(d/(d − 2)).
    theirs = llama(max_length=128, rope_type="dynamic", factor=their_factor)
    factor = their_factor * stretch - (their_factor - 1)
    compare(Rotary(**SIZES, scaling="ntk", factor=factor), theirs, 128 * stretch)


@pytest.mark.parametrize("length", [100, 128, 129, 512])
def test_dynamic_is_ntk_by_the_length_of_a_pass(length: int) -> None:
    dynamic = Rotary(**SIZES, scaling="dynamic", factor=2.0, original_length=128)
    fixed = Rotary(**SIZES, scaling="ntk", factor=max(1.0, 2 * length / 128 - 1))
    x, positions = torch.randn(1, 4, length, 64), torch.arange(length)
    torch.testing.assert_close(dynamic.rotate(x, positions), fixed.rotate(x, positions))


def test_ntk_keeps_the_fastest_pair_and_stretches_the_slowest_by_the_factor() -> None:
    plain = Rotary(**SIZES).frequencies(CPU)
    ratio = plain / Rotary(**SIZES, scaling="ntk", factor=8).frequencies(CPU)
    assert ratio[0].item() == 1
    assert ratio[-1].item() == pytest.approx(8, rel=1e-12)


def test_yarn_stretches_slow_pairs_alone_and_scales_scores() -> None:
    ours = Rotary(**SIZES, scaling="yarn", factor=8, original_length=1024)
    ratio = Rotary(**SIZES).frequencies(CPU) / ours.frequencies(CPU)
    assert ratio[0].item() == 1
    assert ratio[-1].item() == pytest.approx(8, rel=1e-12)
    assert bool((ratio.diff() >= 0).all())
    q = torch.randn(1, 4, 3, 64, dtype=torch.float64)
    grown = ours.rotate(q, torch.arange(3)).norm(dim=-1) / q.norm(dim=-1)
    torch.testing.assert_close(grown, torch.full_like(grown, 0.1 * math.log(8) + 1))


def test_a_factor_of_one_changes_nothing() -> None:
    plain = Rotary(**SIZES).frequencies(CPU)
    for options in ({"scaling": "linear"}, {"scaling": "ntk"}, {"scaling": "yarn", "original_length": 512}):
        ours = Rotary(**SIZES, **options, factor=1)
        torch.testing.assert_close(ours.frequencies(CPU), plain, rtol=1e-14, atol=0)
        assert ours.magnitude == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 2.0}, r"rotary\.factor: expected none without scaling .*, got 2\.0"),
        (
            {"scaling": "linear"},
            r"rotary\.factor: expected a number of at least 1 with scaling='linear', got None",
        ),
        ({"scaling": "ntk", "factor": 0.5}, r"rotary\.factor: expected at least 1, got 0\.5"),
        (
            {"scaling": "yarn", "factor": 2.0},
            r"rotary\.original_length: expected the length trained at, .* got None",
        ),
        (
            {"scaling": "linear", "factor": 2.0, "original_length": 512},
            r"rotary\.original_length: expected only with scaling='dynamic' or .*, got 512 with 'linear'",
        ),
        ({"original_length": 512}, r"rotary\.original_length: expected only with scaling='dynamic'"),
        ({"rotary_dim": 7}, r"rotary\.rotary_dim: expected an even number of at most head_dim=64, got 7"),
        ({"rotary_dim": 66}, r"rotary\.rotary_dim: expected an even number of at most head_dim=64, got 66"),
        ({"attention_factor": 2.0}, r"rotary\.attention_factor: expected only with scaling='yarn', got 2.0 with None"),
        ({"scaling": "llama3", "factor": 2}, r"rotary\.original_length: expected .* with scaling='llama3', got None"),
        ({"beta_fast": 16}, r"rotary\.beta_fast: expected only with scaling='yarn' or 'llama3', got 16"),
        ({"beta_slow": 2}, r"rotary\.beta_slow: expected only with scaling='yarn' or 'llama3', got 2"),
        (
            {"scaling": "yarn", "factor": 2, "original_length": 512, "beta_slow": 0},
            r"rotary\.beta_slow: expected more than 0, got 0",
        ),
        (
            {"scaling": "yarn", "factor": 2, "original_length": 512, "beta_fast": 1},
            r"rotary\.beta_fast: expected more than beta_slow=1, got 1",
        ),
        (
            {"scaling": "yarn", "factor": 2, "original_length": 6},
            r"rotary\.original_length: expected more than 2π·beta_slow .*, got 6",
        ),
        ({"scaling": "yarm", "factor": 2}, r"rotary\.scaling: .*, got 'yarm'; did you mean 'yarn'"),
        ({"scaling": "ntk", "factor": 2, "head_dim": 2}, r"head_dim: expected at least 4 with scaling='ntk'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotary(**{**SIZES, **options})


def test_options_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(TypeError, match=r"rotary\.factor: expected a number, got '2'"):
        Rotary(**SIZES, scaling="linear", factor="2")
    with pytest.raises(TypeError, match=r"rotary\.original_length: expected a whole number, got 512\.0"):
        Rotary(**SIZES, scaling="yarn", factor=2, original_length=512.0)
