"""The positions need torch and the attention layer, and nothing above them."""

import ast
from pathlib import Path

import pytest

import lengthen.positions

PACKAGE = Path(lengthen.positions.__file__).parent


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_imports_only_what_lies_below(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        for name in imported:
            if name.startswith("lengthen"):
                assert name.startswith(("lengthen.attention.", "lengthen.positions."))
