"""Imports point downwards: callbacks -> evaluation -> metrics, attacks -> functional -> utilities."""

import ast
from pathlib import Path

import pytest

import lightning_robustness

PACKAGE = Path(lightning_robustness.__file__).parent
BELOW = {
    "utilities": {"utilities"},
    "functional": {"functional", "utilities"},
    "attacks": {"attacks", "utilities"},
    "metrics": {"metrics", "functional", "utilities"},
    "evaluation": {"evaluation", "metrics", "attacks", "functional", "utilities"},
    "callbacks": {"callbacks", "evaluation", "metrics", "attacks", "functional", "utilities"},
    "cli": {"cli", "evaluation", "attacks", "utilities"},
}
FOREIGN = {
    "lightning": {"callbacks"},
    "pytorch_lightning": {"callbacks"},
    "torchmetrics": {"metrics", "evaluation", "callbacks"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/**/*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    layer = path.relative_to(PACKAGE).parts[0]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "lightning_robustness" and len(parts) > 1:
            assert parts[1] in BELOW[layer], f"{path} imports {name}"
        assert layer in FOREIGN.get(parts[0], {layer}), f"{path} imports {name}"


def test_every_layer_is_known():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= BELOW.keys()
