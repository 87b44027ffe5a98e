import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from torch import nn

from lightning_robustness.attacks import PGD
from lightning_robustness.losses import trades_loss


def by_hand(logits, adv_logits, y, beta):
    total = 0.0
    for z, z_adv, label in zip(logits.numpy(), adv_logits.numpy(), y.tolist(), strict=True):
        log_p, adv_log_p = log_softmax(z), log_softmax(z_adv)
        total += -log_p[label] + beta * np.sum(np.exp(log_p) * (log_p - adv_log_p))
    return total / len(y)


@given(
    seed=st.integers(0, 2**31),
    num_samples=st.integers(1, 6),
    num_classes=st.integers(2, 5),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    beta=st.floats(0.0, 10.0),
)
def test_formula_by_hand(seed, num_samples, num_classes, scale, beta):
    generator = torch.Generator().manual_seed(seed)
    logits, adv_logits = scale * torch.randn(2, num_samples, num_classes, generator=generator, dtype=torch.float64)
    y = torch.randint(num_classes, (num_samples,), generator=generator)
    expected = by_hand(logits, adv_logits, y, beta)
    loss = trades_loss(nn.Identity(), logits, y, weight=beta, x_adv=adv_logits)
    assert loss.item() == pytest.approx(expected, rel=1e-9)


def test_without_weight_it_is_the_plain_loss(digits, digits_network):
    x, y = digits[0][1200:1300], digits[1][1200:1300]
    expected = nn.functional.cross_entropy(digits_network(x), y)
    torch.testing.assert_close(trades_loss(digits_network, x, y, weight=0.0), expected)


def test_published_defaults(digits, digits_network):
    x, y = digits[0][1200:1300], digits[1][1200:1300]
    options = {"weight": 6.0, "eps": 8 / 255, "alpha": 2 / 255, "steps": 10}
    expected = trades_loss(digits_network, x, y, **options, seed=1)
    assert torch.equal(trades_loss(digits_network, x, y, seed=1), expected)
    assert expected > trades_loss(digits_network, x, y, weight=0.0)


def test_worst_case_costs_more_than_chance(digits, digits_network):
    x, y = digits[0][1200:1300], digits[1][1200:1300]
    noisy = (x + torch.empty_like(x).uniform_(-0.1, 0.1)).clamp(0, 1)
    worst = trades_loss(digits_network, x, y, eps=0.1, alpha=0.02)
    assert worst > 2 * trades_loss(digits_network, x, y, x_adv=noisy)


def batch_norm_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


@pytest.mark.parametrize(("is_half", "tolerance"), [(False, 1e-5), (True, 2e-3)])
def test_a_training_step_is_two_plain_passes_in_train_mode(digits, is_half, tolerance):
    x, y, network, expected = digits[0][:64], digits[1][:64], batch_norm_network(), batch_norm_network()
    options = {"eps": 0.1, "alpha": 0.02, "steps": 3}
    x_adv = PGD(**options, start="gaussian", loss="kl", all_steps=True)(expected, x, y, seed=2)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        loss = trades_loss(network, x, y, **options, seed=2)
        logits, adv_logits = expected(x).float(), expected(x_adv).float()
    p, q = logits.softmax(dim=1), adv_logits.softmax(dim=1)
    expected_loss = nn.functional.cross_entropy(logits, y) + 6 * (p * (p / q).log()).sum(dim=1).mean()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss)
    loss.backward()
    expected_loss.backward()
    for ours, theirs in zip(network.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=tolerance)
    for ours, theirs in zip(network.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
