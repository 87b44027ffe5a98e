import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from torch import nn

from lightning_robustness.losses import mart_loss


def by_hand(logits, adv_logits, y, weight):
    total = 0.0
    for z, z_adv, label in zip(logits.numpy(), adv_logits.numpy(), y.tolist(), strict=True):
        p, q = softmax(z), softmax(z_adv)
        boosted = -np.log(q[label]) - np.log(1 - np.delete(q, label).max())
        divergence = np.sum(p * (log_softmax(z) - log_softmax(z_adv)))
        total += boosted + weight * divergence * (1 - p[label])
    return total / len(y)


@given(
    seed=st.integers(0, 2**31),
    num_samples=st.integers(1, 6),
    num_classes=st.integers(2, 5),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    weight=st.floats(0.0, 10.0),
)
def test_formula_by_hand(seed, num_samples, num_classes, scale, weight):
    generator = torch.Generator().manual_seed(seed)
    logits, adv_logits = scale * torch.randn(2, num_samples, num_classes, generator=generator, dtype=torch.float64)
    y = torch.randint(num_classes, (num_samples,), generator=generator)
    expected = by_hand(logits, adv_logits, y, weight)
    loss = mart_loss(nn.Identity(), logits, y, weight=weight, x_adv=adv_logits)
    assert loss.item() == pytest.approx(expected, rel=1e-7)


def test_confident_mistakes_stay_finite():
    adv_logits = torch.tensor([[-200.0, 200.0, 0.0]], requires_grad=True)
    clean = torch.tensor([[1.0, 0.0, 0.0]])
    loss = mart_loss(nn.Identity(), clean, torch.tensor([0]), weight=0.0, x_adv=adv_logits)
    loss.backward()
    assert loss.item() == pytest.approx(400 + 200)  # log(1 - p) = log p of the next class, -200
    torch.testing.assert_close(adv_logits.grad, torch.tensor([[-1.0, 2.0, -1.0]]))


def test_published_defaults(digits, digits_network):
    x, y = digits[0][1200:1300], digits[1][1200:1300]
    options = {"weight": 5.0, "eps": 8 / 255, "alpha": 2 / 255, "steps": 10}
    expected = mart_loss(digits_network, x, y, **options, seed=1)
    assert torch.equal(mart_loss(digits_network, x, y, seed=1), expected)
    assert expected > mart_loss(digits_network, x, y, x_adv=x)


def test_gradients_reach_the_weights_from_both_passes(digits):
    x, y = digits[0][:64], digits[1][:64]
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    x_adv = (x + 0.1 * torch.randn_like(x)).clamp(0, 1)
    mart_loss(network, x, y, x_adv=x_adv).backward()
    clean, adversarial = network(x), network(x_adv)
    p, q = clean.softmax(dim=1), adversarial.softmax(dim=1)
    own = torch.nn.functional.one_hot(y, 10).bool()
    boosted = -q[own].log() - (1 - q.masked_fill(own, 0.0).amax(dim=1)).log()
    expected = (boosted + 5 * (p * (p / q).log()).sum(dim=1) * (1 - p[own])).mean()
    gradients = torch.autograd.grad(expected, network.parameters())
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
