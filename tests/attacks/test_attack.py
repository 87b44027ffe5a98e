import pytest
import torch

from lightning_robustness.attacks import PGD, Attack, run_attack
from lightning_robustness.input_space import InputSpace
from tests.attacks.cases import BUILT_IN
from tests.attacks.traces import assert_same, network_in_training, snapshot


def test_an_attack_has_to_perturb():
    with pytest.raises(TypeError, match="perturb"):
        Attack()


@pytest.mark.parametrize("attack", BUILT_IN)
def test_a_direct_call_is_a_run_without_a_trace(digits, digits_network, attack):
    attack, network = BUILT_IN[attack], network_in_training(digits_network)
    before = snapshot(network)
    x, y = digits[0][:6], digits[1][:6]
    x_adv = attack(network, x, y, seed=1, index=2)
    assert_same(snapshot(network), before)
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
