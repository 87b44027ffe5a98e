"""Logits times a constant are the same decisions: attacks that use gradients succeed as often."""

import pytest
import torch

from lightning_robustness.attacks import PGD, get_attack, run_attack

SCALED = {
    **{name: get_attack(name, eps=0.1) for name in ("fgsm", "rfgsm", "bim", "pgd", "mifgsm")},
    "fast_pgd": get_attack("pgd", eps=0.1, strength="fast"),
    "pgd_l2": PGD(eps=0.6, norm="l2"),
    "adaptive": PGD(eps=0.1, schedule="adaptive", steps=20),
    "adaptive_l2": PGD(eps=0.6, norm="l2", schedule="adaptive", steps=20),
    "gaussian": PGD(eps=0.1, start="gaussian"),
    "margin": PGD(eps=0.1, loss="margin", schedule="adaptive", steps=20),
    "rivals": PGD(eps=0.1, loss="rivals", schedule="adaptive", restarts=3),
    "targeted": PGD(eps=0.25, targeted=True),
}


# Cross-entropy of small logits is another function by its definition: all rivals of the label count alike
CASES = [(name, scale) for name in SCALED for scale in (30.0, 1000.0)]
CASES += [(name, 0.01) for name in ("fast_pgd", "margin", "rivals")]


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_the_scale_of_logits_does_not_matter(digits, digits_network, name, scale):
    """Where the gradient of cross-entropy underflows, it loses its way from a factor of 10 on."""
    x, y = digits[0][:300], digits[1][:300]
    y = (y + 1) % 10 if name == "targeted" else y
    expected = run_attack(digits_network, SCALED[name], x, y).success_rate
    assert 0.1 < expected < 0.99
    result = run_attack(lambda images: scale * digits_network(images), SCALED[name], x, y)
    assert result.success_rate == pytest.approx(expected, abs=0.1 if name == "targeted" else 0.05)


@pytest.mark.parametrize("name", ["margin", "rivals"])
@pytest.mark.parametrize("scale", [2.0**-7, 2.0**10])
def test_the_margin_is_the_same_at_every_scale(digits, digits_network, name, scale):
    x, y = digits[0][:100], digits[1][:100]
    expected = run_attack(digits_network, SCALED[name], x, y)
    result = run_attack(lambda images: scale * digits_network(images), SCALED[name], x, y)
    assert torch.equal(result.x_adv, expected.x_adv)
