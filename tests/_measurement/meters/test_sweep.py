import math
from dataclasses import dataclass

import pytest
import torch

from lightning_robustness._arguments import read_budgets
from lightning_robustness._measurement.meters.sweep import (
    SWEEP_BUDGETS,
    SweepMeter,
    _follow,
    _stretch,
    plan_sweep,
)
from lightning_robustness.attacks import CW, PGD, Square, get_attack, run_attack
from lightning_robustness.attacks._classifier import open_classifier
from lightning_robustness.functional._image_quality import image_quality
from lightning_robustness.input_space import InputSpace
from tests._measurement.subjects import rows_of

COARSE = (0.03, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Idle:
    """An attack that changes nothing."""

    eps: float = 0.1

    def __call__(self, model, x, y):
        return x


@pytest.mark.parametrize("batch_size", [13, 40])
def test_rows_are_those_of_every_budget(digits, robust_digits_network, batch_size):
    """FGSM has the same gradient at all budgets, so that a sweep of it is one attack after the other."""
    x, y = digits[0][1200:1240], digits[1][1200:1240].clone()
    y[:3] = (y[:3] + 1) % 10  # wrong before the attack
    meter = SweepMeter(40, plan_sweep({"fgsm": "fgsm", "idle": Idle()}, COARSE))
    rows = rows_of(meter, robust_digits_network, x, y, batch_size=batch_size)
    results = [run_attack(robust_digits_network, get_attack("fgsm", eps=eps, all_steps=True), x, y) for eps in COARSE]
    right = results[0].preds == y
    broken = torch.stack([result.adv_preds != y for result in results])
    first = torch.cat([broken, torch.ones(1, 40, dtype=torch.bool)]).int().argmax(dim=0)
    assert rows["first"][:, 0].tolist() == torch.where(right, first, -1).tolist()
    assert rows["first"][:, 1].tolist() == torch.where(right, len(COARSE), -1).tolist()
    assert torch.equal(rows["y"], y)
    quality = torch.stack([torch.stack(image_quality(result.x_adv, x), dim=1) for result in results], dim=1)
    torch.testing.assert_close(rows["quality"][:, 0], quality.double(), rtol=1e-4, atol=1e-6)
    assert (rows["seconds"] > 0).all()


@pytest.mark.parametrize(
    "attack", ["fgsm", "bim", "pgd", "mifgsm", "pgd_l2", Square(num_queries=200), PGD(restarts=2, steps=3)]
)
def test_images_use_the_budget_and_stay_in_it(digits, robust_digits_network, attack):
    x, y = digits[0][1200:1232], digits[1][1200:1232]
    attacks = [named.popitem()[1] for named in plan_sweep([attack], COARSE)]
    with open_classifier(robust_digits_network, x, y) as (model, x, y):
        right = robust_digits_network(x).argmax(1) == y
        for eps, (x_adv, _) in zip(COARSE, _follow(model, attacks, x, y, right), strict=True):
            order = 2 if attack == "pgd_l2" else math.inf
            assert (torch.linalg.vector_norm((x_adv - x).flatten(1), ord=order, dim=1) <= eps + 1e-5).all()
            x_adv = _stretch(model, attacks[COARSE.index(eps)], x, x_adv)
            distance = torch.linalg.vector_norm((x_adv - x).flatten(1), ord=order, dim=1)
            assert (distance <= eps + 1e-5).all()
            # What is clipped at the range is lost for an l2 ball
            assert (distance > (0.5 if order == 2 else 0.99) * eps).all()
            assert x_adv.min() >= 0
            assert x_adv.max() <= 1


def test_warm_start_takes_fewer_steps(digits, robust_digits_network):
    x, y = digits[0][1200:1300], digits[1][1200:1300]
    rows = []
    hook = robust_digits_network.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    rows_of(SweepMeter(100, plan_sweep(["pgd"], SWEEP_BUDGETS)), robust_digits_network, x, y)
    warm = sum(rows)
    rows.clear()
    for eps in SWEEP_BUDGETS:
        run_attack(robust_digits_network, get_attack("pgd", eps=eps, all_steps=True), x, y)
    hook.remove()
    assert warm < 0.5 * sum(rows)


def test_budgets_may_be_of_any_kind_of_number():
    assert read_budgets("budgets", torch.tensor([0.125, 0.25])) == [0.125, 0.25]
    assert read_budgets("budgets", [1, 2]) == [1.0, 2.0]
    for eps in (0.1, None, ["much"]):
        with pytest.raises(TypeError, match="`budgets`"):
            read_budgets("budgets", eps)


def test_attacks_have_the_budget_of_their_place():
    plan = plan_sweep(["pgd", "cascade"], COARSE)
    assert [attacks["pgd"] for attacks in plan] == [PGD(eps=eps) for eps in COARSE]
    assert [attacks["cascade"] for attacks in plan] == [get_attack("cascade", eps=eps) for eps in COARSE]


@pytest.mark.parametrize(
    ("attacks", "eps", "message"),
    [
        (["pgd"], [], "`budgets` to hold positive, increasing"),
        (["pgd"], [0.2, 0.1], "`budgets` to hold positive, increasing"),
        (["pgd"], [math.nan], "`budgets` to hold positive, increasing"),
        ([], [0.1], "at least one attack"),
        ([CW()], [0.1], "`attacks` to hold attacks whose budget can be set"),
        (["pgd"], [0.5, 300.0], "`input_space`. Change `budgets`"),
    ],
)
def test_plans_are_checked(attacks, eps, message):
    with pytest.raises(ValueError, match=message):
        plan_sweep(attacks, eps, InputSpace(high=255.0))


def test_budgets_for_another_range_are_named():
    with pytest.warns(
        UserWarning, match="All `sweep_budgets` are below one grey level.*multiply them by 255"
    ) as record:
        plan_sweep(["pgd", "square"], [0.1, 0.2], InputSpace(high=255.0), "sweep_")
    assert len(record) == 1
    plan_sweep(["pgd"], [0.1, 1.0], InputSpace(high=255.0))
