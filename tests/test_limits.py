"""Limits that keep the package readable; ruff checks the complexity of functions."""

import ast
from pathlib import Path

import pytest

import lightning_robustness

PACKAGE = Path(lightning_robustness.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Classes that keep more than this many things, and why
MANY_ATTRIBUTES = {
    "ModuleState": "each of its lists holds one kind of thing to put back",
    "HeadTap": "the state of a pass that somebody else runs",
    "AdaptiveSteps": "the state of Auto-PGD, by its authors' names",
    "Classifier": "what attacks know of the model and its inputs",
}


def attributes(node):
    """Names of the attributes that the methods of a class set on ``self``."""
    for statement in ast.walk(node):
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    yield part.attr


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 350


def test_classes_keep_few_things():
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    assert sorted(node.name for node in nodes if len(set(attributes(node))) > 12) == sorted(MANY_ATTRIBUTES)


def test_no_two_things_have_one_name():
    nodes = [node for path in FILES for node in ast.parse(path.read_text()).body]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert sorted(names) == sorted(set(names))


def test_there_are_few_files():
    assert len(FILES) <= 140
