import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness._isolation.draws import Draws
from lightning_robustness.attacks import PGD
from lightning_robustness.losses import mart_loss, trades_loss
from lightning_robustness.losses._passes import find_training_layers, held_batch_statistics, log_probabilities
from tests.attacks.traces import assert_same, network_in_training, snapshot

LAYERS = {
    "1d": (nn.BatchNorm1d(3), (6, 3)),
    "signals": (nn.BatchNorm1d(3), (6, 3, 5)),
    "images": (nn.BatchNorm2d(3), (6, 3, 4, 4)),
    "volumes": (nn.BatchNorm3d(3), (6, 3, 2, 2, 2)),
    "without weights": (nn.BatchNorm2d(3, affine=False), (6, 3, 4, 4)),
    "large eps": (nn.BatchNorm2d(3, eps=0.5), (6, 3, 4, 4)),
}


def changed(layer):
    layer = copy.deepcopy(layer)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS.keys())
def test_output_of_train_mode(layer, shape):
    layer, x = changed(layer), 2 * torch.randn(shape) + 3
    expected = layer.train()(x)
    layer.eval()
    with held_batch_statistics([layer], lambda: layer(x)):
        torch.testing.assert_close(layer(x), expected)
    assert not torch.allclose(layer(x), expected)  # the hook is gone


def test_samples_are_by_themselves():
    layer, x = changed(nn.BatchNorm1d(3)).eval(), torch.randn(6, 3)
    moved = torch.cat([x[:1] + 1, x[1:]])
    with held_batch_statistics([layer], lambda: layer(x)):
        y = layer(moved)
    with held_batch_statistics([layer], lambda: layer(x)):
        expected = layer(x)
    torch.testing.assert_close(y[1:], expected[1:])
    assert not torch.allclose(y[0], expected[0])


def test_a_layer_that_is_used_twice():
    layer, x = changed(nn.BatchNorm1d(3)), torch.randn(6, 3)

    def network(x):
        return layer(layer(x).square())

    expected = network(x)
    layer.eval()
    with held_batch_statistics([layer], lambda: network(x)):
        torch.testing.assert_close(network(x), expected)


def test_hooks_go_after_an_exception():
    layer = nn.BatchNorm1d(3).eval()
    with pytest.raises(ZeroDivisionError), held_batch_statistics([layer], lambda: layer(torch.randn(6, 3))):
        raise ZeroDivisionError
    assert not layer._forward_hooks


def test_layers_in_train_mode_are_found():
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.BatchNorm2d(3).eval(), nn.Sequential(nn.BatchNorm3d(3)))
    assert find_training_layers(network) == [network[0], network[3][0]]
    assert find_training_layers(lambda x: network(x)) == [network[0], network[3][0]]
    assert find_training_layers(network.eval()) == []


def test_nothing_runs_without_layers():
    with held_batch_statistics([], lambda: 1 / 0):
        pass


ATTACK = PGD(eps=0.1, alpha=0.03, steps=5, start="gaussian", loss="kl", all_steps=True)


@pytest.fixture
def batch(digits):
    return digits[0][:50].double(), digits[1][:50]


@pytest.fixture
def network(digits_network):
    """In double precision: rounding hides the gradients of small changes."""
    return copy.deepcopy(digits_network).double()


def search(network, x, y, input_space=None, seed=0, **options):
    """Adversarial inputs that the search comes up with, and the log-probabilities."""
    seen = []

    def model(inputs):
        seen.append(inputs.detach())
        return network(inputs)

    pair = log_probabilities(model, x, y, None, replace(ATTACK, **options), input_space, seed)
    return seen[-1], pair


def by_hand(network, x, start, objective):
    """The published loop, from a given start."""
    x_adv = start
    for _ in range(ATTACK.steps):
        x_adv.requires_grad_()
        (gradient,) = torch.autograd.grad(objective(network(x_adv)), x_adv)
        x_adv = x_adv.detach() + ATTACK.alpha * gradient.sign()
        x_adv = torch.min(torch.max(x_adv, x - ATTACK.eps), x + ATTACK.eps).clamp(0, 1)
    return x_adv


@pytest.mark.parametrize("loss", ["cross_entropy", "kl"])
def test_search_by_hand(batch, network, monkeypatch, loss):
    x, y = batch
    noise, p = torch.randn_like(x), network(x).softmax(dim=1)
    monkeypatch.setattr(Draws, "normal", lambda self, counter, shape, dtype: noise)
    objectives = {
        "cross_entropy": lambda logits: nn.functional.cross_entropy(logits, y),
        "kl": lambda logits: nn.functional.kl_div(logits.log_softmax(dim=1), p, reduction="sum"),
    }
    expected = by_hand(network, x, x + 0.001 * noise, objectives[loss])
    x_adv, pair = search(network, x, y, loss=loss)
    torch.testing.assert_close(x_adv, expected, atol=1e-12, rtol=0)
    for log_p, inputs in zip(pair, (x, expected), strict=True):
        torch.testing.assert_close(log_p, network(inputs).log_softmax(dim=1))


def test_normalised_inputs_move_by_the_same_pixels(batch, network):
    x, y = batch
    space = InputSpace(mean=0.25, std=0.5)
    expected, _ = search(network, x, y)
    x_adv, _ = search(lambda t: network(space.unnormalize(t)), space.normalize(x), y, input_space=space)
    torch.testing.assert_close(space.unnormalize(x_adv), expected, atol=1e-9, rtol=0)


def test_no_range(network):
    x, y = 3 * torch.randn(10, 1, 8, 8, dtype=torch.float64), torch.zeros(10).long()
    x_adv, _ = search(network, x, y, input_space=InputSpace(low=None, high=None))
    assert (x_adv - x).abs().max() <= 0.1 + 1e-6
    assert (x_adv.abs() > 1).float().mean() > 0.5


def test_the_search_leaves_no_trace(digits, digits_network):
    network, x, y = network_in_training(digits_network).eval(), digits[0][:5], digits[1][:5]
    before = snapshot(network)
    log_probabilities(network, x, y, None, ATTACK, None, seed=0)
    assert_same(before, snapshot(network))


def test_start_comes_from_the_seed_or_the_random_state(batch, network):
    def run(seed):
        return search(network, *batch, seed=seed, steps=1)[0]

    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))
    torch.manual_seed(5)
    first, second = run(None), run(None)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(run(None), first)


def test_half_precision(digits):
    network, x = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(torch.bfloat16), digits[0][:10]
    x_adv, pair = search(network, x.to(torch.bfloat16), digits[1][:10])
    assert x_adv.dtype == torch.bfloat16
    assert (x_adv.float() - x).abs().max() == pytest.approx(0.1, abs=0.005)
    assert all(log_p.dtype == torch.float32 for log_p in pair)


@pytest.mark.parametrize("loss", [trades_loss, mart_loss])
def test_a_model_without_a_graph(loss):
    layer, x, y = nn.Linear(2, 2), torch.ones(1, 2), torch.zeros(1).long()
    with pytest.raises(ValueError, match=r"`detach`.* Square"):
        loss(lambda inputs: layer(inputs.detach()).detach(), x, y)
    loss(layer, x, y, x_adv=x).backward()
    assert layer.weight.grad.any()
