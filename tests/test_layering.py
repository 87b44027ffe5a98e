"""Imports point down, in the order of the layers; Lightning is imported in callbacks and _lightning alone."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import lightning_robustness

PACKAGE = Path(lightning_robustness.__file__).parent
# From the bottom up; layers of one row do not know each other
LAYERS = [
    {"_arguments", "_numbers", "_processes"},
    {"_isolation", "input_space"},
    {"_model"},
    {"functional"},
    {"attacks"},
    {"metrics", "losses"},
    {"_measurement"},
    {"_display"},
    {"_lightning", "evaluation"},
    {"callbacks", "cli"},
]
# Imports that the order forbids, to be removed: this list only shrinks
EXCEPTIONS: set[tuple[str, str]] = set()
FOREIGN = {
    "lightning": {"callbacks", "_lightning"},
    "pytorch_lightning": {"callbacks", "_lightning"},
    "torchmetrics": {"metrics", "_measurement", "evaluation", "callbacks", "_lightning"},
}
RANK = {layer: rank for rank, layers in enumerate(LAYERS) for layer in layers}


def imports(path, is_at_start=False):
    """Names that a file imports, anywhere or when it is itself imported."""
    tree = ast.parse(path.read_text())
    for node in tree.body if is_at_start else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            if node.module == PACKAGE.name:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def layer_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def modules():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or not path.stem.startswith("__")]


def is_allowed(layer, other):
    if other in RANK:
        return RANK[other] < RANK[layer] or other == layer
    return other == "__version__"


def test_imports_point_down():
    wrong = []
    for path in modules():
        layer = layer_of(path)
        for name in imports(path):
            parts = name.split(".")
            is_upwards = parts[0] == PACKAGE.name and len(parts) > 1 and not is_allowed(layer, parts[1])
            if is_upwards or layer not in FOREIGN.get(parts[0], {layer}):
                wrong.append((str(path.relative_to(PACKAGE)), name))
    assert set(wrong) == EXCEPTIONS


def test_no_file_imports_itself_through_others():
    paths = {".".join([PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in modules()}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {name: paths.keys() & set(imports(path, is_at_start=True)) - {name} for name, path in paths.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(paths)  # raises CycleError where there is one


def test_every_layer_is_known():
    assert {layer_of(path) for path in modules()} == RANK.keys()
