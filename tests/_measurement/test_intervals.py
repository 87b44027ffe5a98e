import pytest
import scipy.stats

from lightning_robustness._measurement.statistics import accuracy_interval


@pytest.mark.parametrize(("successes", "number"), [(0, 10), (3, 10), (10, 10), (4999, 10000)])
def test_interval_is_that_of_scipy(successes, number):
    expected = scipy.stats.binomtest(successes, number).proportion_ci(method="wilson")
    assert accuracy_interval(successes / number, number) == pytest.approx((expected.low, expected.high), abs=1e-9)
