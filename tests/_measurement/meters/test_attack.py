import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness._measurement.meters.attack import AttackMeter, attack_again
from lightning_robustness._measurement.plan import name_attacks
from lightning_robustness._processes import Processes
from lightning_robustness.attacks import CW, PGD, Budget, Cascade, Square
from lightning_robustness.input_space import InputSpace
from tests._measurement.subjects import RESULTS, attack_by_hand, rows_of, samples, subject, untouched


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize(
    "attack",
    [PGD(eps=0.06, steps=3), CW(steps=10, lr=0.05), Square(eps=0.06, num_queries=20)],
    ids=lambda attack: type(attack).__name__,
)
def test_rows_are_those_of_run_attack(digits, digits_network, dtype, batch_size, attack):
    number = 6 if batch_size == 1 else 50
    model, space = copy.deepcopy(digits_network).to(dtype), InputSpace(mean=0.1)
    x, y = space.normalize(digits[0][1200 : 1200 + number].to(dtype)), digits[1][1200 : 1200 + number]
    meter = AttackMeter("mine", attack, number)
    rows = rows_of(meter, model, x, y, space, seed=3, batch_size=batch_size)
    result = attack_by_hand(model, attack, x, y, batch_size, space, seed=3)
    for name in RESULTS[:-1]:
        assert rows[name].numpy() == pytest.approx(result[name], rel=1e-6), name
    assert torch.equal(rows["y"], y)
    assert rows.positions.tolist() == list(range(number))
    assert (rows["l2_budget"] == math.inf).all()
    assert rows["deterministic"].all()
    assert not rows["probabilities"].any()
    assert (meter.name, meter.title, meter.label) == ("attack mine", "mine attack", "the attack mine")


def test_rows_of_foreign_attacks_tell_nothing_of_gradients(digits, digits_network):
    x, y = digits[0][1200:1210], digits[1][1200:1210]
    assert not rows_of(AttackMeter("mine", untouched, 10), digits_network, x, y)["tells_gradients"].any()
    assert rows_of(AttackMeter("pgd", PGD(steps=1), 10), digits_network, x, y)["tells_gradients"].all()


@pytest.mark.parametrize(
    ("budget", "num_coordinates", "size"),
    [
        (Budget("l2", 0.4), 2, 0.4),
        (Budget("l2", 0.4), 400, 0.4),
        (Budget("linf", 0.4), 2, 0.4),  # the square root of 2 is below 4
        (Budget("linf", 0.1), 256, 0.4),
        (None, 2, math.inf),
    ],
)
def test_l2_budget_of_minimum_norm_attacks(budget, num_coordinates, size):
    torch.manual_seed(0)
    model, x = nn.Linear(num_coordinates, 2), torch.rand(3, num_coordinates)
    y = model(x).argmax(dim=1)
    rows = rows_of(AttackMeter("cw", CW(steps=1), 3, budget), model, x, y)
    assert rows["l2_budget"].tolist() == pytest.approx([size] * 3)
    for attack in (PGD(steps=1), Cascade(attacks=(PGD(steps=1), CW(steps=1))), untouched):
        assert (rows_of(AttackMeter("other", attack, 3, budget), model, x, y)["l2_budget"] == math.inf).all()


@pytest.mark.parametrize("name", ["torchattacks:CW", "torchattacks:DeepFool", "ddn", "cw"])
def test_which_attacks_minimise_the_l2_norm(digits, digits_network, name):
    ((key, attack),) = name_attacks([name], eps=0.1).items()
    meter = AttackMeter(key, attack, 5, Budget("linf", 0.1))
    rows = rows_of(meter, digits_network, digits[0][1200:1205], digits[1][1200:1205])
    assert rows["l2_budget"].tolist() == pytest.approx([0.2] * 5)  # 8 * 0.1 / 4


def test_rows_of_nothing():
    rows = rows_of(AttackMeter("pgd", PGD(), 8), nn.Linear(2, 2), torch.zeros(0, 0), torch.zeros(0, dtype=torch.long))
    assert (len(rows), rows.columns) == (0, {})


def test_labels_are_needed():
    with pytest.raises(ValueError, match=r"labels, for attacks, but got none.*`batch_fn="):
        rows_of(AttackMeter("pgd", PGD(), 8), nn.Linear(2, 2), torch.rand(3, 2))


def examples_of(model, attack, x, y, positions, space=None, batch_size=16):
    measured = subject(model, space, seed=1, batch_size=batch_size)
    meter = AttackMeter("mine", attack, len(x))
    return attack_again(meter, measured, samples(x, y), torch.as_tensor(positions), Processes())


def test_examples_are_successes(digits, digits_network):
    x, y = digits[0][1200:1240], digits[1][1200:1240]
    attack, space = PGD(eps=0.08, steps=3), InputSpace(mean=0.3, std=0.25)

    def model(x):
        return digits_network(space.unnormalize(x))

    inputs = space.normalize(x)
    result = attack_by_hand(model, attack, inputs, y, 16, space, seed=1)
    broken = np.flatnonzero(result["success"])
    assert 3 < len(broken) < 40
    examples = examples_of(model, attack, inputs, y, broken[:3], space)
    rows = broken[:3]
    assert torch.equal(examples.x, inputs[rows])
    assert torch.equal(examples.y, y[rows])
    assert torch.equal(examples.preds, examples.y)
    assert (examples.adv_preds != examples.y).all()
    assert torch.equal(model(examples.x_adv).argmax(dim=1), examples.adv_preds)
    assert examples.x_adv.numpy() == pytest.approx(result["x_adv"][rows], abs=1e-5)
    distance = (space.unnormalize(examples.x_adv) - space.unnormalize(examples.x)).abs().amax()
    assert distance.item() == pytest.approx(0.08, abs=1e-5)


def test_no_examples_without_a_success(digits, digits_network):
    x, y = digits[0][1200:1210], digits[1][1200:1210]
    assert examples_of(digits_network, untouched, x, y, [2, 5]) is None
    assert examples_of(digits_network, PGD(eps=0.5), x, y, []) is None


def test_examples_have_one_shape():
    """Those of the first batch, since pictures stand side by side."""
    torch.manual_seed(0)
    x = [torch.rand(3, 4, 4), torch.rand(3, 4, 4), torch.rand(3, 6, 6)]

    def model(x):
        mean = x.mean(dim=(1, 2, 3))
        return torch.stack([mean, 1 - mean], dim=1)

    y = torch.tensor([int(row.mean() < 0.5) for row in x])
    examples = examples_of(model, PGD(eps=0.9), x, y, [0, 1, 2])
    assert examples.x.shape == examples.x_adv.shape == (2, 3, 4, 4)


def measure_share(rank, sizes, attack, model, x, y):
    meter = AttackMeter("mine", attack, len(x), Budget("linf", 0.06))
    own_x, own_y = x.split(sizes)[rank], y.split(sizes)[rank]
    first = sum(sizes[:rank])
    # A process whose samples are not chosen does not know what others have
    own_x = own_x if len(own_x) else torch.zeros(0, 0)
    rows = rows_of(meter, model, own_x, own_y, first=first, batch_size=8)
    broken = rows.positions[rows["success"]][:6]
    examples = attack_again(meter, subject(model), samples(own_x, own_y, first), broken, Processes())
    return rows, examples


@pytest.mark.parametrize("sizes", [[11, 29], [40, 0], [0, 40]])
@pytest.mark.parametrize("attack", [PGD(eps=0.06), CW(steps=10, lr=0.05)], ids=["pgd", "cw"])
def test_rows_and_examples_of_two_processes_equal_those_of_one(two_processes, digits, digits_network, sizes, attack):
    x, y = digits[0][1200:1240].double(), digits[1][1200:1240]
    model = copy.deepcopy(digits_network).double()  # so that the arithmetic does not depend on the size of a batch
    expected, examples = measure_share(0, [40], attack, model, x, y)
    assert 0 < expected["success"].sum() < 40
    for rows, found in two_processes(measure_share, sizes, attack, model, x, y):
        assert torch.equal(rows.positions, expected.positions)
        assert rows.columns.keys() == expected.columns.keys()
        for name, column in expected.columns.items():
            torch.testing.assert_close(rows[name], column, rtol=1e-6, atol=1e-9)
        for part, other in zip(found, examples, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-6, atol=1e-9)
