"""What an attack does to a sample depends on the seed and its position in the data set, never on its batch."""

import copy

import pytest
import torch
from torch import nn

from lightning_robustness._measurement.meters.attack import AttackMeter
from lightning_robustness.attacks import (
    CW,
    DDN,
    PGD,
    Cascade,
    MinimumNormCW,
    SirenAttack,
    Square,
    get_attack,
    run_attack,
)
from tests._measurement.subjects import rows_of

ATTACKS = {
    "pgd": PGD(eps=0.08, steps=3, restarts=2),
    "rfgsm": get_attack("rfgsm", eps=0.08, steps=3),
    "gaussian": PGD(eps=0.08, steps=3, start="gaussian"),
    "kl": PGD(eps=0.08, steps=3, start="gaussian", loss="kl", all_steps=True),
    "l2": PGD(eps=0.6, steps=3, norm="l2", restarts=2),
    "mifgsm": get_attack("mifgsm", eps=0.08, steps=3),
    "cw": MinimumNormCW(steps=10, lr=0.05, binary_search_steps=2),
    "ddn": DDN(steps=10),
    "square": Square(eps=0.1, num_queries=80),
    "square_l2": Square(eps=0.8, num_queries=80, norm="l2"),
    "siren": SirenAttack(eps=0.1, steps=12, num_particles=3, patience=3, gradient_steps=2, alpha=0.02),
    "cascade": Cascade(attacks=(PGD(eps=0.05), PGD(eps=0.05, loss="margin", restarts=2), Square(num_queries=20))),
}


@pytest.fixture(scope="module")
def network(digits_network):
    return copy.deepcopy(digits_network).double()


@pytest.mark.parametrize("attack", ATTACKS)
def test_equal_sample_by_sample_whatever_the_batch(digits, network, attack):
    x, y, positions = digits[0][1200:1264].double(), digits[1][1200:1264], torch.arange(1200, 1264)
    if attack == "siren":
        x, network = x.flatten(1), nn.Sequential(nn.Unflatten(1, (1, 8, 8)), network)
    attack = ATTACKS[attack]
    whole = run_attack(network, attack, x, y, seed=5, positions=positions)
    assert 0 < whole.success.sum() < 64 or isinstance(attack, CW | DDN)
    order = torch.arange(64)
    for rows in (order, *order[:12].split(1), *order.split(7), *torch.randperm(64).split(16)):
        part = run_attack(network, attack, x[rows], y[rows], seed=5, positions=positions[rows])
        torch.testing.assert_close(part.x_adv, whole.x_adv[rows], rtol=0, atol=1e-9)
        for name in ("adv_preds", "success", "queries"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows])


@pytest.mark.parametrize("name", ["pgd", "square"])
def test_rows_of_the_meter_do_not_depend_on_the_batch_size(digits, network, name):
    x, y = digits[0][1200:1301].double(), digits[1][1200:1301]
    meter = AttackMeter(name, ATTACKS[name], size=101)
    rows, *others = (rows_of(meter, network, x, y, batch_size=batch_size) for batch_size in (101, 8, 64))
    for other in others:
        assert torch.equal(other.positions, rows.positions)
        for column, values in rows.columns.items():
            torch.testing.assert_close(other[column], values, rtol=0, atol=1e-9)


def test_other_positions_other_random_numbers(digits, network):
    x, y = digits[0][1200:1230].double(), digits[1][1200:1230]
    first = run_attack(network, ATTACKS["pgd"], x, y)
    assert torch.equal(first.x_adv, run_attack(network, ATTACKS["pgd"], x, y, positions=torch.arange(30)).x_adv)
    assert not torch.equal(first.x_adv, run_attack(network, ATTACKS["pgd"], x, y, positions=torch.arange(1, 31)).x_adv)


def test_members_of_a_cascade_do_not_try_the_same(digits, network):
    x, y = digits[0][1200:1230].double(), digits[1][1200:1230]
    starts = []

    def record(model, images, labels):
        starts.append(model.draws.uniform(0, (3,)))
        return images

    run_attack(network, Cascade(attacks=(record, record)), x, y)
    assert not torch.equal(*starts)


def test_attacks_that_are_not_built_in_draw_by_the_first_position(digits, network):
    """Their draws are the same for the same batch, not for the same sample."""
    x, y = digits[0][1200:1230].double(), digits[1][1200:1230]

    def noise(model, images, labels):
        return (images + 0.1 * torch.rand_like(images)).clamp(0, 1)

    first, again, other = (run_attack(network, noise, x, y, positions=torch.arange(30) + p).x_adv for p in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
