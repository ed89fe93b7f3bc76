import pytest

from lengthen import positions
from lengthen.positions import (
    T5,
    ALiBi,
    PositionMethod,
    Rotary,
    Sinusoidal,
    XPos,
    build,
    names,
    options,
    summaries,
)
from lengthen.positions.compose import Composed
from lengthen.positions.registry import METHODS, canonical

SIZES = {"heads": 4, "head_dim": 8, "width": 32}


def test_names_are_sorted_and_all_there() -> None:
    assert names() == tuple(sorted(names()))
    assert {"alibi", "kerple", "learned", "none", "rotary", "sandwich", "sinusoidal", "t5", "xpos"} <= set(names())


def test_rope_is_rotary() -> None:
    assert isinstance(build("rope", **SIZES), Rotary)
    assert options("rope") == options("rotary")
    assert canonical("rope + alibi") == "rotary+alibi"
    assert [part.name for part in build("rope+alibi", **SIZES).parts] == ["rotary", "alibi"]  # type: ignore[union-attr]


def test_every_name_builds_its_class_which_is_public() -> None:
    for name in names():
        method = build(name, **SIZES, **({"max_length": 8} if name == "learned" else {}))
        assert type(method) is METHODS[name]
        assert type(method).__name__ in positions.__all__
        assert (method.heads, method.head_dim, method.width) == (4, 8, 32)


def test_summaries_are_one_line_each() -> None:
    assert tuple(summaries()) == names()
    for line in summaries().values():
        assert line.endswith(".")
        assert "\n" not in line
        assert line != (PositionMethod.__doc__ or "").split("\n")[0]


def test_options_are_those_of_the_constructor() -> None:
    assert list(options("t5")) == ["buckets", "max_distance", "bidirectional"]
    assert options("t5")["buckets"].default == 32
    assert not options("none")


def test_options_reach_the_method() -> None:
    method = build("t5", **SIZES, buckets=16, max_distance=99)
    assert isinstance(method, T5)
    assert method.weight.shape == (16, 4)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("alibii", "alibi"),
        ("ALiBi", "alibi"),
        ("rope-rotary", "rotary"),
        ("x-pos", "xpos"),
        ("rotary+alibo", "alibi"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"expected one of alibi, .*kerple, .*xpos, got .*; did you mean '{near}'\?"):
        build(name, **SIZES)


def test_names_that_are_like_no_other_get_the_list_alone() -> None:
    with pytest.raises(ValueError, match=r"expected one of alibi, .*, got 'qqq'$"):
        build("qqq", **SIZES)
    with pytest.raises(ValueError, match="got ''"):
        build("rotary+", **SIZES)
    with pytest.raises(TypeError, match="name: expected the name of a position method, got None"):
        build(None, **SIZES)


def test_an_unknown_option_is_refused_with_the_nearest_and_the_list() -> None:
    with pytest.raises(TypeError, match=r"xpos: unknown option 'gama'; did you mean 'gamma'\? \(its options are base"):
        build("xpos", **SIZES, gama=0.4)
    with pytest.raises(TypeError, match=r"none: unknown option 'learned' \(it has no options\)"):
        build("none", **SIZES, learned=True)
    with pytest.raises(TypeError, match=r"rotary\+alibi: unknown option 'slope'; did you mean 'slopes'\?"):
        build("rotary+alibi", **SIZES, slope=[1.0])


def test_a_required_option_is_asked_for() -> None:
    with pytest.raises(TypeError, match="learned: expected the option 'max_length', which has no default"):
        build("learned", **SIZES)
    with pytest.raises(TypeError, match="learned: expected the option 'max_length'"):
        build("learned+alibi", **SIZES)


def test_sizes_are_required() -> None:
    with pytest.raises(TypeError, match="width"):
        build("alibi", heads=4, head_dim=8)


def test_composed_names_share_out_the_options() -> None:
    method = build("sinusoidal + rotary+alibi", **SIZES, base=500.0, learned=True, pairs="neighbours")
    assert isinstance(method, Composed)
    embed, rotate, bias = method.parts
    assert isinstance(embed, Sinusoidal)
    assert isinstance(rotate, Rotary)
    assert isinstance(bias, ALiBi)
    assert (embed.base, rotate.base, rotate.pairs, bias.learned) == (500.0, 500.0, "neighbours", True)


def test_composed_names_are_refused_like_composed_methods() -> None:
    with pytest.raises(ValueError, match="rotary and xpos both rotate"):
        build("rotary+xpos", **SIZES)
    with pytest.raises(ValueError, match="alibi and alibi both add a bias"):
        build("alibi+alibi", **SIZES)
    with pytest.raises(ValueError, match="none says that there is no position information"):
        build("none+alibi", **SIZES)


def test_the_composed_xpos_keeps_its_decay() -> None:
    method = build("xpos+t5", **SIZES)
    assert isinstance(method, Composed)
    assert isinstance(method.parts[0], XPos)
    assert method.decay() is not None
