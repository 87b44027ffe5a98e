import foolbox
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness.attacks import DDN, MinimumNormCW, run_attack
from lightning_robustness.input_space import InputSpace
from tests.attacks.linear import closest_boundary, random_linear

NETWORKS = ["digits_network", "robust_digits_network"]


@pytest.mark.parametrize("network", NETWORKS)
def test_breaks_all_samples_at_less_distance_than_foolbox(digits, request, network):
    network, x, y = request.getfixturevalue(network), digits[0][:150], digits[1][:150]
    result = run_attack(network, "ddn", x, y)
    assert torch.equal(result.success, result.eligible)
    assert (result.queries[result.eligible] == 106).all()
    for reference in (foolbox.attacks.DDNAttack(steps=100), foolbox.attacks.L2FMNAttack(steps=100)):
        with sandbox(network, x):
            x_adv = reference(foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu"), x, y, epsilons=None)[1]
        broken = result.eligible & (network(x_adv).argmax(1) != y) & (x_adv.flatten(1).amax(1) > 0)
        assert broken.sum() > 100
        assert result.l2[broken].mean() <= 1.005 * (x_adv - x).flatten(1).norm(dim=1)[broken].mean()


@pytest.mark.parametrize("attack", [DDN(), MinimumNormCW()])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_scale_of_the_logits_changes_nothing(digits, request, network, attack):
    network, x, y = request.getfixturevalue(network), digits[0][:100], digits[1][:100]
    plain = run_attack(network, attack, x, y)
    for scale in (0.01, 1000.0):
        scaled = run_attack(lambda images, scale=scale: scale * network(images), attack, x, y)
        assert torch.equal(scaled.success, plain.success)
        assert scaled.l2.mean().item() == pytest.approx(plain.l2.mean().item(), rel=0.02)
        assert ((scaled.l2 - plain.l2).abs() <= 0.02 * plain.l2).float().mean() >= 0.95


@pytest.mark.parametrize(
    ("attack", "factor", "slack"),
    [(DDN(), 1.03, 1e-4), (MinimumNormCW(steps=100, lr=0.05, binary_search_steps=5, c=0.1), 1.1, 0.01)],
)
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_finds_the_boundary_of_a_linear_model(attack, factor, slack, seed):
    model = random_linear(seed, num_classes=2)
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(seed))
    y = model(x).argmax(1)
    result = run_attack(model, attack, x, y, input_space=InputSpace(low=None, high=None))
    expected = closest_boundary(model, x, y, "l2")
    clear = expected > 1e-3
    assert result.success[clear].all()
    assert (result.l2 >= expected - 1e-4).all()
    assert (result.l2[clear] <= factor * expected[clear] + slack).all()


class Plateau(nn.Module):
    """Class 1 where the mean is above 0.45, by logits that are flat but for a slope near there."""

    def forward(self, x):
        height = (8 * (x.mean(dim=1, keepdim=True) - 0.45)).clamp(-1, 1)
        return torch.cat([-height, height], dim=1)


def test_leaves_a_plateau_by_random_steps():
    x, y = torch.full((20, 30), 0.1), torch.zeros(20, dtype=torch.long)
    result = run_attack(Plateau(), DDN(), x, y)
    assert result.zero_gradients.all()
    assert result.success.all()
    assert (result.l2 < 1.1 * 0.35 * 30**0.5).all()


def test_tries_random_images_where_gradients_mislead():
    """The gradient always points away from class 1, which half of all images belong to."""

    def model(x):
        height = (x.mean(dim=1, keepdim=True).detach() - 0.5).sign() - 1e-3 * (x - x.detach()).sum(dim=1, keepdim=True)
        return torch.cat([-height, height], dim=1)

    x, y = torch.full((20, 4), 0.2), torch.zeros(20, dtype=torch.long)
    result = run_attack(model, DDN(steps=10), x, y)
    assert result.success.float().mean() > 0.9
    assert (result.l2[result.success] < 1.0).all()
    assert (result.queries[result.success] > 16).all()


def test_equal_logits_are_no_fault_of_the_gradients():
    """Where their spread is 0, the softmax over the rivals has no scale."""
    x, y = torch.rand(3, 4), torch.zeros(3, dtype=torch.long)
    result = run_attack(lambda x: torch.zeros(len(x), 3) * x.sum(), DDN(steps=5), x, y)
    assert not result.nonfinite_gradients.any()


def test_what_is_misclassified_stays_as_it_is(digits, digits_network):
    x, y = digits[0][:20], digits[1][:20].clone()
    y[::2] = (y[::2] + 1) % 10
    x_adv = DDN(steps=10, all_steps=True)(digits_network, x, y)
    assert torch.equal(x_adv[::2], x[::2])
