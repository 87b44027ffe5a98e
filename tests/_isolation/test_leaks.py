import functools
import itertools
import random
import weakref
from collections import UserDict, UserList
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness._isolation import module_state
from lightning_robustness._isolation.sandbox import find_leaks, sandbox
from tests._isolation.test_module_state import CHANGES, Lazy, Stateful, frozen


class Memory:
    """An object that is no module."""

    def __init__(self):
        self.count = 0
        self.generators = torch.Generator(), np.random.default_rng(0), random.Random(0)

    @property
    def total(self):
        raise AssertionError("properties of others are not to be called")

    def write(self, x):
        self.count += 1


class Rows(list):
    pass


class Slots:
    __slots__ = ("count", "unset")

    def __init__(self):
        self.count = 0


def numbers():
    number = 0
    while True:
        number += 1
        yield number


LEAKS = {
    "a parameter with gradient": (lambda: nn.Parameter(torch.rand(4)), lambda n, x: n.state.data.add_(1), ["state"]),
    "an object": (Memory, lambda n, x: n.state.write(x), ["state.count"]),
    "a slot": (Slots, lambda n, x: setattr(n.state, "count", n.state.count + 1), ["state.count"]),
    "a count": (itertools.count, lambda n, x: next(n.state), ["state"]),
    "a Python generator": (lambda: numbers(), lambda n, x: next(n.state), ["state.number"]),
    "a method of an object": (lambda: Memory().write, lambda n, x: n.state(x), ["state.__self__.count"]),
    "an argument of a partial": (
        lambda: functools.partial(list.append, [1]),
        lambda n, x: n.state(1),
        ["state.args"],
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

    assert find_leaks(Stateful(None, change).train(), torch.rand(2, 4)) == []


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


LIST, COUNT, TENSOR, OBJECT = [], 0, torch.zeros(4), Memory()
GENERATORS = {"torch": torch.Generator(), "numpy": np.random.default_rng(0)}
PYTHON = random.Random(0)


def count():
    global COUNT
    COUNT += 1


class Shared:
    rows = []  # noqa: RUF012
    hits = 0

    @classmethod
    def hit(cls):
        cls.hits += 1


class Variable(nn.Linear):
    """A network whose ``forward`` changes what is not its own."""

    number, seen, total = 0, [], torch.zeros(4)

    def __init__(self):
        super().__init__(4, 3)


class Counting(Variable):
    def forward(self, x):
        count()


class InMethod(Counting):
    def forward(self, x):
        return self.half(x)

    def half(self, x):
        return next(super(InMethod, self).forward(x) for _ in range(1))


def change_class(self, x):
    type(self).number += 1
    self.seen.append(1)
    self.total.add_(x[0])


def default(self, x, cache={}):  # noqa: B006
    cache[len(cache)] = x


def nested(self, x):
    def note():
        LIST.append(1)

    note()


def closure():
    rows = []
    return lambda self, x: rows.append(1)


def tally():
    tally.total += 1


tally.total = 0


class FunctionOfTheModule(Variable):
    def __init__(self):
        super().__init__()
        self.count = count

    def forward(self, x):
        self.count()
        return super().forward(x)


VARIABLES = {
    "an attribute of a function": (lambda self, x: tally(), ["total"]),
    "a list of the file": (lambda self, x: LIST.append(1), ["LIST"]),
    "a tensor of the file": (lambda self, x: TENSOR.add_(x[0]), ["TENSOR"]),
    "an object of the file": (lambda self, x: OBJECT.write(x), ["OBJECT"]),
    "attributes of the class": (change_class, ["number", "seen", "total"]),
    "an attribute of another class": (lambda self, x: Shared.rows.append(1), ["rows"]),
    "a class method of another class": (lambda self, x: Shared.hit(), ["hits"]),
    "a default": (default, ["__defaults__"]),
    "a variable of a nested function": (nested, ["LIST"]),
    "a variable of a closure": (closure(), ["rows"]),
}
MODULES = {name: (type("Own", (Variable,), {"forward": own}), expected) for name, (own, expected) in VARIABLES.items()}
MODULES |= {
    "a number that a function changes": (Counting, ["COUNT"]),
    "a number that a function of the module changes": (FunctionOfTheModule, ["COUNT"]),
    "a number that the function of a method changes": (InMethod, ["COUNT"]),
}


@pytest.mark.parametrize(("make", "expected"), MODULES.values(), ids=MODULES)
def test_variables_that_forward_changes_are_named(make, expected):
    network = make()
    for model in (network, nn.Sequential(network), lambda x: network(x)):
        leaks = find_leaks(model, torch.rand(2, 4))
        assert len(leaks) == len(expected)
        assert all(leak.endswith(f".{name}") for leak, name in zip(leaks, expected, strict=True))


def test_variables_that_a_function_changes_are_named():
    network, rows = nn.Linear(4, 3), []

    def forward(x):
        rows.append(1)
        return network(x)

    leaks = find_leaks(forward, torch.rand(2, 4))
    assert [leak.split(".")[-1] for leak in leaks] == ["rows"]
    forward = SimpleForward(network)
    assert find_leaks(forward, torch.rand(2, 4)) == ["SimpleForward.calls"]


class SimpleForward:
    def __init__(self, network):
        self.network, self.calls = network, 0

    def __call__(self, x):
        self.calls += 1
        return self.network(x)


class Noisy(Variable):
    """Draws from generators of the file, of the class and of a closure, and through a function."""

    generator = torch.Generator()

    def forward(self, x):
        x = x + torch.rand(4, generator=GENERATORS["torch"]) + torch.rand(4, generator=self.generator)
        return super().forward(x + GENERATORS["numpy"].random() + draw())


def draw():
    return PYTHON.random()


def states():
    return [
        GENERATORS["torch"].get_state().tolist(),
        Noisy.generator.get_state().tolist(),
        GENERATORS["numpy"].bit_generator.state,
        PYTHON.getstate(),
    ]


def test_generators_that_forward_refers_to_are_put_back():
    network, before = Noisy(), states()
    for model in (network, nn.Sequential(network), network.forward, lambda x: network(x) + draw()):
        with sandbox(model, torch.rand(2, 4)) as (x,):
            model(x)
            assert all(state != other for state, other in zip(states(), before, strict=True))
        assert states() == before
        assert find_leaks(model, torch.rand(2, 4)) == []


class Draws:
    """An object that draws from a generator of its own."""

    __slots__ = ("generator",)

    def __init__(self):
        self.generator = random.Random(0)

    def __call__(self):
        return self.generator.random()

    def method(self):
        return self.generator.random()

    @classmethod
    def of_the_class(cls):
        return cls.shared.random()

    shared = random.Random(0)


def draw_from(generator):
    return generator.random()


HELD = {
    "a function": lambda: draw,
    "a lambda over a closure": lambda: (lambda generator: lambda: generator.random())(random.Random(0)),
    "a partial": lambda: functools.partial(draw_from, random.Random(0)),
    "an object": Draws,
    "a bound method": lambda: Draws().method,
    "a class method": lambda: Draws.of_the_class,
    "a function that stands in a list": lambda: UserList([draw]),
}


@pytest.mark.parametrize("make", HELD.values(), ids=HELD)
def test_generators_behind_what_a_module_holds_are_put_back(make):
    def change(network, x):
        drawn.append((network.state[0] if isinstance(network.state, UserList) else network.state)())

    drawn: list[float] = []
    network = Stateful(make, change)
    with sandbox(network, torch.rand(2, 4)) as (x,):
        network(x)
    network(x)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("make", [UserDict, UserList])
def test_long_user_containers_are_named(make):
    state = make(dict.fromkeys(range(20000), 0)) if make is UserDict else make([0] * 20_000)
    network = Stateful(lambda: state, lambda n, x: n.state.__setitem__(5, 1 + n.state[5]))
    assert find_leaks(network, torch.rand(2, 4)) == ["state.data"]
