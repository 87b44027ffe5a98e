import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from lightning_robustness.functional import attack_success_rate
from lightning_robustness.functional.attack_success_rate import wilson_interval


def labels(*values):
    return torch.tensor(values, dtype=torch.long)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=30))
def test_equals_a_loop(samples):
    correct = [(a, y) for k, a, y in samples if k == y]
    flipped = [a for a, y in correct if a != y]
    expected = len(flipped) / len(correct) if correct else 0.0
    assert attack_success_rate(*torch.tensor(samples).unbind(dim=1)).item() == pytest.approx(expected)


def test_failures_are_infinitely_far_away():
    y = labels(0, 0, 0, 0, 0)
    distortion = torch.tensor([0.5, torch.nan, torch.nan, torch.nan, 0.7])
    parts = attack_success_rate(y, labels(1, 0, 0, 0, 1), y, distortion=distortion, return_components=True)
    assert parts.distortion == torch.inf  # of three in five


def test_no_correct_sample_is_zero():
    assert attack_success_rate(labels(1, 0), labels(0, 1), labels(0, 1)) == 0
    assert attack_success_rate(labels(), labels(), labels()) == 0


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (8, 10), (0, 50), (50, 50), (333, 1000)])
def test_wilson_interval_equals_scipys(successes, trials, confidence):
    expected = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    low, high = wilson_interval(torch.tensor(successes), torch.tensor(trials), confidence)
    assert [low.item(), high.item()] == pytest.approx([expected.low, expected.high], abs=1e-6)


def test_wilson_interval_of_nothing_is_everything():
    low, high = wilson_interval(torch.tensor(0), torch.tensor(0))
    assert [low.item(), high.item()] == pytest.approx([0, 1], abs=1e-6)
