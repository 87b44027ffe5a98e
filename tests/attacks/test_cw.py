import itertools

import foolbox
import pytest
import torch
import torchattacks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_robustness.attacks import CW, DDN, run
from lightning_robustness.attacks.objective import margin
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.sandbox import sandbox
from tests.attacks.linear import closest_boundary, linear, random_linear


def distances(network, x, y, x_adv):
    """Distance of images that succeed, infinite for the others (foolbox returns black images there)."""
    broken = (network(x).argmax(1) == y) & (network(x_adv).argmax(1) != y) & (x_adv.flatten(1).amax(1) > 0)
    return torch.where(broken, (x_adv - x).flatten(1).norm(dim=1), torch.inf)


@pytest.mark.parametrize("initial_steps", [0, 10])
@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_at_least_the_success_of_torchattacks_at_no_more_distortion(digits, request, network, initial_steps):
    network, x, y = request.getfixturevalue(network), digits[0][:1100], digits[1][:1100]
    with sandbox(network, x):
        expected = distances(network, x, y, torchattacks.CW(network, c=3, steps=30, lr=0.02)(x, y))
    result = run(network, CW(c=3.0, steps=30, lr=0.02, initial_steps=initial_steps), x, y)
    found = torch.where(result.success, result.l2, torch.inf)
    assert result.eligible.sum() > 1000
    assert found.isfinite().sum() >= expected.isfinite().sum()
    both = found.isfinite() & expected.isfinite()
    assert found[both].mean() <= expected[both].mean()


@pytest.mark.parametrize("initial_steps", [0, 20])
@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_with_binary_search_at_least_foolbox(digits, request, network, initial_steps):
    network, x, y = request.getfixturevalue(network), digits[0][:250], digits[1][:250]
    reference = foolbox.attacks.L2CarliniWagnerAttack(4, steps=40, stepsize=0.02, initial_const=0.1)
    with sandbox(network, x):
        x_adv = reference(foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu"), x, y, epsilons=None)[1]
    expected = distances(network, x, y, x_adv)
    result = run(network, CW(c=0.1, steps=40, lr=0.02, binary_search_steps=4, initial_steps=initial_steps), x, y)
    found = torch.where(result.success, result.l2, torch.inf)
    assert found.isfinite().sum() >= expected.isfinite().sum()
    both = found.isfinite() & expected.isfinite()
    assert found[both].mean() <= expected[both].mean()


@pytest.mark.parametrize("tail", [nn.LogSoftmax(dim=1), lambda z: z + 30.0, lambda z: z - 30.0])
def test_a_constant_in_the_logits_changes_nothing(digits, digits_network, tail):
    x, y = digits[0][:200], digits[1][:200]
    attack = CW(steps=20, lr=0.05)
    plain = run(digits_network, attack, x, y)
    shifted = run(lambda images: tail(digits_network(images)), attack, x, y)
    assert plain.success_rate > 0.9
    assert (plain.success != shifted.success).float().mean() <= 0.01
    assert shifted.l2.mean().item() == pytest.approx(plain.l2.mean().item(), rel=0.01)


def test_pixels_at_the_ends_of_the_range_move():
    model = linear([[1.0, -1.0], [-1.0, 1.0]])
    result = run(model, CW(steps=100, lr=0.05), torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert result.success.all()
    torch.testing.assert_close(result.x_adv, torch.tensor([[0.5, 0.5]]), atol=0.02, rtol=0)


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_finds_the_boundary_of_a_linear_model(seed):
    model = random_linear(seed, num_classes=2)
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(seed))
    y = model(x).argmax(1)
    attack = CW(steps=100, lr=0.05, binary_search_steps=5, c=0.1)
    result = run(model, attack, x, y, InputSpace(low=None, high=None))
    expected = closest_boundary(model, x, y, "l2")
    assert result.success[expected > 1e-3].all()
    assert (result.l2 >= expected - 1e-4).all()
    assert (result.l2 <= 1.1 * expected + 0.01).all()


@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_breaks_all_samples_and_comes_closer_than_its_start(digits, request, network):
    network, x, y = request.getfixturevalue(network), digits[0][:300], digits[1][:300]
    result, start = (run(network, attack, x, y) for attack in (CW(steps=50, lr=0.02), DDN(steps=50)))
    assert torch.equal(result.success, result.eligible)
    assert result.l2[result.success].mean() < start.l2[start.success].mean()
    assert (result.l2 <= start.l2 * (1 + 1 / 32)).all()  # to the resolution of the bisection
    assert (result.queries[result.eligible] == 106).all()


def test_more_weights_give_more_success_and_less_distortion(digits, robust_digits_network):
    x, y = digits[0][:150], digits[1][:150]
    found = []
    for number in (1, 2, 4):
        attack = CW(steps=20, lr=0.05, binary_search_steps=number, initial_steps=0)
        result = run(robust_digits_network, attack, x, y)
        found.append(torch.where(result.success, result.l2, torch.inf))
    for fewer, more in itertools.pairwise(found):
        assert (more.isfinite() | fewer.isinf()).all()
        assert more[fewer.isfinite()].mean() < fewer[fewer.isfinite()].mean()


def test_weights_mean_the_same_in_another_range(digits, digits_network):
    x, y = digits[0][:100], digits[1][:100]
    attack = CW(steps=20, lr=0.05)
    result = run(digits_network, attack, x, y)
    other = run(lambda images: digits_network(images / 255), attack, x * 255, y, InputSpace(high=255))
    assert (other.success == result.success).float().mean() >= 0.98
    assert other.l2.mean().item() / 255 == pytest.approx(result.l2.mean().item(), rel=0.02)


def test_confidence(digits, digits_network):
    x, y = digits[0][:100], digits[1][:100]
    result = run(digits_network, CW(c=10.0, kappa=2.0, steps=40, lr=0.05), x, y)
    assert result.success_rate > 0.9
    assert (margin(digits_network(result.x_adv), y)[result.success] <= -2).all()


def test_targeted(digits, digits_network):
    x, target = digits[0][:100], (digits[1][:100] + 1) % 10
    result = run(digits_network, CW(c=10.0, steps=40, lr=0.05, targeted=True), x, target)
    assert result.success_rate > 0.9
    assert (result.adv_preds[result.success] == target[result.success]).all()


def test_without_success_the_input_comes_back():
    model = linear([[1.0, 0.0], [0.0, 0.0]], [9.0, 0.0])
    x = torch.tensor([[0.5, 0.5]])
    result = run(model, CW(steps=5, initial_steps=0), x, torch.tensor([0]))
    assert torch.equal(result.x_adv, x)
    assert not result.success.any()
    assert result.queries.tolist() == [5]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"c": 0.0}, r"`c` to be a finite number above 0 but got 0\.0"),
        ({"lr": -1.0}, r"`lr` to be a finite number above 0 but got -1\.0"),
        ({"kappa": -1.0}, r"`kappa` to be a finite number of at least 0 but got -1\.0"),
        ({"initial_steps": -1}, r"`initial_steps` to be an integer of at least 0 but got -1"),
        ({"steps": 0}, r"`steps` to be an integer of at least 1 but got 0"),
        ({"binary_search_steps": 0}, r"`binary_search_steps` to be an integer of at least 1 but got 0"),
    ],
)
def test_arguments_are_checked(options, match):
    with pytest.raises(ValueError, match=match):
        CW(**options)
