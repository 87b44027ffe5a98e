import math

import pytest
import scipy.stats

from lightning_robustness._measurement.statistics import accuracy_interval, interval_values


@pytest.mark.parametrize(("successes", "number"), [(0, 10), (3, 10), (10, 10), (4999, 10000)])
def test_interval_is_that_of_scipy(successes, number):
    expected = scipy.stats.binomtest(successes, number).proportion_ci(method="wilson")
    assert accuracy_interval(successes / number, number) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_every_accuracy_under_attack_has_an_interval():
    values = {"adv_acc/pgd": 0.5, "adv_acc/deep/fool": 0.25, "adv_acc/nan": math.nan, "acc": 0.75, "asr/pgd": 0.5}
    ends = interval_values(values | {"samples_attacks": 8})
    low, high = accuracy_interval(0.25, 8)
    assert ends.keys() == {f"adv_acc_{end}/{name}" for end in ("low", "high") for name in ("pgd", "deep/fool")}
    assert (ends["adv_acc_low/deep/fool"], ends["adv_acc_high/deep/fool"]) == (low, high)
    assert interval_values(values) == {}
