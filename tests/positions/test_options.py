import pytest

from lengthen.checks import choice, flag, nearest, number


def test_number_accepts_whole_and_real_numbers() -> None:
    assert number("a", 3) == 3.0
    assert isinstance(number("a", 3), float)
    assert number("a", 1, at_least=1) == 1


@pytest.mark.parametrize("value", ["3", None, True, [3.0]])
def test_number_refuses_other_types(value: object) -> None:
    with pytest.raises(TypeError, match=r"rotary\.base: expected a number, got"):
        number("rotary.base", value)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (float("nan"), {}, "a: expected a finite number, got nan"),
        (float("inf"), {}, "a: expected a finite number, got inf"),
        (0, {"above": 0}, "a: expected more than 0, got 0"),
        (0.5, {"at_least": 1}, "a: expected at least 1, got 0.5"),
    ],
)
def test_number_refuses_values_outside_its_bounds(value: float, bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        number("a", value, **bounds)


def test_flag_takes_no_other_truth() -> None:
    assert flag("a", True) is True
    assert flag("a", False) is False
    with pytest.raises(TypeError, match="a: expected True or False, got 1"):
        flag("a", 1)


def test_choice_names_what_is_allowed_and_the_nearest() -> None:
    assert choice("a", "halves", ("halves", "neighbours")) == "halves"
    with pytest.raises(ValueError, match="expected 'halves' or 'neighbours', got 'halve'; did you mean 'halves'"):
        choice("a", "halve", ("halves", "neighbours"))
    with pytest.raises(TypeError, match="a: expected 'x', got None"):
        choice("a", None, ("x",))


def test_nearest_is_silent_when_nothing_is_near() -> None:
    assert nearest("ALIBI", ("alibi", "t5")) == "; did you mean 'alibi'?"
    assert nearest("zzzz", ("alibi", "t5")) == ""
