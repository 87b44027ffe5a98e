import itertools
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness._isolation import module_state
from lightning_robustness._isolation.leaks import find_leaks
from tests._isolation.test_module_state import CHANGES, Lazy, Stateful, frozen


class Memory:
    """An object that is no module."""

    def __init__(self):
        self.count = 0
        self.rows = [torch.zeros(4)]
        self.generators = torch.Generator(), np.random.default_rng(0), random.Random(0)

    @property
    def total(self):
        raise AssertionError("properties of others are not to be called")

    def write(self, x):
        self.count += 1
        self.rows[0].add_(x[0])


class Rows(list):
    pass


LEAKS = {
    "a parameter with gradient": (lambda: nn.Parameter(torch.rand(4)), lambda n, x: n.state.data.add_(1), ["state"]),
    "an object": (Memory, lambda n, x: n.state.write(x), ["state.count", "state.rows"]),
    "a generator of an object": (
        Memory,
        lambda n, x: torch.rand(2, generator=n.state.generators[0]),
        ["state.generators"],
    ),
    "an array of an object": (
        lambda: SimpleNamespace(array=np.zeros(2)),
        lambda n, x: n.state.array.__iadd__(1),
        ["state.array"],
    ),
    "a list of another class": (Rows, lambda n, x: n.state.append(1), ["state"]),
    "an object in a list": (lambda: [Memory()], lambda n, x: n.state[0].write(x), ["state"]),
    "a long list": (lambda: [0] * 20_000, lambda n, x: n.state.__setitem__(10_500, n.state[10_500] + 1), ["state"]),
    "elements of a list": (
        lambda: [torch.zeros(1) for _ in range(200)],
        lambda n, x: n.state[150].add_(1),
        ["state"],
    ),
    "a set of an object": (
        lambda: SimpleNamespace(names={"a"}),
        lambda n, x: n.state.names.add(len(n.state.names)),
        ["state.names"],
    ),
}


@pytest.mark.parametrize(("state", "change", "expected"), LEAKS.values(), ids=LEAKS)
def test_what_cannot_be_put_back_is_named(state, change, expected):
    network = Stateful(state, change)
    assert find_leaks(network, torch.rand(2, 4)) == expected
    assert find_leaks(nn.Sequential(nn.Sequential(network)), torch.rand(2, 4)) == [f"0.0.{name}" for name in expected]


@pytest.mark.parametrize(("state", "change"), CHANGES.values(), ids=CHANGES)
def test_what_is_put_back_is_not_named(state, change):
    assert find_leaks(Stateful(state, change), torch.rand(2, 4)) == []


def test_large_parameters_without_gradient(monkeypatch):
    monkeypatch.setattr(module_state, "_MAX_BYTES", 10)
    network = Stateful(lambda: frozen(3000, 2000), lambda n, x: n.state.mul_(0.9))
    assert find_leaks(network, torch.rand(2, 4)) == ["state"]


def test_the_mode_counts():
    def change(network, x):
        if network.training:
            network.head.weight.data.mul_(0.9)

    network = Stateful(None, change)
    assert find_leaks(network, torch.rand(2, 4)) == []
    assert find_leaks(network, torch.rand(2, 4), eval_mode=False) == ["head.weight"]


def test_ordinary_networks_have_none():
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    network.cyclic = {"self": network, "list": [network]}
    vars(network)["proxy"] = weakref.proxy(network[0])
    network.numbers = itertools.count()
    network.half = torch.rand(3).bfloat16()
    network.complex = torch.rand(3, dtype=torch.complex64).conj()
    network.empty = torch.zeros(0)
    network.sparse = torch.eye(3).to_sparse()
    assert find_leaks(network, torch.rand(2, 4)) == []
    assert find_leaks(lambda x: network(x), torch.rand(2, 4)) == []
    assert find_leaks(Lazy(), torch.rand(4, 2, 5, 5)) == []


def test_a_dead_proxy_is_not_asked():
    network = nn.Linear(4, 3)
    other = nn.Linear(2, 2)
    network.proxy = weakref.proxy(other)
    del other
    assert find_leaks(network, torch.rand(2, 4)) == []
