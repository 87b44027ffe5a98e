import random
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness._isolation import module_state
from lightning_robustness._isolation.module_state import ModuleState, is_lazy
from lightning_robustness._isolation.sandbox import find_leaks, sandbox
from tests._isolation.test_sandbox import assert_same, disturb, snapshot, trained_once

Pair = namedtuple("Pair", "first second")


def bits(value):
    """A copy of a value that is equal to another exactly if they are the same bit for bit, types included."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return type(value), value.dtype, tuple(value.shape), value.stride(), value.requires_grad, numbers.tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return [bits(part) for part in value.get_state()]
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (dict, UserDict)):
        return type(value), [(key, bits(element)) for key, element in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [bits(element) for element in value]
    return type(value), repr(value)


class Stateful(nn.Module):
    """A network whose ``forward`` changes one attribute, ``state``, in a way that is given."""

    def __init__(self, state, change):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.state = state() if callable(state) else state
        self.change = change

    def forward(self, x):
        self.change(self, x.detach())
        return self.head(x)


def frozen(*size):
    return nn.Parameter(torch.rand(*size), requires_grad=False)


def rebind(network, x):
    network.state = x.mean(dim=0)


def step_recurrent(network, x):
    cell = nn.LSTM(4, 4)
    _, network.state = cell(x[None], network.state)


def delete(network, x):
    vars(network).pop("state", None)
    network.other = x


def assign_data(network, x):
    network.state.data = network.state.data * 0.9 + x[0] * 0.1


def exchange_key(network, x):
    (key,) = network.state
    network.state[key + 1] = network.state.pop(key)


class Dictionary(UserDict):
    pass


def change_dictionary(network, x):
    network.state.update(b=1)
    network.state["a"].add_(1)


CHANGES = {
    "moving average, in place": (lambda: frozen(4), lambda n, x: n.state.mul_(0.9).add_(x[0] * 0.1)),
    "moving average, by data": (lambda: frozen(4), lambda n, x: n.state.data.mul_(0.9).add_(x[0] * 0.1)),
    "moving average, replaced data": (lambda: frozen(4), assign_data),
    "constrained weights, replaced data": (lambda: nn.Parameter(torch.rand(4)), assign_data),
    "not contiguous": (lambda: frozen(4, 4).t(), lambda n, x: n.state.add_(x[0])),
    "negative zero": (lambda: torch.tensor([-0.0, torch.nan]), lambda n, x: n.state.zero_()),
    "tensor, in place": (lambda: torch.zeros(4), lambda n, x: n.state.add_(x[0])),
    "tensor, replaced": (lambda: torch.zeros(4), rebind),
    "tensor, resized": (lambda: torch.zeros(0), lambda n, x: n.state.resize_(5).fill_(1.0)),
    "tensor, another type": (lambda: torch.zeros(4), lambda n, x: setattr(n.state, "data", x[0].double())),
    "none": (None, rebind),
    "deleted": (1, delete),
    "counter": (0, lambda n, x: setattr(n, "state", n.state + 1)),
    "hidden state": (lambda: (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)), step_recurrent),
    "queue": (lambda: [torch.zeros(4)], lambda n, x: (n.state.append(x[0]), n.state.pop(0))),
    "elements of a list": (lambda: [torch.zeros(4)], lambda n, x: n.state[0].add_(x[0])),
    "elements of a named tuple": (lambda: Pair(torch.zeros(4), [1]), lambda n, x: n.state.second.append(2)),
    "dictionary": (lambda: {"a": torch.zeros(4)}, lambda n, x: n.state.update(a=x[0], b=1)),
    "keys": (lambda: {3: 1}, exchange_key),
    "ordered dictionary": (lambda: OrderedDict(a=1, b=2), lambda n, x: n.state.move_to_end("a")),
    "default dictionary": (lambda: defaultdict(list), lambda n, x: n.state["a"].append(x)),
    "counter of keys": (lambda: Counter("aab"), lambda n, x: n.state.update("b")),
    "deque": (lambda: deque([torch.zeros(4)], maxlen=2), lambda n, x: n.state.extend([x, x])),
    "set": (lambda: {1}, lambda n, x: n.state.add(2)),
    "user dictionary": (lambda: UserDict(a=torch.zeros(4)), change_dictionary),
    "user dictionary of another class": (lambda: Dictionary(a=torch.zeros(4)), change_dictionary),
    "user list": (lambda: UserList([1]), lambda n, x: n.state.append(2)),
    "array": (lambda: np.zeros(3), lambda n, x: n.state.__iadd__(1)),
    "torch generator": (torch.Generator, lambda n, x: torch.rand(2, generator=n.state)),
    "numpy generator": (np.random.default_rng, lambda n, x: n.state.random()),
    "numpy random state": (np.random.RandomState, lambda n, x: n.state.normal()),
    "python generator": (random.Random, lambda n, x: n.state.gauss(0, 1)),
    "nested": (lambda: {"a": [(torch.zeros(4), deque([1]))]}, lambda n, x: n.state["a"][0][1].append(2)),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("state", "change"), CHANGES.values(), ids=CHANGES)
def test_what_forward_changes_is_put_back(state, change, fails):
    network = Stateful(state, change)
    value, before, others = network.state, bits(network.state), set(vars(network))
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), sandbox(network, torch.rand(2, 4)) as (x,):
        network(x), network(x)
        assert not hasattr(network, "state") or bits(network.state) != before
        if fails:
            raise ZeroDivisionError
    assert network.state is value
    assert bits(network.state) == before
    assert set(vars(network)) == others


def test_buffers_that_are_resized_or_added():
    class Observer(nn.Module):  # as those of quantisation by channel
        def __init__(self):
            super().__init__()
            self.register_buffer("low", torch.tensor([]))

        def forward(self, x):
            self.low.resize_(x.shape[1]).copy_(x.amin(dim=0))
            self.register_buffer("high", x.amax(dim=0))
            return x

    network = Observer()
    low = network.low
    with sandbox(network, torch.rand(5, 3)) as (x,):
        network(x)
        assert network.low.shape == (3,)
    assert network.low is low
    assert {name: buffer.shape for name, buffer in network.state_dict().items()} == {"low": (0,)}


@pytest.mark.parametrize(
    "normalize", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm]
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_hooks_and_parametrizations_that_compute_weights(normalize):
    network, x = normalize(nn.Linear(4, 3)), torch.rand(2, 4)
    expected = network.eval()(x)
    network.train()
    before = {name: bits(value) for name, value in network.state_dict().items()}
    weight = vars(network).get("weight")
    with sandbox(network, x) as (x,):
        torch.testing.assert_close(network(x), expected)
        network.train()(x)
    assert {name: bits(value) for name, value in network.state_dict().items()} == before
    assert vars(network).get("weight") is weight


def test_modules_in_containers_are_kept_too():
    hidden, batch = trained_once(), torch.rand(5, 4)
    network = nn.Linear(4, 3)
    network.hidden = [hidden]
    before = snapshot(hidden)
    with sandbox(network, batch) as (x,):
        assert not hidden.training  # whatever `eval()` reaches
        assert not any(p.requires_grad for p in hidden.parameters())
        disturb(hidden, x)
    assert_same(before, snapshot(hidden))


def test_leaves_that_are_no_parameters_get_no_gradient():
    network = Stateful(lambda: torch.rand(4, requires_grad=True), lambda n, x: None)
    with sandbox(network, torch.rand(2, 4)) as (x,):
        (network(x.requires_grad_()) * network.state[0]).sum().backward()
    assert network.state.requires_grad
    assert network.state.grad is None


def test_only_small_values_are_copied(monkeypatch):
    monkeypatch.setattr(module_state, "_MAX_BYTES", 100)
    network = nn.Linear(2, 2)
    network.large, network.small, network.array = torch.zeros(20), frozen(10), np.zeros(7)
    network.register_buffer("buffer", torch.zeros(1000))
    state = ModuleState([network])
    for value in (network.large, network.small.data, network.array, network.buffer):
        value += 1
    state.restore()
    assert network.large.tolist() == [1.0] * 20
    assert network.array.tolist() == [0.0] * 7
    assert network.small.max() < 1
    assert network.buffer.tolist() == [0.0] * 1000


@pytest.mark.filterwarnings("ignore:.*quantize.* deprecated", "ignore:The PyTorch API of nested tensors")
def test_tensors_of_other_kinds():
    network = nn.Linear(2, 2)
    network.register_buffer("quantized", torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8))
    network.register_buffer("conjugate", torch.rand(3, dtype=torch.complex64).conj())
    network.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    network.register_buffer("jagged", torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))
    network.register_buffer("expanded", torch.rand(1).expand(3))
    network.register_buffer("sparse", torch.eye(3).to_sparse())
    network.register_buffer("meta", torch.empty(3, device="meta"))
    with torch.inference_mode():
        network.register_buffer("inference", torch.rand(3))
    before = bits(network.inference), bits(network.conjugate), bits(network.quantized.int_repr())
    with sandbox(network):
        network.inference = torch.rand(3)
        network.conjugate.zero_()
        network.quantized.copy_(torch.rand(3))
    assert (bits(network.inference), bits(network.conjugate), bits(network.quantized.int_repr())) == before
    assert find_leaks(network, torch.rand(2, 2)) == []
    assert network.expanded.stride() == (0,)


def test_values_come_back_without_a_new_version():
    network = nn.BatchNorm1d(3)
    x = torch.rand(4, 3, requires_grad=True)
    loss = network.eval()(x).square().sum()
    with sandbox(network):
        network.running_mean.data.add_(1)
    loss.backward()
    assert network.running_mean.tolist() == [0.0] * 3


class Lazy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.Dropout(), nn.LazyLinear(3))


def test_lazy_modules_are_left_for_training_to_initialise():
    def train(is_watched):
        torch.manual_seed(0)
        network, x = Lazy(), torch.rand(4, 2, 5, 5)
        if is_watched:
            with sandbox(network, x) as (inputs,):
                first = network(inputs)
                assert not is_lazy(network)
                assert torch.equal(network(inputs), first)
            assert is_lazy(network)
            assert [type(module) for module in network] == [type(module) for module in Lazy()]
            assert repr(network) == repr(Lazy())
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(2):
            network(x).square().sum().backward()
            optimizer.step()
        return {name: bits(value) for name, value in network.state_dict().items()}, repr(network)

    assert train(True) == train(False)


def test_lazy_modules_are_left_alone_without_a_pass():
    network = Lazy()
    with sandbox(network):
        pass
    assert is_lazy(network)
    assert all(p.requires_grad for p in network.parameters())
    assert not is_lazy(nn.Linear(2, 2))


class Rebinding(nn.Module):
    """Replaces a buffer by another tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("eval_mode", [False, True])
def test_scripted_modules(eval_mode):
    network = torch.jit.script(nn.Sequential(nn.BatchNorm1d(3), Rebinding()))
    before = {name: bits(value) for name, value in network.state_dict().items()}
    with sandbox(network, torch.rand(4, 3), eval_mode=eval_mode) as (x,):
        network(x)
        assert network.training is not eval_mode
        assert {name: bits(value) for name, value in network.state_dict().items()} != before
    assert {name: bits(value) for name, value in network.state_dict().items()} == before
    assert network.training


def test_every_module_is_found_once():
    shared = nn.Linear(2, 2)
    network = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()))
    network.register_module("absent", None)
    found = ModuleState([network, shared]).modules
    assert set(found) == set(network.modules())
    assert len(found) == 4
