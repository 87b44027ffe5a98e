import math

import numpy as np
import pytest
import scipy.stats
import torch

from lightning_robustness._measurement.statistics import candidates, kendall, measure_trust, pick, reference_of


@pytest.mark.parametrize("seed", range(10))
def test_kendall_is_that_of_scipy_with_ties_and_infinity(seed):
    generator = np.random.default_rng(seed)
    x, y = generator.integers(0, 6, size=(2, 15)).astype(float)
    x[x == 5] = np.inf
    assert kendall(torch.tensor(x), torch.tensor(y)) == pytest.approx(scipy.stats.kendalltau(x, y).statistic, abs=1e-12)


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0], [1.0, math.nan, 2.0]])
def test_kendall_is_undefined_for_constants_and_nan(values):
    assert math.isnan(kendall(torch.tensor(values), torch.tensor([1.0, 2.0, 3.0])))
    assert math.isnan(kendall(torch.tensor([1.0]), torch.tensor([1.0])))


def run(number, seed=0, every=1):
    """A run of PGD in each epoch and of all attacks in some."""
    generator = np.random.default_rng(seed)
    names = ("rdi", "roby", "fim", "fim_geometric", "lipschitz", "acc", "adv_acc/pgd")
    rows = [{"epoch": epoch, **dict(zip(names, generator.random(7), strict=True))} for epoch in range(number)]
    return [row | ({"adv_acc/worst": row["adv_acc/pgd"] / 2} if row["epoch"] % every == 0 else {}) for row in rows]


def test_trust_is_the_signed_coefficient_of_scipy():
    history = run(9)
    trust = measure_trust(history)
    assert trust.keys() == {"rdi", "roby", "fim", "lipschitz"}  # those with a direction
    robust = [row["adv_acc/worst"] for row in history]
    for name, sign in {"rdi": 1, "roby": -1, "fim": -1, "lipschitz": -1}.items():
        expected = sign * scipy.stats.kendalltau([row[name] for row in history], robust).statistic
        assert trust[name] == (pytest.approx(expected), 9, "adv_acc/worst")


def test_evaluations_without_both_do_not_count():
    history = run(9)
    history[1].pop("rdi")
    history[2]["rdi"] = math.nan
    for name in ("adv_acc/worst", "adv_acc/pgd"):
        history[3].pop(name)
    rows = [history[epoch] for epoch in (0, 4, 5, 6, 7, 8)]
    expected = scipy.stats.kendalltau([row["rdi"] for row in rows], [row["adv_acc/worst"] for row in rows]).statistic
    assert measure_trust(history)["rdi"] == (pytest.approx(expected), 6, "adv_acc/worst")
    assert measure_trust(history)["fim"].num_evaluations == 8


def test_trust_takes_five_evaluations_and_values_that_differ():
    assert measure_trust([]) == {}
    assert measure_trust(run(4)) == {}
    assert measure_trust(run(5)).keys() == {"rdi", "roby", "fim", "lipschitz"}
    constant = [row | {"rdi": 0.5} for row in run(8)]
    assert measure_trust(constant).keys() == {"roby", "fim", "lipschitz"}
    broken = [row | {"adv_acc/worst": 0.0} for row in run(8)]
    assert measure_trust(broken) == {}


def test_the_reference_has_the_most_evaluations():
    assert reference_of(run(10, every=1)) == "adv_acc/worst"
    assert reference_of(run(10, every=5)) == "adv_acc/pgd"
    assert reference_of([]) == "adv_acc/worst"
    assert measure_trust(run(10, every=5))["rdi"].reference == "adv_acc/pgd"
    mixed = {"square": 1, "pgd": 3, "worst": 3}
    rows = [{f"adv_acc/{name}": 0.5 for name, every in mixed.items() if epoch % every == 0} for epoch in range(7)]
    assert reference_of([*rows, {"adv_acc/final": 0.1}]) == "adv_acc/square"


HISTORY = [
    {"epoch": 0, "rdi": 0.9, "acc": 0.60},
    {"epoch": 1, "rdi": 0.5, "acc": 0.95},
    {"epoch": 2, "rdi": 0.7, "acc": 0.93},
    {"epoch": 3, "rdi": 0.7, "acc": 0.94},
]


@pytest.mark.parametrize(
    ("higher", "tolerance", "epoch"), [(True, 1.0, 0), (False, 1.0, 1), (True, 0.021, 2), (True, 0.011, 3)]
)
def test_the_epoch_that_a_value_picks(higher, tolerance, epoch):
    assert pick(candidates(HISTORY, tolerance), "rdi", higher)["epoch"] == epoch


def test_without_clean_accuracy_all_epochs_are_candidates():
    rows = [{"epoch": row["epoch"], "rdi": row["rdi"]} for row in HISTORY]
    assert candidates(rows) == rows
    assert candidates([*rows, HISTORY[1]]) == [HISTORY[1]]
    assert candidates([]) == []
