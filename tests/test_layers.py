"""A layer imports only from itself and from the layers above it in the list; nothing imports the cli."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lengthen

PACKAGE = Path(lengthen.__file__).parent
# Those that are single modules need no torch; a config builds its position method when asked.
LAYERS = (
    *("checks", "io", "attention", "positions", "config", "model", "data", "training", "evaluation", "interop"),
    *("serving", "report", "cli"),
)
OUTSIDE = {"__init__": LAYERS[:-1], "__main__": LAYERS}  # what each may import; no other module stands outside
BASE = {"attention", "positions"}  # these need torch alone, and Triton where there is a GPU
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path, source: str | None = None) -> Iterator[str]:
    """Yield the full dotted name of everything that a file imports, wherever in the file."""
    package = ["lengthen", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") if source is None else source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def allowed_layers(path: Path) -> tuple[str, ...]:
    first = path.relative_to(PACKAGE).parts[0]
    name = first.removesuffix(".py")
    return OUTSIDE[name] if name in OUTSIDE else LAYERS[: LAYERS.index(name) + 1]


def strays(path: Path, source: str | None = None) -> list[str]:
    """Return what a file imports of the package that it may not."""
    own = [name.split(".") for name in imports(path, source) if name.partition(".")[0] == "lengthen"]
    return [
        ".".join(parts) for parts in own if len(parts) < 2 or parts[1] not in (*allowed_layers(path), "__version__")
    ]


def test_everything_belongs_to_a_layer() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert parts - set(LAYERS) <= set(OUTSIDE)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_from_its_own_layer_and_those_above(path: Path) -> None:
    assert strays(path) == []


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if p.relative_to(PACKAGE).parts[0] in BASE],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_the_base_imports_torch_alone(path: Path) -> None:
    used = {name.partition(".")[0] for name in imports(path)}
    assert used - set(sys.stdlib_module_names) <= {"torch", "triton", "lengthen"}


@pytest.mark.parametrize(
    ("source", "stray"),
    [
        ("from lengthen.positions import build", ["lengthen.positions.build"]),
        ("def f():\n    import lengthen.model.decoder", ["lengthen.model.decoder"]),
        ("from lengthen import positions", ["lengthen.positions"]),
        ("from ..positions import build", ["lengthen.positions.build"]),
        ("from .. import positions", ["lengthen.positions"]),
        ("from lengthen import attention", []),
        ("from . import reach", []),
        ("from .backends.chunked.runs import Run", []),
        ("import lengthen", ["lengthen"]),
    ],
)
def test_strays_are_found(source: str, stray: list[str]) -> None:
    assert strays(PACKAGE / "attention" / "op.py", source) == stray
