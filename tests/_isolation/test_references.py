"""Networks that a model holds in other ways than as its children, in train mode."""

import collections
import copy
import functools
import types

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import RobustnessMonitor, evaluate
from tests.callbacks.modules import make_trainer

NETWORKS = []
X = torch.rand(60, 6, generator=torch.Generator().manual_seed(0))


def make_network():
    """A network whose BatchNorm has statistics that are not those of any batch."""
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        network[1].running_mean.normal_()
        network[3].weight.mul_(5)
    return network.train()


def mean_of(networks, x):
    return sum(network(x) for network in networks) / len(networks)


class InList(nn.Module):
    def __init__(self, networks):
        super().__init__()
        self.networks = networks

    def forward(self, x):
        return mean_of(self.networks, x)


class InDictionary(InList):
    def __init__(self, networks):
        super().__init__({"all": networks})

    def forward(self, x):
        return mean_of(self.networks["all"], x)


class Slots:
    __slots__ = ("networks",)

    def __init__(self, networks):
        self.networks = networks

    def __call__(self, x):
        return mean_of(self.networks, x)


class OfTheClass:
    @classmethod
    def call(cls, module, x):
        return mean_of(cls.networks, x)


class Calling(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


class InGlobal(nn.Module):
    def forward(self, x):
        return mean_of(NETWORKS, x)


def in_closure(networks):
    def forward(module, x):
        def one(number):
            return networks[number](x)

        return (one(0) + one(1)) / 2

    return forward


def in_global(module, x):
    def all_of_them():
        return mean_of(NETWORKS, x)

    return all_of_them()


def call(function, module, x):
    return function(x)


def of_a_function(networks):
    def forward(module, x):
        return mean_of(forward.networks, x)

    forward.networks = networks
    return forward


def of_a_class(networks):
    OfTheClass.networks = networks
    return OfTheClass.call


def in_containers(networks):
    """Containers of many kinds, one in another."""
    first, second = networks
    pair = collections.namedtuple("Pair", "one two")(collections.deque([first]), types.SimpleNamespace(two=[second]))
    inner = collections.OrderedDict(pair=types.MappingProxyType({"pair": collections.UserList([pair])}))
    outer = collections.defaultdict(list, {"all": collections.UserDict(inner).values()})

    def forward(module, x):
        (proxy,) = outer["all"]
        (found,) = proxy["pair"]
        return mean_of([found.one[0], found.two.two[0]], x)

    return forward


MODELS = {
    "containers": lambda nets: (nn.Identity(), in_containers(nets)),
    "an attribute of a function": lambda nets: (nn.Identity(), of_a_function(nets)),
    "a class method": lambda nets: (nn.Identity(), of_a_class(nets)),
    "slots": lambda nets: (nn.Identity(), functools.partial(call, Slots(nets))),
    "a long list": lambda nets: (InList([nn.Identity()] * 200 + nets), lambda m, x: mean_of(m.networks[200:], x)),
    "an object that the model holds": lambda nets: (Calling(Slots(nets)), None),
    "a method that the model holds": lambda nets: (Calling(Slots(nets).__call__), None),
    "a function that the model holds": lambda nets: (Calling(lambda x: mean_of(nets, x)), None),
    "a list that `forward_fn` refers to": lambda nets: (nn.Identity(), lambda module, x: mean_of(nets, x)),
    "a nested function": lambda nets: (nn.Identity(), in_closure(nets)),
    "a list of the file, in a nested function": lambda nets: (nn.Identity(), in_global),
    "a partial": lambda nets: (nn.Identity(), functools.partial(lambda nets, module, x: mean_of(nets, x), nets)),
    "an attribute": lambda nets: (InList(nets), None),
    "a dictionary": lambda nets: (InDictionary(nets), None),
    "a list of the file": lambda nets: (InGlobal(), None),
    "a module in a module": lambda nets: (nn.Sequential(InGlobal()), None),
}


@pytest.mark.filterwarnings("ignore:.*has no last layer")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_networks_in_train_mode_are_evaluated_in_eval_mode(make):
    torch.manual_seed(0)
    networks = [make_network(), make_network()]
    NETWORKS[:] = networks
    for network in networks:
        network.eval()
    with torch.no_grad():
        y = mean_of(networks, X).argmax(dim=1)
    for network in networks:
        network.train()
    with torch.no_grad():
        assert (mean_of([copy.deepcopy(network) for network in networks], X).argmax(dim=1) != y).any()
    before = [{name: value.clone() for name, value in network.state_dict().items()} for network in networks]
    model, forward_fn = make(networks)
    loader = DataLoader(TensorDataset(X, y), 20)
    report = evaluate(model, loader, forward_fn=forward_fn, attacks=["fgsm"], eps=0.01, fim_samples=20, progress=False)
    assert report.metrics["acc"] == 1
    for network, state in zip(networks, before, strict=True):
        assert all(module.training for module in network.modules())
        assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


class Hiding(L.LightningModule):
    def __init__(self, networks):
        super().__init__()
        self.networks, self.scale = networks, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * mean_of(self.networks, x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:Hiding has no last layer")
def test_the_monitor_refuses_networks_that_validation_runs_in_train_mode(tmp_path):
    torch.manual_seed(0)
    networks = [make_network(), make_network()]
    loader = DataLoader(TensorDataset(X, torch.arange(60) % 3), 20)
    options = {"attacks": ["fgsm"], "eps": 0.01, "fim_samples": 20, "log_figures": False}
    with pytest.raises(MisconfigurationException, match="train mode"):
        make_trainer(tmp_path, RobustnessMonitor(**options)).fit(Hiding(networks), loader, loader)
    monitor = RobustnessMonitor(**options)
    make_trainer(tmp_path, monitor).fit(Hiding(nn.ModuleList(networks)), loader, loader)
    assert monitor.history[-1]["adv_acc/fgsm"] <= monitor.history[-1]["acc"]
