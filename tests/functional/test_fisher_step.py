from functools import partial

import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness.attacks import get_attack, run_attack
from lightning_robustness.functional import fisher_step


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_equals_fgsm_for_two_classes(norm):
    torch.manual_seed(0)
    space = InputSpace(mean=(0.5,), std=(0.25,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
    x = space.normalize(0.3 + 0.4 * torch.rand(8, 1, 3, 3))
    y = model(x).argmax(1)  # the gradient of the loss is along the only eigenvector
    step = run_attack(model, partial(fisher_step, eps=0.1, norm=norm), x, y, input_space=space)
    fgsm = run_attack(model, get_attack("fgsm", eps=0.1, norm=norm), x, y, input_space=space)
    torch.testing.assert_close(step.x_adv, fgsm.x_adv, rtol=1e-4, atol=1e-5)


def test_stays_in_the_range_of_the_attacked_model():
    model = nn.Linear(4, 3)
    result = run_attack(model, partial(fisher_step, eps=3.0, norm="linf"), torch.rand(5, 4), torch.zeros(5).long())
    assert result.x_adv.min() >= 0
    assert result.x_adv.max() <= 1
