from fractions import Fraction

import pytest
import torch

from lightning_robustness.attacks import (
    CW,
    PGD,
    Attack,
    Budget,
    Cascade,
    MinimumNormCW,
    SirenAttack,
    Square,
    budget_of,
    get_attack,
    run_attack,
)
from lightning_robustness.attacks.attack import budgets_of, check_budgets
from lightning_robustness.input_space import InputSpace
from tests._isolation.test_sandbox import assert_same, snapshot
from tests.attacks.cases import BUILT_IN, network_in_training


def test_an_attack_has_to_perturb():
    with pytest.raises(TypeError, match="perturb"):
        Attack()


@pytest.mark.parametrize("attack", BUILT_IN)
def test_a_direct_call_is_a_run_without_a_trace(digits, digits_network, attack):
    attack, network = BUILT_IN[attack], network_in_training(digits_network)
    before = snapshot(network)
    x, y = digits[0][:6], digits[1][:6]
    x_adv = attack(network, x, y, seed=1, index=2)
    assert_same(before, snapshot(network))
    assert torch.equal(x_adv, run_attack(network, attack, x, y, seed=1, index=2).x_adv)


@pytest.mark.parametrize("all_steps", [False, True])
def test_a_direct_call_takes_inputs_as_the_model_sees_them(digits, digits_network, all_steps):
    x, y = digits[0][:20], digits[1][:20]
    space = InputSpace(low=-1.0, high=1.0, mean=0.25, std=0.5)

    def model(images):
        return digits_network((space.unnormalize(images) + 1) / 2)

    attack = PGD(eps=0.2, all_steps=all_steps)
    x_adv = attack(model, space.normalize(2 * x - 1), y, input_space=space)
    assert torch.equal(x_adv, run_attack(model, attack, space.normalize(2 * x - 1), y, input_space=space).x_adv)
    expected = PGD(eps=0.1, all_steps=all_steps)(digits_network, x, y)
    close = ((space.unnormalize(x_adv) + 1) / 2 - expected).abs() < 1e-4
    assert close.float().mean() > 0.99


def test_an_empty_batch(digits, digits_network):
    x_adv = PGD()(digits_network, digits[0][:0], digits[1][:0])
    assert x_adv.shape == (0, 1, 8, 8)


def foreign(**attributes):
    def attack(model, x, y):
        return x

    for name, value in attributes.items():
        setattr(attack, name, value)
    return attack


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (PGD(eps=0.1), Budget("linf", 0.1)),
        (Square(eps=0.5, norm="l2"), Budget("l2", 0.5)),
        (SirenAttack(eps=0.2), Budget("linf", 0.2)),
        (CW(), None),
        (MinimumNormCW(), None),
        (foreign(), None),
        (foreign(eps=0.1, norm="l2"), Budget("l2", 0.1)),
        (foreign(eps=1), Budget(None, 1)),
        (foreign(eps=Fraction(1, 4)), Budget(None, 0.25)),
        (foreign(eps="0.1"), None),
        (foreign(eps=torch.ones(3)), None),
        (get_attack("torchattacks:PGDL2", eps=0.5), Budget("l2", 0.5)),
    ],
)
def test_attacks_of_any_kind(attack, expected):
    assert budget_of(attack) == expected
    assert budgets_of(attack) == [expected]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ((PGD(eps=0.1), Square(eps=0.3), PGD(eps=0.2)), Budget("linf", 0.3)),
        ((PGD(eps=0.1), Cascade(attacks=(foreign(eps=0.4, norm="linf"),))), Budget("linf", 0.4)),
        ((PGD(eps=0.1), PGD(eps=0.1, norm="l2")), None),
        ((PGD(eps=0.1), CW()), None),
        ((PGD(eps=0.1), foreign(eps=0.1)), None),
    ],
)
def test_a_cascade_has_the_largest_budget_of_members_in_one_norm(members, expected):
    assert budget_of(Cascade(attacks=members)) == expected


def test_members_are_asked_in_the_units_of_the_range():
    cascade = Cascade(attacks=(PGD(eps=4.0), get_attack("torchattacks:FGSM")))
    assert budget_of(cascade, InputSpace(high=255.0)) == Budget("linf", pytest.approx(8.0))


@pytest.mark.parametrize(
    ("attack", "space"),
    [
        (PGD(eps=1.0), None),
        (PGD(eps=255.0), InputSpace(high=255.0)),
        (PGD(eps=8.0), InputSpace(low=None)),
        (PGD(eps=8.0, norm="l2"), InputSpace()),
        (PGD(eps=0.001), InputSpace()),
        (PGD(eps=0.001), InputSpace(low=-1.0)),
        (PGD(eps=1.0), InputSpace(high=255.0)),
        (PGD(eps=0.0), InputSpace(high=255.0)),
        (CW(), InputSpace(high=255.0)),
        (get_attack("torchattacks:PGD"), InputSpace(high=255.0)),
    ],
)
def test_budgets_in_the_units_of_the_range(attack, space, recwarn):
    check_budgets([attack], space, smallest=0.0)
    assert not recwarn.list


@pytest.mark.parametrize(
    "attack",
    [PGD(eps=8.0), foreign(eps=8.0, norm="linf"), Cascade(attacks=(PGD(norm="l2"), foreign(), PGD(eps=8.0)))],
)
def test_budgets_wider_than_the_range(attack):
    with pytest.raises(ValueError, match=r"\[-1, 1\], but got 8\. .*8/255"):
        check_budgets([CW(), attack], InputSpace(low=-1.0))


def test_budgets_below_a_grey_level_warn_once_with_the_budget_that_was_meant():
    attacks = [PGD(eps=8 / 255), Square(eps=8 / 255), PGD(eps=0.5, norm="l2")]
    with pytest.warns(UserWarning, match=r"eps=0\.0313725 .*\[0, 255\].*`eps=8`") as warned:
        check_budgets(attacks, InputSpace(high=255.0))
    assert len(warned) == 1


def test_the_remedy_for_a_small_budget_breaks_as_many_samples_as_in_the_unit_range(digits, digits_network):
    x, y = digits[0][:40], digits[1][:40]
    expected = run_attack(digits_network, PGD(eps=0.1), x, y)
    rescaled = InputSpace(high=255.0)
    with pytest.warns(UserWarning, match=r"pass `eps=25\.5`"):
        small = run_attack(lambda x: digits_network(x / 255), PGD(eps=0.1), 255 * x, y, input_space=rescaled)
    assert not small.success.any()
    mended = run_attack(lambda x: digits_network(x / 255), PGD(eps=25.5), 255 * x, y, input_space=rescaled)
    assert mended.success_rate == pytest.approx(expected.success_rate, abs=0.05)
    assert expected.success_rate > 0.2
