import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness.attacks import Budget, FisherStep, budget_of, get_attack, run_attack
from lightning_robustness.evaluation import evaluate, sweep
from lightning_robustness.functional import fisher_spectral_norm


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_equals_fgsm_for_two_classes(norm):
    torch.manual_seed(0)
    space = InputSpace(mean=(0.5,), std=(0.25,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
    x = space.normalize(0.3 + 0.4 * torch.rand(8, 1, 3, 3))
    y = model(x).argmax(1)  # the gradient of the loss is along the only eigenvector
    step = run_attack(model, FisherStep(eps=0.1, norm=norm), x, y, input_space=space)
    fgsm = run_attack(model, get_attack("fgsm", eps=0.1, norm=norm), x, y, input_space=space)
    torch.testing.assert_close(step.x_adv, fgsm.x_adv, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["auto", "lanczos", "blackbox"])
def test_follows_the_direction_of_the_method(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 4))
    x = 0.3 + 0.4 * torch.rand(8, 9)
    attack = FisherStep(eps=0.01, norm="l2", method=method)
    direction = fisher_spectral_norm(model, x, method, return_direction=True).direction
    torch.testing.assert_close(attack(model, x, model(x).argmax(1)), x + 0.01 * direction, rtol=1e-4, atol=1e-5)
    assert attack.white_box == (method != "blackbox")


def test_stays_in_the_range():
    result = run_attack(nn.Linear(4, 3), "fisher", torch.rand(5, 4), torch.zeros(5).long())
    wide = run_attack(nn.Linear(4, 3), FisherStep(eps=1.0), torch.rand(5, 4), torch.zeros(5).long())
    assert result.attack == FisherStep(eps=8 / 255)
    assert (wide.x_adv.min(), wide.x_adv.max()) == (0, 1)


def test_has_a_budget_everywhere(digits, digits_network):
    assert budget_of(get_attack("fisher", eps=0.2, norm="l2")) == Budget("l2", 0.2)
    loader = [(digits[0][:64], digits[1][:64])]
    report = evaluate(digits_network, loader, ["fisher", "pgd"], 0.1, strength="fast", fim_samples=0, progress=False)
    assert report.threat_model.describe()["attacks"].startswith("fisher (1 step along the principal eigenvector")
    assert "no budget" not in report.threat_model.describe()["attacks"]
    assert report.metrics["adv_acc/pgd"] <= report.metrics["adv_acc/fisher"] < report.metrics["acc"]
    curve = sweep(digits_network, loader, ["fisher"], [0.05, 0.2], progress=False, warm_starts=False)
    assert curve.worst[1] < curve.worst[0] < curve.clean_accuracy


def test_black_box_steps_are_lost_in_half_precision():
    model, x = torch.nn.Linear(2, 2).half(), torch.rand(3, 2).half()
    with pytest.raises(ValueError, match=r"float32 for method='blackbox'.*`float\(\)`"):
        run_attack(model, FisherStep(method="blackbox", all_steps=True), x, torch.zeros(3).long())


def test_has_no_targets():
    with pytest.raises(ValueError, match=r"`targeted`.*FisherStep.*PGD"):
        FisherStep(targeted=True)
