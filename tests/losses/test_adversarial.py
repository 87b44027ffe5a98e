import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness._isolation.draws import Draws
from lightning_robustness.attacks import PGD
from lightning_robustness.losses import mart_loss, trades_loss
from lightning_robustness.losses.adversarial import log_probabilities
from tests._isolation.test_sandbox import assert_same, snapshot
from tests.attacks.cases import network_in_training


def trades_by_hand(z, z_adv, label, weight):
    log_p, adv_log_p = log_softmax(z), log_softmax(z_adv)
    return -log_p[label] + weight * np.sum(np.exp(log_p) * (log_p - adv_log_p))


def mart_by_hand(z, z_adv, label, weight):
    p, q = softmax(z), softmax(z_adv)
    boosted = -np.log(q[label]) - np.log(1 - np.delete(q, label).max())
    divergence = np.sum(p * (log_softmax(z) - log_softmax(z_adv)))
    return boosted + weight * divergence * (1 - p[label])


def trades_in_torch(logits, adv_logits, y):
    p, q = logits.softmax(dim=1), adv_logits.softmax(dim=1)
    return nn.functional.cross_entropy(logits, y) + 6 * (p * (p / q).log()).sum(dim=1).mean()


def mart_in_torch(logits, adv_logits, y):
    p, q = logits.softmax(dim=1), adv_logits.softmax(dim=1)
    own = nn.functional.one_hot(y, 10).bool()
    boosted = -q[own].log() - (1 - q.masked_fill(own, 0.0).amax(dim=1)).log()
    return (boosted + 5 * (p * (p / q).log()).sum(dim=1) * (1 - p[own])).mean()


# The loss, for one sample in numpy, for a batch in torch, the loss of its search, and its published weight
LOSSES = {
    "trades": (trades_loss, trades_by_hand, trades_in_torch, "kl", 6.0),
    "mart": (mart_loss, mart_by_hand, mart_in_torch, "cross_entropy", 5.0),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


@each_loss
@given(
    seed=st.integers(0, 2**31),
    num_samples=st.integers(1, 6),
    num_classes=st.integers(2, 5),
    scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]),
    weight=st.floats(0.0, 10.0),
)
def test_formula_by_hand(name, seed, num_samples, num_classes, scale, weight):
    loss, by_hand, *_ = LOSSES[name]
    scale = min(scale, 5.0) if name == "mart" else scale  # beyond, 1 - p of the formula rounds to zero
    generator = torch.Generator().manual_seed(seed)
    logits, adv_logits = scale * torch.randn(2, num_samples, num_classes, generator=generator, dtype=torch.float64)
    y = torch.randint(num_classes, (num_samples,), generator=generator)
    rows = zip(logits.numpy(), adv_logits.numpy(), y.tolist(), strict=True)
    expected = np.mean([by_hand(*row, weight) for row in rows])
    assert loss(nn.Identity(), logits, y, weight=weight, x_adv=adv_logits).item() == pytest.approx(expected, rel=1e-7)


@pytest.fixture
def batch(digits):
    return digits[0][1200:1300], digits[1][1200:1300]


@each_loss
def test_published_defaults(batch, digits_network, name):
    loss, *_, weight = LOSSES[name]
    options = {"weight": weight, "eps": 8 / 255, "alpha": 2 / 255, "steps": 10}
    expected = loss(digits_network, *batch, **options, seed=1)
    assert torch.equal(loss(digits_network, *batch, seed=1), expected)
    assert expected > loss(digits_network, *batch, x_adv=batch[0])


def test_without_weight_trades_is_the_plain_loss(batch, digits_network):
    expected = nn.functional.cross_entropy(digits_network(batch[0]), batch[1])
    torch.testing.assert_close(trades_loss(digits_network, *batch, weight=0.0), expected)


@each_loss
def test_worst_case_costs_more_than_chance(batch, digits_network, name):
    loss, (x, y) = LOSSES[name][0], batch
    noisy = (x + torch.empty_like(x).uniform_(-0.1, 0.1)).clamp(0, 1)
    worst = loss(digits_network, x, y, eps=0.1, alpha=0.02)
    assert worst > 2 * loss(digits_network, x, y, x_adv=noisy)


def batch_norm_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


@each_loss
@pytest.mark.parametrize(("is_half", "tolerance"), [(False, 1e-5), (True, 2e-3)])
def test_a_training_step_is_two_plain_passes_in_train_mode(digits, name, is_half, tolerance):
    loss, _, in_torch, objective, _ = LOSSES[name]
    x, y, network, expected = digits[0][:64], digits[1][:64], batch_norm_network(), batch_norm_network()
    options = {"eps": 0.1, "alpha": 0.02, "steps": 3}
    x_adv = PGD(**options, start="gaussian", loss=objective, all_steps=True)(expected, x, y, seed=2)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        value = loss(network, x, y, **options, seed=2)
        expected_value = in_torch(expected(x).float(), expected(x_adv).float(), y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected_value)
    value.backward()
    expected_value.backward()
    for ours, theirs in zip(network.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=tolerance)
    for ours, theirs in zip(network.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@each_loss
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_labels_of_any_integers(batch, digits_network, name, dtype):
    loss, (x, y) = LOSSES[name][0], batch
    assert torch.equal(loss(digits_network, x, y.to(dtype), seed=1), loss(digits_network, x, y, seed=1))


def test_confident_mistakes_stay_finite():
    adv_logits = torch.tensor([[-200.0, 200.0, 0.0]], requires_grad=True)
    clean = torch.tensor([[1.0, 0.0, 0.0]])
    loss = mart_loss(nn.Identity(), clean, torch.tensor([0]), weight=0.0, x_adv=adv_logits)
    loss.backward()
    assert loss.item() == pytest.approx(400 + 200)  # log(1 - p) = log p of the next class, -200
    torch.testing.assert_close(adv_logits.grad, torch.tensor([[-1.0, 2.0, -1.0]]))


# The search and the passes, which both have in common

ATTACK = PGD(eps=0.1, alpha=0.03, steps=5, start="gaussian", loss="kl", all_steps=True)


@pytest.fixture
def wide_network(digits_network):
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
def test_search_by_hand(batch, wide_network, monkeypatch, loss):
    x, y, network = batch[0][:50].double(), batch[1][:50], wide_network
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


def test_normalised_inputs_move_by_the_same_pixels(batch, wide_network):
    x, y, network = batch[0][:50].double(), batch[1][:50], wide_network
    space = InputSpace(mean=0.25, std=0.5)
    expected, _ = search(network, x, y)
    x_adv, _ = search(lambda t: network(space.unnormalize(t)), space.normalize(x), y, input_space=space)
    torch.testing.assert_close(space.unnormalize(x_adv), expected, atol=1e-9, rtol=0)


def test_no_range(wide_network):
    x, y = 3 * torch.randn(10, 1, 8, 8, dtype=torch.float64), torch.zeros(10).long()
    x_adv, _ = search(wide_network, x, y, input_space=InputSpace(low=None, high=None))
    assert (x_adv - x).abs().max() <= 0.1 + 1e-6
    assert (x_adv.abs() > 1).float().mean() > 0.5


def test_the_search_leaves_no_trace(digits, digits_network):
    network, x, y = network_in_training(digits_network).eval(), digits[0][:5], digits[1][:5]
    before = snapshot(network)
    log_probabilities(network, x, y, None, ATTACK, None, seed=0)
    assert_same(before, snapshot(network))


def test_start_comes_from_the_seed_or_the_random_state(batch, wide_network):
    def run(seed):
        return search(wide_network, batch[0].double(), batch[1], seed=seed, steps=1)[0]

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
