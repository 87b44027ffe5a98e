import sys
from pathlib import Path

import pytest
from torch import nn

from lightning_robustness.cli.class_path import load_object, read_arguments, split_target
from tests.cli import checkpoint_models
from tests.cli.checkpoint_models import Activation, Composed, Described, Net

HERE = "tests.cli.checkpoint_models"


@pytest.fixture(autouse=True)
def _directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_both_forms_of_a_path_and_modules_of_the_current_directory():
    assert load_object(f"{HERE}:Net") is load_object(f"{HERE}.Net") is Net
    Path("module_of_this_directory.py").write_text("VALUE = 3")
    assert load_object("module_of_this_directory:VALUE") == 3
    assert sys.path[0] == str(Path.cwd())


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("Net", "ValueError"),
        (":Net", "ValueError"),
        ("module:", "ModuleNotFoundError: .*'module'"),
        ("no_such_package.models.Net", "ModuleNotFoundError: .*'no_such_package'"),
        ("..models:Net", "ValueError"),
        ("package_that_fails.module.Net", "ModuleNotFoundError: .*'no_such_dependency'"),
        ("module_that_fails:Net", "ZeroDivisionError"),
        (f"{HERE}:Nothing", "AttributeError: .*'Nothing'"),
    ],
)
def test_paths_that_lead_nowhere(path, reason):
    Path("module_that_fails.py").write_text("1 / 0")
    Path("package_that_fails").mkdir()
    Path("package_that_fails/module.py").write_text("import no_such_dependency")
    with pytest.raises(ValueError, match=rf"package\.module:Name but got '{path}'.*: {reason}"):
        load_object(path)


def test_targets():
    assert split_target("a:B") == ("a:B", {}, {})
    target = {"class_path": "a.B", "init_args": {"x": 1}, "dict_kwargs": {"y": 2}}
    assert split_target(target) == ("a.B", {"x": 1}, {"y": 2})
    assert split_target({"class_path": "a.B", "init_args": None}) == ("a.B", {}, {})


@pytest.mark.parametrize(
    "target",
    [{}, {"width": 3}, {"class_path": 3}, {"class_path": "a.B", "init_args": [1]}, {"class_path": "a.B", "width": 3}],
)
def test_mappings_that_are_not_targets(target):
    with pytest.raises(ValueError, match=r"`class_path` .*`init_args` .* got {"):
        split_target(target)


def test_arguments_become_what_their_annotations_say():
    network = {"class_path": f"{HERE}.Net", "init_args": {"width": 6}}
    made = read_arguments(Composed, {"network": network, "scale": "0.5"})
    assert made["network"].head.in_features == 6
    assert made["scale"] == 0.5
    made = read_arguments(Described, {"activation": "TANH", "folder": "a/b", "sizes": {"width": 3}, "other": "1"})
    assert made["activation"] is Activation.TANH
    assert made["folder"] == Path("a/b")
    assert made["sizes"] == checkpoint_models.Sizes(3)
    assert made["other"] == "1"  # not a parameter, so it has no annotation


def test_arguments_of_parents():
    class Child(Composed):
        def __init__(self, depth: int, **kwargs):
            super().__init__(**kwargs)

    made = read_arguments(Child, {"depth": "2", "network": {"class_path": "torch.nn.Identity"}})
    assert made["depth"] == 2
    assert isinstance(made["network"], nn.Identity)


def test_annotations_that_cannot_be_read_and_arguments_that_do_not_fit():
    def build(width: "NotImported", depth):  # noqa: F821
        return width, depth

    assert read_arguments(build, {"width": "3", "depth": 2}) == {"width": "3", "depth": 2}
    with pytest.raises(ValueError, match=r"Composed .*{'scale': 'big'}: (.|\n)*float"):
        read_arguments(Composed, {"scale": "big"})
