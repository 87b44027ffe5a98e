import lightning as L
import pytest
import torch
from torch import nn

from lightning_robustness.cli.loading import load_data, load_model
from tests.cli import checkpoint_models
from tests.cli.checkpoint_models import Net

HERE = "tests.cli.checkpoint_models"
OWN = "tests.cli.test_loading"


class Module(L.LightningModule):
    def __init__(self, width=4, rate=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.network = Net(width)


class Configured(L.LightningModule):
    """Takes its hyper-parameters as one dictionary."""

    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)
        self.network = Net(config["width"])


class Late(L.LightningModule):
    """Makes its layers only when they are needed."""

    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters()
        self.network = None

    def configure_model(self):
        if self.network is None:
            self.network = Net(self.hparams.config["width"])


class Renaming(Configured):
    """Saves its weights by other names."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.removeprefix("old."): value for name, value in state.items()}


def save_checkpoint(module, path, weights_only=False):
    trainer = L.Trainer(accelerator="cpu", max_epochs=0, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    module.configure_model()
    trainer.save_checkpoint(path, weights_only=weights_only)


def same_weights(model, other):
    return all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_checkpoint_of_lightning_brings_its_arguments(tmp_path):
    module = Module(width=7)
    save_checkpoint(module, tmp_path / "module.ckpt", weights_only=True)
    loaded = load_model(f"{OWN}:Module", tmp_path / "module.ckpt")
    assert same_weights(loaded, module)
    assert loaded.hparams.width == 7
    # The network that was an attribute of the module; of the hyper-parameters it takes those that it knows
    assert same_weights(load_model(f"{HERE}:Net", tmp_path / "module.ckpt"), module.network)


@pytest.mark.parametrize("kind", [Configured, Late, Renaming])
def test_class_of_lightning_loads_itself(tmp_path, kind):
    module = kind({"width": 7})
    save_checkpoint(module, tmp_path / "module.ckpt")
    path = f"{OWN}:{kind.__name__}"
    loaded = load_model(path, tmp_path / "module.ckpt")
    assert same_weights(loaded, module)
    assert same_weights(module, loaded)
    with pytest.raises(ValueError, match=r"(?s)module.ckpt .*`model_args`.*size mismatch for network.body.0.weight"):
        load_model(path, tmp_path / "module.ckpt", {"config": {"width": 8}})


class Partial(Configured):
    """Saves only a part of its weights."""

    def __init__(self, config):
        super().__init__(config)
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if self.hparams["part"] in name}


def test_loading_that_is_not_strict(tmp_path):
    module = Partial({"width": 7, "part": "head"})
    save_checkpoint(module, tmp_path / "module.ckpt")
    with pytest.warns(UserWarning, match=r"initial values: network.body.0.weight, network.body.0.bias"):
        loaded = load_model(f"{OWN}:Partial", tmp_path / "module.ckpt")
    assert torch.equal(loaded.network.head.weight, module.network.head.weight)
    save_checkpoint(Partial({"width": 7, "part": "nothing"}), tmp_path / "module.ckpt")
    with pytest.raises(ValueError, match=r"(?s)to hold the weights of Partial .*Missing key.*network.body"):
        load_model(f"{OWN}:Partial", tmp_path / "module.ckpt")


class Failing(Configured):
    def on_load_checkpoint(self, checkpoint):
        raise KeyError("ema")


def test_hook_that_fails(tmp_path):
    save_checkpoint(Failing({"width": 7}), tmp_path / "module.ckpt")
    with pytest.raises(ValueError, match=r":Failing' .*module.ckpt .*KeyError: 'ema'"):
        load_model(f"{OWN}:Failing", tmp_path / "module.ckpt")


def test_network_that_is_not_the_only_one(tmp_path):
    states = {"teacher.": Net().state_dict(), "student.": Net().state_dict(), "wide.": Net(8).state_dict()}
    state = {prefix + key: value for prefix, weights in states.items() for key, value in weights.items()}
    torch.save(state, tmp_path / "all.pt")
    expected = r"Expected one Net in .*all.pt but got 2, with the prefixes 'teacher.', 'student.'. Save the state dict"
    with pytest.raises(ValueError, match=expected):
        load_model(f"{HERE}:Net", tmp_path / "all.pt")
    wide = load_model(f"{HERE}:Net", tmp_path / "all.pt", {"width": 8})
    assert torch.equal(wide.head.weight, states["wide."]["head.weight"])
    # One network by two names
    torch.save({f"{name}.{k}": v for name in ("a", "b") for k, v in states["teacher."].items()}, tmp_path / "same.pt")
    loaded = load_model(f"{HERE}:Net", tmp_path / "same.pt")
    assert torch.equal(loaded.head.weight, states["teacher."]["head.weight"])


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model.network."])
def test_prefixes_of_wrappers_go_away(tmp_path, prefix):
    net = Net()
    state = {f"{prefix}{key}": value for key, value in net.state_dict().items()} | {"loss.weight": torch.ones(3)}
    torch.save({"state_dict": state}, tmp_path / "net.ckpt")
    assert same_weights(load_model(f"{HERE}:Net", tmp_path / "net.ckpt"), net)


def test_arguments_take_precedence(tmp_path):
    torch.save({"state_dict": Net(9).state_dict(), "hyper_parameters": {"width": 2, "old": 1}}, tmp_path / "net.ckpt")
    assert load_model(f"{HERE}:Net", tmp_path / "net.ckpt", {"width": 9}).head.in_features == 9
    torch.save({"state_dict": {}, "hyper_parameters": {"width": 2, "old": 1}}, tmp_path / "any.ckpt")
    assert load_model(f"{HERE}:Anything", tmp_path / "any.ckpt").arguments == {"width": 2, "old": 1}


NO_WEIGHTS = r"(?s)x.pt to hold the weights of Net .*"


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        (
            "Net",
            nn.Linear(2, 3).state_dict(),
            ValueError,
            f"{NO_WEIGHTS}`model_args`.*Missing.*body.0.*Unexpected",
        ),
        ("Net", Net(width=8).state_dict(), ValueError, f"{NO_WEIGHTS}size mismatch for body.0.weight"),
        ("Net", {"model": Net().state_dict(), "epoch": 3}, ValueError, r"dictionaries \(model\): save"),
        ("Net", {"state_dict": 7}, ValueError, "x.pt .* 7"),
        ("Net", {**Net().state_dict(), "head.bias": 7}, ValueError, f"{NO_WEIGHTS}head.bias"),
        ("NeedsArgument", {}, TypeError, "failed: .*width"),
        ("NUMBER", None, TypeError, ":NUMBER' to take the arguments none"),
        ("make_nothing", None, TypeError, "torch.nn.Module but got NoneType"),
        ("Net", None, ValueError, "`checkpoint` .*:Net.*a function that returns the trained"),  # it would be untrained
    ],
)
def test_errors(tmp_path, name, content, error, message):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(error, match=message):
        load_model(f"{HERE}:{name}", None if content is None else tmp_path / "x.pt")


def test_data_modules_and_functions(monkeypatch):
    assert len(load_data(f"{HERE}:Data").dataset) == 40
    assert len(load_data(f"{HERE}:Data", "val", {"number": 10}).dataset) == 5
    assert len(load_data(f"{HERE}:make_loader", arguments={"number": 3}).dataset) == 3
    target = {"class_path": f"{HERE}.ValidationData", "init_args": {"number": "12"}}
    assert len(load_data(target, "val").dataset) == 12
    assert len(load_data(target, "val", {"number": 5}).dataset) == 5
    loader = checkpoint_models.make_loader()
    monkeypatch.setattr(checkpoint_models.Data, "test_dataloader", lambda self: [loader])
    assert load_data(f"{HERE}:Data") is loader


@pytest.mark.parametrize(("split", "stage"), [("test", "test"), ("val", "validate")])
def test_data_modules_are_prepared(monkeypatch, split, stage):
    made = []
    monkeypatch.setattr(checkpoint_models.Data, "setup", lambda self, stage: made.append((list(self.stages), stage)))
    load_data(f"{HERE}:Data", split)
    assert made == [(["prepare"], stage)]


@pytest.mark.parametrize(
    ("name", "split", "remedy"),
    [
        ("ValidationData", "test", r"Use split='val' \(--split val\)"),
        ("NoData", "test", "Give it a method `test_dataloader`"),
        ("NoData", "val", "Give it a method `val_dataloader`"),
    ],
)
def test_data_module_without_the_loader(name, split, remedy):
    with pytest.raises(ValueError, match=f"'{split}' but it has none. {remedy}"):
        load_data(f"{HERE}:{name}", split)


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        (f"{HERE}:make_two_loaders", {}, "'test' but got 2 in a list"),
        (f"{HERE}:make_nothing", {}, "'test' but got NoneType"),
        ("math:pi", {}, "'math:pi' to take the arguments none"),
        (f"{HERE}:Data", {"size": 3}, "size .*TypeError: .*`data_args`"),
    ],
)
def test_data_that_cannot_be_made(path, arguments, message):
    with pytest.raises(TypeError, match=message):
        load_data(path, arguments=arguments)
