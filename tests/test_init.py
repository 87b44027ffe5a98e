import subprocess
import sys
from pathlib import Path

import pytest

import lightning_robustness
from lightning_robustness import callbacks
from lightning_robustness.input_space import InputSpace


def test_classes_are_those_of_their_modules():
    assert lightning_robustness.InputSpace is InputSpace
    for name in callbacks.__all__:
        assert getattr(lightning_robustness, name) is getattr(callbacks, name)
    assert set(lightning_robustness.__all__) == {
        *(*callbacks.__all__, "InputSpace", "__version__", "is_sandboxed", "sandbox"),
        *("evaluate", "compare", "sweep"),
    }
    assert set(lightning_robustness.__all__) <= set(dir(lightning_robustness))


def test_subpackages_are_attributes():
    root = Path(lightning_robustness.__file__).parent
    packages = {path.parent.name for path in root.glob("[a-z]*/__init__.py")} - {"cli"}
    assert packages == set(lightning_robustness._SUBPACKAGES)
    for name in packages:
        assert getattr(lightning_robustness, name).__name__ == f"lightning_robustness.{name}"


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'lightning_robustness' has no attribute 'Monitor'"):
        lightning_robustness.Monitor  # noqa: B018
    with pytest.raises(ImportError, match="'Monitor'"):
        from lightning_robustness import Monitor  # noqa: F401


def test_star_import_has_everything_and_plain_import_nothing_heavy():
    code = (
        "import sys, lightning_robustness\n"
        "assert not {'torch', 'lightning'} & sys.modules.keys()\n"
        "assert lightning_robustness.attacks.PGD.__name__ == 'PGD'"
    )
    root = Path(lightning_robustness.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
    names = {}
    exec("from lightning_robustness import *", names)
    assert set(lightning_robustness.__all__) <= set(names)
