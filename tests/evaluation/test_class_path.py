import sys
from pathlib import Path

import pytest
from torch import nn

from lightning_robustness.evaluation.class_path import load_object, read_arguments, split_target
from tests.evaluation import checkpoint_models
from tests.evaluation.checkpoint_models import Activation, Composed, Described, Net

HERE = "tests.evaluation.checkpoint_models"


@pytest.fixture(autouse=True)
def _directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("path", [f"{HERE}:Net", f"{HERE}.Net"])
def test_both_forms_of_a_path(path):
    assert load_object(path) is Net


def test_modules_of_the_current_directory_come_first():
    Path("module_of_this_directory.py").write_text("VALUE = 3")
    assert load_object("module_of_this_directory:VALUE") == 3
    assert sys.path[0] == str(Path.cwd())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Net", "Expected a path of the form package.module:Name but got 'Net'"),
        (":Net", "Expected a path of the form package.module:Name but got ':Net'"),
        ("module:", "Expected a path of the form package.module:Name but got 'module:'"),
        ("no_such_package.models:Net", "Expected the module of .* to be found but there is no 'no_such_package'"),
        ("..models:Net", "Expected the module of .* to be imported but it failed: TypeError: .* Try `import"),
        ("module_that_fails:Net", r"to be imported but it failed: ZeroDivisionError.* Try `import module_that_fails`"),
        (f"{HERE}:Nothing", "Expected 'Nothing' in the module .* but found only the classes Activation, .*, Net, "),
    ],
)
def test_paths_that_lead_nowhere(path, message):
    Path("module_that_fails.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=message):
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
def test_mappings_that_are_no_targets(target):
    with pytest.raises(ValueError, match=r"or a mapping with `class_path` \(a string\) and `init_args` .* but got {"):
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


def test_annotations_that_cannot_be_read():
    def build(width: "NotImported", depth):  # noqa: F821
        return width, depth

    assert read_arguments(build, {"width": "3", "depth": 2}) == {"width": "3", "depth": 2}


def test_arguments_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"that fit the annotations of Composed but got {'scale': 'big'}: (.|\n)*float"
    ):
        read_arguments(Composed, {"scale": "big"})
