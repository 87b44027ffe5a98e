import pytest
import torch
from scipy import stats

from lightning_robustness.attacks.masking import LEVEL, binomial_tail, is_higher_rate, is_more_often, is_more_than


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.5])
@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (0, 5), (3, 3), (7, 500), (20, 100), (600, 1000), (5, 3)])
def test_binomial_tail(successes, trials, probability):
    expected = stats.binom.sf(successes - 1, trials, probability)
    assert binomial_tail(successes, trials, probability) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_certain_and_impossible_events():
    assert binomial_tail(3, 5, 1.0) == 1
    assert binomial_tail(3, 5, 0.0) == 0
    assert binomial_tail(6, 5, 1.0) == 0


@pytest.mark.parametrize(("first", "second"), [(7, 0), (6, 0), (20, 8), (20, 12), (0, 9)])
def test_more_often_is_the_exact_test_of_mcnemar(first, second):
    p_value = stats.binomtest(first, first + second, 0.5, alternative="greater").pvalue
    assert is_more_often(first, second, 100, 0.0) == (p_value < LEVEL)
    assert not is_more_often(first, second, 100_000, 0.01)


def test_more_than_a_share_and_more_than_a_handful():
    assert not is_more_than(6, 6, 0.01)
    assert is_more_than(7, 7, 0.01)
    assert not is_more_than(8, 500, 0.01)
    assert is_more_than(13, 500, 0.01)


def test_rates_of_two_samples_that_are_equal_rarely_differ():
    generator = torch.Generator().manual_seed(0)
    for rate in (0.02, 0.5):
        counts = torch.binomial(torch.full((2000, 2), 200.0), torch.full((2000, 2), rate), generator=generator)
        alarms = sum(is_higher_rate((int(a), 200), (int(b), 200), 0.0) for a, b in counts)
        assert alarms <= 2000 * 0.015
    assert is_higher_rate((60, 200), (30, 200), 0.01)
    assert not is_higher_rate((60, 200), (30, 200), 0.1)
