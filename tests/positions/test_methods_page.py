"""docs/methods.md is true: its snippets run, and it lists every method, option and default."""

import re
from pathlib import Path

import pytest

from lengthen.positions import names, options

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SECTIONS = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run(number: int) -> None:
    exec(compile(SNIPPETS[number], f"docs/methods.md, snippet {number}", "exec"), {})


def test_there_is_a_section_for_each_method() -> None:
    assert sorted(SECTIONS) == list(names())
    assert len(SNIPPETS) >= 5


@pytest.mark.parametrize("name", names())
def test_options_and_defaults_are_those_of_the_code(name: str) -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", SECTIONS[name], flags=re.MULTILINE))
    expected = {
        key: "required" if option.default is option.empty else f"`{option.default!r}`"
        for key, option in options(name).items()
    }
    assert listed == expected
