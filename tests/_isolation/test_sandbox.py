import contextvars
import functools
import os
import random
import signal
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness._isolation.references import find_modules
from lightning_robustness._isolation.sandbox import is_compiled, is_sandboxed, sandbox
from lightning_robustness.attacks import PGD, run_attack


class Network(nn.Module):
    """A network with everything that could be left changed."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.frozen = nn.BatchNorm1d(8).eval()
        self.head = nn.Linear(8, 3)
        self.head.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.full((2,), float("nan")))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.calls += 1  # in place
        self.last = x.detach()[0, :2]  # by another tensor
        return self.head(self.frozen(self.body(x)))


def trained_once():
    network, optimizer = Network(), None
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(torch.randn(16, 4)).sum().backward()
    optimizer.step()
    return network


def snapshot(network):
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "identities": {name: id(tensor) for name, tensor in tensors.items()},
        "versions": {name: p._version for name, p in network.named_parameters()},
        "gradients": {
            name: (id(p.grad), None if p.grad is None else p.grad.clone()) for name, p in network.named_parameters()
        },
        "requires_grad": {name: p.requires_grad for name, p in network.named_parameters()},
        "modes": {name: module.training for name, module in network.named_modules()},
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state(),
    }


def assert_same(before, after):
    for key, expected in before.items():
        if key in ("values", "gradients"):
            assert expected.keys() == after[key].keys()
            for name in expected:
                torch.testing.assert_close(after[key][name], expected[name], rtol=0, atol=0, equal_nan=True)
        elif key == "torch":
            assert torch.equal(after[key], expected)
        else:
            assert after[key] == expected


def disturb(network, x):
    """What a careless attack does."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    random.random(), np.random.rand(), torch.rand(1)
    network.train()
    for p in network.parameters():
        p.requires_grad_(True)
    network(x.requires_grad_()).sum().backward()
    network.eval()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("eval_mode", [False, True])
def test_everything_is_as_before(eval_mode, fails):
    network, batch = trained_once(), torch.randn(5, 4)
    before = snapshot(network)
    expected = pytest.raises(ZeroDivisionError) if fails else nullcontext()
    with expected, sandbox(network, batch, eval_mode=eval_mode) as (x,):
        disturb(network, x)
        if fails:
            raise ZeroDivisionError
    assert_same(before, snapshot(network))


def test_inside():
    network = trained_once()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        batch = torch.randn(5, 4)
        with sandbox(network, batch, batch[:, 0]) as (x, column):
            assert not torch.is_inference_mode_enabled()
            assert torch.is_grad_enabled()
            assert not any(module.training for module in network.modules())
            assert not any(p.requires_grad for p in network.parameters())
            assert all(p.grad is None for p in network.parameters())
            logits = network(x.requires_grad_())
            assert logits.dtype == torch.float32
            (gradient,) = torch.autograd.grad(logits.sum(), x)
            assert gradient.abs().sum() > 0
            x.data.zero_()
            assert column.shape == (5,)
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert batch.abs().sum() > 0
    with torch.no_grad(), sandbox(network):
        assert torch.is_grad_enabled()


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_random_state_depends_on_seed_and_index_only():
    draws = {}
    for seed, index in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        draw()
        with sandbox(nn.Identity(), seed=seed, index=index):
            drawn = draw()
        assert draws.setdefault((seed, index), drawn) == drawn
    assert len({number for numbers in draws.values() for number in numbers}) == 9


def test_eval_mode_does_not_call_what_a_module_overrides():
    class Stubborn(nn.Linear):
        def train(self, mode=True):
            raise RuntimeError("refuses to change")

    with sandbox(Stubborn(2, 2)) as _:
        pass


def test_nested():
    network = trained_once()
    before = snapshot(network)
    with sandbox(network):
        outer = draw()
        with sandbox(network, seed=5):
            draw()
        assert is_sandboxed()
        assert not network.training
    assert not is_sandboxed()
    with sandbox(network):
        assert draw() == outer
    assert_same(before, snapshot(network))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.cell = nn.Conv1d(2, 2, 1), nn.LSTM(2, 2, batch_first=True)

    def forward(self, x):
        return self.cell(self.convolution(x).mT)[0].sum(dim=1)


def test_only_recurrent_layers_run_without_cudnn(monkeypatch):
    network, seen = Recurrent(), {}
    for kind, name in ((nn.Conv1d, "convolution"), (nn.LSTM, "cell")):

        def forward(layer, x, name=name, original=kind.forward):
            seen[name] = torch.backends.cudnn.enabled
            return original(layer, x)

        monkeypatch.setattr(kind, "forward", forward)
    hooks = [len(network.cell._forward_hooks), len(network.cell._forward_pre_hooks)]
    with sandbox(network, torch.rand(3, 2, 4)) as (x,), sandbox(network):
        network(x.requires_grad_()).sum().backward()
        assert torch.backends.cudnn.enabled
        with pytest.raises(ValueError, match="5D"):
            network.cell(torch.rand(1, 2, 3, 4, 5))
        assert torch.backends.cudnn.enabled
    assert seen == {"convolution": True, "cell": False}
    assert hooks == [len(network.cell._forward_hooks), len(network.cell._forward_pre_hooks)] == [0, 0]


def precision():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled


@pytest.mark.parametrize("network", [nn.Linear(2, 2), nn.LSTM(2, 2)])
def test_tf32_is_off_unless_it_is_for_training(network):
    torch.set_float32_matmul_precision("medium")
    before = precision()
    assert before == ("medium", True, True)
    with sandbox(network, precise=False):
        assert precision() == ("medium", True, True)
        with sandbox(network):
            assert precision() == ("highest", False, True)
        assert precision() == ("medium", True, True)
    with pytest.raises(ZeroDivisionError), sandbox(network):
        raise ZeroDivisionError
    assert precision() == before
    torch.set_float32_matmul_precision("highest")


def compiled():
    return torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), backend="aot_eager")


def compiled_in_place():
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    network.compile(backend="aot_eager")
    return network


class CompiledForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @torch.compile(backend="aot_eager")
    def forward(self, x):
        return self.linear(x).tanh()


class CompiledPart(CompiledForward):
    def forward(self, x):
        return compiled_tanh(self.linear(x))


@torch.compile(backend="aot_eager")
def compiled_tanh(x):
    return x.tanh()


def with_compiled_method():
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    network.forward = torch.compile(network.forward, backend="aot_eager")
    return network


@pytest.mark.parametrize("make", [compiled, compiled_in_place, CompiledForward, CompiledPart, with_compiled_method])
def test_compiled_networks_are_differentiated_without_their_compiled_code(make):
    network, x = make(), torch.randn(2, 3)
    expected = network(x)
    with sandbox(network, x) as (x,):
        output = network(x.requires_grad_())
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(output, expected)
    assert second.abs().sum() > 0


def test_what_is_compiled():
    networks = [compiled(), compiled_in_place(), CompiledForward(), with_compiled_method()]
    assert [is_compiled([network]) for network in networks] == [True] * 4
    assert not is_compiled(trained_once().modules())


def test_the_module_of_a_compiled_method_is_found():
    network = nn.Linear(2, 2)
    assert find_modules(torch.compile(network.forward, backend="eager")) == [network]
    assert find_modules(torch.compile(lambda x: network(x), backend="eager")) == [network]


def test_hooks_that_change_the_output_run():
    network, x = nn.Linear(2, 2), torch.randn(3, 2)
    network.register_forward_hook(lambda module, args, output: 2 * output)
    expected = network(x)
    with sandbox(network, x) as (x,):
        assert torch.equal(network(x), expected)


def in_threads(*functions):
    """Run functions at once and return their results."""
    results = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def call(number):
        barrier.wait()
        try:
            results[number] = functions[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("is_shared", [False, True])
def test_threads(is_shared):
    torch.manual_seed(0)
    networks = [trained_once() for _ in range(4)]
    networks = [networks[0]] * 4 if is_shared else networks
    x, y = torch.rand(8, 4), torch.arange(8) % 3

    def attack(number):
        attack = PGD(eps=0.1, steps=3)
        return [run_attack(networks[number], attack, x, y, seed=number, index=i).x_adv for i in range(10)]

    expected = [attack(number) for number in range(4)]
    before = [snapshot(network) for network in networks]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        results = in_threads(*[functools.partial(attack, number) for number in range(4)])
    finally:
        sys.setswitchinterval(interval)
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(torch.stack(result), torch.stack(value))
    for network, state in zip(networks, before, strict=True):
        assert_same(state, snapshot(network))


def test_a_thread_with_the_context_of_a_sandbox_does_not_wait():
    model = nn.Linear(2, 2)

    def nested():
        with sandbox(model):
            return is_sandboxed()

    with sandbox(model):
        context = contextvars.copy_context()
        assert in_threads(lambda: context.run(nested)) == [True]


def test_a_sandbox_can_be_left_in_another_thread():
    def generate():
        with sandbox(nn.Linear(2, 2)):
            yield

    def begin():
        next(generator)

    generator = generate()
    context = contextvars.copy_context()
    in_threads(lambda: context.run(begin))
    in_threads(lambda: context.run(generator.close))
    assert not is_sandboxed()
    with sandbox(nn.Linear(2, 2)):  # would wait forever
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have():
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay():
        with sandbox(nn.Linear(2, 2)):
            is_inside.set()
            may_leave.wait()

    thread = threading.Thread(target=stay, daemon=True)
    thread.start()
    is_inside.wait()
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        with sandbox(nn.Linear(2, 2)):
            os._exit(7)
    _, status = os.waitpid(process, 0)
    may_leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7
