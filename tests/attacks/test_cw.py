import copy
import itertools

import foolbox
import pytest
import torch
import torchattacks
from torch import nn

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness.attacks import CW, DDN, MinimumNormCW, run_attack
from lightning_robustness.attacks._steps import margin
from lightning_robustness.attacks.attack import most_passes
from tests.attacks.linear import linear
from tests.references import carlini_wagner


def distances(network, x, y, x_adv):
    """Distance of images that succeed, infinite for the others (foolbox returns black images there)."""
    broken = (network(x).argmax(1) == y) & (network(x_adv).argmax(1) != y) & (x_adv.flatten(1).amax(1) > 0)
    return torch.where(broken, (x_adv - x).flatten(1).norm(dim=1), torch.inf)


def found_by(network, attack, x, y):
    """Distance of images on which one of our attacks succeeds, infinite for the others."""
    result = run_attack(network, attack, x, y)
    return torch.where(result.success, result.l2, torch.inf)


def assert_agree(found, expected):
    """Within two points of success and 5 % of the median distance."""
    (share, median), (expected_share, expected_median) = (
        (part.isfinite().double().mean().item(), part[part.isfinite()].median().item()) for part in (found, expected)
    )
    assert share == pytest.approx(expected_share, abs=0.02)
    assert median == pytest.approx(expected_median, rel=0.05)


@pytest.mark.parametrize(
    ("c", "steps"), [(1.0, 50), (1.0, 20), (0.5, 10), (0.1, 10)], ids=["mnist", "fisher", "cifar10", "cifar100"]
)
@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_published_attack_equals_torchattacks_and_the_formulas(digits, request, network, c, steps):
    network, x, y = request.getfixturevalue(network), digits[0][-300:], digits[1][-300:]
    is_right = network(x).argmax(1) == y
    x, y = x[is_right], y[is_right]
    with sandbox(network, x):
        theirs = distances(network, x, y, torchattacks.CW(network, c=c, steps=steps, lr=0.01)(x, y))
    formulas = carlini_wagner(copy.deepcopy(network).double(), x, y, c, steps, lr=0.01)
    found = found_by(network, CW(c=c, steps=steps, lr=0.01), x, y)
    assert found.isfinite().any()
    for expected in (theirs, formulas):
        assert_agree(found, expected)


@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_binary_search_as_in_foolbox(digits, request, network):
    network, x, y = request.getfixturevalue(network), digits[0][:120], digits[1][:120]
    expected = distances(network, x, y, foolbox_images(network, x, y))
    found = found_by(network, CW(c=0.1, steps=40, lr=0.02, binary_search_steps=4), x, y)
    assert_agree(found, expected)


@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_from_a_ddn_start_at_least_torchattacks_and_foolbox(digits, request, network):
    network, x, y = request.getfixturevalue(network), digits[0][:120], digits[1][:120]
    with sandbox(network, x):
        theirs = torchattacks.CW(network, c=3, steps=30, lr=0.02)(x, y)
    plain = MinimumNormCW(c=3.0, steps=30, lr=0.02, initial_steps=10)
    searching = MinimumNormCW(c=0.1, steps=40, lr=0.02, binary_search_steps=4, initial_steps=20)
    for attack, images in ((plain, theirs), (searching, foolbox_images(network, x, y))):
        found, expected = found_by(network, attack, x, y), distances(network, x, y, images)
        assert found.isfinite().sum() >= expected.isfinite().sum()
        both = found.isfinite() & expected.isfinite()
        assert found[both].mean() <= expected[both].mean()


def foolbox_images(network, x, y):
    reference = foolbox.attacks.L2CarliniWagnerAttack(4, steps=40, stepsize=0.02, initial_const=0.1)
    with sandbox(network, x):
        return reference(foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu"), x, y, epsilons=None)[1]


@pytest.mark.parametrize("attack", [CW(c=10.0, steps=20, lr=0.05), MinimumNormCW(steps=20, lr=0.05)], ids=repr)
@pytest.mark.parametrize("tail", [nn.LogSoftmax(dim=1), lambda z: z + 30.0, lambda z: z - 30.0])
def test_a_constant_in_the_logits_changes_nothing(digits, digits_network, attack, tail):
    x, y = digits[0][:100], digits[1][:100]
    plain = run_attack(digits_network, attack, x, y)
    shifted = run_attack(lambda images: tail(digits_network(images)), attack, x, y)
    assert plain.success_rate > 0.9
    assert (plain.success != shifted.success).float().mean() <= 0.01
    assert shifted.l2.mean().item() == pytest.approx(plain.l2.mean().item(), rel=0.01)


def test_pixels_at_the_ends_of_the_range_barely_move_in_the_published_attack():
    model = linear([[1.0, 1.0], [0.0, 0.0]], [-1.4, 0.0])  # right of the label, 0, wherever the sum is above 1.4
    result = run_attack(model, CW(c=10.0), torch.tensor([[1.0, 0.5]]), torch.tensor([0]))
    assert result.success.all()
    end, inside = result.x_adv[0].tolist()
    assert inside == pytest.approx(0.4, abs=0.01)
    # From 0.999999 of the box, in about 20 steps of 0.01: 1 - x = 5e-7 exp(2 * 0.2)
    assert 1 - end == pytest.approx(7.5e-7, abs=1.5e-7)


def test_pixels_at_the_ends_of_the_range_move_from_a_ddn_start():
    model = linear([[1.0, -1.0], [-1.0, 1.0]])
    result = run_attack(model, MinimumNormCW(steps=100, lr=0.05), torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert result.success.all()
    torch.testing.assert_close(result.x_adv, torch.tensor([[0.5, 0.5]]), atol=0.02, rtol=0)


@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_breaks_all_samples_and_comes_closer_than_its_start(digits, request, network):
    """A short search leaves something to find: about 4 % of the distance."""
    network, x, y = request.getfixturevalue(network), digits[0][:150], digits[1][:150]
    attacks = MinimumNormCW(steps=50, lr=0.02, initial_steps=5), DDN(steps=5)
    result, start = (run_attack(network, attack, x, y) for attack in attacks)
    assert torch.equal(result.success, result.eligible)
    assert result.l2[start.success].mean() < 0.98 * start.l2[start.success].mean()
    assert (result.queries[start.success] == 61).all()
    assert most_passes(result.attack) == 55


def test_more_weights_give_more_success_and_less_distortion(digits, robust_digits_network):
    x, y = digits[0][:150], digits[1][:150]
    found = []
    for number in (1, 2, 4):
        attack = CW(steps=20, lr=0.05, binary_search_steps=number)
        result = run_attack(robust_digits_network, attack, x, y)
        found.append(torch.where(result.success, result.l2, torch.inf))
    for fewer, more in itertools.pairwise(found):
        assert (more.isfinite() | fewer.isinf()).all()
        assert more[fewer.isfinite()].mean() < fewer[fewer.isfinite()].mean()


@pytest.mark.parametrize("kind", [CW, MinimumNormCW])
def test_confidence(digits, digits_network, kind):
    x, y = digits[0][:100], digits[1][:100]
    result = run_attack(digits_network, kind(c=10.0, kappa=2.0, steps=40, lr=0.05), x, y)
    assert result.success_rate > 0.9
    assert (margin(digits_network(result.x_adv), y)[result.success] <= -2).all()
