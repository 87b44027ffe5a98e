import argparse
import os
import sys
from pathlib import Path, PurePath

import lightning as L
import pytest
import torch
from torch import nn

from lightning_robustness.cli import class_path
from lightning_robustness.cli.loading import load_model
from tests.cli.checkpoint_models import Activation, Anything, Composed, Described, Net, Sizes, run_command

HERE = "tests.cli.checkpoint_models"
EVIL = """
import pathlib
pathlib.Path("executed").touch()
class Thing:
    pass
def run(*args, **kwargs):
    pathlib.Path("executed").touch()
"""


class Command:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.fixture(autouse=True)
def _directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *sys.path])
    Path("evil_module.py").write_text(EVIL)
    yield
    sys.modules.pop("evil_module", None)


def save(hyper_parameters, module=None, path="x.ckpt", **more):
    """Write what Lightning writes."""
    state = (module or Described()).state_dict()
    content = {"state_dict": state, "pytorch-lightning_version": L.__version__, "hyper_parameters": hyper_parameters}
    torch.save(content | more, path)


@pytest.mark.parametrize(
    "hyper_parameters",
    [
        {"_instantiator": "lightning.pytorch.cli.instantiate_module", "extra": {"class_path": "evil_module.Thing"}},
        {"_instantiator": "lightning.pytorch.cli.instantiate_module", "_class_path": "evil_module.Thing"},
        # Lightning 2.5 calls whatever is named
        {"_instantiator": "evil_module.run"},
        {"_class_path": "evil_module.Thing"},
    ],
)
def test_instantiators_are_not_obeyed(hyper_parameters, monkeypatch):
    module = Described()
    save({"optimizer": 7, **hyper_parameters}, module)
    monkeypatch.setattr(Described, "load_from_checkpoint", lambda *args, **kwargs: pytest.fail("Lightning has loaded"))
    loaded = load_model(f"{HERE}:Described", "x.ckpt")
    assert type(loaded) is Described
    assert loaded.hparams.optimizer == 7
    assert torch.equal(loaded.network.head.weight, module.network.head.weight)
    assert not Path("executed").exists()
    assert "evil_module" not in sys.modules


CODE = {"class_path": "evil_module.Thing"}


@pytest.mark.parametrize("name", ["loss", "optimizer"])
def test_code_that_lightning_would_import(name, monkeypatch):
    """With the current directory on the path, as in ``python -m``, this runs the module in every Lightning."""
    monkeypatch.syspath_prepend(Path.cwd())
    save({"_instantiator": "lightning.pytorch.cli.instantiate_module", name: CODE})
    with pytest.raises(ValueError, match=rf"`{name}` holds `class_path`.*'evil_module.Th"):
        load_model(f"{HERE}:Described", "x.ckpt")
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (CODE, "class_path"),
        ([{"steps": (1, CODE)}], "class_path"),
        (argparse.Namespace(inner=CODE), "class_path"),
        ({"_target_": "evil_module.run"}, "_target_"),
        ({"_instantiator": "evil_module.run"}, "_instantiator"),
    ],
)
def test_names_of_code_in_hyper_parameters(value, key):
    save({"optimizer": value})
    expected = rf"in x.ckpt to be plain values but `optimizer` holds `{key}`, the name of code to run: 'evil_module"
    with pytest.raises(ValueError, match=expected) as error:
        load_model(f"{HERE}:Described", "x.ckpt")
    assert not Path("executed").exists()
    # Both remedies in the message
    assert "Give `optimizer` yourself, as `model_args`" in str(error.value)
    assert load_model(f"{HERE}:Described", "x.ckpt", {"optimizer": "mine"}).hparams.optimizer == "mine"
    assert "pass `trust_checkpoint=True`" in str(error.value)
    assert load_model(f"{HERE}:Described", "x.ckpt", trust_checkpoint=True).hparams.optimizer == value


def test_names_of_code_among_arguments_of_any_name():
    save({"class_path": "evil_module.Thing"}, Anything())
    with pytest.raises(ValueError, match=r"`class_path` holds .*'evil_module.Th"):
        load_model(f"{HERE}:Anything", "x.ckpt")


def test_checkpoint_of_lightning_cli_with_a_network_of_its_own():
    network = {"class_path": f"{HERE}.Net", "init_args": {"width": 6}}
    module = Composed(Net(6))
    save({"_instantiator": "lightning.pytorch.cli.instantiate_module", "network": network}, module)
    with pytest.raises(ValueError, match=r"`network` holds .*LightningCLI"):
        load_model(f"{HERE}:Composed", "x.ckpt")
    configuration = {"class_path": f"{HERE}.Composed", "init_args": {"network": network, "scale": 3.0}}
    for loaded in (
        load_model(configuration, "x.ckpt"),
        load_model(f"{HERE}:Composed", "x.ckpt", trust_checkpoint=True),
    ):
        assert torch.equal(loaded.network.head.weight, module.network.head.weight)


def test_hyper_parameters_that_contain_themselves():
    value = {}
    value["again"] = [value]
    save({"optimizer": value})
    loaded = load_model(f"{HERE}:Described", "x.ckpt")
    assert loaded.hparams.optimizer["again"][0] is loaded.hparams.optimizer


@pytest.mark.parametrize("hyper_parameters", [7, None, [1], {1: 2}])
def test_hyper_parameters_that_are_no_dictionary(hyper_parameters):
    save(hyper_parameters)
    with pytest.raises(ValueError, match=r"`hyper_parameters` in x.ckpt"):
        load_model(f"{HERE}:Described", "x.ckpt")


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickled_code_is_refused_by_name(is_zip):
    torch.save({"state_dict": Net().state_dict(), "x": Command()}, "x.pt", _use_new_zipfile_serialization=is_zip)
    name = f"{os.system.__module__}.system"
    expected = rf"Expected x.pt to hold weights, .* only but it refers to {name}\. Save the state dict alone"
    with pytest.raises(ValueError, match=expected) as error:
        load_model(f"{HERE}:Net", "x.pt")
    assert not Path("executed").exists()
    assert "`--trust_checkpoint` on the command line): it may then run any code" in str(error.value)
    load_model(f"{HERE}:Net", "x.pt", trust_checkpoint=True)
    assert Path("executed").exists()


class Elsewhere:
    """A class of another module than that of the model."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (run_command, f"{HERE}.run_command"),
        (Elsewhere(), f"{__name__}.Elsewhere"),
        (class_path.load_object, "lightning_robustness.cli.class_path.load_object"),
        (torch.hub.load, "torch.hub.load"),
        (torch.optim.swa_utils.AveragedModel, "torch.optim.swa_utils.AveragedModel"),
        (nn.DataParallel, "torch.nn.parallel.data_parallel.DataParallel"),
        (nn.functional.relu, "torch.nn.functional.relu"),
        (PurePath("a"), f"{type(PurePath()).__module__}.{type(PurePath()).__name__}"),  # of this Python and system
    ],
)
def test_other_objects_are_refused_by_name(value, name):
    save({"optimizer": value})
    with pytest.raises(ValueError, match=rf"refers to {name}\."):
        load_model(f"{HERE}:Described", "x.ckpt")


def test_classes_of_torch_and_of_the_model_are_read():
    given = {
        "sizes": Sizes(5),
        "activation": Activation.TANH,
        "layer": nn.Bilinear,
        "loss": nn.CrossEntropyLoss(weight=torch.arange(3.0)),
        "folder": Path("a/b"),
        "optimizer": [torch.optim.Adam, torch.optim.lr_scheduler.StepLR, argparse.Namespace(lr=0.1)],
    }
    save(given, Described(Sizes(5)))
    loaded = load_model(f"{HERE}:Described", "x.ckpt").hparams
    assert torch.equal(loaded.pop("loss").weight, torch.arange(3.0))
    del given["loss"]
    assert dict(loaded) == given


def test_classes_of_a_module_that_was_run_as_a_script(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Sizes, "__module__", "__main__")
        patch.setattr(sys.modules["__main__"], "Sizes", Sizes, raising=False)
        save({"sizes": Sizes(5)}, Described(Sizes(5)))
    assert b"__main__\nSizes" in Path("x.ckpt").read_bytes()
    assert load_model(f"{HERE}:Described", "x.ckpt").hparams.sizes == Sizes(5)


def test_classes_that_the_module_of_the_model_imports_from_its_package():
    Path("my_package").mkdir()
    Path("my_package/__init__.py").touch()
    Path("my_package/sizes.py").write_text("class Sizes:\n    width = 4\nclass Other:\n    pass\n")
    Path("my_package/model.py").write_text(
        "from torch import nn\nfrom my_package.sizes import Sizes\n"
        "class Model(nn.Linear):\n    def __init__(self, sizes):\n        super().__init__(sizes().width, 2)\n"
    )
    sizes = class_path.load_object("my_package.sizes:Sizes")
    other = class_path.load_object("my_package.sizes:Other")
    save({"sizes": sizes}, nn.Linear(4, 2))
    assert load_model("my_package.model:Model", "x.ckpt").in_features == 4
    save({"sizes": other}, nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"refers to my_package.sizes.Other\."):
        load_model("my_package.model:Model", "x.ckpt")


def test_whole_model_is_a_state_dict_if_trusted():
    net = Net()
    torch.save(net, "x.pt")
    loaded = load_model(f"{HERE}:Net", "x.pt", trust_checkpoint=True)
    assert torch.equal(loaded.head.weight, net.head.weight)


def test_current_directory_is_not_searched_while_a_checkpoint_is_read(monkeypatch):
    Path("my_network.py").write_text("from torch import nn\nclass Mine(nn.Linear):\n    pass\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry) != Path.cwd()])
    torch.save(nn.Linear(2, 3).state_dict(), "x.pt")
    seen, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: seen.append(list(sys.path)) or load(*args, **kwargs))
    load_model("my_network:Mine", "x.pt", {"in_features": 2, "out_features": 3})
    assert len(seen) == 1
    assert str(Path.cwd()) not in seen[0]
    assert str(Path.cwd()) in sys.path


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"epoch: 3\nloss: 0.1\n", b"\x80\x02}q\x00.", b"PK\x03\x04" + bytes(64)]
)
def test_files_that_are_no_checkpoint(content):
    Path("x.ckpt").write_bytes(content)
    expected = (
        r"Expected argument `checkpoint` to be a file that `torch.save` or Lightning has written but x.ckpt cannot"
    )
    with pytest.raises(ValueError, match=expected):
        load_model(f"{HERE}:Net", "x.ckpt")


def test_other_things_that_are_no_checkpoint():
    with pytest.raises(ValueError, match=r"none.ckpt .*no such file"):
        load_model(f"{HERE}:Net", "none.ckpt")
    Path("folder.ckpt").mkdir()
    with pytest.raises(ValueError, match=r"the directory folder.ckpt. Make"):
        load_model(f"{HERE}:Net", "folder.ckpt")
    torch.save(torch.ones(3), "tensor.pt")
    with pytest.raises(ValueError, match=r"tensor.pt but got Tensor"):
        load_model(f"{HERE}:Net", "tensor.pt")


def test_checkpoint_that_lightning_cannot_load():
    save({"sizes": 3})
    with pytest.raises(ValueError, match=r"x.ckpt .*AttributeError: .*`model_args`"):
        load_model(f"{HERE}:Described", "x.ckpt", trust_checkpoint=True)
    with pytest.raises(TypeError, match=r"sizes .*AttributeError: .*`model_args`"):
        load_model(f"{HERE}:Described", "x.ckpt")
