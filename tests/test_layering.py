"""Imports point down: callbacks | evaluation, measurement, metrics | losses, functional | attacks, utilities."""

import ast
from pathlib import Path

import lightning_robustness

PACKAGE = Path(lightning_robustness.__file__).parent
BELOW = {
    "utilities": {"utilities"},
    "functional": {"functional", "utilities"},
    "attacks": {"attacks", "utilities"},
    "metrics": {"metrics", "functional", "utilities"},
    "measurement": {"measurement", "metrics", "losses", "attacks", "functional", "utilities"},
    "losses": {"losses", "attacks", "functional", "utilities"},
    "evaluation": {"evaluation", "measurement", "metrics", "losses", "attacks", "functional", "utilities"},
    "cli": {"cli", "evaluation", "measurement", "attacks", "utilities"},
    "callbacks": {"callbacks", "measurement", "metrics", "losses", "attacks", "functional", "utilities"},
}
FOREIGN = {
    "lightning": {"callbacks", "cli"},
    "pytorch_lightning": {"callbacks"},
    "torchmetrics": {"metrics", "measurement", "evaluation", "callbacks"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module


def test_imports_point_down():
    wrong = []
    for path in sorted(PACKAGE.glob("*/**/*.py")):
        layer = path.relative_to(PACKAGE).parts[0]
        for name in imports(path):
            parts = name.split(".")
            is_upwards = parts[0] == PACKAGE.name and len(parts) > 1 and parts[1] not in BELOW[layer]
            if is_upwards or layer not in FOREIGN.get(parts[0], {layer}):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_every_layer_is_known():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= BELOW.keys()
