import math

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness._measurement.statistics import kendall, kendall_w, pearson, rank, spearman

# Few different values, so that there are ties
series = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=12).filter(
    lambda pairs: len({x for x, _ in pairs}) > 1 and len({y for _, y in pairs}) > 1
)


@given(series)
@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance"),
    [
        (pearson, scipy.stats.pearsonr, 1e-12),
        (spearman, scipy.stats.spearmanr, 1e-12),
        (kendall, scipy.stats.kendalltau, 1e-6),  # in float32
    ],
)
def test_equals_scipy_with_ties(ours, theirs, tolerance, pairs):
    x, y = (torch.tensor(values, dtype=torch.float64) for values in zip(*pairs, strict=True))
    assert ours(x, y) == pytest.approx(theirs(x.numpy(), y.numpy())[0], abs=tolerance)


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
