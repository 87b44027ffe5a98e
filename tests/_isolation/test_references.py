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

from lightning_robustness import RobustnessMonitor, evaluate, sandbox
from lightning_robustness._isolation.references import find_modules
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


class Calling(nn.Module):
    """A module that calls what it holds."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


class InList(nn.Module):
    def __init__(self, networks):
        super().__init__()
        self.networks = networks

    def forward(self, x):
        return mean_of(self.networks[-2:], x)


class InDictionary(InList):
    def forward(self, x):
        return mean_of(self.networks["all"], x)


class InGlobal(nn.Module):
    def forward(self, x):
        return mean_of(NETWORKS, x)


class Slots:
    __slots__ = ("networks",)

    def __init__(self, networks):
        self.networks = networks

    def __call__(self, x):
        return mean_of(self.networks, x)

    def method(self, x):
        return mean_of(self.networks, x)


class OfTheClass:
    @classmethod
    def call(cls, x):
        return mean_of(cls.networks, x)


def in_closure(networks):
    def forward(x):
        def one(number):
            return networks[number](x)

        return (one(0) + one(1)) / 2

    return forward


def in_global(x):
    def all_of_them():
        return mean_of(NETWORKS, x)

    return all_of_them()


def of_a_function(networks):
    def forward(x):
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

    def forward(x):
        (proxy,) = outer["all"]
        (found,) = proxy["pair"]
        return mean_of([found.one[0], found.two.two[0]], x)

    return forward


HOLDERS = {
    "containers": in_containers,
    "an attribute of a function": of_a_function,
    "a class method": of_a_class,
    "an object with slots": Slots,
    "a method of an object": lambda nets: Slots(nets).method,
    "a closure": lambda nets: lambda x: mean_of(nets, x),
    "a closure of a nested function": in_closure,
    "a list of the file, in a nested function": lambda nets: in_global,
    "an argument of a partial": lambda nets: functools.partial(mean_of, nets),
    "a method of a module": lambda nets: InList(nets).forward,
    "a partial of a method": lambda nets: functools.partial(InList(nets).forward),
    "an attribute": InList,
    "a long list": lambda nets: InList([nn.Identity()] * 200 + nets),
    "a dictionary": lambda nets: InDictionary({"all": nets}),
    "a list of the file": lambda nets: InGlobal(),
    "a module in a module": lambda nets: nn.Sequential(InGlobal()),
    "an object that a module holds": lambda nets: Calling(Slots(nets)),
    "a method that a module holds": lambda nets: Calling(Slots(nets).method),
    "a function that a module holds": lambda nets: Calling(lambda x: mean_of(nets, x)),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_networks_in_train_mode_are_run_in_eval_mode(hold):
    NETWORKS[:] = networks = [make_network(), make_network()]
    forward, modules = hold(networks), [module for network in networks for module in network.modules()]
    before = copy.deepcopy([network.state_dict() for network in networks])
    with sandbox(forward, X) as (x,):
        assert not any(module.training for module in modules)
        assert torch.equal(forward(x), mean_of(networks, x))
    assert all(module.training for module in modules)
    for network, state in zip(networks, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


def test_what_holds_no_network_has_none():
    assert find_modules(torch.sin) == []


def make_labels(networks):
    """The classes that networks predict in eval mode; they are in train mode before and after."""
    with torch.no_grad():
        y = mean_of([copy.deepcopy(network).eval() for network in networks], X).argmax(dim=1)
        assert (mean_of([copy.deepcopy(network) for network in networks], X).argmax(dim=1) != y).any()
    return y


@pytest.mark.filterwarnings("ignore:.*has no last layer")
@pytest.mark.parametrize("has_forward_fn", [False, True])
def test_evaluate_finds_the_networks_of_model_and_forward_fn(has_forward_fn):
    networks = [make_network(), make_network()]
    loader = DataLoader(TensorDataset(X, make_labels(networks)), 20)
    model, forward_fn = InList(networks), None
    if has_forward_fn:
        model, forward_fn = nn.Identity(), lambda module, x: mean_of(networks, x)
    report = evaluate(model, loader, forward_fn=forward_fn, attacks=["fgsm"], eps=0.01, fim_samples=20, progress=False)
    assert report.metrics["acc"] == 1


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
