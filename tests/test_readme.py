"""The README and the pages of docs/ are true: their examples run, and the commands they name exist."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN_TEST = "methods.md"  # tests/positions/test_methods_page.py runs its snippets
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, flags=re.MULTILINE))


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != OWN_TEST and examples(p)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_examples_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what an example writes does not go into the checkout
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")  # dataclasses and compilers look their module up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, example in enumerate(examples(page)):
        exec(compile(example, f"{page.name}, example {number}", "exec"), vars(module))


def test_there_are_examples_where_a_reader_looks_for_them() -> None:
    counts = {page.name: len(examples(page)) for page in PAGES}
    assert counts["README.md"] >= 2
    assert counts["attention.md"] >= 5
    assert counts["reach.md"] >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_in_the_makefile(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^ {4})make ([a-z]+)", text, flags=re.MULTILINE))
    assert named <= TARGETS
    if page.name == "README.md":
        assert {"demo", "test"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if f": {page}\n" not in nav] == []


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) < 150
