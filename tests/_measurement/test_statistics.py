import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness._measurement.statistics import (
    accuracy_interval,
    candidates,
    kendall,
    kendall_w,
    measure_trust,
    pearson,
    pick,
    rank,
    reference_of,
    spearman,
)


@pytest.mark.parametrize(("successes", "number"), [(0, 10), (3, 10), (10, 10), (4999, 10000)])
def test_interval_is_that_of_scipy(successes, number):
    expected = scipy.stats.binomtest(successes, number).proportion_ci(method="wilson")
    assert accuracy_interval(successes / number, number) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_kendall_is_that_of_scipy_with_ties_and_infinity(seed):
    generator = np.random.default_rng(seed)
    x, y = generator.integers(0, 6, size=(2, 15)).astype(float)
    x[x == 5] = np.inf
    assert kendall(torch.tensor(x), torch.tensor(y)) == pytest.approx(scipy.stats.kendalltau(x, y).statistic, abs=1e-12)


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


# Few different values, so that there are ties
series = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=12).filter(
    lambda pairs: len({x for x, _ in pairs}) > 1 and len({y for _, y in pairs}) > 1
)


@given(series)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(pearson, scipy.stats.pearsonr), (spearman, scipy.stats.spearmanr), (kendall, scipy.stats.kendalltau)],
)
def test_equals_scipy_with_ties(ours, theirs, pairs):
    x, y = (torch.tensor(values, dtype=torch.float64) for values in zip(*pairs, strict=True))
    assert ours(x, y) == pytest.approx(theirs(x.numpy(), y.numpy())[0], abs=1e-12)


@pytest.mark.parametrize(("scale", "shift"), [(1e-120, 0.0), (1e120, 0.0), (1e-6, 1.0)])
@pytest.mark.filterwarnings("error")
def test_pearson_neither_overflows_nor_underflows(scale, shift):
    x, y = torch.randn(2, 20, dtype=torch.float64)
    assert pearson(scale * x + shift, scale * y) == pytest.approx(scipy.stats.pearsonr(x, y)[0], rel=1e-8)


@pytest.mark.parametrize("measure", [pearson, spearman, kendall])
@pytest.mark.filterwarnings("error")
def test_undefined_is_nan(measure):
    constant, other = torch.ones(3), torch.arange(3.0)
    assert math.isnan(measure(constant, other))
    assert math.isnan(measure(other, constant))
    assert math.isnan(measure(torch.tensor([0.0, 1.0, torch.nan]), other))
    for number in (0, 1):
        assert math.isnan(measure(torch.ones(number), torch.ones(number)))
    assert measure(torch.tensor([1.0, 2.0]), torch.tensor([7.0, 5.0])) == pytest.approx(-1.0)


def test_rank_of_ties_is_their_mean():
    assert rank(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=3, max_size=6))
def test_concordance_equals_friedman_statistic_with_ties(rows):
    ratings = torch.tensor(rows, dtype=torch.float64)
    if all(len(set(row)) == 1 for row in rows):
        assert math.isnan(kendall_w(ratings))
        return
    # Friedman's statistic, which scipy has, is k (n - 1) W
    statistic = scipy.stats.friedmanchisquare(*ratings.T.numpy())[0]
    assert kendall_w(ratings) == pytest.approx(statistic / (len(rows) * 3), abs=1e-12)


def test_concordance_by_hand():
    # Rank sums of three judges on three items: 3, 7, 8; their mean is 6, S = 9 + 1 + 4 = 14, W = 12 * 14 / (9 * 24)
    assert kendall_w(torch.tensor([[1.0, 2, 3], [10, 20, 30], [1, 3, 2]])) == pytest.approx(14 / 18)
    assert kendall_w(torch.arange(8.0).repeat(5, 1)) == pytest.approx(1.0)
    assert kendall_w(torch.tensor([[1.0, 2, 3], [3, 2, 1]])) == 0
